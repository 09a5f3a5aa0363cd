import copy
import inspect
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
import torch

import fusegen
from fusegen import arity, ir
from fusegen.dsl import chain
from fusegen.errors import ChainError
from fusegen.ir import Expr
from fusegen.ops import ALIASES, OPS, Channel, Op, Trailing, lookup, op

ROOT = Path(__file__).resolve().parent.parent
RANK = 5
EVERYWHERE = frozenset(range(-RANK, 0))
X = ir.tensor("x", EVERYWHERE, RANK)

pytestmark = pytest.mark.usefixtures("restore_registry")
each_op = pytest.mark.parametrize("name", list(OPS))


def running_value(name: str) -> Expr:
    """What an op may be applied to: a condition for those that want one."""
    return X > 0 if name == "where" or name.startswith("logical_") else X


# --- every op of the table ---


@each_op
def test_an_op_is_listed_with_a_sentence(name: str) -> None:
    assert OPS[name].summary.endswith(".")
    assert OPS[name].signature.startswith(f"{name}(")


@each_op
def test_the_examples_of_an_op_read_back_and_cover_its_samples(name: str) -> None:
    examples = OPS[name].examples
    assert len(examples) >= len(OPS[name].samples)
    for example in examples:
        assert chain(example.text) == example


@each_op
def test_the_body_of_an_op_gives_an_expression_of_as_many_axes(name: str) -> None:
    for example in OPS[name].examples:
        (step,) = example.steps
        parameters = {OPS[name].parameter(p): n for p, n in step.operands}
        operands = {
            p.name: "float16" if p.is_type else ir.tensor(n, EVERYWHERE, RANK, p.kind)
            for p, n in parameters.items()
        }
        result = OPS[name].function(running_value(name), **operands, **dict(step.attributes))
        assert result.rank == RANK
        assert all(ir.name_of(leaf) in ("x", *example.operands) for leaf in ir.inputs([result]))


@each_op
def test_an_op_says_what_torch_calls_it(name: str) -> None:
    assert OPS[name].reference is not None
    assert callable(OPS[name].resolve_reference())


def test_every_primitive_is_an_op() -> None:
    casts = {*arity.CASTS, *arity.QUANTISING_CASTS}  # the op `to`, and the end of `quantize`
    casts |= {*arity.WRAPS, *arity.MADE, arity.QUOTIENT}  # and what is behind each step of integers
    assert set(arity.ARITY) - casts <= set(OPS)


def test_an_alias_is_the_op_itself() -> None:
    assert lookup("layer_norm") is lookup("layernorm")
    assert "layer_norm" not in OPS


@pytest.mark.parametrize("step", ["clip(0.5)", "multiply(2)", "arctanh", "greater_equal(bound)"])
def test_torchs_other_names_are_understood(step: str) -> None:
    alias, *_ = step.split("(")
    assert getattr(fusegen, alias) is lookup(alias)
    assert chain(step) == chain(step.replace(alias, ALIASES[alias]))


def test_an_alias_that_torch_has_is_torchs_name_of_the_same() -> None:
    x = torch.linspace(0.1, 0.9, 7, dtype=torch.float64)
    for alias, name in ALIASES.items():
        if hasattr(torch, alias) and OPS[name].is_primitive:
            others = [torch.full_like(x, 0.5)] * (arity.ARITY[name] - 1)
            found, wanted = (getattr(torch, n)(x, *others) for n in (alias, name))
            torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def test_a_signature_tells_tensors_constants_and_keywords_apart() -> None:
    assert OPS["leaky_relu"].signature == "leaky_relu(negative_slope: float = 0.01)"
    assert OPS["add"].signature == "add(other: Expr | float)"
    assert OPS["add_channel"].signature == "add_channel(bias: Channel, *, axis: int = 1)"
    assert OPS["layernorm"].signature.startswith("layernorm(weight: Trailing | None = None, ")


# --- on expressions ---


def test_on_an_expression_an_op_runs_its_body() -> None:
    assert OPS["leaky_relu"](X, 0.2) is ir.primitive("where", X > 0, X, X * 0.2)
    assert OPS["leaky_relu"](X, negative_slope=0.2) is OPS["leaky_relu"](X, 0.2)


