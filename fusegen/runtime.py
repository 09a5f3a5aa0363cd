"""Fused: a chain as an ordinary differentiable function of tensors.

The first call on a combination of shapes and types checks it, builds or loads the module and makes
a plan; a later call is a look-up, the allocation of the outputs and one call into C. Derivatives
are programs too, made when first needed and run by the same code, so that they can be
differentiated in their turn.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fusegen import ir, toolchain
from fusegen.describe import Situation, sources
from fusegen.errors import ArgumentError
from fusegen.lower import Bound, bind, stages
from fusegen.ops import Chain
from fusegen.plan import Meta, Plan, Target, check_tensor, dtype_name, make_plan, memory_order
from fusegen.program import (
    Derivative,
    Program,
    Signature,
    derivative,
    forward,
    index_dtype,
    source,
)
from fusegen.reference import run_eagerly

_TARGET_OF_DEVICE = {"cpu": "cpp", "cuda": "cuda"}
# On the GPU, a row longer than this shared by too few blocks goes over many of them instead, in
# passes.
_LONG_ROW = 1 << 16
_FEW_ROWS = 512


class Fused:
    """A compiled chain. Call it with x and the operands, in the chain's order or by name.

    It returns what the eager chain returns: same shape, dtype and layout, with gradients for x and
    every operand that needs one. x and operands must be floating and on one device. Nothing is
    built before the first call.
    """

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self._parts = tuple(_Part(stage) for stage in stages(chain))
        self._single = self._parts[0] if len(self._parts) == 1 else None

    def __call__(
        self, x: Tensor, *operands: Tensor, out: Tensor | None = None, **named: Tensor
    ) -> Tensor:
        """The chain applied to x.

        out, where given, receives the result and is returned; it must have the result's shape,
        dtype and device, must not overlap x, and nothing that needs a gradient may go in. Raises
        ArgumentError for a mistake in the arguments.
        """
        if named or len(operands) != len(self.chain.operands):
            operands = self._by_name(operands, named)
        if self._single is not None:
            return self._single(x, operands, out)
        at = 0
        for part in self._parts:
            mine = operands[at : at + len(part.chain.operands)]
            at += len(mine)
            x = part(x, mine, out if part is self._parts[-1] else None)
        return x

    def _by_name(
        self, operands: Sequence[Tensor], named: Mapping[str, Tensor]
    ) -> tuple[Tensor, ...]:
        names = self.chain.operands
        given = dict(zip(names, operands, strict=False))
        expected = f"the chain {self.chain.text!r} takes x" + "".join(f", {n}" for n in names)
        if len(operands) > len(names):
            raise ArgumentError(f"got {len(operands)} operands, wanted {len(names)}: {expected}")
        for name in named:
            if name not in names:
                raise ArgumentError(f"no operand is called {name!r}: {expected}")
            if name in given:
                raise ArgumentError(f"operand {name!r} is given twice, by position and by name")
        given |= named
        missing = [n for n in names if n not in given]
        if missing:
            raise ArgumentError(f"operand {missing[0]!r} is missing: {expected}")
        return tuple(given[n] for n in names)

    def reference(self, x: Tensor, *operands: Tensor, **named: Tensor) -> Tensor:
        """The same chain run with torch's own operations, one by one."""
        if named or len(operands) != len(self.chain.operands):
            operands = self._by_name(operands, named)
        return run_eagerly(self.chain, x, dict(zip(self.chain.operands, operands, strict=True)))

    def source(
        self,
        target: str | None = None,
        dtype: str | torch.dtype = "float32",
        *,
        grad: bool = False,
        shape: Sequence[int] | None = None,
        operands: Mapping[str, Sequence[int]] | None = None,
        layout: str = "contiguous",
    ) -> str:
        """The text that a call builds: the forward, and with grad the backward for every input.

        target is "cuda" or "cpp", None the one that this machine runs; dtype is x's and the
        operands'; layout is "contiguous" or "channels_last". Shapes that are left out are assumed;
        they decide little more than what broadcasts. Where pooling follows a reduction, there are
        two modules, one after the other.
        """
        situation = Situation(
            None if shape is None else tuple(shape),
            {name: tuple(sizes) for name, sizes in (operands or {}).items()},
            dtype if isinstance(dtype, str) else dtype_name(dtype),
            layout,
        )
        chosen = target or ("cuda" if torch.cuda.is_available() else "cpp")
        return "\n".join(s.text for s in sources(self.chain, chosen, situation, grad=grad))

    def __repr__(self) -> str:
        return f"fusegen.compile({self.chain.text!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Fused, (self.chain,)

    def __deepcopy__(self, memo: object) -> Fused:
        return self  # it holds no state but caches


