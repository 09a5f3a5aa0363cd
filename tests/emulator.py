"""CUDA sources run on the CPU: translated for g++, with a stand-in for CUDA's own header.

So that CI, which has no GPU, executes every skeleton and not only compiles it.
"""

import atexit
import ctypes
import math
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from fusegen import dsl, ir
from fusegen.bind import bind
from fusegen.dealing import deal_of
from fusegen.describe import axes_in_memory, classes, element_type, has_gradient
from fusegen.emission import source
from fusegen.execution import Part
from fusegen.holding import signature
from fusegen.joining import chosen, ways
from fusegen.program import Places, derivative, forward
from fusegen.promotion import FLOATING, INTEGERS
from fusegen.reference import run_eagerly
from fusegen.selecting import at_places
from fusegen.signature import element_types, with_derivative, with_gaps
from fusegen.strides import Pitch, dense_strides, pitch_of
from fusegen.target import H200, ITEM_BYTES, Limits
from fusegen.unrolling import grouped
from fusegen.windowing import windows_along

EMULATION = Path(__file__).parent / "emulation"
COMPILER = ("g++", "-std=c++17", "-fPIC", "-ffp-contract=off", "-w", "-D_GLIBCXX_BITS_SPECFUN_H")
KERNELS = ("-O0", "-fno-asynchronous-unwind-tables")
RUNTIME = ("-O1", "-U_FORTIFY_SOURCE")  # with jumps between stacks
# Of the C++ library a linker reads less in an archive; where there is another linker, it is faster.
LINKING = ("-static-libstdc++", *(["-fuse-ld=gold"] if shutil.which("ld.gold") else []))
_LAUNCH = re.compile(r"(\w+)<<<(.*?),\s*stream>>>\((.*?)\);", re.DOTALL)
_FOLLOW = re.compile(r"\bfollow\((\w+),\s+(.*?),\s+stream,\s+(.*?)\);", re.DOTALL)
_TOGETHER = re.compile(r"cudaLaunchKernelEx\(&launch,\s*(?!kernel)(\w+),\s*(.*?)\);", re.DOTALL)
_ASYNC_COPY = re.compile(r'asm volatile\("cp\.async\.c[ag].*?\);', re.DOTALL)
_ASYNC_ORDER = re.compile(r'asm volatile\("cp\.async\.(commit|wait).*?\);', re.DOTALL)
_NOTHING = re.compile(r'asm volatile\("" : "\+[fd]"\(\w+\)\);')
_INSTRUCTION = re.compile(
    r'asm\("(?P<name>[\w.]+) %0, %1(?:, %2)?;" : "=[fh]"\((?P<result>[\w.]+)\) : '
    r'"[fh]"\((?P<a>[\w.]+)\)(?:, "f"\((?P<b>\w+)\))?\);'
)
_IN_C = {
    "cvt.f32.f16": "float_of_half({a})",
    "cvt.rn.f16.f32": "half_of({a})",
    "ex2.approx.ftz.f32": "exp2f({a})",
    "rcp.approx.ftz.f32": "1.0f / {a}",
    "lg2.approx.f32": "log2f({a})",
    "lg2.approx.ftz.f32": "log2f({a})",
    "div.full.f32": "{a} / {b}",
    "sqrt.approx.f32": "sqrtf({a})",
    "min.NaN.f32": "{a} != {a} || {a} < {b} ? {a} : {b}",
    "max.NaN.f32": "{a} != {a} || {a} > {b} ? {a} : {b}",
}


def _as_c(instruction: re.Match[str]) -> str:
    """It in C; as it is, where there is another way for want of the instruction."""
    if instruction["name"] not in _IN_C:
        return instruction[0]
    spelled = _IN_C[instruction["name"]].format(**instruction.groupdict())
    return f"{instruction['result']} = {spelled};"


