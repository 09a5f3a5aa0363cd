"""Random chains over tensors of up to three million elements, in three types: what kernels do with
rows of every length, columns of every number and sums of every shape.

test_chains_random.py draws from every operation, over a few elements; these are fewer operations,
over as many elements as take each family of kernels and each of its ways through memory.
"""

import math
import random

import pytest
import torch
from numeric import cotangent_for, outcome

import fusegen
from fusegen.describe import Situation, sources
from fusegen.errors import FusegenError

CHAINS = {"cpu": 8, "cuda": 60}
LARGEST = {"cpu": 1 << 16, "cuda": 3 << 20}
# What a value may be off by, of the largest or of one, or so many times what eager is in single
# precision, where terms cancel; but for so few: of values that rounding makes equal, a window's
# winner may be another one, and so may be the side of a kink.
CLOSE = {torch.float32: 1e-3, torch.float16: 2**-6, torch.bfloat16: 2**-4}
TIMES_EAGERS = 4
FEW = 0.02
SIZES = (
    *(1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 17, 24, 31, 32, 33, 48, 64, 65, 96, 100, 127, 128, 130, 192),
    *(256, 257, 300, 512, 768, 1000, 1024, 1280, 2048, 2560, 4096, 4100, 8192, 8200, 12288, 12289),
    *(16384, 20480, 32000, 50257, 65536),
)
ELEMENTWISE = (
    *("relu", "gelu", "silu", "tanh", "mul(2.0)", "hardswish", "mish", "leaky_relu(0.1)", "neg"),
    *("sigmoid", "elu", "clamp(-1, 1)", "softplus", "gelu(approximate='tanh')", "softsign", "abs"),
)