class _Part:
    """A chain, or one of the two stages of a chain that pools after a reduction, with its plans."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.plans: dict[Any, _Call] = {}
        self.programs: dict[Any, Program] = {}
        self.derivatives: dict[Any, Derivative] = {}
        self.launches: dict[Any, Callable[..., int]] = {}

    def __call__(self, x: Tensor, operands: Sequence[Tensor], out: Tensor | None) -> Tensor:
        tensors = (x, *operands)
        try:
            wanted = tuple([t.requires_grad for t in tensors]) if torch.is_grad_enabled() else ()
            needs = True in wanted
            key = (needs and wanted, *[(t.dtype, t.shape, t.stride(), t.device) for t in tensors])
        except (AttributeError, RuntimeError):
            self._check_tensors(tensors)
            raise
        call = self.plans.get(key)
        if call is None:
            call = self._first_call(tensors, wanted if needs else None)
            remember(self.plans, key, call)
        if out is not None:
            return self._into(out, call, tensors)
        if needs:
            result: Tensor = apply(call, *tensors)[0]
            return result
        return call.plan.run(tensors)[0]

    def _check_tensors(self, tensors: Sequence[Any]) -> None:
        for name, value in zip(("x", *self.chain.operands), tensors, strict=True):
            check_tensor(name, value)

    def _first_call(self, tensors: Sequence[Tensor], wanted: tuple[bool, ...] | None) -> _Call:
        self._check_tensors(tensors)
        x = tensors[0]
        target_of(x.device)
        for name, t in zip(self.chain.operands, tensors[1:], strict=True):
            if t.device != x.device:
                raise ArgumentError(
                    f"argument {name!r}: got a tensor on {t.device}, wanted one on {x.device}, "
                    "where x is"
                )
        bound = bind(
            self.chain,
            (tuple(x.shape), dtype_name(x.dtype)),
            {
                name: (tuple(t.shape), dtype_name(t.dtype))
                for name, t in zip(self.chain.operands, tensors[1:], strict=True)
            },
        )
        order, is_dense = memory_order(tuple(x.shape), x.stride())
        if not is_dense or len(bound.domain) != x.dim():
            order = tuple(range(-len(bound.domain), 0))
        key = (bound.pattern, wanted is not None)
        if key not in self.programs:
            self.programs[key] = forward(bound, is_training=wanted is not None)
        program = self.programs[key]
        metas = [Meta.of(t) for t in tensors]
        dtypes = dict(zip(program.input_names, (dtype_name(m.dtype) for m in metas), strict=True))
        targets = []
        for name, expr in program.graph.outputs:
            if name == "out":
                dtypes[name] = bound.dtype
                extent = frozenset(range(-len(bound.domain), 0))
                targets.append(Target(extent, bound.result_shape, getattr(torch, bound.dtype)))
            else:
                picked = name.removeprefix("picked_")
                dtypes[name] = dtypes.get(picked) or index_dtype(bound.windows)
                targets.append(Target(expr.extent, None, getattr(torch, dtypes[name])))
        return self.prepare(program, bound, order, metas, targets, dtypes, x.device, wanted)

    def prepare(
        self,
        program: Program,
        bound: Bound,
        order: tuple[int, ...],
        metas: Sequence[Meta],
        targets: Sequence[Target],
        dtypes: dict[str, str],
        device: torch.device,
        wanted: tuple[bool, ...] | None,
        built_with: Signature | None = None,
    ) -> _Call:
        """The call of a program: its module loaded, its plan made, and its derivative foreseen
        where it is wanted.

        built_with is the signature of a module that may hold the program already.
        """
        programs = [program]
        foreseen = None
        if wanted is not None:
            foreseen = self.derivative(program, wanted, _differentiable(program))
            if program.name == "forward":
                first = self.derivative(program, wanted, (0,))
                programs.append(first.program)
                dtypes = _with_derivative(program, first, dtypes)
        if built_with is not None and (id(program), built_with) in self.launches:
            signature = built_with
        else:
            signature = Signature(
                target_of(device),
                order,
                tuple(sorted((n, d) for n, d in dtypes.items() if _mentions(programs, n))),
                _index_bits(bound, device),
                _allows_fused(program, bound),
            )
        launch = self.launcher(programs, signature, device)
        plan = make_plan(program, bound, order, metas, targets, device, launch)
        return _Call(self, program, plan, bound, order, tuple(metas), dtypes, foreseen, signature)

    def derivative(
        self, program: Program, wanted: Iterable[bool], present: Iterable[int]
    ) -> Derivative:
        """The derivative of a program, made once."""
        needs = tuple(i for i, w in enumerate(wanted) if w)
        key = (id(program), needs, tuple(present))
        if key not in self.derivatives:
            self.derivatives[key] = derivative(program, needs, key[2])
        return self.derivatives[key]

    def launcher(
        self, programs: Sequence[Program], signature: Signature, device: torch.device
    ) -> Callable[..., int]:
        """The entry point of the first program; the module holds the others' too."""
        key = (id(programs[0]), signature)
        if key not in self.launches:
            module = load(self.chain, programs, signature, device)
            for p in programs:
                self.launches.setdefault((id(p), signature), getattr(module, p.name))
        return self.launches[key]

    def _into(self, out: Tensor, call: _Call, tensors: Sequence[Tensor]) -> Tensor:
        if call.foreseen is not None:
            names = ("x", *self.chain.operands)
            name = next(n for n, t in zip(names, tensors, strict=True) if t.requires_grad)
            raise ArgumentError(
                f"out= was given, but {name!r} needs a gradient, which a result written in place "
                "cannot have; "
                f"call without out=, or under torch.no_grad()"
            )
        check_tensor("out", out)
        wanted = call.plan.outputs[0]
        have = (tuple(out.shape), out.dtype, out.device)
        if have != (wanted.final_shape, wanted.dtype, call.plan.device):
            raise ArgumentError(
                f"argument 'out': got shape {have[0]}, {have[1]} on {have[2]}; wanted shape "
                f"{wanted.final_shape}, {wanted.dtype} on {call.plan.device}"
            )
        if out.requires_grad and torch.is_grad_enabled():
            raise ArgumentError(
                "argument 'out' needs a gradient, which a tensor that is written in place cannot "
                "have; "
                "pass out.detach(), or call under torch.no_grad()"
            )
        if _is_in_place(out, wanted.strides) and not any(_overlap(out, t) for t in tensors):
            call.plan.run(tensors, out)
            # Written behind torch's back: its version check must know.
            torch.autograd.graph.increment_version(out)
        else:
            out.copy_(call.plan.run(tensors)[0])
        return out


