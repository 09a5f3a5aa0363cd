"""Modules: which target a device wants, and the built module of a source."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType

import torch

from fusegen import toolchain
from fusegen.errors import ArgumentError
from fusegen.ops import Chain
from fusegen.program import Program, Signature, source

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
