"""What bad input gets: an error that says where, what it got and what was wanted, before anything
is launched.
"""

import pytest
import torch

import fusegen
from fusegen import ArgumentError, ChainError, FusegenError
from fusegen.plan import Plan

X = (2, 3, 4, 6)


@pytest.fixture(autouse=True)
def nothing_is_launched(monkeypatch):
    """Whatever the mistake, no kernel has run when it is told."""

    def refuse(*arguments):
        raise AssertionError("launched in spite of a mistake in the arguments")

    monkeypatch.setattr(Plan, "run", refuse)


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


# (chain, x, operands, what the message must hold)
CALLS = {
    "too few operands": ("add_channel(bias)", ones(*X), [], ["'bias' is missing", "takes x, bias"]),
    "too many operands": (
        "add_channel(bias)",
        ones(*X),
        [ones(3), ones(3)],
        ["got 2 operands, wanted 1", "takes x, bias"],
    ),
    "no tensor": ("gelu", 1.5, [], ["argument 'x'", "got float", "wanted a torch.Tensor"]),
    "no tensor among operands": ("add(other)", ones(*X), [2.0], ["argument 'other'", "got float"]),
    "a list": ("add(other)", ones(*X), [[1.0, 2.0]], ["argument 'other'", "got list"]),
    "None": ("add(other)", ones(*X), [None], ["argument 'other'", "got NoneType"]),
    "an integer x": (
        "gelu",
        ones(*X, dtype=torch.int64),
        [],
        ["gelu", "of integers alone", "to('float32')"],
    ),
    "a bool x": (
        "gelu",
        ones(*X, dtype=torch.bool),
        [],
        ["argument 'x'", "bool", "wanted one of float16"],
    ),
    "a complex x": ("gelu", ones(*X, dtype=torch.complex64), [], ["argument 'x'", "complex64"]),
    "an integer operand": (
        "add(other)",
        ones(*X),
        [ones(6, dtype=torch.complex64)],
        ["argument 'other'", "complex64", "other.float()"],
    ),
    "a sparse x": ("gelu", ones(4, 6).to_sparse(), [], ["argument 'x'", "sparse", "x.to_dense()"]),
    "a sparse operand": (
        "add(other)",
        ones(4, 6),
        [ones(4, 6).to_sparse()],
        ["argument 'other'", "sparse"],
    ),
    "another device": (
        "add(other)",
        ones(*X),
        [ones(6).to("meta")],
        ["argument 'other'", "on meta", "wanted one on cpu", "where x is"],
    ),
    "a device without a target": (
        "gelu",
        ones(*X).to("meta"),
        [],
        ["argument 'x'", "meta", "cpu or cuda"],
    ),
    "no broadcast": (
        "mul(other)",
        ones(*X),
        [ones(5)],
        ["mul(other)", "'other' got shape (5,)", "does not broadcast", "(2, 3, 4, 6)"],
    ),
    "a channel count": (
        "add_channel(bias)",
        ones(*X),
        [ones(4)],
        ["'bias' got shape (4,)", "wanted (3,) or (1, 3, 1, 1)", "3 channels"],
    ),
    "channels along another axis": (
        "mul_channel(scale)",
        ones(*X),
        [ones(3, 1)],
        ["'scale' got shape (3, 1)", "wanted (3,) or (1, 3, 1, 1)"],
    ),
    "too few axes for a channel": (
        "add_channel(bias)",
        ones(6),
        [ones(6)],
        ["axis 1 is out of range", "(6,)"],
    ),
    "layernorm over another size": (
        "layernorm(normalized_shape=64)",
        ones(*X),
        [],
        ["normalized_shape is (64,)", "(2, 3, 4, 6)", "(6,)"],
    ),
    "layernorm over more axes than there are": (
        "layernorm(normalized_shape=(2, 3))",
        ones(3),
        [],
        ["normalized_shape is (2, 3)", "(3,)"],
    ),
    "layernorm of a number": (
        "layernorm",
        ones(),
        [],
        ["layernorm", "shape ()", "at least one axis"],
    ),
    "layernorm's weight": (
        "layernorm(weight)",
        ones(*X),
        [ones(4)],
        ["'weight' got shape (4,)", "wanted (6,)"],
    ),
    "layernorm's bias over an axis": (
        "layernorm(weight, bias, axis=1)",
        ones(*X),
        [ones(3), ones(6)],
        ["'bias' got shape (6,)", "wanted (3,)"],
    ),
    "layernorm's axis": ("layernorm(axis=4)", ones(*X), [], ["axis 4 is out of range", "4 axes"]),
    "a mix that is not taken": (
        "layernorm(weight)",
        ones(*X, dtype=torch.float16),
        [ones(6).double()],
        ["'weight' is float64", "float16", "weight.to(torch.float16)"],
    ),
    "pooling of too few axes": (
        "max_pool2d(2)",
        ones(4, 6),
        [],
        ["max_pool2d(2)", "(4, 6)", "3 or 4 axes"],
    ),
    "pooling of too many axes": (
        "max_pool2d(2)",
        ones(1, *X),
        [],
        ["(1, 2, 3, 4, 6)", "3 or 4 axes"],
    ),
    "a window that does not fit": (
        "max_pool2d((5, 2))",
        ones(*X),
        [],
        ["(5, 2)", "does not fit", "(2, 3, 4, 6)"],
    ),
    "a window that does not fit, after a reduction": (
        "layernorm | max_pool2d((5, 2))",
        ones(*X),
        [],
        ["(5, 2)", "does not fit", "(2, 3, 4, 6)"],
    ),
}