class _Call:
    """A program planned for one combination of arguments, with what its derivative will want to
    know.
    """

    __slots__ = (
        "bound",
        "dtypes",
        "fixed",
        "foreseen",
        "kept",
        "metas",
        "next_calls",
        "order",
        "part",
        "plan",
        "program",
        "signature",
    )

    def __init__(
        self,
        part: _Part,
        program: Program,
        plan: Plan,
        bound: Bound,
        order: tuple[int, ...],
        metas: tuple[Meta, ...],
        dtypes: dict[str, str],
        foreseen: Derivative | None,
        signature: Signature,
    ) -> None:
        self.part = part
        self.program = program
        self.plan = plan
        self.bound = bound
        self.order = order
        self.metas = metas
        self.dtypes = dtypes
        self.foreseen = foreseen
        self.signature = signature
        count = len(program.graph.inputs)
        shift = {"input": 0, "output": count}
        sources = foreseen.sources if foreseen is not None else ()
        # What the derivative reads, as positions among inputs and outputs together; and the outputs
        # that have none.
        self.kept = tuple(shift[pool] + i for pool, i in sources if pool in shift)
        self.fixed = tuple(i for i, value in enumerate(program.values) if value is None)
        self.next_calls: dict[Any, tuple[Derivative, _Call]] = {}

    def backward_call(
        self,
        tensors: Sequence[Tensor | None],
        present: tuple[int, ...],
        needs: tuple[bool, ...],
        cotangents: Sequence[Tensor | None],
    ) -> tuple[Derivative, _Call, list[Tensor]]:
        """The derivative, planned for these cotangents, and its inputs in order."""
        found = self.part.derivative(self.program, needs, present)
        count = len(self.program.graph.inputs)
        saved = dict(zip(self.kept, tensors, strict=True))
        inputs = [
            cotangents[i] if pool == "cotangent" else saved[i if pool == "input" else count + i]
            for pool, i in found.sources
        ]
        ready = [t for t in inputs if t is not None]
        assert len(ready) == len(inputs)
        again = torch.is_grad_enabled() and any(t.requires_grad for t in ready)
        wanted = tuple([t.requires_grad for t in ready]) if again else None
        key = (present, needs, wanted, *[(t.shape, t.stride()) for t in ready])
        if key not in self.next_calls:
            leaves = self.program.graph.inputs
            targets = [
                Target(leaves[i].extent, self.metas[i].shape, self.metas[i].dtype)
                for i in found.targets
            ]
            dtypes = _with_derivative(self.program, found, self.dtypes)
            call = self.part.prepare(
                found.program,
                self.bound,
                self.order,
                [Meta.of(t) for t in ready],
                targets,
                dtypes,
                self.plan.device,
                wanted,
                self.signature,
            )
            remember(self.next_calls, key, (found, call))
        found, call = self.next_calls[key]
        return found, call, ready


