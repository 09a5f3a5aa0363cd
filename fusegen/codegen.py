"""Kernels to source text: finished lines and names go into the loop skeletons of templates/.

The text is a pure function of (chain, kernels, target): no counter, clock or set order reaches it.
A skeleton declares a local `<leaf>_value` for everything an element function reads and
`<result>_value` for what it gives, and then makes the call that stands ready; so skeletons never
see an operation, and operations never see a loop.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
from jinja2.bccache import Bucket

from fusegen import __version__, arity, cache, ir
from fusegen.bundleviews import BundleView
from fusegen.errors import CacheError
from fusegen.flatviews import FinaliseView, PointwiseView
from fusegen.grouping import Grouping
from fusegen.innerviews import InnerView
from fusegen.kernel import Buffer, Entry, Kernel
from fusegen.lineviews import LineView
from fusegen.noise import NoiseView
from fusegen.ops import Chain
from fusegen.picking import Piece
from fusegen.rowviews import RowView
from fusegen.severalviews import SeveralView
from fusegen.slidewise import with_winners
from fusegen.streamedviews import StreamedView
from fusegen.stridedviews import StridedBundleView
from fusegen.target import STORAGE, Target
from fusegen.views import KernelView
from fusegen.windowviews import WindowView

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Source:
    """What a build needs and a person reads."""

    target: str
    module_name: str
    text: str
    binding: str
    chain_text: str
    chain_hash: str


def emit(
    chain: Chain, entries: Sequence[Entry], target: Target, *, index_bits: int, signature: str
) -> Source:
    """The source of one module. signature is a line for the banner: dtypes, layout, gradients."""
    views = [EntryView(entry, target) for entry in entries]
    nodes = [n for e in views for k in e.kernels for n in ir.topological(k.expressions)]
    operations = sorted({n.op for n in nodes})
    passing = [k for e in views for k in e.kernels if isinstance(k, InnerView)]
    families = {k.family for e in views for k in e.kernels}
    by_rows = [k for e in views for k in e.kernels if isinstance(k, RowView)]
    by_bundles = [k for e in views for k in e.kernels if isinstance(k, BundleView)]
    by_windows = [k for e in views for k in e.kernels if isinstance(k, WindowView)]
    by_slides = [k for e in views for k in e.kernels if isinstance(k, SeveralView)]
    by_lines = [k for e in views for k in e.kernels if isinstance(k, LineView)]
    context = {
        "version": __version__,
        "target": target,
        "chain": chain,
        "signature": signature,
        "entries": views,
        "index_bits": index_bits,
        "storage": sorted(_stored(views)),
        # A bundle's rows are merged by what merges others.
        "families": sorted(families | {"column" if k.is_strided else "row" for k in by_bundles}),
        "leaves_columns": any(k.leaves_columns for k in by_rows)
        or any(k.leaves_columns for k in by_bundles)
        or any(k.leaves_columns for k in by_windows),
        "leaves_totals": any(k.totals and k.family == "column" for k in by_rows),
        "stores_sums": any(k.sums and k.kept for k in by_rows if k.family == "row"),
        "merges_within": any(s.within for k in by_lines if k.family == "finalise" for s in k.sums),
        "merges_beside": any(k.is_shifted and k.sums for k in by_rows)
        or any(not s.extent for k in by_bundles if not k.is_strided for s in k.sums),
        "sums_by_row": any(k.sums for e in views for k in e.kernels if k.family in _BY_ROW),
        "carries": any(k.carried for e in views for k in e.kernels),
        "joins_rows": any(k.joins_rows for k in passing),
        "followers": any(k.is_following for e in views for k in e.kernels),
        "teams": any(k.is_team for e in views for k in e.kernels),
        "adds_shares": any(k.stretches and k.has_long_stretches for k in by_rows),
        "is_shifted": any(k.is_shifted for k in by_rows),
        "has_trees": any(k.sums for e in views for k in e.kernels if k.family in _BY_TREE),
        "alike": any(k.alike for k in by_rows if k.family == "row"),
        "alone": any(k.is_alone for k in by_rows),
        "across": any(k.family == "column" and not k.is_alone for k in by_rows)
        or any(k.is_strided for k in by_bundles),
        "stripped": any(k.family == "outer" and not k.turns for k in by_rows),
        "persistent": "bundle" in families
        or any(k.is_persistent or (k.family == "outer" and not k.turns) for k in by_rows),
        "spreads": any(k.has_moments for e in views for k in e.kernels),
        "counts_noise": any("uniform(" in line for e in views for line in _lines(e)),
        "has_gaps": any(e.with_gaps or e.pitches for e in views),
        "stores_pieces": any(s.buffer.has_gaps for e in views for k in e.kernels for s in k.stores),
        "has_deals": any(e.is_dealt for e in views),
        "has_positions": any(k.positions for e in views for k in e.kernels),
        "slides_are_packed": any(k.is_packed for k in by_slides),
        "slides_are_several": any(k.is_several for k in by_slides),
        "of_windows": {k.accumulator(r) for k in by_slides for r in k.reductions},
        "loads_anywhere": any(_reads_neighbours(k) for e in views for k in e.kernels),
        "stores_anywhere": any(_leaves_neighbours(k) for e in views for k in e.kernels),
        "staged": any(k.is_staged for k in by_rows),
        "ahead": any(k.is_sent_ahead for e in views for k in e.kernels)
        or any(k.is_staged for k in by_rows),
        "accumulators": sorted({r.kind for e in views for k in e.kernels for r in k.accumulated}),
        "in_lines": set[str]().union(
            *(k.in_lines for k in by_lines), *(k.in_lines for k in by_windows)
        ),
        "slid": {kind for k in by_slides for kind in k.in_lines},
        "at_once": {kind for k in by_windows for kind in k.at_once},
        "operations": operations,
        "rounds": any(op in arity.CASTS for op in operations),
        "vector_functions": _vector_functions(views, target),
        "definitions": _definitions(views, target),
    }
    module = f"{target.name}/module.{target.source_suffix}.jinja"
    text = tidy(_environment().get_template(module).render(context))
    name = f"fusegen_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    context["module_name"] = name
    binding = tidy(_environment().get_template("table.cpp.jinja").render(context))
    return Source(target.name, name, text, binding, chain.text, chain.hash)


def _lines(entry: EntryView) -> Iterator[str]:
    return (line for k in entry.kernels for f in k.functions for line in f.lines)


_WIDTH = 110


def tidy(text: str) -> str:
    """Rendered text as a person would lay it out: no blank lines within a body, no endless
    lines.
    """
    lines = [line.rstrip() for line in text.split("\n")]
    kept: list[str] = []
    for i, line in enumerate(lines):
        following = next((later for later in lines[i + 1 :] if later), "")
        within = following.startswith((" ", "}", "#pragma")) and not following.startswith("}  //")
        if line or not (within or (kept and not kept[-1])):
            kept += _folded(line)
    return "\n".join(kept).strip("\n") + "\n"


def _folded(line: str) -> list[str]:
    """A line cut after commas where it is too long; comments and preprocessor lines stay whole."""
    if len(line) <= _WIDTH or line.startswith("#") or "//" in line or '"' in line:
        return [line]
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    lines = []
    while len(line) > _WIDTH and (cut := line.rfind(", ", len(indent) + 1, _WIDTH)) > 0:
        lines.append(line[: cut + 1])
        line = indent + line[cut + 2 :]
    return [*lines, line]


class _Compiled(jinja2.BytecodeCache):
    """Templates as Jinja has compiled them, which takes it half a second: fusegen's cache keeps
    them. One that cannot be used only costs that time.
    """

    def load_bytecode(self, bucket: Bucket) -> None:
        with contextlib.suppress(OSError, CacheError):
            found = cache.kept(self._name(bucket))
            if found is not None:
                bucket.bytecode_from_string(found.read_bytes())

    def dump_bytecode(self, bucket: Bucket) -> None:
        def write(path: Path) -> None:
            path.write_bytes(bucket.bytecode_to_string())

        with contextlib.suppress(OSError, CacheError):
            cache.keep(self._name(bucket), write)

    def _name(self, bucket: Bucket) -> str:
        facts = (bucket.key, bucket.checksum, jinja2.__version__, sys.version)
        return f"template-{cache.build_key(*facts)}"


@functools.cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        bytecode_cache=_Compiled(),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def _vector_functions(views: Iterable[EntryView], target: Target) -> dict[str, int]:
    """What the element functions call of the mathematical library, with its suffix, and of how many
    arguments; less what has to be alike in every loop: a vector variant's last bit may differ from
    the plain function's.
    """
    found, alike = dict[str | None, int](), set[str | None]()
    for view in views:
        nodes = ir.topological([e for kernel in view.kernels for e in kernel.expressions])
        found |= {target.library_call(n.op, view.compute): len(n.args) for n in nodes}
        alike |= {target.library_call(op, view.compute) for op in view.alike}
    return {name: found[name] for name in sorted(filter(None, found)) if name not in alike}


def _stored(views: Sequence[EntryView]) -> set[str]:
    """The types of what is passed, of what kernels leave each other, and of what is rounded to."""
    found = {view.type(buffer) for view in views for buffer in view.arguments}
    for kernel in (k for view in views for k in view.kernels):
        found |= {kernel.type(buffer) for buffer in kernel.kernel.buffers}
        nodes = ir.topological(kernel.expressions)
        found |= {STORAGE[arity.CASTS[n.op]] for n in nodes if n.op in arity.CASTS}
    return found


def _definitions(views: Iterable[EntryView], target: Target) -> list[str]:
    """The source of the functions that the element functions call and no library has."""
    lines = [n for v in views for k in v.kernels for f in k.functions for n in f.lines]
    return [
        text for name, text in target.definitions.items() if any(f"{name}(" in n for n in lines)
    ]


class EntryView:
    """An Entry as its template sees it."""

    def __init__(self, entry: Entry, target: Target) -> None:
        self.name = entry.name
        self.compute = entry.compute
        self.alike = entry.alike
        self.arguments = entry.arguments
        self.target = target
        self.argument_names = [b.name for b in entry.arguments]
        self.size_names = size_names(entry.grouping)
        self.with_gaps = [b.name for b in entry.arguments if b.has_gaps]
        self.is_dealt = any(kernel.is_dealt for kernel in entry.kernels)
        self.sizes_type = entry.sizes_type
        drawn = [b for b in entry.arguments if b.dtype == "noise"]
        self.noises = [NoiseView(entry.name, b, entry.grouping) for b in drawn]
        self.kernels = [_view(kernel, entry, target) for kernel in entry.kernels]
        taken = {name for k in self.kernels for name in k.argument_names}
        self.pieces = [p for p in entry.pieces if p.name in taken]
        self.grouping = entry.grouping

    @property
    def pitches(self) -> dict[str, Piece]:
        """What tells the gaps of pieces, and one of those."""
        return {p.pitch: p for p in self.pieces if p.pitch}

    def run_of(self, piece: Piece) -> str:
        """How many elements a piece has before a gap, as the sizes among the arguments tell."""
        first = len(self.arguments) + 1
        groups = [g for g, axes in enumerate(self.grouping.axes) if set(axes) & set(piece.behind)]
        return " * ".join(f"a[{first + g}]" for g in groups) or "1"

    @property
    def pointers(self) -> list[tuple[int, Buffer]]:
        """The tensors that kernels take, and where each is among the arguments."""
        taken = {name for k in self.kernels for name in k.argument_names}
        taken |= {p.of for p in self.pieces}
        found = enumerate(self.arguments)
        return [(i, b) for i, b in found if b.name in taken and b.dtype != "noise"]

    @property
    def input_count(self) -> int:
        """How many of the tensors are read."""
        return sum(b.role == "input" for b in self.arguments)

    @property
    def argument_count(self) -> int:
        """How many integers a call takes."""
        numbers = len(self.size_names) + 2 * (len(self.with_gaps) + self.is_dealt)
        return len(self.arguments) + 1 + numbers + self.target.trailing_arguments

    @property
    def scratch(self) -> list[tuple[str, str, str]]:
        """(name, element type, number of elements) of every scratch array, in order."""
        found: list[tuple[str, str, str]] = []
        for k in self.kernels:
            if k.family != "finalise":
                found += [(s.partials, s.type, k.partials_size(s)) for s in k.left]
            for s in k.stores:
                if s.buffer.role == "scratch":
                    found.append((s.name, s.type, k.host_size(s.buffer.extent)))
        return found

    @property
    def packed_arguments(self) -> list[int]:
        """The positions of the tensors that are moved in packs, which need their alignment."""
        moved = [r for k in self.kernels for r in k.packed]
        moved += [r for k in self.kernels if isinstance(k, RowView) for r in k.packs_beside]
        names = {r.buffer.name for r in moved}
        names |= {p.of for p in self.pieces if p.name in names}
        return [i for i, b in enumerate(self.arguments) if b.name in names]

    def type(self, buffer: Buffer) -> str:
        """A buffer's element type in memory."""
        return STORAGE[buffer.dtype]


