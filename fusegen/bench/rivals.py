"""What is compared: data for a work, what a user would write in torch for it, and its compilation.

A chain of the user's own has no such function; there the chain's reference is the eager rival.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._inductor import config as inductor_config
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import gelu, layer_norm, leaky_relu, max_pool3d

from fusegen import dsl, ir
from fusegen.bench.works import Work
from fusegen.bound import Bound
from fusegen.describe import classes, element_type, has_gradient, is_positive
from fusegen.lower import lower
from fusegen.program import forward
from fusegen.runtime import Fused
from fusegen.segments import bind_all, segments
from fusegen.selecting import at_places
from fusegen.target import ITEM_BYTES

Function = Callable[..., Any]  # it gives a tensor, or a tuple of some

_MODES_OF_COMPILE = {"compile": "default", "max_autotune": "max-autotune-no-cudagraphs"}
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def _chain_a(x: Tensor, bias: Tensor) -> Tensor:
    by_channel = bias.view(-1, *(1,) * (x.dim() - 2))
    return gelu(torch.clamp(leaky_relu(x, 0.2) + by_channel, -1, 1))


def _chain_b(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return gelu(layer_norm(x, x.shape[-1:], weight, bias)) * 0.5


def _chain_b_whole(x: Tensor) -> Tensor:
    return gelu(layer_norm(x, x.shape[1:])) * 0.5


def _chain_c(x: Tensor, scale: Tensor) -> Tensor:
    return max_pool3d(leaky_relu(leaky_relu(x, 0.2) * scale.view(-1, 1, 1, 1), 0.2), 2)


def _layernorm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return layer_norm(x, x.shape[-1:], weight, bias)


def _add_layernorm_gelu(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return gelu(layer_norm(x + residual, x.shape[-1:], weight, bias))


def _channel_layernorm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """As ConvNeXt's authors write it."""
    mean = x.mean(1, keepdim=True)
    variance = (x - mean).pow(2).mean(1, keepdim=True)
    normal = (x - mean) / torch.sqrt(variance + 1e-5)
    return normal * weight.view(-1, 1, 1) + bias.view(-1, 1, 1)


def _bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return gelu(x + bias)


EAGER: Mapping[str, Function] = {
    "chain_a": _chain_a,
    "chain_b": _chain_b,
    "chain_b_whole": _chain_b_whole,
    "chain_c": _chain_c,
    "layernorm": _layernorm,
    "add_layernorm_gelu": _add_layernorm_gelu,
    "channel_layernorm": _channel_layernorm,
    "bias_gelu": _bias_gelu,
}


def fused_of(work: Work) -> Fused:
    """A new compilation of the work's chain."""
    return Fused(dsl.chain(work.chain))


def eager_of(work: Work) -> Function:
    """The work with torch's own operations."""
    return EAGER[work.eager] if work.eager is not None else fused_of(work).reference


def compiled(work: Work, device: str, names: tuple[str, ...]) -> dict[str, Function]:
    """torch.compile of the eager work, by the names of its modes here; compiled at their first
    call, for these shapes.
    """
    if not names:
        return {}
    function: Any = eager_of(work)
    if work.eager is None:
        # Dynamo does not see through the reference, which walks the chain; so it is recorded.
        function = make_fx(function, tracing_mode="fake")(*inputs(work, device, 0))
    torch.compiler.reset()
    # Of a kernel's configurations each process finds the fastest itself: another one, that builds
    # while many do, might keep a wrong one.
    inductor_config.autotune_local_cache = False
    return {
        name: torch.compile(function, mode=_MODES_OF_COMPILE[name], dynamic=False) for name in names
    }


def dtype_of(work: Work) -> torch.dtype:
    """The work's dtype as torch has it."""
    found: torch.dtype = getattr(torch, work.dtype)
    return found


def inputs(work: Work, device: str, seed: int) -> tuple[Tensor, ...]:
    """x and the operands, random, different for each seed."""
    generator = torch.Generator(device).manual_seed(seed)

    def random(shape: tuple[int, ...]) -> Tensor:
        is_half = work.layout == "halves" and len(shape) > 1
        whole = (*shape[:-1], 2 * shape[-1]) if is_half else shape
        found = torch.randn(whole, generator=generator, device=device, dtype=dtype_of(work))
        if is_half:
            return found[..., : shape[-1]]
        if work.layout == "channels_last" and len(shape) in _FORMATS:
            found = found.contiguous(memory_format=_FORMATS[len(shape)])
        return found

    tensors = [random(shape) for shape in (work.shape(device), *work.operand_shapes(device))]
    chain, bounds = dsl.chain(work.chain), _bounds(work, device)
    for i, name in enumerate(chain.operands, start=1):
        if is_positive(chain, name):
            tensors[i] = tensors[i].abs() + 0.5
        dtype: torch.dtype = getattr(torch, element_type(chain, name, work.dtype))
        if number := classes(bounds, name):
            tensors[i] = tensors[i].double().abs() * 1e6 % number
        tensors[i] = tensors[i] > 0 if dtype == torch.bool else tensors[i].to(dtype)
    return tuple(tensors)