class _Launch(torch.autograd.Function):
    """A planned program as a node of autograd's graph; its backward is another."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        results = call.plan.run(tensors)
        ctx.call = call
        both = tensors + results
        ctx.save_for_backward(*[both[i] for i in call.kept])
        ctx.set_materialize_grads(False)
        if call.fixed:
            ctx.mark_non_differentiable(*[results[i] for i in call.fixed])
        return results

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        present = tuple([i for i, g in enumerate(cotangents) if g is not None])
        needs = tuple(ctx.needs_input_grad[1:])
        if not call.part.derivative(call.program, needs, present).targets:
            return (None,) * (1 + len(needs))
        found, following, inputs = call.backward_call(ctx.saved_tensors, present, needs, cotangents)
        if following.foreseen is not None:
            gradients = apply(following, *inputs)
        else:
            gradients = following.plan.run(inputs)
        shares: list[Tensor | None] = [None] * (1 + len(needs))
        for i, gradient in zip(found.targets, gradients, strict=True):
            shares[1 + i] = gradient
        return tuple(shares)


# torch's own Function.apply is Python around this, and takes longer than it.
_apply: Callable[..., tuple[Tensor, ...]] = super(torch.autograd.Function, _Launch).apply


def apply(call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Launch as a node of autograd's graph. Under a transform of torch.func, torch says what it
    thinks of that.
    """
    if torch._C._are_functorch_transforms_active():
        result: tuple[Tensor, ...] = _Launch.apply(call, *tensors)  # type: ignore[no-untyped-call]
        return result
    return _apply(call, *tensors)


_MOST_PLANS = 4096


def remember(plans: dict[Any, Any], key: Any, value: Any) -> None:
    """Keep a plan; with every shape seen only once, the oldest go."""
    if len(plans) >= _MOST_PLANS:
        for old in list(plans)[: _MOST_PLANS // 2]:
            del plans[old]
    plans[key] = value


def _differentiable(program: Program) -> tuple[int, ...]:
    return tuple(i for i, value in enumerate(program.values) if value is not None)


def _with_derivative(
    program: Program, found: Derivative, dtypes: Mapping[str, str]
) -> dict[str, str]:
    """Element types of a program's tensors and its derivative's: a cotangent's are those of what
    it belongs to.
    """
    result = dict(dtypes)
    for leaf, (pool, i) in zip(found.program.graph.inputs, found.sources, strict=True):
        name = program.input_names[i] if pool == "input" else program.output_names[i]
        result[ir.name_of(leaf)] = dtypes[name]
    for name, i in zip(found.program.output_names, found.targets, strict=True):
        result[name] = dtypes[program.input_names[i]]
    return result


def _mentions(programs: Sequence[Program], name: str) -> bool:
    return any(name in p.input_names or name in p.output_names for p in programs)


def target_of(device: torch.device) -> str:
    """The target that runs on a device, or an error that names the devices there are."""
    if device.type not in _TARGET_OF_DEVICE:
        raise ArgumentError(
            f"argument 'x': got a tensor on {device}, wanted one on "
            f"{' or '.join(_TARGET_OF_DEVICE)}"
        )
    return _TARGET_OF_DEVICE[device.type]


def _index_bits(bound: Bound, device: torch.device) -> int:
    return 64 if device.type == "cpu" or math.prod(bound.domain) >= 1 << 31 else 32


def _allows_fused(program: Program, bound: Bound) -> bool:
    """Whether each row fits one block: not so for few, very long rows, which many blocks must
    share.
    """
    for node in ir.topological(program.graph.roots):
        if node.op == "reduce":
            _, axes = ir.reduction(node)
            length = math.prod(bound.domain[a] for a in axes if a < 0)
            rows = math.prod(bound.domain) // max(1, length)
            if length > _LONG_ROW and rows < _FEW_ROWS:
                return False
    return True


@functools.cache
def _arch(index: int) -> str:
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


_modules: dict[tuple[str, str | None], ModuleType] = {}


def load(
    chain: Chain, programs: Sequence[Program], signature: Signature, device: torch.device
) -> ModuleType:
    """The module of these programs: from this process, from the cache, or built."""
    text = source(chain, programs, signature)
    arch = _arch(device.index) if device.type == "cuda" else None
    key = (text.module_name, arch)
    if key not in _modules:
        _modules[key] = toolchain.load(text, arch)
    return _modules[key]


def _is_in_place(out: Tensor, strides: Sequence[int]) -> bool:
    """Whether the kernels can write straight into out."""
    pairs = zip(out.shape, out.stride(), strides, strict=True)
    return all(size == 1 or have == want for size, have, want in pairs)


def _overlap(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
