"""Meeting: what integers are where they meet a number that is written as a float, such as 1.0."""

from __future__ import annotations

from typing import Any

from fusegen import ir
from fusegen.ir import Expr
from fusegen.ops import Op
from fusegen.spellings import cast
from fusegen.standing import current
from fusegen.unsaid import current_call, default_type, tells_all


def beside(number: float, x: Any) -> Any:
    """x where it meets a written float: of integers, numbers of the default type."""
    tracing, call = current(), current_call()
    if not isinstance(x, Expr) or tracing is None or x.rank is not None:  # in an op's body
        return x
    if x.op in (*ir.COMPARISONS, *ir.CONNECTIVES):
        return cast(x, default_type())
    if call is not None and tells_all():
        return x if call.of(x).dtype.is_floating_point else cast(x, default_type())
    if number % 1 == 0:
        tracing.loose.update(map(ir.name_of, _making_integers(x)))
    return x


def _making_integers(x: Expr) -> list[Expr]:
    """The tensors that are integers where x is."""
    waiting, found = [x], dict[Expr, None]()
    while waiting:
        node = waiting.pop()
        if node in found:
            continue
        found[node] = None
        if node.op == "call" and isinstance(op := node.attrs[0], Op):
            slots = node.attrs[1]
            assert isinstance(slots, tuple)
            own = zip(slots, node.args[1:], strict=True)
            waiting += [node.args[0], *(a for slot, a in own if op.parameter(slot).broadcasts)]
        elif node.op in (*ir.OF_WHOLES, "minimum", "maximum", "abs"):
            waiting += node.args[node.op == "where" :]
    return [node for node in found if node.op == "input"]