def test_a_primitive_takes_expressions_and_numbers_in_any_place() -> None:
    assert OPS["minimum"](0, X) is ir.primitive("minimum", 0, X)
    assert OPS["where"](X > 0, X, 0.1 * X) is ir.primitive("where", X > 0, X, 0.1 * X)
    assert OPS["where"](X > 0, 1, other=X) is ir.primitive("where", X > 0, 1, X)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: OPS["where"](X, X, 0), "where: got numbers, x, wanted a condition"),
        (lambda: OPS["mul"](X > 0, X), "mul: got a condition, gt(x, 0), wanted numbers"),
        (lambda: OPS["logical_not"](X), "logical_not: got numbers, x, wanted a condition"),
        (lambda: OPS["add"]("bias", X), "add: got 'bias' among expressions"),
        (lambda: OPS["add"](X), "add takes 2 expressions or numbers, got 1"),
        (lambda: OPS["add_channel"](X), "add_channel: bias is missing"),
        (lambda: OPS["add_channel"](X, "bias"), "add_channel: bias wants an expression"),
    ],
)
def test_a_wrong_call_on_expressions_is_told(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(ChainError) as caught:
        call()
    assert message in str(caught.value)


def test_clamp_with_crossed_bounds_gives_the_upper_one_everywhere() -> None:
    crossed = OPS["clamp"](X, 1, -1)
    branches = {ir.constant(n.args[1]) for n in ir.topological([crossed]) if n.op == "where"}
    assert branches == {-1.0, None}


def test_layernorm_reduces_the_axes_it_is_given() -> None:
    def reduced(**attributes: object) -> set[ir.Extent]:
        body = OPS["layernorm"](X, **attributes)
        return {ir.reduction(n)[1] for n in ir.topological([body]) if n.op == "reduce"}

    assert reduced() == {frozenset({-1})}
    assert reduced(normalized_shape=64) == {frozenset({-1})}
    assert reduced(normalized_shape=(32, 64)) == {frozenset({-2, -1})}
    assert reduced(axis=1) == {frozenset({-4})}


# --- a user's own ---


def test_a_bare_decorator_makes_an_op_that_text_knows() -> None:
    @op
    def own_elu(x: Expr, alpha: float = 1.0) -> Expr:
        """x where x > 0, else alpha * (exp(x) - 1)."""
        return ir.primitive("where", x > 0, x, alpha * ir.primitive("expm1", x))

    assert OPS["own_elu"] is own_elu
    assert isinstance(own_elu, Op)
    assert own_elu.summary == "x where x > 0, else alpha * (exp(x) - 1)."
    assert chain("own_elu(0.5) | relu") == own_elu(0.5) | OPS["relu"]()
    assert not own_elu.is_builtin


def test_parameters_follow_the_annotations() -> None:
    @op(samples=[(2.0, 1, True, "a", (2, 3))], aliases=["everything_2"])
    def everything(
        x: Expr,
        scale: Expr,
        bias: Channel,
        weight: Trailing | None = None,
        *,
        either: Expr | float,
        count: int = 1,
        flag: bool = False,
        word: Literal["a", "b"] = "b",
        sizes: int | tuple[int, ...] = 2,
        limit: float | None = None,
    ) -> Expr:
        """Everything."""
        return x

    roles = {p.name: (p.role, p.placement, p.required) for p in everything.parameters}
    assert roles == {
        "scale": ("operand", "broadcast", True),
        "bias": ("operand", "channel", True),
        "weight": ("operand", "trailing", False),
        "either": ("either", "broadcast", True),
        "count": ("attribute", "broadcast", False),
        "flag": ("attribute", "broadcast", False),
        "word": ("attribute", "broadcast", False),
        "sizes": ("attribute", "broadcast", False),
        "limit": ("attribute", "broadcast", False),
    }
    written = everything("s", "b", either=2, count=3, flag=True, word="a", sizes=[4], limit=1)
    assert chain(written.text) == written
    assert lookup("everything_2") is everything


def test_parameters_without_annotations_are_tensors_or_take_the_type_of_their_default() -> None:
    @op
    def plain(x, scale, bias=None, slope=0.1):  # type: ignore[no-untyped-def]
        """Plain."""
        return x * scale * slope

    assert [p.role for p in plain.parameters] == ["operand", "operand", "attribute"]
    assert plain("s", slope=1).text == "plain(1, s)"


def define(factor: float) -> Op:
    @op
    def scaled(x: Expr) -> Expr:
        """x times a constant."""
        return x * factor

    return scaled


def test_a_function_of_the_same_name_replaces_the_op_and_changes_the_hash() -> None:
    first = define(2.0)()
    again = define(2.0)()
    assert first == again
    other = define(3.0)()
    assert other.text == first.text
    assert other != first
    assert other.hash != first.hash
    assert first.steps[0].definition is not OPS["scaled"]


def test_the_hash_of_a_users_op_is_the_same_in_another_process() -> None:
    program = "from tests.test_ops import define; print(define(2.0)().hash)"
    for seed in ("1", "2"):
        result = subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert result.stdout.strip() == define(2.0)().hash


def test_a_body_that_fails_on_some_numbers_of_axes_still_has_a_hash() -> None:
    def define_picky(kind: str) -> Op:
        @op
        def picky(x: Expr) -> Expr:
            """Needs four axes."""
            return ir.reduce(kind, (x.axes[3],), x)

        return picky

    assert define_picky("max")().hash != define_picky("mean")().hash


def test_a_builtin_cannot_be_redefined() -> None:
    def relu(x: Expr) -> Expr:
        return x

    with pytest.raises(ChainError, match="'relu' is already an operation"):
        op(relu)
    with pytest.raises(ChainError, match="'gelu' is already an operation"):
        op(aliases=["gelu"])(define(1.0).function)


@pytest.mark.parametrize(
    "name", ["keep", "recall", "x", "inf", "größe", "<lambda>", "compile", "lower"]
)
def test_a_name_that_text_could_not_call_is_refused(name: str) -> None:
    def function(x: Expr) -> Expr:
        return x

    function.__name__ = name
    with pytest.raises(ChainError, match="an operation cannot be called"):
        op(function)


def no_x() -> Expr:
    return X


def starred(x: Expr, *others: Expr) -> Expr:
    return x


def mapping(x: Expr, table: dict[str, int]) -> Expr:
    return x


def bad_default(x: Expr, slope: float = "steep") -> Expr:  # type: ignore[assignment]
    return x


def tensor_default(x: Expr, scale: Expr = 2.0) -> Expr:  # type: ignore[assignment]
    return x


def unknown_annotation(x: Expr, scale: "Tensor") -> Expr:  # type: ignore[name-defined] # noqa: F821
    return x


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (no_x, "the first parameter of an op is the value it works on"),
        (starred, "without * or **"),
        (mapping, "cannot tell what dict[str, int] takes"),
        (bad_default, "the default: slope wants a number, got 'steep'"),
        (tensor_default, "a tensor's default can only be None"),
        (int, "int: an operation is a function of expressions"),
        (unknown_annotation, "cannot read its annotations: name 'Tensor' is not defined"),
    ],
)
def test_a_signature_that_says_nothing_sensible_is_refused(function: object, message: str) -> None:
    assert callable(function)
    with pytest.raises(ChainError) as caught:
        op(function)
    assert message in str(caught.value)