_BY_ROW = ("row", "column", "bundle")
_BY_TREE = ("inner", "outer", "window")


def _reads_neighbours(kernel: KernelView) -> bool:
    """Whether packs of what varies along few groups begin anywhere in memory."""
    if isinstance(kernel, StreamedView):
        return bool(kernel.along_reads)
    if isinstance(kernel, RowView):
        found = kernel.reads_beside + (kernel.line_reads if kernel.family == "column" else [])
        is_apart = any(r not in kernel.packs_beside for r in found)
        return is_apart or (kernel.family == "outer" and bool(kernel.own_reads))
    return kernel.family in ("pointwise", "inner") and bool(kernel.varying_reads)


def _leaves_neighbours(kernel: KernelView) -> bool:
    """Whether packs of what each of some rows has are stored anywhere in memory."""
    if not isinstance(kernel, RowView):
        return False
    return any(s not in kernel.packs_beside for s in kernel.stores_beside)


def _view(kernel: Kernel, entry: Entry, target: Target) -> KernelView:
    view = _view_of(kernel, target)(kernel, entry, target)
    if isinstance(view, SeveralView) and view.has_winners:
        return SeveralView(with_winners(kernel), entry, target)
    return view


def _view_of(kernel: Kernel, target: Target) -> type[KernelView]:
    if kernel.family == "window":
        return WindowView
    if kernel.family == "bundle":
        return (
            BundleView if kernel.reduced[0] > max(kernel.domain, default=-1) else StridedBundleView
        )
    if kernel.family in ("slide", "cover"):
        return SeveralView
    if not target.is_flat:
        return LineView
    if kernel.is_streamed:
        return StreamedView
    if kernel.tier is not None or kernel.family == "outer":
        return RowView
    return {"inner": InnerView, "finalise": FinaliseView}.get(kernel.family, PointwiseView)


def size_names(grouping: Grouping) -> tuple[str, ...]:
    """The sizes that an entry takes: one a group, and the unpooled size of every pooled one."""
    return (*grouping.names, *(f"{grouping.names[g]}_unpooled" for g in grouping.pooled))
