"""Every operation's first and second derivative, from the graph alone, against torch's in fp64."""

import numpy as np
import pytest
import torch
from evaluator import evaluate

import fusegen
from fusegen import OPS, arity, ir
from fusegen.autodiff import vjp
from fusegen.ops import lookup
from fusegen.simplify import simplification

ROWS, COLUMNS = 7, 33
# What is steep or undefined on the left: tried on the right.
POSITIVE = ("acosh", "log", "log2", "log10", "sqrt", "rsqrt", "pow", "rpow")
WITHIN_ONE = ("asin", "acos", "atanh")
PROBABLE = ("logit",)
# Axes that a matrix has not.
TALLER = ("group_norm", "instance_norm")
# What has no derivative.
FLAT = ("quantize", "detach", "argmax", "argmin", "isnan", "isinf", "isfinite")
EXAMPLES = [
    (example, name)
    for name, op in OPS.items()
    for example in op.examples
    if op.window_axes == 0
    and name not in (*arity.COMPARISONS, *arity.CONNECTIVES, *FLAT)
    and name not in ("to", "type_as")  # round to what they are told, and not in double precision
    and name not in TALLER
    and not any(p.placement == "labels" for p in op.parameters)  # test_losses has them
    and not (op.is_loss and any(p.endswith("weight") for p, _ in example.steps[0].operands))
    and op.shaping not in ("merge", "split", "view")  # whose body is x: test_viewing has them
    and op.shaping != "stack"  # which has one more axis: test_stacking has it
    and not any(value in (2, (2, 3)) for key, value in example.steps[0].attributes if key == "dim")
    and ("p", 0.0) not in example.steps[0].attributes  # which has no gradient
]


def points(name, count):
    generator = np.random.default_rng(count)
    found = generator.normal(size=(ROWS, COLUMNS)) * 2
    if name in WITHIN_ONE:
        return np.tanh(found)
    if name in PROBABLE:
        return 1.0 / (1.0 + np.exp(-found))
    return np.abs(found) + 1.1 if name in POSITIVE else found


def shape_of(parameter):
    return {"channel": (COLUMNS,), "slope": (COLUMNS,), "trailing": (COLUMNS,)}.get(
        parameter.placement, (ROWS, COLUMNS)
    )


@pytest.mark.parametrize(("example", "name"), EXAMPLES, ids=[e.text for e, _ in EXAMPLES])
def test_first_and_second_derivatives_are_torchs(example, name):
    (step,) = example.steps
    definition = lookup(step.op)
    domain = {-2: ROWS, -1: COLUMNS}
    wants_truth = name == "where"
    leaves = {"x": ir.tensor("x", {-2, -1}, 2, "truth" if wants_truth else "number")}
    values = {"x": points(name, 0) > 0 if wants_truth else points(name, 0)}
    for i, (p, _) in enumerate(step.operands, start=1):
        parameter = definition.parameter(p)
        shape = shape_of(parameter)
        leaves[p] = ir.tensor(f"operand {p}", range(-len(shape), 0), 2, parameter.kind)
        drawn = points(name, i)[tuple(slice(0, n) for n in shape)] if len(shape) == 2 else None
        drawn = points(name, i)[0] if drawn is None else drawn
        values[f"operand {p}"] = drawn > 0 if parameter.kind == "truth" else drawn
    attributes = dict(step.attributes)
    if attributes.get("eps", 0.0) is None:
        attributes["eps"] = 1e-9
    operands = {p: leaf for p, leaf in leaves.items() if p != "x"}
    root = definition.function(leaves["x"], **operands, **attributes)
    numbers = [leaf for leaf in leaves.values() if leaf.kind == "number"]
    random = np.random.default_rng(9)
    flat = [domain[a] if a in root.extent else 1 for a in domain]
    values["g"] = random.normal(size=flat)
    g = ir.tensor("g", root.extent, 2)

    # Ours: the gradients, then those of the sum of their sines.
    first = vjp([root], [g], numbers)
    wrt = [leaf for leaf in numbers if leaf in first]
    grads = [first[leaf] for leaf in wrt]
    seeds = [ir.primitive("cos", grad) for grad in grads]
    second = vjp(grads, seeds, wrt)
    wanted = [root, *grads, *(second.get(leaf, ir.const(0.0)) for leaf in wrt)]
    simple = simplification(tuple(wanted))

    def reshaped(leaf_name, array):
        return np.asarray(array).reshape((1,) * (2 - np.ndim(array)) + np.shape(array))

    arrays = {n: reshaped(n, v) for n, v in values.items()}
    ours = evaluate([simple[w] for w in wanted], arrays, domain)

    # torch's.
    tensors = {n: torch.from_numpy(np.array(v)) for n, v in values.items()}
    inputs = {
        leaf: tensors[ir.name_of(leaf)].requires_grad_()
        if leaf in numbers
        else tensors[ir.name_of(leaf)]
        for leaf in leaves.values()
    }
    given = {p: inputs[leaf] for p, leaf in operands.items()}
    axis = {"axis": -1} if "axis" in attributes and attributes["axis"] == 1 else {}
    result = definition.resolve_reference()(inputs[leaves["x"]], **given, **{**attributes, **axis})
    result = result.reshape(flat)  # with the axes that it reduces
    slopes = torch.autograd.grad(
        result, [inputs[leaf] for leaf in wrt], tensors["g"], create_graph=True
    )
    total = sum(slope.sin().sum() for slope in slopes)
    curves = [torch.zeros_like(inputs[leaf]) for leaf in wrt]
    if total.requires_grad:
        curves = torch.autograd.grad(
            total, [inputs[leaf] for leaf in wrt], allow_unused=True, materialize_grads=True
        )
    for mine, theirs in zip(ours, [result, *slopes, *curves], strict=True):
        expected = theirs.detach().numpy(force=True)
        shown = np.broadcast_to(mine, expected.shape if expected.ndim == 2 else (ROWS, COLUMNS))
        shown = shown if expected.ndim == 2 else shown[0]
        np.testing.assert_allclose(shown, expected, rtol=1e-8, atol=1e-10)