@pytest.mark.parametrize("mistake", CALLS)
def test_a_bad_call_is_told(mistake):
    text, x, operands, parts = CALLS[mistake]
    with pytest.raises(ArgumentError) as caught:
        fusegen.compile(text)(x, *operands)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("mistake", CALLS)
def test_a_bad_call_is_told_again_when_a_gradient_is_wanted(mistake):
    text, x, operands, parts = CALLS[mistake]
    tensors = [t.clone() if isinstance(t, torch.Tensor) else t for t in (x, *operands)]
    for t in tensors:
        if isinstance(t, torch.Tensor) and t.is_floating_point():
            t.requires_grad_()
    with pytest.raises(ArgumentError) as caught:
        fusegen.compile(text)(*tensors)
    assert parts[-1] in str(caught.value)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_is_told_of(layout):
    rows = torch.nested.nested_tensor([ones(2, 6), ones(3, 6)], layout=layout)
    with pytest.raises(ArgumentError, match=r"'x': got a nested tensor, .* x.to_padded_tensor"):
        fusegen.compile("softmax(-1)")(rows)
    with pytest.raises(ArgumentError, match="'other': got a nested tensor"):
        fusegen.compile("add(other)")(ones(2, 6), rows)


def test_names_of_operands_are_checked():
    fused = fusegen.compile("add_channel(bias) | mul(scale)")
    x = ones(*X)
    for arguments, named, parts in (
        ([], {"bais": ones(3)}, ["no operand is called 'bais'", "takes x, bias, scale"]),
        ([ones(3)], {"bias": ones(3)}, ["'bias' is given twice"]),
        ([ones(3)], {}, ["'scale' is missing"]),
        ([], {"scale": ones(6)}, ["'bias' is missing"]),
    ):
        with pytest.raises(ArgumentError) as caught:
            fused(x, *arguments, **named)
        for part in parts:
            assert part in str(caught.value)


# out=


def inferred(*shape: int) -> torch.Tensor:
    with torch.inference_mode():
        return torch.empty(shape)


OUTS = {
    "another shape": (ones(2, 3, 4), ["argument 'out'", "got shape (2, 3, 4)", "(2, 3, 4, 6)"]),
    "another type": (ones(*X, dtype=torch.float64), ["argument 'out'", "float64", "float32"]),
    "another device": (ones(*X).to("meta"), ["argument 'out'", "meta", "cpu"]),
    "no tensor": ([1.0], ["argument 'out'", "got list"]),
    "a leaf that needs a gradient": (
        ones(*X).requires_grad_(),
        ["argument 'out'", "needs a gradient", "detach"],
    ),
    "a sparse tensor": (ones(*X).to_sparse(), ["argument 'out'", "sparse"]),
    "an inference tensor": (inferred(*X), ["argument 'out'", "inference_mode", "out.clone()"]),
    "elements that share memory": (
        ones(2, 3, 4, 1).expand(X),
        ["argument 'out'", "more than one element"],
    ),
}


