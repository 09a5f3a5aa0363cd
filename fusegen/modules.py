"""Modules: which target a device wants, and the built module of a source."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

import torch

from fusegen import cache, ir, toolchain
from fusegen.errors import ArgumentError
from fusegen.ops import Chain
from fusegen.program import Program
from fusegen.signature import Signature
from fusegen.target import Limits

_TARGET_OF_DEVICE = {"cpu": "cpp", "cuda": "cuda"}


def target_of(device: torch.device) -> str:
    """The target that runs on a device, or an error that names the devices there are."""
    if device.type not in _TARGET_OF_DEVICE:
        raise ArgumentError(
            f"argument 'x': got a tensor on {device}, wanted one on "
            f"{' or '.join(_TARGET_OF_DEVICE)}"
        )
    return _TARGET_OF_DEVICE[device.type]


@functools.cache
def _arch(index: int) -> str:
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


def limits_here() -> Limits:
    """What the current GPU has; raises ArgumentError where torch finds none."""
    if not torch.cuda.is_available():
        raise ArgumentError("torch finds no GPU here; name one, such as H200")
    return limits(torch.device("cuda", torch.cuda.current_device()))


@functools.cache
def limits(device: torch.device) -> Limits:
    """What a device has; where none is divided into multiprocessors, one."""
    if device.type != "cuda":
        return Limits(1, 0)
    found = torch.cuda.get_device_properties(device)
    shared_bytes = found.shared_memory_per_block_optin  # type: ignore[attr-defined]  # torch's stub
    return Limits(found.multi_processor_count, shared_bytes)


@dataclass(frozen=True)
class _Text:
    """A Source, read back."""

    target: str
    module_name: str
    text: str
    binding: str
    chain_text: str
    chain_hash: str


def _package() -> str:
    """A digest of every file of the package."""
    root = Path(__file__).parent
    files = sorted([*root.rglob("*.py"), *root.glob("templates/**/*.*")])
    return cache.build_key(*[part for f in files for part in (str(f), f.read_text())])


_GENERATOR = _package()  # as it is imported: its files may be others by the time it is asked for


def random_generators() -> tuple[torch.Generator, ...]:
    """Torch's own generators of random numbers: the CPU's, and those of GPUs that are in use."""
    has_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return (torch.default_generator, *(torch.cuda.default_generators if has_gpu else ()))


def generator() -> str:
    """What stands for the generator itself."""
    return _GENERATOR


def _emitted(chain: Chain, programs: Sequence[Program], signature: Signature) -> _Text:
    """The programs' source, which the cache remembers: to print it takes 100 ms the first time."""

    def emit() -> str:
        # Here, because a warm start needs neither the scheduler nor jinja2.
        from fusegen.emission import source

        return json.dumps(asdict(source(chain, programs, signature)))

    outlines = [_outline(p) for p in programs]
    question = "\n\n".join([generator(), chain.hash, chain.text, repr(signature), *outlines])

    def is_sure() -> bool:
        """Whether modules that were imported just now are of this version, and not of one that has
        taken its place meanwhile.
        """
        return _package() == _GENERATOR

    return _Text(**json.loads(cache.remember(question, emit, is_sure=is_sure)))


_modules: dict[tuple[str, str | None], ModuleType] = {}


def load(
    chain: Chain, programs: Sequence[Program], signature: Signature, device: torch.device
) -> ModuleType:
    """The module of these programs: from this process, from the cache, or built."""
    text = _emitted(chain, programs, signature)
    arch = _arch(device.index) if device.type == "cuda" else None
    key = (text.module_name, arch)
    if key not in _modules:
        _modules[key] = toolchain.load(text, arch)
    return _modules[key]


def _outline(program: Program) -> str:
    """All that a program's generated text depends on, as text that is the same in every process."""
    graph, marks = program.graph, program.marks
    order = ir.topological((*graph.inputs, *graph.roots, *(m.node for m in marks)))
    number = {node: i for i, node in enumerate(order)}
    lines = [
        f"{n.op} {n.attrs!r} {sorted(n.extent)} {n.kind} {[number[a] for a in n.args]}"
        for n in order
    ]
    lines.append(repr([number[i] for i in graph.inputs]))
    lines += [f"{name} = {number[expr]}" for name, expr in graph.outputs]
    lines += [f"{m.name} = {number[m.node]}: {m.comment}" for m in marks]
    return "\n".join([program.name, repr(program.windows), *lines])
