"""Stacking: values of one shape side by side, along an axis that none of them varies along.

It need not be a new one of the graph. Where a chain has selected the parts of an axis, what it has
computed of them is put side by side along that axis again, so it meets whatever lies along it.
"""

from __future__ import annotations

from dataclasses import replace

from fusegen.axes import Atlas, Axes, Shape, Value, flat
from fusegen.errors import ArgumentError
from fusegen.fitting import dims_of, rearranged
from fusegen.ops import Step

Operands = list[tuple[str, Axes]]


def require_alike(step: Step, name: str, running: Shape, shape: Shape) -> None:
    """Raise ArgumentError where what is stacked has another shape than the value."""
    if shape != running:
        raise ArgumentError(
            f"{step.text}: {name!r} has shape {shape}, wanted the value's {running}: what is put "
            "side by side has one shape"
        )


def stacked(
    step: Step, value: Value, x: Axes, operands: Operands, atlas: Atlas
) -> tuple[Value, Axes, Operands]:
    """The value behind a step that puts others beside it, and the axes of x and of those as its
    body sees them, to which the result's axes are.
    """
    assert step.definition is not None
    (dim,) = dims_of(step, value.shape)
    result = rearranged(step, step.definition, value)
    size = result.shape[dim]
    before, behind = flat(value.axes[:dim]), flat(value.axes[dim:])
    found = atlas.free(size, before, behind) or atlas.beside(size, behind, before)
    axes = (*value.axes[:dim], found, *value.axes[dim:])

    def apart(axes: Axes) -> Axes:
        return (*axes[:dim], (), *axes[dim:])

    others = [(name, apart(along)) for name, along in operands]
    return replace(result, axes=axes), apart(x), others
