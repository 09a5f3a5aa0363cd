"""Pooling of the last axes, with every window that torch takes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

from fusegen.ir import Expr, primitive, reduce, reduce_sum
from fusegen.ops.registry import op
from fusegen.windowing import Window, adaptive, covered, sliding, windows

_Sizes = int | tuple[int, ...]
_Parts = int | None | tuple[int | None, ...]  # None leaves an axis as it is
_Size = TypeVar("_Size")


def _each(size: _Size | tuple[_Size, ...], axis_count: int) -> tuple[_Size, ...]:
    """One size for each pooled axis."""
    sizes = size if isinstance(size, tuple) else (size,)
    return sizes * axis_count if len(sizes) == 1 else sizes


def _problem(axis_count: int) -> Callable[..., str | None]:
    def problem(**attributes: Any) -> str | None:
        for name, least in (("kernel_size", 1), ("stride", 1), ("padding", 0), ("dilation", 1)):
            value = attributes.get(name)
            if value is None:
                continue
            sizes = _each(value, axis_count)
            if len(sizes) != axis_count or min(sizes) < least:
                some = f"one size or {axis_count}" if axis_count > 1 else "one size"
                return f"{name} wants {some}, each at least {least}, got {value}"
        if attributes.get("divisor_override") == 0:
            return "divisor_override cannot be 0; leave it out to divide by the window's size"
        if attributes.get("norm_type", 1.0) in (0.0, math.inf, -math.inf):
            return f"norm_type wants a number other than 0, got {attributes['norm_type']}"
        kernel, padding = (
            _each(attributes.get(name, 0), axis_count) for name in ("kernel_size", "padding")
        )
        dilation = _each(attributes.get("dilation", 1), axis_count)
        for size, behind, apart in zip(kernel, padding, dilation, strict=True):
            span = apart * (size - 1) + 1
            if behind > span // 2:
                return (
                    f"padding wants at most half of a window, which spans {span}, got "
                    f"{attributes['padding']}"
                )
        return None

    return problem


def _adaptive_problem(axis_count: int) -> Callable[..., str | None]:
    def problem(output_size: _Parts) -> str | None:
        sizes = _each(output_size, axis_count)
        if len(sizes) != axis_count or any(size is not None and size < 1 for size in sizes):
            some = f"one size or {axis_count}" if axis_count > 1 else "one size"
            return f"output_size wants {some}, each at least 1, got {output_size}"
        return None

    return problem


def _windows(lengths: tuple[int, ...], **attributes: Any) -> tuple[Window, ...]:
    """The windows along each pooled axis, of these lengths."""
    count = len(lengths)
    kernel = _each(attributes["kernel_size"], count)
    stride = attributes.get("stride")
    strides = kernel if stride is None else _each(stride, count)
    padding, dilation = (
        _each(attributes.get(name, default), count)
        for name, default in (("padding", 0), ("dilation", 1))
    )
    is_ceil = attributes.get("ceil_mode", False)
    rows = zip(lengths, kernel, strides, padding, dilation, strict=True)
    return tuple(sliding(*row, is_ceil=is_ceil) for row in rows)


def _adaptive_windows(
    lengths: tuple[int, ...], *, output_size: _Parts, **_: object
) -> tuple[Window, ...]:
    sizes = _each(output_size, len(lengths))
    return tuple(
        adaptive(length, length if size is None else size)
        for length, size in zip(lengths, sizes, strict=True)
    )


def _mean_windows(
    lengths: tuple[int, ...], *, output_size: _Parts, **_: object
) -> tuple[Window, ...] | None:
    """None where the mean is over whole axes: a reduction as others are."""
    if set(_each(output_size, len(lengths))) == {1}:
        return None
    return _adaptive_windows(lengths, output_size=output_size)


def _maximum(x: Expr, axis_count: int) -> Expr:
    return reduce("max", windows(x, x.axes[-axis_count:]), x)


def _average(
    x: Expr,
    kernel: tuple[int, ...],
    padding: _Sizes = 0,
    divisor: int | None = None,
    *,
    is_ceil: bool = False,
    counts_padding: bool = True,
) -> Expr:
    axes = x.axes[-len(kernel) :]
    total = reduce_sum(x, windows(x, axes))
    is_padded = max(_each(padding, len(kernel))) > 0
    if divisor is not None:
        return total / float(divisor)
    if is_ceil or (is_padded and not counts_padding):
        return total / covered(x, axes, is_padded=counts_padding)
    return total / float(math.prod(kernel))


def _adaptive_average(x: Expr, output_size: _Parts, axis_count: int) -> Expr:
    axes = x.axes[-axis_count:]
    if set(_each(output_size, axis_count)) == {1}:
        return reduce("mean", axes, x)
    return reduce_sum(x, windows(x, axes)) / covered(x, axes)


def _power_average(x: Expr, norm_type: float, kernel: tuple[int, ...], *, is_ceil: bool) -> Expr:
    mean = _average(primitive("pow", x, norm_type), kernel, is_ceil=is_ceil)
    # Where all of a window is 0, torch lets no gradient through.
    mean = primitive("where", primitive("ne", mean, 0.0), mean, 0.0)
    return primitive("pow", mean * float(math.prod(kernel)), 1.0 / norm_type)


_MAX_SAMPLES = (
    ((2,), (3, 2, 1), (2, 3, 1, 2, True)),
    ((2,), ((3, 2),), (3, 2, 1), ((2, 3), (1, 2), (1, 0), 1, True), (2, 1, 0, 2)),
    ((2,), ((1, 2, 3),), (3, 2, 1), (2, (1, 2, 1), 0, (1, 2, 1), True)),
)
_AVERAGE_SAMPLES = (
    ((2,), (3, 2, 1), (3, 2, 1, True, False)),
    ((2,), (3, 2, 1), ((3, 2), 2, 1, True, False), (3, 2, 1, True), (2, 1, 0, False, True, 3)),
    ((2,), (3, 2, 1), (2, (1, 2, 2), 1, True, False)),
)


@op(
    reference="torch.nn.functional.max_pool1d",
    samples=_MAX_SAMPLES[0],
    ulp=0,
    window_axes=1,
    windowing=_windows,
    check=_problem(1),
)
def max_pool1d(
    x: Expr,
    kernel_size: int | tuple[int, ...],
    stride: int | tuple[int, ...] | None = None,
    padding: int | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    ceil_mode: bool = False,
) -> Expr:
    """The maximum of each window of the last axis; NaN wins.

    The first of equal maxima gets the gradient.
    """
    return _maximum(x, 1)


@op(
    reference="torch.nn.functional.max_pool2d",
    samples=_MAX_SAMPLES[1],
    ulp=0,
    window_axes=2,
    windowing=_windows,
    check=_problem(2),
)
def max_pool2d(
    x: Expr,
    kernel_size: int | tuple[int, ...],
    stride: int | tuple[int, ...] | None = None,
    padding: int | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    ceil_mode: bool = False,
) -> Expr:
    """The maximum of each window of the last two axes; NaN wins.

    The first of equal maxima gets the gradient.
    """
    return _maximum(x, 2)


@op(
    reference="torch.nn.functional.max_pool3d",
    samples=_MAX_SAMPLES[2],
    ulp=0,
    window_axes=3,
    windowing=_windows,
    check=_problem(3),
)
def max_pool3d(
    x: Expr,
    kernel_size: int | tuple[int, ...],
    stride: int | tuple[int, ...] | None = None,
    padding: int | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    ceil_mode: bool = False,
) -> Expr:
    """The maximum of each window of the last three axes; NaN wins.

    The first of equal maxima gets the gradient.
    """
    return _maximum(x, 3)


@op(
    reference="torch.nn.functional.avg_pool1d",
    samples=_AVERAGE_SAMPLES[0],
    window_axes=1,
    windowing=_windows,
    check=_problem(1),
)
def avg_pool1d(
    x: Expr,
    kernel_size: int | tuple[int, ...],
    stride: int | tuple[int, ...] | None = None,
    padding: int | tuple[int, ...] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Expr:
    """The mean of each window of the last axis."""
    return _average(
        x,
        _each(kernel_size, 1),
        padding,
        is_ceil=ceil_mode,
        counts_padding=count_include_pad,
    )


@op(
    reference="torch.nn.functional.avg_pool2d",
    samples=_AVERAGE_SAMPLES[1],
    window_axes=2,
    windowing=_windows,
    check=_problem(2),
)
def avg_pool2d(
    x: Expr,
    kernel_size: int | tuple[int, ...],
    stride: int | tuple[int, ...] | None = None,
    padding: int | tuple[int, ...] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Expr:
    """The mean of each window of the last two axes."""
    return _average(
        x,
        _each(kernel_size, 2),
        padding,
        divisor_override,
        is_ceil=ceil_mode,
        counts_padding=count_include_pad,
    )


@op(
    reference="torch.nn.functional.avg_pool3d",
    samples=_AVERAGE_SAMPLES[2],
    window_axes=3,
    windowing=_windows,
    check=_problem(3),
)
def avg_pool3d(
    x: Expr,
    kernel_size: int | tuple[int, ...],
    stride: int | tuple[int, ...] | None = None,
    padding: int | tuple[int, ...] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Expr:
    """The mean of each window of the last three axes."""
    return _average(
        x,
        _each(kernel_size, 3),
        padding,
        divisor_override,
        is_ceil=ceil_mode,
        counts_padding=count_include_pad,
    )


def _register_power_average(axis_count: int) -> None:
    """lp_pool of this many axes."""

    def pool(
        x: Expr,
        norm_type: float,
        kernel_size: int | tuple[int, ...],
        stride: int | tuple[int, ...] | None = None,
        ceil_mode: bool = False,
    ) -> Expr:
        return _power_average(x, norm_type, _each(kernel_size, axis_count), is_ceil=ceil_mode)

    axes = {1: "", 2: " of two axes", 3: " of three axes"}[axis_count]
    pool.__name__ = f"lp_pool{axis_count}d"
    pool.__doc__ = (
        f"The norm_type-th root of the sum of the norm_type-th powers of each window{axes}."
    )
    kernel: int | tuple[int, ...] = (3, 2, 2)[:axis_count] if axis_count > 1 else 3
    op(
        reference=f"torch.nn.functional.{pool.__name__}",
        samples=[(2.0, 2), (3.0, kernel, 2, True)],
        window_axes=axis_count,
        windowing=_windows,
        check=_problem(axis_count),
    )(pool)


def _register_adaptive(axis_count: int) -> None:
    """adaptive_avg_pool and adaptive_max_pool of this many axes."""
    axes = {1: "the last axis", 2: "the last two axes", 3: "the last three axes"}[axis_count]

    def average(x: Expr, output_size: int | tuple[int | None, ...]) -> Expr:
        return _adaptive_average(x, output_size, axis_count)

    def maximum(x: Expr, output_size: int | tuple[int | None, ...]) -> Expr:
        return _maximum(x, axis_count)

    as_is = " None leaves an axis as it is." if axis_count > 1 else ""
    parts = f"of {axes}, divided evenly into output_size parts"
    average.__doc__ = f"The means {parts}.{as_is}"
    maximum.__doc__ = f"The maxima {parts}; NaN wins.{as_is}"
    table = (("avg", average, _mean_windows, None), ("max", maximum, _adaptive_windows, 0))
    for kind, function, windowing, ulp in table:
        function.__name__ = f"adaptive_{kind}_pool{axis_count}d"
        op(
            reference=f"torch.nn.functional.{function.__name__}",
            samples=[(2,), (1,), (3,)],
            ulp=ulp,
            window_axes=axis_count,
            windowing=windowing,
            check=_adaptive_problem(axis_count),
        )(function)


for _count in (1, 2, 3):
    _register_power_average(_count)
for _count in (1, 2, 3):
    _register_adaptive(_count)
