"""Fused: a chain as an ordinary differentiable function of tensors.

The first call on a combination of shapes and types checks it, builds or loads the module and makes
a plan; a later call is a look-up, the allocation of the outputs and one call into C. Derivatives
are programs too, made when first needed and run by the same code, so that they can be
differentiated in their turn.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.fx import Proxy

from fusegen.arguments import (
    check_all,
    check_out,
    check_tensor,
    check_tensors,
    count_modes,
    in_order,
    is_recorded,
    is_symbolic,
    kinds_of,
    refuse_learning,
    require_floats,
    tracing_state,
)
from fusegen.autocasting import is_sensitive, under_autocast
from fusegen.bound import Bound
from fusegen.cache import build_key
from fusegen.copying import Cached
from fusegen.errors import ArgumentError, EmptyReductionError, OtherAxesError, UnsupportedError
from fusegen.execution import Part, Result
from fusegen.inlining import applied
from fusegen.ir import Expr
from fusegen.joining import ways, with_anew
from fusegen.layouts import dtype_name
from fusegen.modules import generator, target_of
from fusegen.operators import LIBRARY, recorded
from fusegen.ops import Chain
from fusegen.optional import Optionals
from fusegen.parameters import NUMBERS
from fusegen.plan import remember
from fusegen.reference import of_nothing, run_eagerly
from fusegen.situation import situation_of
from fusegen.target import H200_GB_PER_S
from fusegen.unsaid import times_asked

_LEAST, _MOST = -(1 << 63), (1 << 63) - 1


class Fused(Cached):
    """A compiled chain. Call it with x and the operands, in the chain's order or by name.

    It returns what the eager chain returns, of the same shape and dtype, which lies in memory as x
    does, with gradients for x and every operand that needs one. x and operands must be floating and
    on one device. Nothing is built before the first call.
    """

    def __init__(self, chain: Chain, loose: frozenset[str] = frozenset()) -> None:
        self.chain = chain
        self._loose = loose  # tensors that must not be integers, which the chain would keep
        self._ways = ways(chain)
        self._forget()
        self._is_sensitive = is_sensitive(chain)
        self._draws = bool(chain.drawn)
        self._updates = any(chain.updates(name) for name in chain.operands)
        # Plain attributes, which dynamo can read.
        self._text, self._given, self._count = chain.text, chain.given, 1 + len(chain.gives)
        self._name = chain.recorded_name
        self._input = "x"  # what x may be called
        self._optionals = Optionals(None)
        # What a function is compiled to for tensors that its chain does not take, and which are.
        self._instead: Any = None
        self._refused: dict[Any, bool] = {}
        self._made_of = self._otherwise = (Fused, (chain, loose))
        self._generator = build_key(generator())

    def _forget(self) -> None:
        """Have no plans, as at first."""
        self._parts = tuple(tuple(Part(s.chain) for s in way) for way in self._ways)
        self._single = self._parts[0][0] if tuple(map(len, self._parts)) == (1,) else None
        # What was called before in one segment is known again by that, whichever way it is.
        self._alone = tuple(parts[0] for parts in self._parts if len(parts) == 1)
        # Which way goes for what was called with, and its last segment, bound to that.
        self._fitting: dict[Any, tuple[int, Bound]] = {}
        self._autocast: dict[Any, Fused] = {}
        # torch's default type with which it was planned, where results may have that.
        self._default: torch.dtype | None = None

    def __call__(
        self,
        x: Tensor | None = None,
        /,
        *operands: Tensor,
        out: Tensor | None = None,
        **named: Tensor,
    ) -> Any:
        """The chain applied to x: a tensor; or where the chain gives values beside its result, a
        tuple of the result and of those, in the chain's order.

        out, where given, receives the result and is returned; it must have the result's shape,
        dtype and device, nothing that needs a gradient may go in, and the chain
        gives nothing beside it. Raises ArgumentError for a mistake in the arguments.
        """
        if x is None:
            x = self._named_input(named)
        if is_dynamo_compiling():
            return self._shown(x, operands, named, out)
        if named or len(operands) != len(self._given):
            if self._instead and any(isinstance(v, NUMBERS) for v in (*operands, *named.values())):
                return self._instead(x, *operands, out=out, **named)
            fused, operands, named = self._optionals.chosen(self, operands, named)
            if fused is not self:
                return fused(x, *operands, out=out, **named)
            operands = self._by_name(operands, named)
        if self._refused and kinds_of((x, *operands)) in self._refused:
            return self._instead(x, *operands, out=out)
        if self._default is not None and self._default is not torch.get_default_dtype():
            self._forget()
        given = operands
        if self._is_sensitive and torch._C._is_any_autocast_enabled():
            try:
                cast = self.under_autocast(x, operands)
                if cast is not None:
                    return cast(x, *operands, out=out)
            except (ArgumentError, UnsupportedError) as error:
                return self._called_instead(error, x, given, out)
        if self._draws and not is_symbolic((x, *operands)):
            operands = self._with_seeds(x, operands)
        # What looks inside, and would not see a planned call, is refused further down.
        is_plain = out is None and tracing_state() is None and forward_ad._current_level < 0
        is_plain = is_plain and not count_modes()
        if is_plain:
            for part in self._alone:
                result = part.recognised(x, operands)
                if result is not None:
                    return result
        if is_symbolic((x, *operands, out)):
            return self._shown(x, operands, {}, out)
        if self._updates:
            refuse_learning(self.chain, operands)
        try:
            require_floats(self._loose, self._given, (x, *given))
            asked = times_asked()
            result = self._run(x, operands, out, is_plain=is_plain)
            if times_asked() != asked:
                self._default = torch.get_default_dtype()
            return result
        except (ArgumentError, UnsupportedError) as error:
            return self._called_instead(error, x, given, out)

    def _called_instead(
        self, error: Exception, x: Tensor, operands: Sequence[Tensor], out: Tensor | None
    ) -> Result:
        """What the function gives, traced for the call; the error, where it is not traced so."""
        if self._instead is None:
            raise error
        try:
            result: Result = self._instead(x, *operands, out=out)
        except Exception:
            raise error from None
        if (kinds := kinds_of((x, *operands))) is not None:
            remember(self._refused, kinds, True)
        return result

    def _run(
        self, x: Tensor, operands: Sequence[Tensor], out: Tensor | None, *, is_plain: bool
    ) -> Result:
        try:
            if self._single is not None:
                return self._single(x, operands, out)
            return self._through(x, operands, out, is_plain=is_plain)
        except OtherAxesError:
            self._cut_anew()
            return self._through(x, operands, out, is_plain=is_plain)
        except EmptyReductionError:
            if out is not None:
                raise
            result: Result = of_nothing(self.chain, x, operands)
            return result

    def _named_input(self, named: dict[str, Tensor]) -> Tensor:
        """x, by the name that the function has for it."""
        if self._input not in named:
            raise ArgumentError(
                f"argument {self._input!r} is missing, or None: the chain {self._text!r} takes "
                f"{', '.join((self._input, *self._given))}"
            )
        return named.pop(self._input)

    def _shown(
        self, x: Any, operands: Sequence[Any], named: Mapping[str, Any], out: Tensor | None
    ) -> Any:
        """The call as one operator: dynamo reads this instead of running it, torch.fx runs it."""
        if named or len(operands) != len(self._given):
            operands = self._by_name(operands, named)
        if isinstance(x, Expr) and self._loose and hasattr(self, "__wrapped__"):
            return self.__wrapped__(x, *operands)  # where its floats meet what may be integers
        if isinstance(x, Expr):  # in a function that is traced itself
            return applied(self.chain, x, dict(zip(self._given, operands, strict=True)))
        require_floats(self._loose, self._given, (x, *operands))
        if self._updates or out is not None:
            results = torch.ops.fusegen.call_(x, operands, self._name, self._generator, out)
        else:
            results = torch.ops.fusegen.call(x, operands, self._name, self._generator)
        if out is not None:
            return out
        return results[0] if self._count == 1 else tuple([results[i] for i in range(self._count)])

    def _through(
        self,
        x: Tensor,
        operands: Sequence[Tensor],
        out: Tensor | None,
        *,
        is_plain: bool,
    ) -> Result:
        """One segment after the other, with the values that later ones need."""
        # Whatever a later segment or out= has to complain of is told before the first is launched.
        way = self._checked(x, operands, out)
        known = dict(zip(self.chain.operands, operands, strict=True))
        given: list[Tensor] = []
        parts = self._parts[way]
        for part, segment in zip(parts, self._ways[way], strict=True):
            for name in segment.before:
                known[name] = x
            if segment.source is not None:
                x = known[segment.source]
            for name in segment.entering:
                known[name] = x
            mine = tuple([known[name] for name in part.chain.operands])
            result = part.recognised(x, mine) if is_plain else None
            if result is None:
                result = part(x, mine, out if part is parts[-1] else None)
            x, *more = result if isinstance(result, tuple) else (result,)
            given += [*more, *[x] * segment.gives]
            for name in segment.leaving:
                known[name] = x
        return (x, *given) if given else x

    def _cut_anew(self) -> None:
        """Have one way more: tensors may lie along other axes where they are used again."""
        self._single, more = None, with_anew(self.chain, self._ways)
        self._parts += tuple(tuple(Part(s.chain) for s in w) for w in more[len(self._ways) :])
        self._ways = more

    def _checked(self, x: Tensor, operands: Sequence[Tensor], out: Tensor | None) -> int:
        """Which of the ways to go: what `check_all` finds, once for tensors of the same kinds."""
        tensors = (x, *operands)
        try:
            key = (x.stride(), *[(t.shape, t.dtype, t.device, t.layout) for t in tensors])
        except (AttributeError, RuntimeError):
            check_tensors(self.chain, tensors)
            raise
        is_known = not is_recorded(tensors)  # what is recorded may have no sizes yet
        result = self._fitting.get(key) if is_known else None
        if result is None:
            result = check_all(self.chain, self._ways, tensors)
            if is_known:
                remember(self._fitting, key, result)
        way, bound = result
        if out is not None:
            check_out(out, self.chain, bound, tensors)
        return way

    def under_autocast(self, x: Tensor, operands: Sequence[Tensor]) -> Fused | None:
        """The chain that autocast makes of this one for these tensors; None if it changes none."""
        for name, value in zip(("x", *self._given), (x, *operands), strict=True):
            check_tensor(name, value)
        device = x.device.type
        target_of(x.device)
        if not torch.is_autocast_enabled(device):
            return None
        narrow = dtype_name(torch.get_autocast_dtype(device))
        key = (device, narrow, *[(t.dtype, t.dim()) for t in (x, *operands)])
        if key not in self._autocast:
            x_kind, *kinds = [(tuple(t.shape), dtype_name(t.dtype)) for t in (x, *operands)]
            given = dict(zip(self._given, kinds, strict=True))
            given |= dict.fromkeys(self.chain.drawn, ((1,), "int64"))
            try:
                chain = under_autocast(self.chain, x_kind, given, device, narrow)
            except EmptyReductionError:
                return None  # nothing is computed
            self._autocast[key] = self if chain == self.chain else Fused(chain, self._loose)
        found = self._autocast[key]
        return None if found is self else found

    def _with_seeds(self, x: Tensor, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The operands, and a seed for each noise, drawn as torch's own dropout draws: one after
        the other, from the default generator of x's device.
        """
        check_tensor("x", x)
        known = dict(zip(self._given, operands, strict=True))
        for name in self.chain.drawn:
            known[name] = torch.randint(_LEAST, _MOST, (1,), dtype=torch.int64, device=x.device)
        return tuple([known[name] for name in self.chain.operands])

    def _by_name(
        self, operands: Sequence[Tensor], named: Mapping[str, Tensor]
    ) -> tuple[Tensor, ...]:
        expected = f"the chain {self._text!r} takes {', '.join((self._input, *self._given))}"
        if hasattr(self, "__wrapped__"):
            expected += "; a parameter with a default is a number of the chain"
        return in_order(self._given, operands, named, expected)

    def reference(self, x: Tensor, *operands: Tensor, **named: Tensor) -> Any:
        """The same chain run with torch's own operations, one by one. What is drawn differs."""
        if named or len(operands) != len(self._given):
            fused, operands, named = self._optionals.chosen(self, operands, named)
            if fused is not self:
                return fused.reference(x, *operands, **named)
            operands = self._by_name(operands, named)
        given: tuple[Any, ...] = (x, *operands)
        for name, value in zip(("x", *self._given), given, strict=True):
            if not isinstance(value, Tensor | Proxy):
                check_tensor(name, value)
        return run_eagerly(self.chain, x, dict(zip(self._given, operands, strict=True)))

    def source(
        self,
        target: str | None = None,
        dtype: str | torch.dtype = "float32",
        *,
        grad: bool = False,
        shape: Sequence[int] | None = None,
        operands: Mapping[str, Sequence[int]] | None = None,
        layout: str = "contiguous",
        gaps: Sequence[str] = (),
    ) -> str:
        """The text that a call builds: the forward, and with grad the backward for every input.

        target is "cuda" or "cpp", None the one that this machine runs; dtype is x's and the
        operands'; layout is "contiguous" or "channels_last"; gaps names those of x and the operands
        that are dense but for gaps, as half of each row of a larger tensor is. Shapes that are left
        out are assumed; they decide little more than what broadcasts. CUDA is for the current GPU,
        or an H200 where there is none. Where the chain is in segments, there is a module for each,
        one after the other.
        """
        # Here, because a call needs no text.
        from fusegen.describe import sources

        where = situation_of(target, dtype, shape, operands, layout, gaps)
        return "\n".join(s.text for s in sources(self.chain, *where, grad=grad))

    def explain(
        self,
        target: str | None = None,
        dtype: str | torch.dtype = "float32",
        *,
        shape: Sequence[int] | None = None,
        operands: Mapping[str, Sequence[int]] | None = None,
        layout: str = "contiguous",
        bandwidth: float = H200_GB_PER_S,
    ) -> str:
        """The kernels that a call launches, forward and backward: the steps that each holds, the
        bytes that it reads and writes, what is saved, and why the chain is cut where it is.

        As `fusegen explain` prints it. The arguments are those of `source`; bandwidth is in GB/s.
        """
        from fusegen.explain import explain  # here, because a call needs no text

        if not isinstance(bandwidth, int | float) or not 0 < bandwidth < math.inf:
            raise ArgumentError(f"bandwidth: got {bandwidth!r}, wanted GB/s above 0, such as 4290")
        return explain(self.chain, *situation_of(target, dtype, shape, operands, layout), bandwidth)

    def __repr__(self) -> str:
        return f"fusegen.compile({self.chain.text!r})"


@functools.cache
def _fused(name: str) -> Fused:
    return Fused(recorded(name))


def _call(
    x: Tensor, operands: Sequence[Tensor], name: str, made_by: str, out: Tensor | None = None
) -> list[Tensor]:
    """What stands behind the operators that dynamo is shown; other tracers look into it."""
    result = _fused(name)(x, *operands, out=out)
    if out is not None:
        return [result.detach()]  # an operator may not give what it was given
    return [*result] if isinstance(result, tuple) else [result]


for _name in ("call", "call_"):
    torch.library.impl(LIBRARY, _name, "CompositeImplicitAutograd")(_call)
