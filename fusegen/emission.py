"""Emission: programs and a signature in, the text of a module out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from fusegen import arity, ir
from fusegen.codegen import Source, emit
from fusegen.dealing import dealt_out
from fusegen.grouping import Grouping, ordered
from fusegen.guarding import guarded
from fusegen.ir import Expr, Graph
from fusegen.kernel import Buffer, Entry, Gaps, input_buffers
from fusegen.lower import remarked
from fusegen.narrow import narrow_type, narrowed, shorter
from fusegen.ops import Chain
from fusegen.picking import Piece
from fusegen.program import STATISTIC, Program
from fusegen.rewriting import contracted, shortened, with_inverses, with_summed_powers
from fusegen.schedule import HeldRows, schedule
from fusegen.signature import Rows, Signature, is_double, selected_integers
from fusegen.target import TARGETS
from fusegen.unrolling import grouped


@lru_cache(maxsize=256)  # it is asked for by who chooses rows, by who builds, and for every shape
def make_entry(program: Program, signature: Signature) -> Entry:
    """The program scheduled for one layout and one set of element types."""
    dtypes = dict(signature.dtypes)
    compute = "double" if is_double([program], dtypes) else "float"
    is_exact, alike = _compares_with_maxima(program.graph), _below_maxima(program.graph)
    # Kernels of packs add up what is selected, where integers would lose digits.
    are_read = selected_integers(program.graph.roots) == "read"
    program, graph, new, grouping = grouped(program, signature)
    pieces = {p.name: p for p in program.pieces}
    dtypes |= {p.name: dtypes.get(p.of) or dtypes[p.name] for p in program.pieces}
    rows = [rows for name, rows in signature.rows if name == program.name]
    held = [found for r in rows if (found := _held(r, program, grouping)) is not None]
    target = TARGETS[signature.target]
    gaps = {n: Gaps(f"{n}_pitch") for entry, n in signature.gaps if entry == program.name}
    gaps |= {p.name: _gaps(p, grouping) for p in program.pieces if p.pitch}
    is_short = program.name in signature.short_rows
    kernels = schedule(
        graph,
        dtypes,
        "float64" if compute == "double" else "float32",
        remarked(program.marks, new),
        prefix=program.name,
        held=held,
        in_cache=signature.in_cache,
        is_sliding=bool(grouping.slides),
        pooled=grouping.pooled,
        is_exact=is_exact,
        has_strips=program.name in signature.strips,
        has_columns=signature.has_columns,
        gaps=gaps,
        reads_places=are_read or not target.is_flat,
        has_packs=target.is_flat,
        short=len(grouping.axes) - 1 if is_short else None,
    )
    kernels = shortened(kernels)
    if not is_exact:
        narrow = narrow_type(graph, dtypes)
        has_sums = target.is_contracted and _depends_on_sums(graph)
        if narrow:
            kernels = narrowed(kernels, narrow, target)
        elif has_sums and compute == "float":
            kernels = with_summed_powers(shorter(kernels, target))
        if not narrow:
            kernels = contracted(kernels, target, is_short=has_sums)
        if has_sums:
            kernels = with_inverses(kernels)
        kernels = guarded(kernels, target) if compute == "float" else kernels
    arguments = list(input_buffers(graph, dtypes, gaps).values())
    arguments += [
        Buffer(name, dtypes[name], ordered(expr.extent), "output") for name, expr in graph.outputs
    ]
    if signature.is_dealt:
        kernels = dealt_out(kernels, frozenset(range(len(grouping.axes))))
    whole = _whole(arguments, pieces)
    return Entry(
        *(program.name, kernels, whole, grouping, compute, alike, program.pieces),
        has_short_rows=is_short,
    )


def _gaps(piece: Piece, grouping: Grouping) -> Gaps:
    """Those of a piece, with the groups of what lies behind it."""
    run = (g for g, axes in enumerate(grouping.axes) if not set(piece.behind).isdisjoint(axes))
    return Gaps(piece.pitch, tuple(run))


def _whole(buffers: Iterable[Buffer], pieces: Mapping[str, Piece]) -> tuple[Buffer, ...]:
    """The tensors that a call passes, where some of these are pieces of them."""
    found: dict[str, Buffer] = {}
    for buffer in buffers:
        piece = pieces.get(buffer.name)
        if piece is not None:
            buffer = replace(buffer, name=piece.of, gaps=None, pieces=piece.count)
        found[buffer.name] = buffer
    return tuple(found.values())


def _held(rows: Rows, program: Program, grouping: Grouping) -> HeldRows | None:
    """The rows as the program's groups have them, if it holds them."""
    is_forward = program.name == "forward"
    axes = frozenset(g for g, a in enumerate(grouping.axes) if rows.axes.intersection(a))
    domain = frozenset(g for g, a in enumerate(grouping.axes) if rows.domain.issuperset(a))
    # What is left of the rows may lie otherwise.
    is_there = {a for g in domain for a in grouping.axes[g]} == rows.domain
    if not is_there or not (is_forward or rows.tier.holds_derivatives):
        return None
    tier = rows.tier.for_forward if is_forward else rows.tier.for_derivatives
    return HeldRows(tier, axes, domain)


