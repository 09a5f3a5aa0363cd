"""Traffic: the bytes that kernels move between memory and the chip."""

from __future__ import annotations

from fusegen.bound import Bound
from fusegen.kernel import Buffer, Entry, Kernel
from fusegen.target import ITEM_BYTES
from fusegen.windowing import windows_along


def moved(entry: Entry, bound: Bound) -> int:
    """All that a program's kernels read and write. What one writes and the next reads counts twice,
    as if no cache were there; partial sums do not count.
    """
    return sum(
        sum(size.values()) for kernel in entry.kernels for size in tensors(kernel, entry, bound)
    )


def tensors(kernel: Kernel, entry: Entry, bound: Bound) -> tuple[dict[str, int], dict[str, int]]:
    """The tensors that a kernel reads, and those that it writes, each with its bytes."""
    whole = {b.name: bytes_of(b, entry, bound) for b in entry.arguments}
    inputs = [b for _, b in kernel.inputs if not b.is_computed]
    read = {b.name: whole.get(b.name) or bytes_of(b, entry, bound) for b in inputs}
    return read, {b.name: bytes_of(b, entry, bound) for b, _ in kernel.stores}


def bytes_of(buffer: Buffer, entry: Entry, bound: Bound) -> int:
    """The bytes of a tensor; noise is a seed."""
    if buffer.dtype == "noise":
        return 8
    grouping = entry.grouping
    pooled = {a: windows_along(w, bound.domain[a]) for a, w in bound.windows}
    windowed = {
        a
        for i, g in enumerate(grouping.pooled)
        if -1 - i in buffer.extent
        for a in grouping.axes[g]
    }
    count = buffer.pieces
    for group in buffer.extent:
        if group < 0:
            if not buffer.is_windowed:
                count *= grouping.windows[-1 - group]
            continue
        for axis in grouping.axes[group]:
            is_whole = axis not in pooled or (axis in windowed and buffer.is_windowed)
            count *= bound.domain[axis] if is_whole else pooled[axis]
    return count * ITEM_BYTES[buffer.dtype]