def leaves_of(work: Work, tensors: Sequence[Tensor]) -> list[Tensor]:
    """What a work is called with in training: all that may have a gradient needs it, which masks
    and running statistics do not. The latter are updated in place, which changes no result.
    """
    chain = dsl.chain(work.chain)
    needs = (True, *(has_gradient(chain, name) for name in chain.operands))
    return [t.detach().requires_grad_(n) for n, t in zip(needs, tensors, strict=True)]


def results_of(function: Function, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """What a call gives."""
    found = function(*tensors)
    return found if isinstance(found, tuple) else (found,)


def gradients_of(
    function: Function, leaves: Sequence[Tensor], cotangents: Sequence[Tensor] | None = None
) -> tuple[Tensor, ...]:
    """The results and the gradient of every leaf that needs one; with ones for cotangents where
    none are given.
    """
    results = results_of(function, leaves)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    seeds = [torch.ones_like(r) for r in results] if cotangents is None else cotangents
    return *results, *torch.autograd.grad(results, wanted, seeds)


def _bounds(work: Work, device: str) -> tuple[Bound, ...]:
    chain = dsl.chain(work.chain)
    shapes = dict(zip(chain.operands, work.operand_shapes(device), strict=True))
    operands = {n: (shape, element_type(chain, n, work.dtype)) for n, shape in shapes.items()}
    return bind_all(segments(chain), (work.shape(device), work.dtype), operands)


def is_batched(work: Work, device: str) -> bool:
    """Whether each index of the first axis stands for itself: no step reduces over that axis."""
    bounds = _bounds(work, device)
    shape = work.shape(device)
    is_kept = all((b.domain[:1], len(b.domain)) == (shape[:1], len(shape)) for b in bounds)
    if bounds[0].domain != shape or not is_kept:
        return False
    reduces = (
        node
        for bound in bounds
        for node in ir.topological(lower(bound).graph.roots)
        if node.op == "reduce"
    )
    return not any(-len(shape) in ir.reduction(node)[1] for node in reduces)


def limits_of(work: Work, device: str) -> tuple[float, float]:
    """The work's limits; for a chain of the user's own, each tensor read or written once, and of
    one that is read at one place no more than that.
    """
    if work.limits is not None:
        return work.limits
    chain, bounds = dsl.chain(work.chain), _bounds(work, device)
    names = ("x", *chain.operands)
    types = [element_type(chain, name, work.dtype) for name in names]
    numbers = [math.prod(s) for s in (work.shape(device), *work.operand_shapes(device))]
    widths = [ITEM_BYTES[t] / ITEM_BYTES[work.dtype] for t in types]
    whole = [n * width for n, width in zip(numbers, widths, strict=True)]
    read = [size * part for size, part in zip(whole, _parts_read(work, bounds), strict=True)]
    learning = [s for s, n in zip(whole, names, strict=True) if has_gradient(chain, n)]
    written = [math.prod(bounds[-1].result_shape)]
    for segment, bound in zip(segments(chain), bounds, strict=True):
        written += [math.prod(given.shape) for given in bound.gives]
        written += [math.prod(bound.result_shape)] * segment.gives
    once = (sum(read) + sum(written)) / (2 * whole[0])
    return once, once + (sum(read) + sum(learning) + sum(written)) / (2 * whole[0])


def _parts_read(work: Work, bounds: Sequence[Bound]) -> list[float]:
    """How much is read of x and of each operand, from 0 to 1."""
    parts: dict[str, float] = {}
    for bound in bounds:
        program = at_places(forward(bound, is_training=False))
        for i, name in enumerate(program.input_names):
            places = math.prod(bound.domain[axis] for axis, _ in program.places_of(i))
            parts.setdefault(name, 1 / places)
    return [parts.get(name, 1.0) for name in ("x", *dsl.chain(work.chain).operands)]