def _depends_on_sums(graph: Graph) -> bool:
    """Whether elements depend on what others add up to, or are only added up; a maximum is exact in
    any order.
    """
    nodes = ir.topological(graph.roots)
    if _adds_all_up(graph):
        return True
    used = {a for n in nodes for a in n.args}
    saved = tuple(STATISTIC + kind for kind in arity.SUMS)
    is_saved = any(ir.name_of(leaf).startswith(saved) for leaf in graph.inputs)
    return is_saved or any(_is_sum(n) and n in used for n in nodes)


def _adds_all_up(graph: Graph) -> bool:
    """Whether nothing is computed of elements but what goes into sums."""
    widest = max((len(n.extent) for n in ir.topological(graph.roots)), default=0)
    waiting, beyond = list(graph.roots), set[Expr]()
    while waiting:
        node = waiting.pop()
        if node not in beyond and not _is_sum(node):
            beyond.add(node)
            waiting += node.args
    return not any(n.op in arity.ARITY and len(n.extent) == widest for n in beyond)


def _is_sum(node: Expr) -> bool:
    return node.op == "reduce" and node.attrs[0] in arity.SUMS


def _compares_with_maxima(graph: Graph) -> bool:
    """Whether elements are told apart by whether they equal a maximum, perhaps one that another
    program saved: all must then be computed alike wherever they are, which shorter arithmetic does
    not promise.
    """
    nodes = ir.topological(graph.roots)
    return any(_is_largest(n) or (n.op == "reduce" and n.attrs[0] == "argmax") for n in nodes)


def _is_largest(node: Expr) -> bool:
    """Whether it is the value in which gradients are shared among those that equal it."""
    if node.op == "reduce":
        return node.attrs[0] == "amax"
    return node.op == "input" and ir.name_of(node).startswith(STATISTIC + "amax")


def _below_maxima(graph: Graph) -> frozenset[str]:
    """The operations behind the elements of which gradients ask whether they equal a maximum."""
    found: set[str] = set()
    for node in ir.topological(graph.roots):
        is_sought = node.op == "eq" and any(map(_is_largest, node.args))
        if is_sought or (node.op == "reduce" and _is_largest(node)):
            found |= {n.op for n in ir.topological(node.args)}
    return frozenset(found)


def source(chain: Chain, programs: Sequence[Program], signature: Signature) -> Source:
    """The text of one module."""
    entries = [make_entry(p, signature) for p in programs]
    return emit(
        chain,
        entries,
        TARGETS[signature.target],
        index_bits=signature.index_bits,
        signature=signature.text(programs),
    )
