"""Situation: what a chain is called with, where its text is wanted and no tensors are there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from fusegen.arguments import sizes_of
from fusegen.errors import ArgumentError
from fusegen.layouts import dtype_name
from fusegen.modules import limits_here
from fusegen.target import H200

if TYPE_CHECKING:
    from fusegen.describe import Situation


def situation_of(
    target: str | None,
    dtype: str | torch.dtype,
    shape: Sequence[int] | None,
    operands: Mapping[str, Sequence[int]] | None,
    layout: str,
    gaps: Sequence[str] = (),
) -> tuple[str, Situation]:
    """The target, and what a chain is called with there, from what a caller gave."""
    # Here, because a call needs no text.
    from fusegen.describe import Situation

    if not isinstance(target, str | None):
        raise ArgumentError(
            f"target: got a {type(target).__name__}, wanted 'cuda' or 'cpp'; of a tensor x write "
            "shape=tuple(x.shape)"
        )
    if not isinstance(operands, Mapping | None):
        raise ArgumentError(f"operands: got a {type(operands).__name__}, wanted shapes by name")
    if not isinstance(gaps, list | tuple) or not all(isinstance(name, str) for name in gaps):
        raise ArgumentError(f"gaps: got {gaps!r}, wanted a list of names")
    has_gpu = torch.cuda.is_available()
    situation = Situation(
        None if shape is None else sizes_of("shape", shape),
        {name: sizes_of(f"operands[{name!r}]", s) for name, s in dict(operands or {}).items()},
        dtype if isinstance(dtype, str) else dtype_name(dtype),
        layout,
        limits_here() if has_gpu else H200,
        tuple(gaps),
    )
    return target or ("cuda" if has_gpu else "cpp"), situation
