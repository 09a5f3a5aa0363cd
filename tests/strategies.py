"""Hypothesis strategies: chains and tensor shapes derived from the table of operations."""

import math
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

import fusegen
from fusegen import OPS, Op, chain
from fusegen.errors import FusegenError
from fusegen.segments import bind_all, segments

# Smooth almost everywhere and finite for any finite input, so that fp64 and eager agree closely.
# The table's other operations (log of a negative number, 1 / x near zero) are tested one by one, on
# every special value.
TAME = [
    *(
        "leaky_relu",
        "relu",
        "gelu",
        "silu",
        "sigmoid",
        "tanh",
        "clamp",
        "abs",
        "erf",
        "sin",
        "cos",
        "neg",
    ),
    *("elu", "selu", "celu", "mish", "softplus", "softsign", "logsigmoid", "tanhshrink"),
    *("relu6", "hardtanh", "hardsigmoid", "hardswish", "softshrink"),
    *("square", "atan", "asinh"),
    *(
        "add",
        "sub",
        "mul",
        "rsub",
        "minimum",
        "maximum",
        "add_channel",
        "sub_channel",
        "mul_channel",
        "layernorm",
        "softmax",
        "log_softmax",
        "dropout",
    ),
    *("rms_norm", "normalize", "group_norm", "instance_norm", "batch_norm"),
    *("mean", "amax", "sum", "max", "logsumexp", "var"),
]
REDUCTIONS = [name for name in TAME if OPS[name].shaping == "reduce"]


@dataclass(frozen=True)
class Case:
    """A chain with the shapes of a call."""

    text: str
    x: tuple[int, ...]
    operands: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def shapes(self):
        return (self.x, *(shape for _, shape in self.operands))


sizes = st.integers(1, 7)
numbers = st.integers(-8, 8).map(lambda n: n / 4)


@st.composite
def broadcast_to(draw, shape):
    """A shape that broadcasts to this one: axes left out in front, others of size one."""
    kept = shape[draw(st.integers(0, len(shape))) :]
    return tuple(1 if draw(st.integers(0, 3)) == 0 else size for size in kept)


@st.composite
def chains(draw, longest=6):
    """A Case: several steps, operands that are shared or kept values, and at times steps that pool
    or change the shape, which also the last may do.
    """
    rank = draw(st.integers(1, 5))
    wide = tuple(draw(st.tuples(*[sizes] * rank)))
    # At times x is smaller than the result: the first operand that is not widens it.
    x = shape = draw(st.just(wide) | broadcast_to(wide).filter(len))
    operands: dict[str, tuple[int, ...]] = {}
    kept: list[str] = []
    steps: list[str] = []
    for _ in range(draw(st.integers(1, longest))):
        if len(kept) < 2 and draw(st.integers(0, 5)) == 0:
            kept.append(f"kept_{len(kept)}")
            gives = bool(steps) and draw(st.booleans())
            steps.append(f"{'give' if gives else 'keep'}({kept[-1]})")
        steps.append(draw(step(draw(st.sampled_from(TAME)), shape, operands, kept)))
        if shape != wide and draw(st.booleans()):
            shape = wide
            operands[f"t{len(operands)}"] = wide
            steps.append(f"{draw(st.sampled_from(['add', 'mul']))}(t{len(operands) - 1})")
        if shape == wide and draw(st.integers(0, 3)) == 0:
            changes = [pooling(shape)] * (len(shape) > 1) + [view(shape), dropped(shape)]
            changed = draw(st.one_of(changes))
            seen = torch.empty(shape, device="meta", dtype=torch.float64)
            shape = wide = tuple(fusegen.compile(changed).reference(seen).shape)
            # What was kept has the shape of before; at times it is used, where it broadcasts.
            kept = kept if draw(st.integers(0, 3)) == 0 else []
            steps.append(changed)
        if not shape:
            break  # all is one number, and most steps want an axis
    text = " | ".join(steps)
    return Case(text, x, tuple((name, operands[name]) for name in chain(text).operands))