@pytest.mark.parametrize("mistake", OUTS)
def test_a_bad_out_is_told(mistake):
    out, parts = OUTS[mistake]
    with pytest.raises(ArgumentError) as caught:
        fusegen.compile("gelu")(ones(*X), out=out)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "text", ["add_channel(bias)", "layernorm | mul_channel(bias) | max_pool2d(2)"]
)
@pytest.mark.parametrize("who", ["x", "bias"])
def test_out_is_refused_where_a_gradient_is_needed(who, text):
    tensors = {"x": ones(*X), "bias": ones(3)}
    tensors[who].requires_grad_()
    out = torch.zeros(fusegen.compile(text).reference(*tensors.values()).shape)
    with pytest.raises(ArgumentError, match=f"out= was given, but '{who}' needs a gradient"):
        fusegen.compile(text)(*tensors.values(), out=out)
    assert not out.any()


# What is told without a call.

CHAINS = {
    "an unknown op": ("gelo", ["'gelo'", "did you mean 'gelu'?"]),
    "an attribute": ("leaky_relu('steep')", ["leaky_relu"]),
    "an argument's name": ("leaky_relu(slope=1)", ["'slope'", "leaky_relu"]),
    "windows that do not move": ("max_pool2d(3, stride=0)", ["stride", "at least 1, got 0"]),
    "too much padding": ("max_pool2d(3, 2, 2)", ["at most half", "spans 3", "got 2"]),
    "padding for three axes": ("avg_pool2d(3, 2, (1, 1, 1))", ["one size or 2", "(1, 1, 1)"]),
    "windows of nothing": ("avg_pool1d(0)", ["kernel_size wants one size, each at least 1"]),
    "a divisor of 0": ("avg_pool2d(2, divisor_override=0)", ["divisor_override cannot be 0"]),
    "a norm of infinity": ("lp_pool2d(inf, 2)", ["norm_type wants a number other than 0"]),
    "parts of a word": ("adaptive_avg_pool2d(('a', 1))", ["integers or None", "('a', 1)"]),
    "None in a tuple of integers": ("sum((0, None))", ["a tuple of integers", "(0, None)"]),
    "no parts": ("adaptive_avg_pool2d(0)", ["output_size wants one size or 2", "got 0"]),
}


@pytest.mark.parametrize("mistake", CHAINS)
def test_a_bad_chain_is_told(mistake):
    text, parts = CHAINS[mistake]
    with pytest.raises(ChainError) as caught:
        fusegen.compile(text)
    for part in parts:
        assert part in str(caught.value)


def test_every_mistake_is_one_kind_of_error():
    for call in (
        lambda: fusegen.compile("gelo"),
        lambda: fusegen.compile("max_pool2d(3, 0)"),
        lambda: fusegen.compile("gelu")(3),
    ):
        with pytest.raises(FusegenError):
            call()


def test_a_mistake_changes_nothing():
    fused = fusegen.compile("add_channel(bias)")
    x, bias = ones(*X), ones(4)
    versions = x._version, bias._version
    with pytest.raises(ArgumentError):
        fused(x, bias)
    assert (x._version, bias._version) == versions
    assert all(not part.plans for way in fused._parts for part in way)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"shape": 5}, "shape: got 5, wanted sizes such as (8, 64, 14, 14)"),
        ({"shape": (2, -3)}, "shape: got (2, -3), wanted sizes"),
        ({"shape": (2, 2.5)}, "shape: got (2, 2.5), wanted sizes"),
        ({"shape": "ab"}, "shape: got 'ab', wanted sizes"),
        ({"operands": {"p": 3}}, "operands['p']: got 3, wanted sizes"),
    ],
)
def test_sizes_that_a_source_is_asked_for_are_checked(given, message):
    fused = fusegen.compile("add(p)")
    for told in (fused.source, fused.explain):
        with pytest.raises(ArgumentError) as caught:
            told("cpp", **given)
        assert message in str(caught.value)


@pytest.mark.parametrize("given", [0, -1.0, "fast", float("inf"), float("nan")])
def test_the_bandwidth_that_limits_are_for_is_checked(given):
    with pytest.raises(ArgumentError, match=r"bandwidth: got .*, wanted GB/s above 0"):
        fusegen.compile("relu").explain("cpp", bandwidth=given)


def test_what_is_no_operation_is_told():
    with pytest.raises(ChainError, match="an operation is a function with a name, got 5"):
        fusegen.op(5)
    with pytest.raises(ChainError, match=r"own_op: reference is the dotted name .*, got 5"):

        @fusegen.op(reference=5)
        def own_op(x):
            return x