def test_what_a_backward_asks_for_alone_has_a_second_derivative_of_zero(device):
    """As in eager, where a gradient penalty goes through all that it was computed from."""
    fused = fusegen.compile("add(b) | leaky_relu(0.2)")
    x, b = (torch.randn(s, device=device).requires_grad_() for s in ((2, 3), (3,)))
    (first,) = torch.autograd.grad(fused(x, b).sum(), x, create_graph=True)
    seconds = torch.autograd.grad(first.square().sum(), [x, b])
    assert [s.shape for s in seconds] == [x.shape, b.shape]
    assert not any(s.count_nonzero() for s in seconds)


# Where a function's own pieces overflow, or another piece begins; as torch's functions do it.
EDGES = [
    *[(name, [89.0, 100.0, 1.0, -1.0]) for name in ("softplus", "elu", "selu", "celu")],
    ("elu | square", [89.0, 100.0, 1.0, -1.0]),
    ("softplus(0.5)", [200.0, 1.0, -300.0]),
    ("leaky_relu(0.1) | softplus | mean", [100.0, 1.0]),
    ("huber_loss(t)", [1.0, 2.5, 10.0, 3.0]),
    ("smooth_l1_loss(t, reduction='sum')", [1.0, 2.5, 10.0, 3.0]),
    ("huber_loss(t, delta=0.3)", [1.0, 2.3, 10.0, 3.0]),
    ("norm(0.5, -1)", [2.0, 1.0, 4.0]),
]


@pytest.mark.parametrize(("text", "values"), EDGES, ids=[text for text, _ in EDGES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_derivatives_are_numbers_where_torchs_are(text, values, dtype, device):
    fused = fusegen.compile(text)
    given = [torch.tensor([1.0, 2.0, 3.0, 2.0], device=device, dtype=dtype)] * ("(t" in text)
    found = []
    for function in (fused, fused.reference):
        x = torch.tensor(values, device=device, dtype=dtype, requires_grad=True)
        (first,) = torch.autograd.grad(function(x, *given).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        found.append((first, second))
    for mine, theirs in zip(*found, strict=True):
        assert mine.isfinite().all() or not theirs.isfinite().all()
        finite = theirs.isfinite()
        torch.testing.assert_close(mine[finite], theirs[finite])


@pytest.mark.parametrize("p", [0.5, 0.9, -1.0, -2.0])
def test_zeros_have_no_gradient_of_a_steep_norm(p, device):
    x = torch.tensor([[0.0, 1.0, 4.0]], device=device, requires_grad=True)
    (found,) = torch.autograd.grad(fusegen.compile(f"norm({p}, -1)")(x).sum(), x)
    (wanted,) = torch.autograd.grad(torch.linalg.vector_norm(x, p, -1).sum(), x)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("bound", ["inf", "-inf"])
def test_bounds_of_double_precision_may_be_infinite(bound, device):
    x = torch.tensor([1.0, 2.0], dtype=torch.float64, device=device)
    for op in (torch.maximum, torch.minimum):
        wanted = op(x, torch.tensor(float(bound), dtype=torch.float64, device=device))
        assert torch.equal(fusegen.compile(f"{op.__name__}({bound})")(x), wanted)
