"""torch's functions by their names, since the operations are read where there is no torch."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from typing import Any


def function_of(name: str) -> Any:
    """What a dotted name such as torch.nn.functional.gelu stands for; imports what it lies in.

    Of torch by attributes alone, which torch.compile can follow into a reference.
    """
    if not name.startswith("torch."):
        return pkgutil.resolve_name(name)
    found = sys.modules.get("torch") or importlib.import_module("torch")
    for part in name.split(".")[1:]:
        found = getattr(found, part)
    return found


def is_tensor(value: object) -> bool:
    """Whether it is one of torch's, which need not be imported to tell."""
    return any(map(is_torchs, type(value).__mro__))


def is_torchs(kind: object) -> bool:
    """Whether it is torch's class of tensors."""
    return (getattr(kind, "__module__", ""), getattr(kind, "__name__", "")) == ("torch", "Tensor")
