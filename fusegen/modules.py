"""Modules: which target and variant a device and shape want, and the module that holds it."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from types import ModuleType

import torch

from fusegen import ir, toolchain
from fusegen.errors import ArgumentError
from fusegen.lower import Bound
from fusegen.ops import Chain
from fusegen.program import Program, Signature, source

_TARGET_OF_DEVICE = {"cpu": "cpp", "cuda": "cuda"}
# On the GPU, a row longer than this shared by too few blocks goes over many of them instead, in
# passes.
_LONG_ROW = 1 << 16
_FEW_ROWS = 512


def target_of(device: torch.device) -> str:
    """The target that runs on a device, or an error that names the devices there are."""
    if device.type not in _TARGET_OF_DEVICE:
        raise ArgumentError(
            f"argument 'x': got a tensor on {device}, wanted one on "
            f"{' or '.join(_TARGET_OF_DEVICE)}"
        )
    return _TARGET_OF_DEVICE[device.type]


def index_bits(bound: Bound, device: torch.device) -> int:
    """How wide an offset has to be; on the CPU a wide one costs nothing."""
    return 64 if device.type == "cpu" or math.prod(bound.domain) >= 1 << 31 else 32


def allows_fused(program: Program, bound: Bound) -> bool:
    """Whether each row fits one block: not so for few, very long rows, which many blocks must
    share.
    """
    for node in ir.topological(program.graph.roots):
        if node.op == "reduce":
            _, axes = ir.reduction(node)
            length = math.prod(bound.domain[a] for a in axes if a < 0)
            rows = math.prod(bound.domain) // max(1, length)
            if length > _LONG_ROW and rows < _FEW_ROWS:
                return False
    return True


@functools.cache
def _arch(index: int) -> str:
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


_modules: dict[tuple[str, str | None], ModuleType] = {}


def load(
    chain: Chain, programs: Sequence[Program], signature: Signature, device: torch.device
) -> ModuleType:
    """The module of these programs: from this process, from the cache, or built."""
    text = source(chain, programs, signature)
    arch = _arch(device.index) if device.type == "cuda" else None
    key = (text.module_name, arch)
    if key not in _modules:
        _modules[key] = toolchain.load(text, arch)
    return _modules[key]
