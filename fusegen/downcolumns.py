"""Elements down columns: whether the threads of a kernel that goes element by element stay in
columns, and read once what each column has of its own, such as a channel's statistics where
channels lie innermost.

Element by element, it is read for every pack, from a cache; which in two bytes takes longer than
the elements do.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusegen.bound import Bound
from fusegen.kernel import Buffer
from fusegen.target import ITEM_BYTES, PACK_BYTES

_NARROW = 2  # bytes of an element; wider ones take memory longer than the rest takes the cache
# Bytes that a column has of its own, from which on this is faster on an H200. In copies, by element
# and down columns: of 6 bytes 1.07 and 1.16, of 8 1.38 and 1.29, of 16 1.76 and 1.21.
_LEAST_OF_COLUMN = 8


def has_whole_columns(bound: Bound, order: Sequence[int]) -> bool:
    """Whether no pack of narrow elements crosses the end of a row of columns."""
    sizes = [bound.domain[a] for a in order if bound.domain[a] != 1]
    return bool(sizes) and sizes[-1] % (PACK_BYTES // _NARROW) == 0


def kept_down_columns(domain: tuple[int, ...], buffers: Sequence[Buffer]) -> tuple[int, ...] | None:
    """The outermost groups that a kernel which reads and writes these keeps apart where it goes
    down columns, such as samples that have something of their own; None where it is faster element
    by element.
    """
    columns = domain[-1:]
    whole = [ITEM_BYTES[b.dtype] for b in buffers if b.extent == domain]
    rest = [b for b in buffers if b.extent != domain]
    kept = max((tuple(g for g in b.extent if g not in columns) for b in rest), key=len, default=())
    of_column = sum(ITEM_BYTES[b.dtype] for b in rest if b.extent[-1:] == columns)
    is_apt = kept == domain[: len(kept)] and len(kept) + 1 < len(domain)
    extents = ((), columns, kept, (*kept, *columns))
    is_plain = all(b.extent in extents and b.dtype != "noise" for b in rest)
    is_narrow = max(whole, default=0) == _NARROW
    return kept if is_apt and is_plain and is_narrow and of_column >= _LEAST_OF_COLUMN else None
