"""What a call does, as `explain` of functions and layers tells it."""

import pytest
import torch
from test_assigning import boxes, masked
from torch import nn

import fusegen
from fusegen.errors import ArgumentError, ChainError


def _paragraphs(told: str) -> list[str]:
    heads = ("forward", "backward", "at ", "no backward", "d_")
    return [p for p in told.split("\n\n") if not p.startswith(heads)]


def test_what_torch_moves_is_told_between_the_chains():
    told = fusegen.compile(boxes).explain(torch.randn(3, 4), torch.randn(3, 2))
    chains = "tanh | mul(2)"
    assert _paragraphs(told) == [
        f"computed, by a chain: {chains}",
        f"computed_, by a chain: {chains} | unflatten(-1, (-1, 2)) | select(-2, 0) | mul(2) | "
        "sub(0.5) | add(v) | mul(8)",
        "computed_part = computed with computed_ at [..., 0:2]: a copy, (3, 4), by torch",
        "computed_part_part = computed_part[..., 2:4]: a view, (3, 2), by torch",
        "mul(2) | pow(2)",
        "computed_part_part_ = computed_part with computed__ at [..., 2:4]: a copy, (3, 4), "
        "by torch",
    ]
    assert told.count("forward in all") == 3


def test_each_chain_is_told_for_its_own_tensors():
    def function(x, t):
        noise = torch.randn(x.shape[1])
        return ((x * 2).relu()[t].exp() + noise)[:, 1:], x.sum(1)

    x, t = torch.randn(3, 4, dtype=torch.bfloat16), torch.tensor([0, 1])
    told = fusegen.compile(function).explain(x, t, target="cuda", bandwidth=1000)
    assert "torch draws, in each call, what the function draws" in told
    assert "x_part = x[t]: a copy, (2, 4), by torch" in told
    assert "at 1000 GB/s" in told
    with pytest.raises(ChainError, match="a chain for each shape and type"):
        fusegen.compile(function).explain()


def test_a_chain_of_a_single_kernel_is_told_as_by_its_text():
    x, mask = torch.randn(3, 4), torch.ones(3, 4, dtype=torch.bool)
    fused = fusegen.compile(masked)
    only = fused.compiled_for(x, mask)
    assert fused.explain(x, mask) == only.explain(shape=(3, 4), operands={"mask": (3, 4)})


def test_a_layer_tells_of_its_modules_tensors():
    layer = fusegen.Layer(nn.Sequential(nn.BatchNorm2d(8), nn.ReLU()))
    x = torch.randn(2, 8, 5, 5).to(memory_format=torch.channels_last)
    told = layer.explain(x)
    assert "x 1.6 kB" in told
    assert told.splitlines()[0] == layer.chain.text
    assert "weight_0 32 B" in told


class Joined(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(5, 1))

    def forward(self, a, b):
        return torch.relu(self.scale * torch.cat([a, b], 1))


def test_of_a_module_that_a_call_has_to_trace_explain_tells_before_the_first_call():
    told = fusegen.Layer(Joined()).explain(torch.randn(2, 3, 4), torch.randn(2, 2, 4))
    assert "a.cat(b, 1): a copy, (2, 5, 4), by torch" in told


def test_a_tensor_in_the_place_of_a_target_is_told():
    with pytest.raises(ArgumentError, match=r"got a Tensor, wanted 'cuda' or 'cpp'; of a tensor"):
        fusegen.compile("relu").explain(torch.randn(3))


def test_of_a_product_with_a_modules_own_tensor_it_is_told_that_chains_follow_products():
    with pytest.raises(ChainError, match="matmul: a chain follows a product"):
        fusegen.Layer(Multiplied())(torch.randn(2, 3))


class Multiplied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3, 3))

    def forward(self, x):
        return torch.relu(torch.matmul(x, self.weight.T))
