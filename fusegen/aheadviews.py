"""Views of what is sent to shared memory ahead of its turn: how much, how early, and where to."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from fusegen.besideviews import BesideView
from fusegen.indexing import Read
from fusegen.target import ITEM_BYTES

_MOST_PACKS = 8  # that a thread of 1,024 holds in registers
_MOST_PACKS_ASKED = 4  # of asked_reads, where there is no room for all of theirs
_MOST_PACKS_BESIDE = 4  # the same beside what tensors have of stretches


class AheadView(BesideView):
    """A kernel whose blocks may have the packs of later turns on their way."""

    @cached_property
    def has_shared_sums(self) -> bool:
        """Whether sums by column are in shared memory, too."""
        return False

    @cached_property
    def apt_blocks(self) -> int:
        """How many blocks a multiprocessor is to have, as far as registers go."""
        return 1

    @cached_property
    def stages_along(self) -> bool:
        """Whether what every row reads is."""
        return False

    @cached_property
    def sent_reads(self) -> list[Read]:
        """What is sent of a row: of full size, and not late."""
        return self._awaited_reads if self.is_skewed else self.full_reads

    @property
    def late_reads(self) -> list[Read]:
        """What a block of a team asks for while the others' numbers for its row are on their way:
        it finishes the row with it, and has shared memory for more blocks.
        """
        return [r for r in self.full_reads if r not in self.sent_reads]

    @property
    def _awaited_reads(self) -> list[Read]:
        """What is read before numbers are merged, where packs begin with their row."""
        if self.is_shifted:
            return self.full_reads
        stages = [s.function for s in self.stages]
        return [r for r in self.full_reads if any(f.reads(r.name) for f in stages)]

    @property
    def held_packs(self) -> int:
        """How many packs of each tensor are in registers: of long rows, no more than those have
        room for, beside what tensors have of stretches, or of the row where what is merged takes
        many, or is dealt out, or beside what is carried past a merge. The others stay where they
        were sent until the row is finished; all of them, where others are asked for.
        """
        most = _MOST_PACKS - 1 if not self.stretch_reads else _MOST_PACKS_BESIDE
        is_merging = self.has_moments or (self.is_team and len(self.stages) > 1)
        if is_merging and len(self.row_reads) > int(self.has_moments):
            most -= 2 if self.is_narrow else 1
        elif self.is_team and len(self.stages) > 1 and self.carried:
            most -= 2 if self.row_stores else 1
        if self.kernel.is_dealt and not self.is_team and len(self.full_reads) > 1:
            most -= 2  # for their places
        is_full = self.is_sent_ahead and self.kernel.tier and self.kernel.tier.is_full
        if self.packs_asked:
            return self.packs_asked
        if self.asked_reads or self.takes_singly:
            return 0
        if not is_full or self.packs * len(self.full_reads) <= _MOST_PACKS:
            return self.packs
        return most // len(self.full_reads)

    @property
    def takes_singly(self) -> bool:
        """Whether packs are taken from shared memory one by one, and the next row's sent for in the
        place of each: for all at once there are no registers beside what is carried, where many
        columns are added up.
        """
        is_apt = self.adds_many and self.has_shared_sums and self.is_sent_ahead
        return is_apt and bool(self.carried) and not (self.in_place or self.is_shifted)

    @property
    def packs_asked(self) -> int:
        """How many packs of what is sent ahead of rows are asked for as their row begins instead:
        shared memory has no room for them.
        """
        return self.kernel.tier.asked if self.kernel.tier else 0

    @property
    def asked_early(self) -> int:
        """How many packs of asked_reads are asked for as their row begins: as many as registers
        have room for; none beside packs of what is wanted first.
        """
        if self.packs_asked:
            return 0
        count = max(1, len(self.asked_reads))
        return self.packs if self.packs * count <= _MOST_PACKS else _MOST_PACKS_ASKED // count

    @property
    def has_rest(self) -> bool:
        """Whether packs stay in shared memory."""
        return self.held_packs < self.packs

    @property
    def sends_own(self) -> bool:
        """Whether rows have something beside their packs on its way: edges, or what each has one
        of.
        """
        return bool(self.row_reads) or self.is_shifted

    @property
    def asked_ahead(self) -> list[tuple[str, str]]:
        """What a team asks for a turn ahead, and its type."""
        found = [(r.name, self.value_type(r.name)) for r in self.row_reads]
        for read in self.long_reads:
            found += [(f"{read.name}_{s}", self.value_type(read.name)) for s in ("low", "high")]
        return found

    @property
    def _sums_bytes(self) -> int:
        if not self.has_shared_sums:
            return 0
        return self.sums_a_thread * self.threads * 4 * self._words * len(self.sums)

    @property
    def _bytes_with_sums(self) -> int:
        """What those take, with the packs that are sent beside them."""
        return self._sums_bytes + self._bytes_of(self.full_reads) if self.has_shared_sums else 0

    @property
    def _bytes_a_turn(self) -> int:
        return sum(self._bytes_ahead(r) for r in self.sent_reads)

    def _bytes_of(self, reads: Sequence[Read]) -> int:
        """What a turn's packs and edges of some tensors take."""
        return sum(self._bytes_ahead(r) + self._edge_bytes(r) for r in reads)

    def _bytes_ahead(self, read: Read) -> int:
        elements = self.elements - self.packs_asked * self.lanes
        return elements * self.threads * ITEM_BYTES[read.buffer.dtype]

    @property
    def _edges_a_turn(self) -> int:
        return sum(self._edge_bytes(r) for r in self.sent_reads)

    def _edge_bytes(self, read: Read) -> int:
        """What one turn's edges take, each with the pack in which it lies."""
        return self.most_edges_beside * self.lanes * ITEM_BYTES[read.buffer.dtype]

    @cached_property
    def turns_ahead(self) -> int:
        """How many turns of the loop ahead packs are sent for: two where there is room and a thread
        holds much.
        """
        if self.is_skewed:
            return 3
        if self.family == "column" or self.has_rest or self.joins_reads:
            return 1
        room = self._most_room // self.apt_blocks - self._sums_bytes - self._along_bytes
        return 2 if 2 * (self._bytes_a_turn + self._edges_a_turn) <= room else 1

    @property
    def room_bytes(self) -> int:
        """Dynamic shared memory: what threads have of their own there, or a block's rows."""
        if self.is_staged:
            return sum(map(self._bytes_ahead, self.full_reads + self.element_stores))
        a_turn = self._bytes_a_turn + self._edges_a_turn
        ahead = self.turns_ahead * a_turn if self.is_sent_ahead else 0
        return self._sums_bytes + ahead

    def _words_along(self, reads: Sequence[Read]) -> int:
        """How many words of 16 bytes a pack of each of these takes, where every row reads them."""
        return sum(max(1, self.lanes * ITEM_BYTES[r.buffer.dtype] // 16) for r in reads)

    @property
    def along_places(self) -> list[tuple[Read, int]]:
        """What every row reads, and how many such words a thread's pack has before it."""
        reads = self.along_reads
        return [(r, self._words_along(reads[:i])) for i, r in enumerate(reads)]

    @property
    def _most_along_bytes(self) -> int:
        return 16 * self.packs * self.threads * self._words_along(self.along_reads)

    @property
    def _along_bytes(self) -> int:
        """What stages_along takes at most."""
        return self._most_along_bytes if self.stages_along else 0

    @property
    def most_room_bytes(self) -> int:
        """Dynamic shared memory at most."""
        return self.room_bytes + self._along_bytes

    @property
    def least_blocks(self) -> int:
        """How many blocks a multiprocessor must have room for: no more than its shared memory has,
        so that threads have the registers of those that would not be there.
        """
        tier = self.kernel.tier
        if tier is None or not self.most_room_bytes:
            return self.apt_blocks
        return max(1, min(self.apt_blocks, tier.room // self.most_room_bytes))

    @property
    def host_room(self) -> str:
        """Dynamic shared memory in bytes, where the launch is set up."""
        return self.host_room_of(f"{self.name}_block")

    def host_room_of(self, block: str) -> str:
        """The same for a block that is not set up yet."""
        if not self.stages_along:
            return str(self.room_bytes)
        a_thread = 16 * self.packs * self._words_along(self.along_reads)
        return f"{self.room_bytes} + {a_thread} * {block}.x"

    def ahead(self, read: Read) -> str:
        """Where the pack that a tensor has at p was sent, counted in packs."""
        turn = self._bytes_a_turn // (ITEM_BYTES[read.buffer.dtype] * self.lanes)
        at = f"(p - kHeld) * {self.threads}" if self.packs_asked else f"p * {self.threads}"
        return f"slot * {turn} + {at}" if self.turns_ahead > 1 else at

    @property
    def edge_turn(self) -> str:
        """Where a turn's edges were sent, counted in packs."""
        return f" + slot * {self.most_edges_beside}" if self.turns_ahead > 1 else ""

    def place_edges(self, read: Read) -> int:
        """Where a tensor's edges are sent, in 16 bytes from the start: behind all packs."""
        before = self.full_reads[: [r.name for r in self.full_reads].index(read.name)]
        packs = self._sums_bytes + self.turns_ahead * self._bytes_a_turn
        return (packs + self.turns_ahead * sum(self._edge_bytes(r) for r in before)) // 16

    def place_ahead(self, read: Read) -> int:
        """Where a tensor's packs are sent, or its rows staged, in 16 bytes from the start."""
        tensors = self.sent_reads + self.element_stores
        before = tensors[: [t.name for t in tensors].index(read.name)]
        return (self._sums_bytes + sum(self._bytes_ahead(r) for r in before)) // 16