def translated(text: str) -> str:
    """A .cu file as C++: launches, dynamic shared memory and asynchronous copies put otherwise."""
    text = _LAUNCH.sub(r"emulation::launch(\2, [=] { \1(\3); });", text)
    text = _FOLLOW.sub(r"emulation::launch(\2, [=] { \1(\3); });", text)
    text = _TOGETHER.sub(r"emulation::launch_together(launch, [=] { \1(\2); });", text)
    text = _ASYNC_COPY.sub("std::memcpy(to, from, sizeof(*to)); static_cast<void>(target);", text)
    text = _INSTRUCTION.sub(_as_c, _NOTHING.sub("", _ASYNC_ORDER.sub("", text)))
    text = text.replace("extern __shared__ uint4 room[];", "uint4* const room = emulation::room;")
    return text.replace("__shared__ alignas(16)", "alignas(16) __shared__")


def build(text: str, folder: Path, processors: int = 6) -> ctypes.CDLL:
    """The translated source as a library with its run_<program> functions."""
    folder.mkdir(parents=True, exist_ok=True)
    file, library = folder / "emulated.cpp", folder / "emulated.so"
    file.write_text(translated(text))
    compile_with_runtime(file, library, "-shared", is_together=bool(_TOGETHER.search(text)))
    loaded = ctypes.CDLL(str(library))
    ctypes.c_int.in_dll(loaded, "emulated_processors").value = processors
    return loaded


def compile_with_runtime(file: Path, result: Path, *flags: str, is_together: bool = False) -> None:
    """A translated source and what runs its kernels, as a library or a program."""
    facts = ("-DRESIDENT_TOGETHER",) if is_together else ()
    header, runtime = _runtime(facts)
    command = [*COMPILER, *KERNELS, *facts, *flags, "-include", header, f"-I{header.parent}"]
    command += ["-o", result, file, runtime, *LINKING]
    subprocess.run(command, check=True, capture_output=True, text=True)