@st.composite
def step(draw, name, shape, operands, kept):
    """One step as text; what tensors it names is added to operands."""
    arguments = []
    axis = None
    op: Op = OPS[name]
    if any(p.name in ("axis", "dim") for p in op.parameters):
        axis = draw(st.integers(-len(shape), len(shape) - 1))
    if name == "dropout":
        return f"{draw(st.sampled_from(['dropout', 'alpha_dropout']))}(0.3, training=False)"
    if name in ("normalize", "rms_norm", "group_norm", "instance_norm", "batch_norm"):
        return draw(norm(name, shape, operands, axis))
    if name in REDUCTIONS:
        # A kept axis is widened again, so that what follows has the shape that it was drawn for.
        wide = draw(operand(shape, operands, exact=True))
        return f"{draw(reduction(name, shape, keepdim=True))} | add({wide})"
    if "dim" in [p.name for p in op.parameters]:
        return f"{name}({axis})"
    if name == "layernorm":
        count = draw(st.integers(1, len(shape)))
        along = shape[-count:]
        if draw(st.booleans()):
            along = (shape[axis],)
            arguments.append(f"axis={axis}")
        else:
            arguments.append(f"normalized_shape={along if len(along) > 1 else along[0]}")
        arguments.append("eps=0.1")
        for parameter in ("weight", "bias"):
            if draw(st.booleans()):
                arguments.append(f"{parameter}={draw(operand(along, operands, exact=True))}")
        return f"{name}({', '.join(arguments)})"
    for p in op.parameters:
        if p.takes_tensor and p.placement == "channel":
            channels = shape[axis]
            forms = [(channels,), (channels,) + (1,) * (len(shape) - 1 - axis % len(shape))]
            arguments.append(draw(operand(draw(st.sampled_from(forms)), operands, exact=True)))
        elif p.takes_tensor:
            choices = [numbers.map(str), operand(shape, operands, exact=False)]
            choices += [st.sampled_from(kept)] if kept else []
            arguments.append(draw(st.one_of(choices)))
        elif p.name == "negative_slope":
            arguments.append(draw(st.sampled_from(["0.2", "0.01", "-0.5"])))
        elif p.name == "approximate":
            arguments.append(draw(st.sampled_from(["approximate='none'", "approximate='tanh'"])))
        elif p.name in ("min", "max"):
            arguments.append(str({"min": -1, "max": 1}[p.name] * draw(st.integers(1, 6)) / 4))
        elif p.name == "axis":
            arguments.append(f"axis={axis}")
    return f"{name}({', '.join(arguments)})"


@st.composite
def norm(draw, name, shape, operands, axis):
    """A norm of some kind; of the last axis, where the shape has too few values for the kind."""
    if name == "normalize":
        return f"normalize({draw(st.sampled_from([1.0, 2.0, 3.0]))}, {axis}, 0.1)"
    channels = shape[1] if len(shape) > 1 else 1
    groups = draw(st.sampled_from([n for n in range(1, channels + 1) if channels % n == 0]))
    values = {
        "group_norm": math.prod(shape[1:]) // groups,
        "instance_norm": math.prod(shape[2:]),
        "batch_norm": math.prod(shape) // channels * (len(shape) > 1),
    }
    arguments = ["eps=0.1"]
    along = (channels,)
    if values.get(name, 0) < 2:
        name, along = "rms_norm", (shape[-1],)
    if name == "group_norm":
        arguments.insert(0, str(groups))
    if name == "batch_norm":
        arguments.append("training=True")
    # torch's group_norm wants no bias without a weight.
    for parameter in ("weight",) if name == "rms_norm" else ("weight", "bias"):
        if parameter == "bias" and "weight" not in arguments[-1]:
            break
        if draw(st.booleans()):
            arguments.append(f"{parameter}={draw(operand(along, operands, exact=True))}")
    return f"{name}({', '.join(arguments)})"


@st.composite
def reduction(draw, name, shape, keepdim):
    """A reduction of one axis, or at times of several."""
    dims = [draw(st.integers(0, len(shape) - 1))]
    if name != "max" and draw(st.integers(0, 2)) == 0:
        dims = draw(st.lists(st.sampled_from(range(len(shape))), min_size=1, unique=True))
    if name == "var" and math.prod(shape[d] for d in dims) < 2:
        name = "mean"
    return f"{name}({dims[0] if len(dims) == 1 else tuple(dims)}, keepdim={keepdim})"


@st.composite
def operand(draw, shape, operands, exact):
    """The name of a tensor for a place of this shape: a new one, or at times one that is there
    already.
    """
    fitting = [name for name, s in operands.items() if s == shape]
    if fitting and draw(st.integers(0, 2)) == 0:
        return draw(st.sampled_from(fitting))
    name = f"t{len(operands)}"
    operands[name] = shape if exact else draw(broadcast_to(shape))
    return name