class Drawing:
    """A chain in the making: its steps, the shape behind them, and the tensors that they name."""

    def __init__(self, seed: int, largest: int) -> None:
        self.pick = random.Random(seed)
        shape = [self.pick.choice(SIZES) for _ in range(self.pick.choice([2, 2, 3, 4, 4, 5]))]
        while math.prod(shape) > largest:
            i = self.pick.randrange(len(shape))
            shape[i] = max(1, shape[i] // 2)
        self.shape, self.x = shape, tuple(shape)
        self.operands: dict[str, tuple[int, ...]] = {}
        self.steps: list[str] = []
        self.kept: list[tuple[str, list[int]]] = []
        kinds = [self.elementwise, self.binary, self.binary, self.mask, self.again, self.norm]
        kinds += [self.norm, self.reduction, self.selection, self.flattening, self.pooling]
        for _ in range(self.pick.randint(2, 6)):
            self.pick.choice(kinds)()
        if not self.steps:
            self.elementwise()

    @property
    def text(self) -> str:
        return " | ".join(self.steps)

    def operand(self, shape: list[int]) -> str:
        """A new tensor's name, of this shape or of one that broadcasts to it."""
        name = f"t{len(self.operands)}"
        first = self.pick.randint(0, max(len(shape) - 1, 0))
        kept = [size if self.pick.random() < 0.6 else 1 for size in shape[first:]]
        self.operands[name] = tuple(shape if self.pick.random() < 0.2 else kept)
        return name

    def elementwise(self) -> None:
        self.steps.append(self.pick.choice(ELEMENTWISE))

    def binary(self) -> None:
        name = self.pick.choice(["add", "mul", "sub", "minimum", "maximum"])
        self.steps.append(f"{name}({self.operand(self.shape)})")

    def mask(self) -> None:
        name = self.operand(self.shape)
        self.steps.append(f"masked_fill({name}, {self.pick.choice(['-1', '0', '2.5'])})")

    def again(self) -> None:
        fitting = [name for name, shape in self.kept if shape == self.shape]
        if fitting:
            self.steps.append(f"{self.pick.choice(['add', 'mul'])}({self.pick.choice(fitting)})")
        elif self.steps:
            self.kept.append((f"k{len(self.kept)}", list(self.shape)))
            self.steps.append(f"keep({self.kept[-1][0]})")

    def norm(self) -> None:
        if not self.shape:
            return
        axis = self.pick.randrange(len(self.shape)) - self.pick.choice([0, len(self.shape)])
        last = tuple(self.shape[self.pick.randrange(len(self.shape)) :])
        found = [f"{name}({axis})" for name in ("softmax", "log_softmax")]
        # As it is left out, eps is another one in each type.
        found += [
            f"{name}(normalized_shape={last}, eps=1e-5)" for name in ("layernorm", "rms_norm")
        ]
        if len(self.shape) > 2:
            channels = self.shape[1]
            groups = self.pick.choice([n for n in (1, 2, 3, 4, 8, 16) if channels % n == 0])
            found += [f"group_norm({groups})", "instance_norm"]
        if len(self.shape) > 1:
            weight, bias = (f"t{len(self.operands) + i}" for i in range(2))
            found += [f"batch_norm(weight={weight}, bias={bias}, training=True)"] * 2
        step = self.pick.choice(found)
        if "weight=" in step:
            self.operands |= dict.fromkeys((weight, bias), (self.shape[1],))
        self.steps.append(step)

    def reduction(self) -> None:
        if not self.shape:
            return
        count = self.pick.randint(1, len(self.shape))
        axes = tuple(sorted(self.pick.sample(range(len(self.shape)), count)))
        keepdim = self.pick.random() < 0.5
        name = self.pick.choice(["sum", "mean", "mean", "amax", "amin", "logsumexp"])
        self.steps.append(f"{name}({axes}, keepdim={keepdim})")
        ones = [1 if i in axes else n for i, n in enumerate(self.shape)]
        fitting = [k for k in self.kept if keepdim and len(k[1]) == len(self.shape)]
        self.shape = ones if keepdim else [n for i, n in enumerate(self.shape) if i not in axes]
        for name, shape in fitting[:1]:
            self.steps.append(f"{self.pick.choice(['add', 'mul', 'rsub'])}({name})")
            self.shape = [max(pair) for pair in zip(self.shape, shape, strict=True)]

    def selection(self) -> None:
        if len(self.shape) > 1:
            axis = self.pick.randrange(len(self.shape))
            self.steps.append(f"select({axis}, {self.pick.choice([0, -1])})")
            del self.shape[axis]

    def flattening(self) -> None:
        if len(self.shape) > 2:
            axis = self.pick.randrange(len(self.shape) - 1)
            self.steps.append(f"flatten({axis}, {axis + 1})")
            self.shape[axis : axis + 2] = [self.shape[axis] * self.shape[axis + 1]]

    def pooling(self) -> None:
        if len(self.shape) > 2 and min(self.shape[-2:]) > 3:
            step = self.pick.choice(["max_pool2d(2)", "avg_pool2d(2)", "max_pool2d(3, 1, 1)"])
            self.steps.append(step)
            if "(2)" in step:
                self.shape[-2:] = [n // 2 for n in self.shape[-2:]]


def draw(number: int, largest: int) -> Drawing:
    """The first of some chains that fusegen takes: not all have more than one value to a norm."""
    for seed in range(number, number + 100_000, 1000):
        drawn = Drawing(seed, largest)
        chain = fusegen.chain(drawn.text)
        shapes = {name: drawn.operands[name] for name in chain.operands}
        try:
            sources(chain, "cpp", Situation(drawn.x, shapes), grad=False)
        except FusegenError:
            continue
        return drawn
    raise AssertionError("no chain is taken")


@pytest.mark.parametrize(
    ("device", "number"),
    [
        *(("cpu", n) for n in range(CHAINS["cpu"])),
        *(pytest.param("cuda", n, marks=pytest.mark.gpu) for n in range(CHAINS["cuda"])),
    ],
    indirect=["device"],
)
def test_a_chain_over_many_elements_is_eagers(number, device, request):
    drawn = draw(number + request.config.getoption("--first-chain"), LARGEST[device])
    # Rounded to 16 bits, a window's values may be equal that are far apart before a norm's weight.
    dtype = torch.float32 if "max_pool" in drawn.text else list(CLOSE)[number % len(CLOSE)]
    fused = fusegen.compile(drawn.text)
    masks = [name for name in fused.chain.operands if f"masked_fill({name}," in drawn.text]
    generator = torch.Generator().manual_seed(number)

    def random(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    x, operands = random(drawn.x), [random(drawn.operands[n]) for n in fused.chain.operands]
    if x.dim() == 4 and number % 2:
        x = x.contiguous(memory_format=torch.channels_last)
    named = zip(fused.chain.operands, operands, strict=True)
    tensors = [x, *(t > 0 if name in masks else t for name, t in named)]
    with torch.no_grad():
        alone = fused(*tensors)
    tensors = [t.requires_grad_() if t.is_floating_point() else t for t in tensors]
    cotangent = cotangent_for(alone)
    ours = outcome(fused, tensors, cotangent)
    wide = outcome(fused.reference, tensors, cotangent.cpu(), torch.float64, "cpu").tensors
    eager = outcome(fused.reference, tensors, cotangent, torch.float32).tensors
    found = [alone, *ours.tensors]
    compared = zip(["alone", *ours.names], found, [wide[0], *wide], [eager[0], *eager], strict=True)
    for name, have, want, eagers in compared:
        is_off = share_off(have, want, eagers) > FEW
        assert not is_off, f"{name} of {drawn.text} over {drawn.x}, {dtype}: {have}, want {want}"


def share_off(have: torch.Tensor, want: torch.Tensor, eagers: torch.Tensor) -> float:
    """How many of a result's values are not close, as a part of all."""
    if not have.numel():
        return 0.0
    rounded = want.to(have.dtype).double()  # it may be too large for the type
    finite = rounded[rounded.isfinite()].abs()
    scale = max(1.0, finite.max().item() if finite.numel() else 0.0)
    found = have.double()
    is_same = (found == rounded) | (found.isnan() & rounded.isnan())
    usual = (eagers.double() - want).abs().nan_to_num(posinf=0.0).flatten()
    usual = usual.kthvalue(math.ceil((1 - FEW) * usual.numel())).values.item()
    allowed = max(CLOSE[have.dtype] * scale, TIMES_EAGERS * usual)
    return 1 - (is_same | ((found - rounded).abs() <= allowed)).double().mean().item()
