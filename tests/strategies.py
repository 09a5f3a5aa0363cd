"""Hypothesis strategies: chains and tensor shapes derived from the table of operations."""

from dataclasses import dataclass

from hypothesis import strategies as st

from fusegen import OPS, Op, chain
from fusegen.bind import bind
from fusegen.errors import FusegenError

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
        "mean",
        "amax",
    ),
]


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
    """A Case: several steps, operands that are shared or kept values, a pooling step at times."""
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
            steps.append(f"keep({kept[-1]})")
        steps.append(draw(step(draw(st.sampled_from(TAME)), shape, operands, kept)))
        if shape != wide and draw(st.booleans()):
            shape = wide
            operands[f"t{len(operands)}"] = wide
            steps.append(f"{draw(st.sampled_from(['add', 'mul']))}(t{len(operands) - 1})")
    if len(shape) >= 3 and draw(st.integers(0, 2)) == 0:
        steps += draw(pooling(shape))
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
    if "dim" in [p.name for p in op.parameters]:
        # A kept axis is widened again, so that what follows has the shape that it was drawn for.
        if op.shaping == "same":
            return f"{name}({axis})"
        wide = draw(operand(shape, operands, exact=True))
        return f"{name}({axis}, keepdim=True) | add({wide})"
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
    """A pooling step that fits the shape; none where no window does."""
    axes = draw(st.sampled_from([n for n in (2, 3) if len(shape) in (n + 1, n + 2)] or [0]))
    if not axes:
        return []
    window = tuple(min(draw(st.integers(1, 3)), size) for size in shape[-axes:])
    return [f"max_pool{axes}d({window})"]


def is_accepted(case):
    """Whether a chain's shapes pass fusegen's own checks; a shared operand may be laid along other
    axes.
    """
    try:
        parsed = chain(case.text)
        given = {name: (shape, "float64") for name, shape in case.operands}
        bind(parsed, (case.x, "float64"), given)
    except FusegenError:
        return False
    return True