@cache
def _runtime(facts: tuple[str, ...]) -> tuple[Path, Path]:
    """The stand-in for CUDA's header, and what runs kernels, both compiled once."""
    folder = Path(tempfile.mkdtemp(prefix="emulation"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    header, runtime = Path(shutil.copy(EMULATION / "cuda_runtime.h", folder)), folder / "runtime.o"
    for command in (
        [*COMPILER, *KERNELS, *facts, "-x", "c++-header", "-o", f"{header}.gch", header],
        [*COMPILER, *RUNTIME, *facts, "-c", "-o", runtime, EMULATION / "runtime.cpp"],
    ):
        subprocess.run(command, check=True, capture_output=True, text=True)
    return header, runtime


@dataclass
class Emulated:
    """A chain's forward and backward on the emulator, and the same in float64 by torch."""

    results: list[torch.Tensor]
    expected: list[torch.Tensor]
    text: str


def run(
    chain_text: str,
    shape: tuple[int, ...],
    operand_shapes: list[tuple[int, ...]],
    folder: Path,
    *,
    dtype: str = "float32",
    layout: str = "contiguous",
    x: torch.Tensor | None = None,
    processors: int = 6,
    shared_bytes: int = H200.shared_bytes,
    has_gaps: bool = False,
    has_gradients: bool = True,
    types: Mapping[str, str] | None = None,
) -> Emulated:
    """The result, then the gradients of x and every operand if there are any and they are wanted,
    on a device with these limits; x is random where it is not given. Every tensor that can have
    gaps has them where has_gaps is True. types are those of operands that have others than x.
    """
    chain = dsl.parse(chain_text)
    given = dict(zip(chain.given, operand_shapes, strict=True))
    operands = dict.fromkeys(chain.operands, ((1,), "int64"))
    told = dict(types or {})
    found_types = {n: element_type(chain, n, dtype) for n in given} | told
    operands |= {n: (s, found_types[n]) for n, s in given.items()}
    found_ways = ways(chain)
    lies = axes_in_memory(shape, layout)
    assert len(found_ways[chosen(found_ways, (shape, dtype), operands, "cuda", lies)[0]]) == 1
    shapes = [shape, *(s for s, _ in operands.values())]
    kinds = [dtype, *(t for _, t in operands.values())]
    bound = bind(chain, (shape, dtype), operands)
    tensors = [_random(shape, dtype) if x is None else x.to(getattr(torch, dtype))]
    tensors += [
        _random(s, t)
        if t != "int64" or name in told
        else torch.randint(classes([bound], name) or 1 << 62, s)
        for name, (s, t) in operands.items()
    ]
    order = bound.memory_order(lies)
    is_differentiable = bound.dtype in FLOATING and has_gradients
    program = forward(bound, is_training=is_differentiable)
    types = element_types(program, bound, kinds)
    programs = [program]
    if is_differentiable:
        found = derivative(program, range(len(shapes)), program.results, shapes)
        types = with_derivative(program, found, types)
        programs.append(found.program)
    windows = dict(bound.windows)
    pooled = {a: windows_along(w, bound.domain[a]) for a, w in windows.items()}

    def place(extent: frozenset[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        sizes = []
        for axis in range(-len(bound.domain), 0):
            is_whole = -axis in extent or ir.SLIDING - axis in extent
            is_pooled = axis in pooled and not is_whole
            size = pooled[axis] if is_pooled else bound.domain[axis]
            sizes.append(size if axis in extent else 1)
        return tuple(sizes), dense_strides(sizes, order)

    def pitch(leaf: ir.Expr) -> Pitch | None:
        """Where a tensor can have gaps: behind as short a run as may be."""
        if leaf.kind == "noise":
            return None
        sizes, strides = place(leaf.extent)
        steps = sorted({s for n, s in zip(sizes, strides, strict=True) if n > 1})
        size = ITEM_BYTES[types[ir.name_of(leaf)]]
        found = (Pitch(s, s + 16) for s in steps)
        return next((pitch for pitch in found if pitch.is_apt(size)), None)

    def there(tensor: torch.Tensor, leaf: ir.Expr, places: Places) -> torch.Tensor:
        """What a program reads of a tensor."""
        if places:
            tensor = tensor.reshape(place(leaf.extent.union(dict(places)))[0])
        for axis, where in places:
            tensor = tensor.narrow(axis, where % tensor.shape[axis], 1)
        return tensor

    def laid_out(leaf: ir.Expr, tensor: torch.Tensor, apart: Pitch | None) -> torch.Tensor:
        sizes, strides = place(leaf.extent)
        if apart:
            strides = [s if s < apart.run else s // apart.run * apart.step for s in strides]
            assert pitch_of(sizes, strides, *place(leaf.extent)) == apart
        memory = 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
        nothing = math.nan if tensor.is_floating_point() else 1
        home = torch.full((memory,), nothing, dtype=tensor.dtype).as_strided(sizes, strides)
        return home.copy_(tensor.reshape(sizes))

    launched = [at_places(p) for p in programs]
    facts = (order, launched, types, bound, Limits(processors, shared_bytes))
    built_with = signature("cuda", *facts)
    if has_gaps:
        leaves = [leaf for p in launched for leaf in p.graph.inputs]
        built_with = with_gaps(built_with, launched, [ir.name_of(i) for i in leaves if pitch(i)])
    text = source(chain, launched, built_with).text
    library = build(text, folder, processors)

    def launch(which, inputs):
        arguments, pitches = [], []
        for i, (leaf, tensor) in enumerate(zip(which.graph.inputs, inputs, strict=True)):
            tensor = there(tensor, leaf, which.places_of(i))
            is_apart = (which.name, ir.name_of(leaf)) in built_with.gaps
            apart = pitch(leaf) if is_apart else None
            pitches += [apart] if apart else []
            arguments.append(tensor if leaf.kind == "noise" else laid_out(leaf, tensor, apart))
        outputs = []
        for name, expr in which.graph.outputs:
            home = torch.empty_strided(*place(expr.extent), dtype=getattr(torch, types[name]))
            # As a plan has it: a kernel writes the edge that windows leave of whole tensors alone.
            is_whole = len([a for a in expr.extent if a < 0]) == len(bound.domain)
            has_edge = any(-a in expr.extent for a in windows) and not is_whole
            outputs.append(
                home.fill_(0.0 if has_edge or not home.is_floating_point() else math.nan)
            )
        *_, groups = grouped(which, built_with)
        numbers = [math.prod(pooled.get(a, bound.domain[a]) for a in g) for g in groups.axes]
        numbers += [bound.domain[groups.axes[g][0]] for g in groups.pooled]
        if built_with.is_dealt:
            numbers += deal_of(order, built_with.order, bound.domain)
        numbers += [n for p in pitches for n in (p.run, p.step - p.run)]
        call = getattr(library, f"run_{which.name}")
        call.restype = ctypes.c_int64

        def with_scratch(scratch: int) -> int:
            values = [t.data_ptr() for t in arguments + outputs] + [scratch, *numbers, 0, 0]
            return call((ctypes.c_int64 * len(values))(*values))

        scratch = torch.full((with_scratch(-1) // 4 + 64,), math.nan)
        assert with_scratch(scratch.data_ptr()) == 0
        return outputs

    outputs = launch(launched[0], tensors)
    if not is_differentiable:
        wide = [t.double() if t.is_floating_point() else t for t in tensors]
        named = dict(zip(chain.operands, wide[1:], strict=True))
        expected = results_of(run_eagerly(chain, wide[0], named))
        outputs = [o.reshape(e.shape) for o, e in zip(outputs, expected, strict=True)]
        return Emulated(outputs, expected, text)
    exact = [t.double() if t.is_floating_point() else t for t in tensors]
    for name, t in zip(("x", *operands), exact, strict=True):
        t.requires_grad_(t.is_floating_point() and (name == "x" or has_gradient(chain, name)))
    if chain.drawn:  # the other target draws the same from the same seeds
        ours = Part(chain)(exact[0], exact[1:], None)
    else:
        ours = run_eagerly(chain, exact[0], dict(zip(chain.operands, exact[1:], strict=True)))
    expected = results_of(ours)
    kinds = [bound.dtype, *(given.dtype for given in bound.gives)]
    cotangents = [
        torch.randn(e.shape, dtype=getattr(torch, k)) for e, k in zip(expected, kinds, strict=True)
    ]
    pools = {"input": tensors, "output": outputs, "cotangent": cotangents}
    results = launch(launched[1], [pools[pool][i] for pool, i in found.sources])
    by_input = {}
    for i, result in zip(found.targets, results, strict=True):
        # A gradient may be the same all along some of its input's axes.
        by_input[i] = result.expand(place(program.graph.inputs[i].extent)[0])
    by_input |= {i: by_input[found.targets[output]] for i, output in found.shared}
    moving = [i for i, t in enumerate(exact) if t.requires_grad]
    ends = [i for i, e in enumerate(expected) if e.requires_grad]
    slopes = torch.autograd.grad(
        [expected[i] for i in ends],
        [exact[i] for i in moving],
        [cotangents[i].double() for i in ends],
    )
    wanted = [*expected, *slopes]
    have = [*outputs[: len(expected)], *(by_input[i] for i in moving)]
    have = [h.reshape(w.shape) for h, w in zip(have, wanted, strict=True)]
    return Emulated(have, [w.detach() for w in wanted], text)


def _random(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    kind = getattr(torch, dtype)
    if dtype in INTEGERS:
        return torch.randint(0, 100, shape, dtype=kind)
    return torch.randn(shape) > 0 if dtype == "bool" else torch.randn(shape, dtype=kind)


def results_of(found: torch.Tensor | tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """What a chain gives."""
    return [*found] if isinstance(found, tuple) else [found]
