"""A Python function of expressions as a chain: traced once, its graph laid out as steps."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

from fusegen import ir
from fusegen.arranging import ALONE, BY_CALL, ORDER, arranged, by_input
from fusegen.errors import ChainError
from fusegen.ir import Expr
from fusegen.ops import BadArgument, Chain, Placement, takes
from fusegen.ops.schema import show_value
from fusegen.overwriting import without_copies
from fusegen.parameters import operand_of, parameters_of
from fusegen.standing import Tracing, known, stand_in, standing_for
from fusegen.taking import Other, Place, View, taken_apart
from fusegen.tensorlike import be_like_tensors
from fusegen.unsaid import NotKnownYet, aligned, current_call

be_like_tensors()


class Traced(NamedTuple):
    """The chain that a function is, and the tensors that stand in it without being passed: those
    that the function has, and those that it makes or takes of them, by the names of operands; and
    which of them are views of others.
    """

    chain: Chain
    held: Mapping[str, Any]
    views: Mapping[str, View]
    wanted: Any = None  # what checks the input, where something is wanted of it
    # Which of the chain's results each of the function's is, where they are in another order; or
    # the name of a tensor that it returns as it is.
    order: tuple[int | str, ...] = ()
    # Chains for results that do not depend on the first parameter, by what they do depend on.
    rest: tuple[tuple[str, Chain], ...] = ()
    main: str = ""  # the view of the input that the chain begins with, where it is not that itself
    drawn: Any = None  # what each call draws of the tensors that it makes, if it draws any
    # Tensors of which it is not known whether they are integers, where that makes a difference.
    loose: frozenset[str] = frozenset()
    # Chains to values that are seen otherwise: of each the name, and its input's, and the chain.
    before: tuple[tuple[str, str, Chain], ...] = ()
    form: Any = None  # of what the function gives, where that is no tuple of values
    seen_as: str = ""  # the name by which the first chain's result is seen otherwise

    def alone(self) -> Chain:
        """The chain, where there is nothing beside it; else it raises NotKnownYet."""
        if self.rest:
            raise NotKnownYet(f"{self.rest[0][1].text}: a result of the function {ALONE}")
        if self.order:
            raise NotKnownYet(f"{self.chain.text}: {ORDER}")
        return self.chain


def trace(
    function: Callable[..., Any],
    held: Mapping[str, object] | None = None,
    given: Container[str] = (),
) -> Chain:
    """The chain that a function computes from its first parameter; the others are its operands, but
    for those that have a default, unless they are given. Of a tuple that it returns, the first is
    the chain's result, and the others are given beside it.
    """
    return traced(function, held, given).alone()


def traced(
    function: Callable[..., Any],
    held: Mapping[str, object] | None = None,
    given: Container[str] = (),
) -> Traced:
    """The same, with the tensors that it holds. held has tensors that the function uses without
    being passed them, by the names of operands that stand for them: those that it does use come
    behind the others. Raises NotKnownYet where it asks for what only a call tells.
    """
    if callable(forward := getattr(function, "forward", None)):  # a module's
        name, function = type(function).__name__, forward
    else:
        name = getattr(function, "__name__", "the function")
    input_name, parameters = parameters_of(function, name, given)
    placements = {operand_of(p): placement for p, placement in parameters.items()}
    x, tensors = stand_in(input_name), {p: stand_in(operand_of(p)) for p in parameters}
    given_back: list[Any] = []
    with standing_for(held or {}, x, {input_name, *placements}) as tracing:
        try:
            tensors = {name: aligned(tensor) for name, tensor in tensors.items()}
            result: object = function(x, **tensors)
            form = taken_apart(result, given_back)
            results = tuple([known(each, name) for each in given_back])
            tracing.check([each for each in results if isinstance(each, Expr)])
            results = tuple([_relaid(each, tracing) for each in results])
        except BadArgument as error:
            raise ChainError(f"{name}: {error}") from error
        except ChainError:
            raise
        except Exception as error:
            if tracing.asked and current_call() is None:
                raise NotKnownYet(
                    f"{name}: {error}; {tracing.asked[-1]} is not known before a call, and "
                    "fusegen.compile, which waits for one, takes such a function"
                ) from error
            if not isinstance(error, TypeError | AttributeError | OverflowError):
                raise
            raise ChainError(
                f"{name}: {error} (a chain's function is called once, with "
                f"expressions; it uses operators and fusegen's operations, and no `if` on their "
                "values)"
            ) from error
    for each in results or [result]:
        if not isinstance(each, Expr):
            raise ChainError(f"{name}: must return an expression, got {show_value(each)}")
    results = without_copies(results)
    computed = tuple(dict.fromkeys(each for each in results if each.op != "input"))
    if not computed and x in results:
        raise ChainError(f"{name}: returns its first parameter unchanged; a chain needs a step")
    places = tuple(map(Place, range(len(results))))
    is_plain = isinstance(form, Place) or (type(form) is tuple and form == places)
    seen_as = ""
    if not computed:  # but for what is seen otherwise then
        computed = tuple([*tracing.before][-1:])
        if not computed:
            raise ChainError(
                f"{name}: computes nothing, but gives what it is given, or parts of it"
            )
        seen_as = ir.name_of(tracing.before[computed[0]])
    others = {**placements, **dict.fromkeys(tracing.others)}
    chains: list[tuple[str, Chain]] = []
    line: list[Expr] = []
    begun = [input_name]
    for part, view in tracing.views.items():
        begun += [part] * (view.of in begun)
    parts = [tracing.others[part] for part in begun[1:]]
    for main, mine in by_input(name, (x, *parts), computed):
        chain, found = arranged(name, main, others, mine, tracing.aligned)
        taken = tuple(operand for operand in others if operand in chain.given)
        chains.append((ir.name_of(main), takes(*taken) | chain if taken else chain))
        line += found
    order: tuple[int | str, ...] = ()
    if tuple(line) != results or len(chains) > 1 or not is_plain:
        order = tuple([line.index(r) if r in line else ir.name_of(r) for r in results])
    used = {*map(str, order), *(n for main, chain in chains for n in (main, *chain.given))}
    before = _before(name, tracing, (x, *parts), others, used, seen_as)
    unused = [p for p in placements if p not in used]
    if unused and current_call() is None:  # its sizes may be all that is wanted
        raise NotKnownYet(f"{name}: the parameter {unused[0]!r} is never used{BY_CALL}")
    (begin, chain), *rest = chains
    begin = "" if begin == input_name else begin
    loose = frozenset("x" if name == input_name else name for name in tracing.loose)
    seen = tuple((n, "" if main == input_name else main, chain) for n, main, chain in before)
    beside = (None, order, tuple(rest), begin, None, loose, seen)
    form = None if is_plain and not isinstance(form, Place) else form
    return Traced(chain, tracing.held, tracing.views, *beside, form, seen_as)


def _relaid(result: Any, tracing: Tracing) -> Any:
    """A result, in the order in memory that the function has asked for last."""
    if not isinstance(result, Expr) or result not in tracing.relaid:
        return result
    if (call := current_call()) is None:
        raise NotKnownYet("x.contiguous: whether a result lies so only a call tells")
    told = tracing.relaid[result]
    return call.view(result.args[0], "contiguous", is_last_resort=True, **told)


def _before(
    name: str,
    tracing: Tracing,
    first: Sequence[Expr],
    others: Mapping[str, Placement | None],
    used: set[str],
    seen_as: str,
) -> list[tuple[str, str, Chain]]:
    """The chains to values that are seen otherwise, as far as they are used; what they use is then
    used too.
    """
    found: list[tuple[str, str, Chain]] = []
    for value, leaf in reversed(tracing.before.items()):
        # Those that are made of others come first, so that what they are made of is used too.
        for part, view in reversed(tracing.views.items()):
            if part in used:
                used |= {view.of, *_names_in(view.args), *_names_in([*view.named.values()])}
        if ir.name_of(leaf) not in used or ir.name_of(leaf) == seen_as:
            continue  # the first chain gives the latter
        ((main, mine),) = by_input(name, first, without_copies((value,)))
        chain, _ = arranged(name, main, others, mine, tracing.aligned)
        taken = tuple(operand for operand in others if operand in chain.given)
        chain = takes(*taken) | chain if taken else chain
        found.insert(0, (ir.name_of(leaf), ir.name_of(main), chain))
        used |= {ir.name_of(main), *taken}
    return found


def _names_in(told: Any) -> list[str]:
    """The names of tensors in what a view is told."""
    if isinstance(told, Other):
        return [told.name]
    return [n for each in told for n in _names_in(each)] if isinstance(told, tuple | list) else []
