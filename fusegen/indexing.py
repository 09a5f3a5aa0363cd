"""Index arithmetic as text: from a compact index to the indices of groups, and to offsets."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from fusegen.grouping import Grouping
from fusegen.kernel import Buffer


@dataclass(frozen=True)
class Read:
    """A tensor that an element function reads: its leaf's name, and how its offset follows from
    the group indices.
    """

    name: str
    buffer: Buffer
    type: str
    extent: frozenset[int]

    @property
    def memory(self) -> str:
        """What the pointer to it is called; where it has gaps, its name is that of what goes over
        them.
        """
        return f"{self.name}{'_memory' * self.buffer.has_gaps}"

    @property
    def is_within(self) -> bool:
        """Whether it varies within windows."""
        return min(self.extent, default=0) < 0


class Indexing:
    """Index arithmetic over the groups of one grouping; the first of the groups in `flat` stands
    for all of them, with the places within their windows where they are not pooled.
    """

    def __init__(
        self, grouping: Grouping, flat: tuple[int, ...] = (), *, is_unpooled: bool = False
    ) -> None:
        self.grouping = grouping
        self.flat = flat
        self.is_unpooled = is_unpooled

    def word(self, group: int) -> str:
        """A group's index as a local."""
        return self.grouping.names[group] if group >= 0 else f"window_{-group}"

    def words_of(self, groups: Iterable[int]) -> str:
        """The indices of several, in a sentence."""
        return ", ".join(self.word(g) for g in groups)

    def size_of(self, group: int) -> str:
        """The number of index values of one group."""
        if group < 0:
            return str(self.grouping.windows[-1 - group])
        if group in self.flat:
            whole = "_unpooled" if self.is_unpooled else ""
            sizes = (f"sizes.{self.grouping.names[g]}{whole}.value" for g in self.flat)
            return f"({' * '.join(sizes)})"
        return f"sizes.{self.grouping.names[group]}.value"

    def size(self, groups: Iterable[int]) -> str:
        """The number of index values of several groups together."""
        return " * ".join(self.size_of(g) for g in groups) or "1"

    def count(self, axes: Iterable[int]) -> str:
        """The number of index values along axes: of a sliding axis and its twin, of elements."""
        within = {g for g in axes if g < 0 and self.grouping.slides}
        whole = {self.grouping.pooled[-1 - g] for g in within}
        sizes = [f"sizes.{self.grouping.names[g]}_unpooled.value" for g in sorted(whole)]
        rest = [g for g in axes if g not in within | whole]
        return " * ".join([self.size(rest)] * bool(rest) + sizes) or "1"

    def host_size(self, groups: Iterable[int]) -> str:
        """The same, where the product may be too large for an Index."""
        return " * ".join(f"static_cast<int64_t>({self.size_of(g)})" for g in groups) or "1"

    def compact(self, groups: Sequence[int]) -> str:
        """The compact index over some groups, from their locals."""
        text = ""
        for group in groups:
            word = self.word(group)
            text = word if not text else f"({text}) * {self.size_of(group)} + {word}"
        return text or "0"

    def taken_apart(self, index: str, groups: Sequence[int], needed: set[int]) -> list[str]:
        """Lines that take a compact index over `groups` apart into locals, innermost first.

        Only what is needed gets a local.
        """
        lines: list[str] = []
        rest = index
        for depth in range(len(groups) - 1, -1, -1):
            group, outer = groups[depth], groups[:depth]
            word = self.word(group)
            if not needed & {group, *outer}:
                break
            if not outer:
                lines.append(f"const Index {word} = {rest};")
                break
            above = f"above_{word}"
            is_one_size = group >= 0 and group not in self.flat
            quotient = (
                f"divide({rest}, sizes.{word})"
                if is_one_size
                else f"{rest} / {self.size_of(group)}"
            )
            lines.append(f"const Index {above} = {quotient};")
            if group in needed:
                lines.append(f"const Index {word} = {rest} - {above} * {self.size_of(group)};")
            rest = above
        return lines

    def offset(self, read: Read, at_first: Container[int] = ()) -> str:
        """A tensor's element offset from the group indices, which are locals by then; at the first
        index along some groups.
        """
        text = ""
        for group in read.buffer.extent:
            if group < 0 and read.buffer.is_windowed:
                continue
            coordinate, size = self.word(group), self.size_of(group)
            if (place := dict(read.buffer.at).get(group)) is not None:
                coordinate = str(place) if place >= 0 else f"({size} - {-place})"
            if read.buffer.is_windowed and group in self.grouping.pooled:
                window = self.grouping.pooled.index(group)
                coordinate = (
                    f"({coordinate} * {self.grouping.windows[window]} + window_{window + 1})"
                )
                size = f"sizes.{self.grouping.names[group]}_unpooled.value"
            if group in at_first:
                text = text and f"({text}) * {size}"
            else:
                text = coordinate if not text else f"({text}) * {size} + {coordinate}"
        return text or "0"
