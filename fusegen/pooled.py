"""What pooling makes of shapes."""

from __future__ import annotations

from collections.abc import Iterable

from fusegen import ir
from fusegen.errors import ArgumentError, UnsupportedError
from fusegen.ops import Definition, Step
from fusegen.windowing import Window, size_of, windows_along

Shape = tuple[int, ...]


def pooled(shape: Shape, windows: Iterable[tuple[int, Window]], collapsed: ir.Extent) -> Shape:
    """A shape whose axes are pooled by windows, or collapsed to one value."""
    sizes = list(shape)
    for axis, window in windows:
        sizes[axis] = windows_along(window, sizes[axis])
    for axis in collapsed:
        sizes[axis] = 1
    return tuple(sizes)


def unpooled(
    text: str,
    result: Shape,
    whole: Shape,
    windows: Iterable[tuple[int, Window]],
    collapsed: ir.Extent,
) -> Shape:
    """The result's shape with the pooled axes as they were before."""
    before = pooled(whole, windows, collapsed)
    sizes = list(result)
    for axis in (*dict(windows), *collapsed):
        if result[axis] != before[axis]:
            raise UnsupportedError(
                f"{text}: what follows the pooling widens its result of shape {before} to "
                f"{result}; compile what follows as a chain of its own"
            )
        sizes[axis] = whole[axis]
    return tuple(sizes)


def pooled_axes(
    step: Step, definition: Definition, running: Shape
) -> tuple[tuple[tuple[int, Window], ...], ir.Extent]:
    """The windows along each pooled axis; and the axes that are reduced as a whole."""
    number = definition.window_axes
    if len(running) not in (number + 1, number + 2):
        raise ArgumentError(
            f"{step.text}: got a value of shape {running}, wanted {number + 1} or {number + 2} "
            "axes, "
            f"the last {number} of which are pooled"
        )
    axes, lengths = tuple(range(-number, 0)), running[-number:]
    found = step.windows(lengths)
    if found is None:
        return (), frozenset(axes)
    for length, window in zip(lengths, found, strict=True):
        if windows_along(window, length) < 1:
            raise ArgumentError(
                f"{step.text}: a window of {tuple(map(size_of, found))} does not fit in a value of "
                f"shape {running}; the result would be empty"
            )
    return tuple(zip(axes, found, strict=True)), frozenset()
