"""Short runs: whether what a reduction takes lies together in runs that are too short to be gone
through one by one, such as a channel's small image in each sample. Down columns, where threads stay
in their columns while samples pass by, packs are whole wherever a run begins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import takewhile

from fusegen import ir
from fusegen.bound import Bound
from fusegen.longrows import reduces_of
from fusegen.program import Program
from fusegen.rowfacts import widest_of
from fusegen.target import PACK_BYTES

# Runs this many times shorter than there are of them leave too many partials each on its own.
_FEWER_IN_RUN = 8
_MUCH_OF_LINE = 32  # elements of a line, beside which its set-up takes little
_SHORTEST_RUN = 64  # elements, gone through in this way also where samples are not whole packs
_LEAST_PASSING, _LEAST_MOMENTS = 32, 64  # runs of a column, that it is worth a partial
# On an H200, where packs do not begin with runs: the longest of which one pass leaves a partial
# each, in elements, and with so many runs or elements of four bytes; and of which a block takes
# several, in bytes, where they are added up and where their moments are found.
_LONGEST_RIDING, _LONGEST_RIDING_MANY, _MANY_PASSING = 128, 320, 100
_LONGEST_ADDED_BYTES, _LONGEST_MOMENTS_BYTES = 256, 128
_SHORTEST_BYTES = 128  # wherever they begin
_NARROW = 2


def in_short_runs(
    program: Program,
    held: ir.Extent,
    bound: Bound,
    order: Sequence[int],
    dtypes: Mapping[str, str],
) -> bool:
    """Whether a reduction over most elements goes along the innermost axes and others further out,
    but not along all between, and what lies together is short: such as a group's channels where
    those are innermost. Rows to be held, where they lie together, are none of those.
    """
    if bound.windows:
        return _lies_far_among_windows(program, bound, order)
    is_together = lie_together(held, order)
    reduces = reduces_of(program)
    most = max((len(r.args[0].extent) for r in reduces), default=0)
    for node in (r for r in reduces if len(r.args[0].extent) == most):
        axes = ir.reduction(node)[1]
        if is_together and axes == held:
            continue
        along, run, runs = _runs_of(node, bound, order)
        if not along:
            continue
        if run * _FEWER_IN_RUN < runs and (run <= _SHORTEST_RUN or not _rides(program, most)):
            return True
        columns = math.prod(bound.domain[a] for a in node.args[0].extent - axes) * run
        widest = widest_of(program, along, dtypes)
        outermost = next(a for a in order if a in node.args[0].extent)
        is_group = outermost not in axes  # of a sample's channels, which lie innermost
        is_narrow = widest <= _NARROW and run * widest <= _SHORTEST_BYTES
        if is_group and is_narrow and runs >= _LEAST_MOMENTS:
            return True
        is_apt = runs >= _LEAST_PASSING and columns * widest % PACK_BYTES == 0
        if is_apt and _is_short(program, reduces, most, run, runs, widest):
            return True
    return False


def leaves_lines_empty(program: Program, bound: Bound, order: Sequence[int]) -> bool:
    """Whether groups of a sample's channels take runs so short that arithmetic by lines has little
    to do in each: the same for targets that go through elements so. What is summed over samples
    goes by runs whatever the shape, so that no other shape is built anew.
    """
    reduces = reduces_of(program)
    most = max((len(r.args[0].extent) for r in reduces), default=0)
    for node in (r for r in reduces if len(r.args[0].extent) == most):
        along, run, runs = _runs_of(node, bound, order)
        outermost = next(a for a in order if a in node.args[0].extent)
        is_group = bool(along) and outermost not in ir.reduction(node)[1]
        if is_group and run <= _MUCH_OF_LINE and run * _FEWER_IN_RUN < runs:
            return True
    return False


def _lies_far_among_windows(program: Program, bound: Bound, order: Sequence[int]) -> bool:
    """The same of what windows pool, by the elements of x."""
    found = [_runs_of(node, bound, order) for node in reduces_of(program)]
    return any(a and n <= _SHORTEST_RUN and n * _FEWER_IN_RUN < runs for a, n, runs in found)


def _runs_of(node: ir.Expr, bound: Bound, order: Sequence[int]) -> tuple[ir.Extent, int, int]:
    """The innermost axes along which a reduction goes, how many elements lie together there, and in
    how many such runs; not counting places within windows.
    """
    axes = frozenset(a for a in ir.reduction(node)[1] if a < 0)
    inward = [a for a in reversed(order) if a in node.args[0].extent]
    along = frozenset(takewhile(axes.__contains__, inward))
    run = math.prod(bound.domain[a] for a in along)
    return along, run, math.prod(bound.domain[a] for a in axes - along)


def lie_together(axes: ir.Extent, order: Sequence[int]) -> bool:
    """Whether some axes follow each other in memory."""
    places = sorted(order.index(a) for a in axes)
    return bool(places) and places == list(range(places[0], places[0] + len(places)))


def _is_short(
    program: Program, reduces: Sequence[ir.Expr], most: int, run: int, runs: int, widest: int
) -> bool:
    """Whether so many runs of so many elements, of so many bytes each, are faster down columns."""
    kinds = {ir.reduction(n)[0] for n in reduces}
    length = run * widest
    is_whole = length % PACK_BYTES == 0
    if "variance" in kinds:
        return not is_whole and length < _LONGEST_MOMENTS_BYTES and runs >= _LEAST_MOMENTS
    if not kinds <= {"sum", "mean"}:
        return False
    if not _rides(program, most):
        return not is_whole and length < _LONGEST_ADDED_BYTES
    is_many = runs >= _MANY_PASSING or widest > _NARROW
    longest = _LONGEST_RIDING_MANY if is_many else _LONGEST_RIDING
    return length <= _SHORTEST_BYTES or (not is_whole and run <= longest)


def _rides(program: Program, most: int) -> bool:
    """Whether elements are written while they are added up, as they wait for no reduction."""
    roots = [root for root in program.graph.roots if len(root.extent) == most]
    return any(all(n.op != "reduce" for n in ir.topological([root])) for root in roots)