def test_a_body_that_returns_no_expression_is_told() -> None:
    @op
    def constant(x: Expr) -> Expr:
        """Three."""
        return 3  # type: ignore[return-value]

    with pytest.raises(ChainError, match="constant: its body must return an expression, got 3"):
        constant(X)


def test_an_op_survives_copy_and_pickle_as_itself() -> None:
    gelu = OPS["gelu"]
    assert copy.deepcopy(gelu) is gelu
    assert copy.copy(gelu) is gelu
    assert pickle.loads(pickle.dumps(gelu)) is gelu


def test_a_body_that_returns_nothing_is_told() -> None:
    @op
    def forgetful(x: Expr) -> Expr:
        x + 1

    with pytest.raises(ChainError, match=r"forgetful: its body returns a NoneType, .* a return"):
        fusegen.compile("forgetful")(torch.ones(2))


@pytest.mark.parametrize("text", ["mul(1e300)", "norm(1e-300, -1)"])
def test_a_number_that_single_precision_lacks_is_infinite(text: str) -> None:
    source = fusegen.compile(text).source("cpp")
    assert "INFINITY" in source
    assert torch.equal(fusegen.compile("mul(1e300)")(torch.ones(2)), torch.full((2,), torch.inf))


def test_a_body_reduces_along_axes_that_count_from_the_end() -> None:
    for reduced in (fusegen.reduce_mean, fusegen.reduce_sum, fusegen.reduce_max):
        assert reduced(X, -1) is reduced(X, (X.axes[-1],))
        for axis in (1, -9):
            with pytest.raises(
                ChainError, match=f"got axis {axis} of a value of 5 axes, wanted -5"
            ):
                reduced(X, (axis,))
    with pytest.raises(ChainError, match="reduce_variance: got axis 0"):
        fusegen.reduce_variance(X, 0)


def test_an_op_tells_its_signature_and_its_text() -> None:
    assert [*inspect.signature(fusegen.leaky_relu).parameters] == ["x", "negative_slope"]
    assert fusegen.gelu.__doc__.startswith("x times the normal distribution function")

    @fusegen.compile
    def scaled(x: Expr, scale: Expr) -> Expr:
        """x times a scale."""
        return x * scale

    assert [*inspect.signature(scaled).parameters] == ["x", "scale"]
    assert (scaled.__name__, scaled.__doc__) == ("scaled", "x times a scale.")
    assert pickle.loads(pickle.dumps(scaled)).chain == scaled.chain
