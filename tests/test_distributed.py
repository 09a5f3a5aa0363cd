"""Models with fused chains among several processes: what wraps their parameters and gradients."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor

import fusegen
from fusegen import UnsupportedError

BEHIND_CONV = "gelu | mul_channel(scale) | group_norm(2) | relu | max_pool2d(2) | mean((2, 3))"
BEHIND_LINEAR = "layernorm(weight, bias) | silu"


@pytest.fixture
def mesh(tmp_path, device):
    """One process that takes itself for all of them."""
    backend = "nccl" if device == "cuda" else "gloo"
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    yield init_device_mesh(device, (1,))
    dist.destroy_process_group()


class Model(nn.Module):
    def __init__(self, *, is_fused):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.linear = nn.Conv2d(3, 8, 3), nn.Linear(8, 16)
        self.scale = nn.Parameter(torch.rand(8))
        self.weight, self.bias = nn.Parameter(torch.ones(16)), nn.Parameter(torch.zeros(16))
        chains = fusegen.compile(BEHIND_CONV), fusegen.compile(BEHIND_LINEAR)
        self.first, self.second = chains if is_fused else [c.reference for c in chains]

    def forward(self, x):
        pooled = self.first(self.conv(x), self.scale)
        return self.second(self.linear(pooled), self.weight, self.bias)


def losses(model, wrapped, device):
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    found = []
    for turn in range(3):
        generator = torch.Generator().manual_seed(turn)
        loss = wrapped(torch.randn(4, 3, 10, 10, generator=generator).to(device)).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        found.append(loss.detach())
    return torch.stack(found)


@pytest.mark.parametrize("wrap", ["distributed data parallel", "fully sharded"])
def test_a_model_trains_as_the_eager_one_does(wrap, mesh, device):
    eager = Model(is_fused=False).to(device)
    expected = losses(eager, eager, device)
    ours = Model(is_fused=True).to(device)
    if wrap == "fully sharded":
        wrapped = fully_shard(ours, mesh=mesh)
    else:
        wrapped = nn.parallel.DistributedDataParallel(ours)
    torch.testing.assert_close(losses(ours, wrapped, device), expected)


def test_a_distributed_tensor_is_refused(mesh, device):
    x = distribute_tensor(torch.randn(4, 16, device=device), mesh, [Replicate()])
    with pytest.raises(UnsupportedError, match="got a DTensor"):
        fusegen.compile("gelu")(x)
