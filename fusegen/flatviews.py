"""Views of the kernels that go by elements, or by what others have left of each result."""

from __future__ import annotations

from collections.abc import Iterable

from fusegen import ir
from fusegen.indexing import Read
from fusegen.reductionviews import ReductionView
from fusegen.target import FUNCTIONS, ITEM_BYTES
from fusegen.views import NUMBERS, KernelView

_THREADS, _THREADS_WRITING = 64, 256  # of a block, the latter where it reads little
_BLOCKS, _BLOCKS_CALLING = 24, 16  # of _THREADS, the latter where functions are called
_MOST_LOADED = 64  # bytes of a thread on their way beside which the registers of _BLOCKS are enough
_MOST_NUMBERS = 8  # of a thread in shared memory, for 512 threads


class PointwiseView(KernelView):
    """A kernel that goes element by element."""

    @property
    def threads(self) -> int:
        """Threads in a block. Where elements are only written, one of few threads is over sooner
        than the next is begun.
        """
        return _THREADS if self.full_reads else _THREADS_WRITING

    @property
    def packs(self) -> int:
        """How many 16-byte accesses of each tensor a thread has in flight."""
        # Fewer wait for memory, of more the instructions do not fit in their cache.
        return 4 if 0 < len(self.loaded_reads) < 3 and not self.varying_reads else 2

    @property
    def drawn_reads(self) -> list[Read]:
        """Noise of each element, which is drawn while others are on their way."""
        return [r for r in self.full_reads if r.buffer.dtype == "noise"]

    @property
    def loaded_reads(self) -> list[Read]:
        """What memory has of each element."""
        return [r for r in self.full_reads if r not in self.drawn_reads]

    @property
    def wanted_blocks(self) -> int:
        """How many blocks the compiler is to leave room for, 0 where it may decide: of elements of
        two bytes, or where tensors have gaps, it would have more of them, and spill for that.
        """
        has_gaps = self.kernel.has_gaps
        if all(ITEM_BYTES[r.buffer.dtype] > 2 for r in self.packed) and not has_gaps:
            return 0
        calls = any(n.op in FUNCTIONS for n in ir.topological(self.expressions))
        each = sum(ITEM_BYTES[r.buffer.dtype] for r in self.loaded_reads)
        loaded = each * self.lanes * self.packs
        is_full = loaded > _MOST_LOADED or (not loaded and bool(self.varying_reads))
        blocks = _BLOCKS_CALLING if calls or has_gaps or is_full else _BLOCKS
        return blocks * _THREADS // self.threads


class FinaliseView(KernelView):
    """A kernel that merges partials, and goes on from the results."""

    @property
    def slots_at_once(self) -> int:
        """How many slots' partials a thread asks for before it adds any."""
        numbers = _numbers(self.sums)
        return 8 if numbers <= 4 else 4 if numbers <= 8 else 2

    @property
    def merged_together(self) -> list[list[ReductionView]]:
        """The sums whose accumulators shared memory has room for at once."""
        found: list[list[ReductionView]] = []
        for s in self.sums:
            if found and _numbers([*found[-1], s]) <= _MOST_NUMBERS:
                found[-1].append(s)
            else:
                found.append([s])
        return found

    @property
    def tree_bytes(self) -> int:
        """What a thread has of shared memory for them, in double precision."""
        return 8 * max(map(_numbers, self.merged_together), default=0)


def _numbers(sums: Iterable[ReductionView]) -> int:
    return sum(NUMBERS[s.kind] for s in sums)