@st.composite
def pooling(draw, shape):
    """A pooling step of some kind that fits the shape."""
    axes = draw(st.sampled_from([n for n in (1, 2, 3) if len(shape) in (n + 1, n + 2)]))
    sizes = shape[-axes:]
    if draw(st.integers(0, 3)) == 0:
        kind = draw(st.sampled_from(["adaptive_avg_pool", "adaptive_max_pool"]))
        return f"{kind}{axes}d({tuple(draw(st.integers(1, min(size, 3))) for size in sizes)})"
    window = tuple(draw(st.integers(1, min(size, 3))) for size in sizes)
    stride = tuple(draw(st.integers(1, 3)) for _ in sizes) if draw(st.booleans()) else window
    ceil = draw(st.booleans())
    if axes < 3 and draw(st.integers(0, 3)) == 0:
        if axes == 1:  # torch wants numbers there
            return f"lp_pool1d(2, {window[0]}, {stride[0]}, ceil_mode={ceil})"
        return f"lp_pool2d(2, {window}, {stride}, ceil_mode={ceil})"
    padding = tuple(draw(st.integers(0, size // 2)) for size in window)
    if draw(st.booleans()):
        return f"max_pool{axes}d({window}, {stride}, {padding}, ceil_mode={ceil})"
    counted = draw(st.booleans())
    arguments = f"{window}, {stride}, {padding}, ceil_mode={ceil}, count_include_pad={counted}"
    return f"avg_pool{axes}d({arguments})"


@st.composite
def view(draw, shape):
    """A step that sees a value of this shape in another of at most five axes."""
    rank = len(shape)
    first = draw(st.integers(0, rank - 1))
    last = draw(st.integers(first, rank - 1))
    kind = draw(st.sampled_from(["flatten", "unflatten", "reshape"]))
    if kind == "flatten":
        return f"flatten({first}, {draw(st.sampled_from([last, last - rank]))})"
    count = shape[first] if kind == "unflatten" else math.prod(shape)
    room = min(5 - rank + 1, 3) if kind == "unflatten" else 3
    parts = []
    for _ in range(draw(st.integers(0, room - 1))):
        parts.append(draw(st.sampled_from([n for n in range(1, count + 1) if count % n == 0])))
        count //= parts[-1]
    sizes = tuple(draw(st.permutations([*parts, -1])))
    return f"reshape({sizes})" if kind == "reshape" else f"unflatten({first}, {sizes})"


@st.composite
def dropped(draw, shape):
    """A reduction whose axes are gone."""
    return draw(reduction(draw(st.sampled_from(REDUCTIONS)), shape, keepdim=False))


def is_accepted(case):
    """Whether a chain's shapes pass fusegen's own checks; a shared operand may be laid along other
    axes.
    """
    try:
        parsed = chain(case.text)
        given = {name: (shape, "float64") for name, shape in case.operands}
        bind_all(segments(parsed), (case.x, "float64"), given)
    except FusegenError:
        return False
    return True


@st.composite
def reductions(draw):
    """A Case: reductions of what reductions gave, softmax and tanh between them."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=5)))
    steps, rank, sizes = [], len(shape), list(shape)
    for _ in range(draw(st.integers(1, 3))):
        if rank == 0:
            break
        kinds = ["sum", "mean", "amax", "logsumexp", "softmax", "max", "tanh", "select"]
        name = draw(st.sampled_from(kinds))
        dims = draw(
            st.lists(st.integers(0, rank - 1), min_size=1, max_size=rank, unique=True).map(tuple)
        )
        if name in ("softmax", "max", "select"):
            dims = dims[:1]
        keepdim = draw(st.booleans())
        if name == "tanh":
            steps.append("tanh")
        elif name == "softmax":
            steps.append(f"softmax({dims[0]})")
        else:
            dim = dims[0] if len(dims) == 1 else dims
            index = f"{draw(st.integers(0, sizes[dims[0]] - 1))}, " if name == "select" else ""
            steps.append(f"{name}({dim}, {index}keepdim={keepdim})")
            rank -= 0 if keepdim else len(dims)
            sizes = [1 if i in dims else n for i, n in enumerate(sizes) if keepdim or i not in dims]
    return Case(" | ".join(steps), shape, ())
