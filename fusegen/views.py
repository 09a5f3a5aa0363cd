"""Kernels as the templates see them: names, types, index arithmetic and calls, all finished text.

A skeleton declares a local `<leaf>_value` for everything an element function reads and
`<result>_value` for what it gives, and then makes the call that stands ready; so skeletons never
see an operation, and operations never see a loop.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property

from fusegen import ir
from fusegen.indexing import Indexing, Read
from fusegen.kernel import Buffer, Entry, Kernel, Reduction
from fusegen.reductionviews import ReductionView, StageView
from fusegen.statements import ElementFunction, element_function, found_once, leaf_name
from fusegen.target import ITEM_BYTES, PACK_BYTES, STORAGE, Target

NUMBERS = {"sum": 1, "moments": 4, "max": 2, "peak": 1, "pick": 1, "winner": 3}  # of an accumulator


def noise_type(entry_name: str, buffer: Buffer) -> str:
    """The struct that stands for noise where others have a pointer."""
    return f"{entry_name}_drawn_{buffer.name}".title().replace("_", "")


class KernelView(Indexing):
    """A Kernel as its template sees it."""

    def __init__(self, kernel: Kernel, entry: Entry, target: Target) -> None:
        super().__init__(entry.grouping, kernel.flat, is_unpooled=kernel.is_unpooled)
        self.kernel = kernel
        self.target = target
        self.compute, self.has_short_rows = entry.compute, entry.has_short_rows
        self.name, self.family = kernel.name, kernel.family
        self.domain, self.reduced, self.kept = kernel.domain, kernel.reduced, kernel.kept
        self.entry_name, self.sizes_type = entry.name, entry.sizes_type
        self.sums = [ReductionView(r, b, self) for r, b in kernel.sums]
        self.stretches = [ReductionView(r, b, self) for r, b in kernel.stretches]
        self.totals = [ReductionView(r, b, self) for r, b in kernel.totals]
        self.left = self.sums + self.stretches + self.totals  # what goes to partials
        self.stages = [self._stage(i, stage) for i, stage in enumerate(kernel.stages)]
        self.reductions = [r for s in self.stages for r in s.reductions] + self.left
        ends = [(f"{name}_finished", value) for name, _, value in kernel.ends]
        ends += [term for s in self.totals for term in s.terms]
        results = [*((b.name, expr) for b, expr in kernel.stores), *ends]
        self.last_sums, self.last_stretches = last = self._sums_at(len(kernel.stages))
        results += [t for part in last for s in part if not s.is_plain for t in s.terms]
        self.expressions = [e for _, e in results]
        accumulated = [e for s in kernel.stages for r in s for e in (r.value, r.index, *r.picks)]
        self.expressions += [e for e in accumulated if e is not None]
        self.expressions += [value for pairs in kernel.held for _, value in pairs]
        self.expressions += [s.reduction.value for s in self.left]
        is_split = kernel.family in ("row", "column", "window", "slide", "bundle")
        along = set(kernel.reduced) if is_split else set(kernel.domain)
        row_names = {s.name for s in self.stores if is_split and not s.extent & along}
        row_names |= {s.term for s in self.sums if kernel.family == "window"}
        row_names |= {name for name, _ in ends}
        self.row_stores = [s for s in self.stores if s.name in row_names]
        self.element_stores = [s for s in self.stores if s.name not in row_names]
        self.values = self._function("values", [r for r in results if r[0] not in row_names])
        self.row_values = self._function("row_values", [r for r in results if r[0] in row_names])
        # A team's blocks are to be there at once; strided rows are faster with pointers promised.
        is_apart = self.is_team or (kernel.family == "column" and kernel is entry.kernels[0])
        self.is_following = target.reports_errors and not is_apart

    def _function(self, stem: str, results: Sequence[tuple[str, ir.Expr]]) -> ElementFunction:
        name = f"{self.name}_{stem}"
        spelling = (self.target, self.compute, self.kernel.marks, self.grouping.names)
        if not self.varying or stem == "row_values":
            return element_function(name, results, *spelling)
        return found_once(name, results, self.varying, self._names, *spelling)

    @property
    def varying(self) -> tuple[int, ...]:
        """The groups from one of whose elements to the next a function is called again, where what
        varies along none of them is found once; () where nothing is.
        """
        is_packed = self.family in ("pointwise", "inner") and self.target.is_flat
        return self.domain[-1:] if is_packed else ()

    @cached_property
    def _names(self) -> set[str]:
        """What the kernel's locals are called."""
        leaves = [leaf for leaf, _ in self.kernel.inputs]
        leaves += [leaf for s in self.kernel.stages for r in s for _, leaf in r.results]
        leaves += [leaf for pairs in self.kernel.held for leaf, _ in pairs]
        names = {ir.name_of(leaf) for leaf in leaves} | {b.name for b, _ in self.kernel.stores}
        return names | {s.term for s in self.left}

    def _stage(self, i: int, stage: tuple[Reduction, ...]) -> StageView:
        views = [ReductionView(r, None, self) for r in stage]
        apart = [v for v in views if self.stands_apart(v, views)]
        results = [t for v in views if not v.is_plain and v not in apart for t in v.terms]
        results += [(f"{v.term}_at", index) for v in views for index in v.indices]
        held = self.kernel.held[i] if self.kernel.held else ()
        results += [(ir.name_of(leaf), value) for leaf, value in held]
        sums, stretches = self._sums_at(i)
        results += [t for s in (*sums, *stretches) if not s.is_plain for t in s.terms]
        function = self._function(f"stage_{i + 1}", results)
        names = [ir.name_of(leaf) for leaf, _ in held]
        places = {v: self._function(f"stage_{i + 1}_{v.name}", v.terms) for v in apart}
        return StageView(function, views, names, sums, stretches, places)

    def stands_apart(self, reduction: ReductionView, stage: Sequence[ReductionView]) -> bool:
        """Whether only where its one place is anything is added up, instead of zeros elsewhere."""
        return False

    def takes_plain(self, reduction: Reduction) -> bool:
        """Whether something is reduced as it is read, without a term."""
        return False

    @property
    def adds_products(self) -> bool:
        """Whether a sum takes the factors of a product, and joins them with its addition."""
        return False

    @cached_property
    def carried(self) -> list[str]:
        """What stages leave for later ones."""
        return [name for s in self.stages for name in s.held]

    def _sums_at(self, level: int) -> tuple[list[ReductionView], list[ReductionView]]:
        """The sums, and those of stretches, whose terms are known behind so many stages."""
        if self.family == "finalise":
            return [], []
        placed = self.kernel.placed or (len(self.kernel.stages),) * len(self.sums)
        pairs = zip(self.sums + self.stretches, placed, strict=True)
        known = [s for s, at in pairs if at == level]
        return [s for s in known if s in self.sums], [s for s in known if s in self.stretches]

    # What stands in the parameter list.

    @cached_property
    def reads(self) -> list[Read]:
        """Everything read, in the order of the inputs."""
        return [
            Read(ir.name_of(leaf), b, self.type(b), frozenset(b.varying))
            for leaf, b in self.kernel.inputs
        ]

    def reads_of(
        self, function: ElementFunction, among: Sequence[Read] | None = None
    ) -> list[Read]:
        """The tensors that one element function reads."""
        return [r for r in (self.reads if among is None else among) if function.reads(r.name)]

    @cached_property
    def stores(self) -> list[Read]:
        """Everything written at finished values."""
        return [Read(b.name, b, self.type(b), frozenset(b.extent)) for b, _ in self.kernel.stores]

    @cached_property
    def _loaded(self) -> list[Read]:
        """What is read from memory."""
        return [r for r in self.reads if not r.buffer.is_computed]

    @property
    def positions(self) -> list[Read]:
        """What is read but lies nowhere: positions along groups."""
        return [r for r in self.reads if r.buffer.is_computed]

    @property
    def parameters(self) -> list[str]:
        """The pointers that the kernel takes; reads are to stay behind the wait for who wrote."""

        def pointer(name: str, *, is_read: bool) -> str:
            is_alone = name not in self.kernel.updated and not (is_read and self.is_following)
            return f"*{' __restrict__' * is_alone} {name}"

        taken = [
            f"const {noise_type(self.entry_name, r.buffer)} {r.name}"
            if r.buffer.dtype == "noise"
            else f"const {r.type}{pointer(r.memory, is_read=True)}"
            for r in self._loaded
        ]
        taken += [f"{s.type}{pointer(s.memory, is_read=False)}" for s in self.stores]
        is_read = self.family == "finalise"
        start = "const " * is_read
        return taken + [f"{start}{s.type}{pointer(s.partials, is_read=is_read)}" for s in self.left]

    @property
    def argument_names(self) -> list[str]:
        """The pointers' names, in the parameters' order."""
        tensors = [r.buffer.name for r in self._loaded + self.stores]
        return tensors + [s.partials for s in self.left]

    @property
    def in_rows(self) -> list[Read]:
        """The tensors in pieces of which each row is one."""
        return []

    def type(self, buffer: Buffer) -> str:
        """A buffer's element type in memory."""
        return STORAGE[buffer.dtype]

    def value_type(self, name: str) -> str:
        """The type in which it takes part in arithmetic: with all digits, where some want them."""
        kinds = [kind for f in self.functions for kind, n in f.leaves + f.results if n == name]
        return max(kinds, key=lambda kind: kind == STORAGE["int64"], default=self.compute)

    @property
    def functions(self) -> list[ElementFunction]:
        """The element functions, in the order they run."""
        found = [f for s in self.stages for f in (s.function, *s.places.values())]
        found += [self.values, self.row_values]
        return [g for f in found for g in (f.once, f) if g is not None and g.results]

    def reduced_leaves(self, function: ElementFunction) -> list[str]:
        """The results of this kernel's own reductions that a function reads."""
        return [leaf for s in self.reductions for _, leaf in s.results if function.reads(leaf)]

    @property
    def counts(self) -> list[tuple[str, str]]:
        """(name, product of sizes) of every count that a function reads."""
        nodes = [n for n in ir.topological(self.expressions) if n.op == "count"]
        names = {leaf_name(n, self.grouping.names): self.count(ir.axes_of(n)) for n in nodes}
        return sorted(n for n in names.items() if any(f.reads(n[0]) for f in self.functions))

    # The groups of the loops.

    @property
    def groups_before(self) -> tuple[int, ...]:
        """The groups outside the reduced ones."""
        return tuple(g for g in self.domain if g < min(self.reduced))

    @property
    def groups_behind(self) -> tuple[int, ...]:
        """The groups inside the reduced ones."""
        return tuple(g for g in self.domain if g > max(self.reduced))

    @property
    def row_groups(self) -> tuple[int, ...]:
        """The groups that tell the rows which leave partials."""
        columns = len(self.kernel.columns) if self.family == "outer" else 1
        return self.domain[:-columns]

    @property
    def passing(self) -> tuple[int, ...]:
        """Of sums down columns: the groups along which rows pass by."""
        return tuple(g for g in self.row_groups if g not in self.kept)

    @property
    def window_size(self) -> int:
        """The number of elements in a pooling window."""
        return math.prod(self.grouping.windows[-1 - g] for g in self.reduced)

    @property
    def columns(self) -> str:
        """In a finalise kernel: how many results lie side by side in each slot of the partials."""
        return self.sums[0].columns

    @property
    def host_columns(self) -> str:
        """columns, where the launch is set up."""
        return self.host_size(self.kernel.columns)

    def partials_size(self, reduction: ReductionView) -> str:
        """The number of partials that one reduction leaves."""
        return f"{self.host_size(reduction.extent)} * {reduction.partials}_slots"

    # Index arithmetic.

    @property
    def needed(self) -> set[int]:
        """The groups whose indices something asks for; elementwise tensors go by the flat index
        where there is one.
        """
        is_flat = self.family in ("pointwise", "inner") and self.target.is_flat
        tensors = self.partial_reads if is_flat else self.reads + self.stores
        groups = {g for r in tensors for g in r.extent}
        if self.family in ("inner", "outer", "window"):
            groups |= {g for s in self.sums for g in (*s.kept, *s.summed)}
        return groups | ({self.last} if self.family == "pointwise" else set())

    def locate(self, index: str, groups: Sequence[int], reads: Iterable[Read] = ()) -> list[str]:
        """Lines that take a compact index over `groups` apart into locals, as far as anything in
        the kernel asks for them, or just `reads`.
        """
        return self.taken_apart(index, groups, {g for r in reads for g in r.extent} or self.needed)

    # The classes of tensors, by how a skeleton reaches them.

    @cached_property
    def full_reads(self) -> list[Read]:
        """What varies along every group of the domain: reached by the flat index."""
        whole = frozenset(self.kernel.domain)
        return [r for r in self._loaded if r.extent == whole and not r.buffer.at]

    @cached_property
    def partial_reads(self) -> list[Read]:
        """What is broadcast along some group."""
        return [r for r in self.reads if r not in self.full_reads]

    @property
    def uniform_reads(self) -> list[Read]:
        """What is broadcast along the innermost group."""
        return [r for r in self.partial_reads if self.last not in r.extent]

    @property
    def varying_reads(self) -> list[Read]:
        """What varies along the innermost group, but not along all."""
        return [r for r in self.partial_reads if self.last in r.extent]

    @property
    def steady(self) -> list[tuple[str, str]]:
        """(type, name) of what is the same all along the innermost group, and is asked for at each
        of its elements.
        """
        uniform = {r.name for r in self.uniform_reads}
        once = self.values.once
        found = {name for _, name in once.results} if once else set[str]()
        return [pair for pair in self.values.leaves if pair[1] in uniform | found]

    @cached_property
    def single_reads(self) -> list[Read]:
        """What is asked for element by element: positions, and noise."""
        return [r for r in self.reads if r.buffer.is_computed or r.buffer.dtype == "noise"]

    @cached_property
    def packed(self) -> list[Read]:
        """What is moved in packs, and so must be aligned."""
        return self.full_reads + self.stores if self.family in ("pointwise", "inner") else []

    @property
    def last(self) -> int:
        """The innermost group."""
        return self.domain[-1] if self.domain else 0

    @property
    def threads(self) -> int:
        """Threads in a block."""
        return {"inner": 128, "finalise": 512}.get(self.family, 256)

    @property
    def accumulated(self) -> list[ReductionView]:
        """The reductions that have an accumulator of their kind."""
        return self.reductions

    @cached_property
    def is_sent_ahead(self) -> bool:
        """Whether a block sends for its next elements before it works on these."""
        return False

    @property
    def has_moments(self) -> bool:
        """Whether a mean and a variance are among the reductions that are merged on the chip."""
        return False

    @property
    def is_team(self) -> bool:
        """Whether several blocks may share a row."""
        return False

    @cached_property
    def is_skewed(self) -> bool:
        """Whether a block finishes a row a turn after it added it up."""
        return False

    @property
    def least_blocks(self) -> int:
        """How many blocks a multiprocessor must have room for."""
        return 2 if len(self.full_reads) < 3 else 1

    @property
    def packs(self) -> int:
        """How many 16-byte accesses of each tensor a thread has in flight."""
        return 2

    @property
    def accumulator_bytes(self) -> int:
        """The size of the largest accumulator."""
        width = 8 if self.compute == "double" else 4
        return width * max((NUMBERS[r.kind] for r in self.reductions), default=0)

    @property
    def summary(self) -> str:
        """What the kernel reads, accumulates and writes, in a line."""
        full = [r.name for r in self.reads if set(self.domain + self.reduced) <= r.extent]
        rest = [
            f"{r.name} by ({', '.join(map(self.word, r.buffer.varying))})"
            for r in self.reads
            if r.name not in full
        ]
        parts = [f"Reads {', '.join(full + rest)}"] if self.reads else []
        if self.left:
            verb = "merges partials into" if self.family == "finalise" else "leaves partials of"
            parts.append(f"{verb} {', '.join(s.name for s in self.left)}")
        if self.stores:
            parts.append(f"writes {', '.join(s.name for s in self.stores)}")
        text = "; ".join(parts)
        return f"{text[:1].upper()}{text[1:]}."

    @cached_property
    def lanes(self) -> int:
        """How many elements one 16-byte access of the widest tensor holds."""
        moved = [r for r in self.packed if r.buffer.dtype != "noise"]
        return PACK_BYTES // max((ITEM_BYTES[r.buffer.dtype] for r in moved), default=4)
