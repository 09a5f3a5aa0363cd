"""Noise as the templates see it: what stands where other tensors have a pointer.

Nothing is in memory but a seed. A number is half of a hash of the seed and of the place of a pair
of elements in the logical order of the axes, so it is the same in every layout, on every target,
however many elements a thread has; and a backward finds the forward's numbers again.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusegen.grouping import Grouping
from fusegen.kernel import Buffer
from fusegen.views import noise_type


class NoiseView:
    """One noise of one entry."""

    def __init__(self, entry_name: str, buffer: Buffer, grouping: Grouping) -> None:
        self.name = buffer.name
        self.type = noise_type(entry_name, buffer)
        self.grouping = grouping
        self.groups = tuple(g for g in buffer.extent if g >= 0)
        self.windowed = {g for i, g in enumerate(grouping.pooled) if -1 - i in buffer.extent}

    @property
    def is_in_order(self) -> bool:
        """Whether neighbours in memory are neighbours in the logical order."""
        return len(self.place) == 1

    @property
    def place(self) -> list[str]:
        """Lines that make of `offset`, an offset in memory order, the place in logical order."""
        axes = [a for g in self.groups for a in self.grouping.axes[g]]
        if axes == sorted(axes):
            return ["return offset;"]
        lines = []
        rest = "offset"
        for g in reversed(self.groups[1:]):
            word = self.grouping.names[g]
            lines.append(f"const Index above_{word} = divide({rest}, {self._size(g)});")
            lines.append(f"const Index {word} = {rest} - above_{word} * {self._size(g)}.value;")
            rest = f"above_{word}"
        lines.append(f"const Index {self.grouping.names[self.groups[0]]} = {rest};")
        logical = sorted(self.groups, key=lambda g: self.grouping.axes[g])
        return [*lines, f"return {self._compact(logical)};"]

    def _compact(self, groups: Sequence[int]) -> str:
        text = ""
        for g in groups:
            word = self.grouping.names[g]
            text = word if not text else f"({text}) * {self._size(g)}.value + {word}"
        return text

    def _size(self, group: int) -> str:
        behind = "_unpooled" if group in self.windowed else ""
        return f"sizes.{self.grouping.names[group]}{behind}"
