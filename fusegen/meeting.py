"""Meeting: what values are where they meet others: integers beside a written float such as 1.0,
conditions beside integers, and what is computed of operands alone beside what is not.
"""

from __future__ import annotations

from typing import Any

from fusegen import arity, ir
from fusegen.ir import Expr
from fusegen.ops import Op
from fusegen.spellings import cast
from fusegen.standing import current
from fusegen.unsaid import current_call, default_type, leaves_joining, tells_all


def beside(number: float, x: Any) -> Any:
    """x where it meets a written float: of integers, numbers of the default type."""
    tracing, call = current(), current_call()
    if not isinstance(x, Expr) or tracing is None or x.rank is not None:  # in an op's body
        return x
    if x.op in (*arity.COMPARISONS, *arity.CONNECTIVES):
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
        elif node.op in (*arity.OF_WHOLES, "minimum", "maximum", "abs"):
            waiting += node.args[node.op == "where" :]
    return [node for node in found if node.op == "input"]


def conditions_beside_integers(x: Expr, other: Expr) -> tuple[Expr, Expr]:
    """Two values, of which conditions are integers where the call says that the other one is."""
    call = current_call()
    if call is None or not tells_all():
        return x, other
    types = [str(call.of(value).dtype).removeprefix("torch.") for value in (x, other)]
    if types[0] == "bool" and types[1].startswith(("int", "uint")):
        return cast(x, types[1]), other
    if types[1] == "bool" and types[0].startswith(("int", "uint")):
        return x, cast(other, types[0])
    return x, other


def apart(values: list[Any]) -> list[Any]:
    """Values that meet; what is computed of operands alone as the result of a chain of its own, if
    that is how the call wants it, beside what is computed of the first tensor.
    """
    call, tracing = current_call(), current()
    if call is None or tracing is None or not leaves_joining():
        return values
    computed = [v for v in values if isinstance(v, Expr) and v.op not in ("input", "const")]
    others = [v for v in computed if not tracing.is_of_main(v)]
    if not any(isinstance(v, Expr) and tracing.is_of_main(v) for v in values):
        return values
    return [call.there(v) if isinstance(v, Expr) and v in others else v for v in values]
