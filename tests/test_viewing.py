"""Steps that only say in what shape a value is seen: where they cut a chain, and that what comes
out has torch's shape, values and gradients.
"""

import pytest
import torch
from numeric import has_right_second_derivatives, home_of_eager, leaves, outcome

import fusegen
from fusegen.cli import OK, main
from fusegen.describe import Situation, modules, sources
from fusegen.dsl import chain
from fusegen.errors import ArgumentError, ChainError
from fusegen.explain import explain
from fusegen.segments import bind_all, segments

SHAPE = (2, 6, 4, 5)

# A chain, its segments, the shapes of its operands; for an x of SHAPE.
CHAINS = {
    "flatten": (["flatten"], []),
    "reshape(5, -1)": (["reshape((5, -1))"], []),
    "unflatten(1, (2, -1))": (["unflatten(1, (2, -1))"], []),
    # Last, or where the axes can be followed: no cut.
    "gelu | adaptive_avg_pool2d(1) | flatten(1)": (
        ["gelu | adaptive_avg_pool2d(1) | flatten(1)"],
        [],
    ),
    "gelu | mean((2, 3)) | unsqueeze(0) | view(-1)": (
        ["gelu | mean((2, 3)) | unsqueeze(0) | reshape((-1,))"],
        [],
    ),
    "tanh | reshape(-1, 10) | flatten": (["tanh | reshape((-1, 10)) | flatten"], []),
    "max_pool2d(2) | flatten(1)": (["max_pool2d(2) | flatten(1)"], []),
    "max_pool2d(2) | unflatten(1, (3, 2))": (["max_pool2d(2) | unflatten(1, (3, 2))"], []),
    "avg_pool2d(3, 1, 1) | flatten(1) | add(b) | tanh": (
        ["avg_pool2d(3, 1, 1) | flatten(1) | add(b) | tanh"],
        [(120,)],
    ),
    "tanh | flatten(1) | layernorm(w, b)": (
        ["tanh | flatten(1) | layernorm(w, b)"],
        [(120,), (120,)],
    ),
    "tanh | flatten(2) | softmax(-1)": (["tanh | flatten(2) | softmax(-1)"], []),
    "flatten(1) | max(1)": (["flatten(1) | max(1)"], []),
    "mean((2, 3), keepdim=True) | flatten(2) | mul(w)": (
        ["mean((2, 3), keepdim=True) | flatten(2) | mul(w)"],
        [(6, 20)],
    ),
    "mul_channel(w) | flatten(2) | group_norm(3) | flatten(0, 1)": (
        ["mul_channel(w) | flatten(2) | group_norm(3) | flatten(end_dim=1)"],
        [(6,)],
    ),
    "tanh | unflatten(1, (2, -1)) | softmax(2) | mul(w) | flatten(1, 2)": (
        ["tanh | unflatten(1, (2, -1)) | softmax(2) | mul(w) | flatten(1, 2)"],
        [(3, 1, 1)],
    ),
    "keep(y) | tanh | mul(y) | flatten(1) | keep(z) | softmax(1) | mul(z)": (
        ["keep(y) | tanh | mul(y) | flatten(1) | keep(y_2) | softmax(1) | mul(y_2)"],
        [],
    ),
    # First: what follows finds x in that shape, and may do with it what it likes.
    "flatten(2) | max_pool1d(2) | flatten": (["flatten(2) | max_pool1d(2) | flatten"], []),
    "flatten(1, 2) | group_norm(4)": (["flatten(1, 2) | group_norm(4)"], []),
    "flatten | unflatten(0, (8, -1)) | softmax(0)": (
        ["flatten | unflatten(0, (8, -1)) | softmax(0)"],
        [],
    ),
    # Between: a cut, and then it is first.
    "tanh | reshape(4, -1) | softmax(0)": (["tanh", "reshape((4, -1)) | softmax(0)"], []),
    "tanh | flatten(2) | max_pool1d(2)": (["tanh | flatten(2)", "max_pool1d(2)"], []),
    "tanh | flatten(1, 2) | group_norm(4)": (["tanh | flatten(1, 2)", "group_norm(4)"], []),
    "group_norm(2) | unflatten(1, (3, 2)) | mul(w)": (
        ["group_norm(2)", "unflatten(1, (3, 2)) | mul(w)"],
        [(2, 1, 1)],
    ),
    "max_pool2d(2) | unflatten(3, (2, 1)) | mul(w)": (
        ["max_pool2d(2)", "unflatten(3, (2, 1)) | mul(w)"],
        [(2, 1)],
    ),
    "tanh | flatten(2) | softmax(-1) | unflatten(2, (4, -1)) | mul(w)": (
        ["tanh | flatten(2) | softmax(-1)", "unflatten(2, (4, -1)) | mul(w)"],
        [(5,)],
    ),
    # What was there before is in memory, in the shape that it had.
    "keep(y) | flatten(2) | softmax(-1) | unflatten(2, (4, -1)) | mul(y)": (
        ["keep(y) | flatten(2) | softmax(-1)", "unflatten(2, (4, -1)) | mul(y)"],
        [],
    ),
    "tanh | keep(y) | gelu | flatten(1) | recall(y) | flatten(2) | sum(2)": (
        ["tanh", "gelu", "flatten(1)", "flatten(2) | sum(2)"],
        [],
    ),
    "keep(y) | sum((0, 1)) | flatten | unflatten(0, (4, 5)) | add(y)": (
        ["keep(y) | sum((0, 1)) | flatten", "unflatten(0, (4, 5)) | add(y)"],
        [],
    ),
    "mul(w) | flatten(1, 2) | mul(w)": (["mul(w)", "flatten(1, 2) | mul(w)"], [(5,)]),
}
LAYOUTS = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "permuted": lambda x: x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
    "a window of a larger one": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
}


def compare(fused, tensors, rtol=1e-11):
    """The result and every gradient beside torch's own."""
    home = home_of_eager(fused.chain.text, tensors[0].device.type, tensors[0].dtype)
    others = leaves(tensors, device=home)
    result, wanted = fused(*tensors), fused.reference(*others)
    assert result.shape == wanted.shape
    torch.testing.assert_close(result, wanted.to(result.device), rtol=rtol, atol=rtol)
    # A gradient of another layout than the result's.
    cotangent = torch.randn(wanted.shape[::-1]).to(wanted).permute(*range(wanted.dim())[::-1])
    found = torch.autograd.grad(result, tensors, cotangent.to(result.device))
    expected = torch.autograd.grad(wanted, others, cotangent)
    for tensor, a, b in zip(tensors, found, expected, strict=True):
        assert a.shape == tensor.shape
        torch.testing.assert_close(a, b.to(a.device), rtol=rtol, atol=rtol)


def tensors_for(text, device="cpu", layout="contiguous", shape=SHAPE):
    x = torch.randn(shape, dtype=torch.float64, device=device)
    operands = [torch.randn(s, dtype=torch.float64, device=device) for s in CHAINS[text][1]]
    return [t.detach().requires_grad_() for t in (LAYOUTS[layout](x), *operands)]


@pytest.mark.parametrize("text", CHAINS)
def test_a_chain_is_cut_only_where_axes_cannot_be_followed(text):
    assert [s.chain.text for s in segments(chain(text))] == CHAINS[text][0]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("text", CHAINS)
def test_shape_values_and_gradients_are_torchs(text, layout, device):
    compare(fusegen.compile(text), tensors_for(text, device, layout))


SMALL = {
    "tanh | flatten(1) | layernorm(w, b)": ((2, 3, 2), [(6,), (6,)]),
    "tanh | unflatten(1, (2, -1)) | softmax(2) | mul(w) | flatten(1, 2)": ((2, 4), [(2,)]),
    "tanh | reshape(4, -1) | softmax(0) | flatten": ((2, 3, 2), []),
    "keep(y) | flatten(1) | softmax(-1) | unflatten(1, (2, -1)) | mul(y)": ((2, 2, 2), []),
    "avg_pool2d(2) | flatten(1) | mul(w) | tanh": ((2, 2, 2, 4), [(4,)]),
    "reshape(2, -1) | mul(w) | tanh": ((3, 4), [(6,)]),
}


@pytest.mark.parametrize("text", SMALL)
def test_second_derivatives_are_right(text):
    shape, operands = SMALL[text]
    tensors = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in (shape, *operands)]
    assert has_right_second_derivatives(fusegen.compile(text), tensors)


# Of a batch of none torch makes no rows of 4 or 5 either; and a sum of none has elements.
WITH_EMPTY = [
    t for t in CHAINS if not t.startswith(("tanh | reshape(4", "reshape(5", "keep(y) | sum"))
]


@pytest.mark.parametrize("text", WITH_EMPTY)
def test_an_empty_batch_gives_an_empty_result(text, device):
    shape = (0, *SHAPE[1:])
    tensors = tensors_for(text, device, shape=shape)
    fused = fusegen.compile(text)
    result, wanted = fused(*tensors), fused.reference(*tensors)
    assert result.shape == wanted.shape
    gradients = torch.autograd.grad(result, tensors, torch.zeros_like(wanted))
    assert [g.shape for g in gradients] == [t.shape for t in tensors]


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("tanh | unflatten(1, (0, 3)) | mul(2)", (2, 0)),
        ("tanh | unflatten(1, (3, 0, 2)) | softmax(1)", (2, 0)),
        ("tanh | reshape(0, 7)", (2, 0)),
        ("flatten | reshape(3, 0)", (2, 0)),
        ("flatten", ()),
        ("tanh | flatten | mul(3)", ()),
        ("unflatten(0, (1, 1, -1)) | tanh", (1,)),
        ("reshape(1) | unflatten(-1, (1, 1)) | tanh", ()),
        ("tanh | flatten(1) | sum(1)", (3, 1, 1)),
    ],
)
def test_sizes_of_none_and_one_are_torchs(text, shape):
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    compare(fusegen.compile(text), [x])


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize(
    "text",
    [
        "gelu | adaptive_avg_pool2d(1) | flatten(1)",
        "tanh | flatten(1)",
        "tanh | reshape(4, -1) | softmax(0)",
        "max_pool2d(2) | flatten(1)",
    ],
)
def test_the_result_is_written_into_out(text, layout, device):
    fused = fusegen.compile(text)
    x = LAYOUTS[layout](torch.randn(SHAPE, device=device))
    wanted = fused(x)
    for out in (torch.empty_like(wanted), torch.empty(wanted.shape[::-1], device=device).mT):
        assert fused(x, out=out) is out
        assert torch.equal(out, wanted)
    with pytest.raises(ArgumentError, match="argument 'out': got shape"):
        fused(x, out=torch.empty(SHAPE, device=device))


def test_a_flattened_result_is_contiguous_as_torchs_is():
    x = torch.randn(SHAPE).contiguous(memory_format=torch.channels_last)
    assert fusegen.compile("relu | flatten(1)")(x).is_contiguous()
    # What lies together stays as it lies.
    assert fusegen.compile("relu | flatten(2)")(x).stride() == x.relu().flatten(2).stride()


def test_the_first_of_equal_maxima_is_the_first_in_the_shape_that_is_seen():
    x = torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    x[:, 0, 0, 1] = x[:, 1, 0, 0] = 1
    x.requires_grad_()
    found = fusegen.compile("flatten(1) | max(1)")(x)
    (gradient,) = torch.autograd.grad(found.sum(), x)
    assert gradient[0].nonzero().tolist() == [[0, 0, 1]]


def test_a_mask_of_noise_is_the_same_in_any_shape():
    x = torch.randn(SHAPE)
    found = []
    for text in ("dropout(0.5) | flatten(1) | mul(2)", "flatten(1) | dropout(0.5) | mul(2)"):
        for layout in ("contiguous", "channels_last"):
            torch.manual_seed(3)
            found.append(fusegen.compile(text)(LAYOUTS[layout](x)))
    assert all(torch.equal(found[0], other) for other in found[1:])
    assert (found[0] == 0).any()


def test_numbers_may_stand_one_by_one():
    texts = ["reshape(2, -1)", "reshape((2, -1))", "view(2, -1)", "reshape([2, -1])"]
    assert {chain(text).text for text in texts} == {"reshape((2, -1))"}
    assert fusegen.reshape(2, -1) == fusegen.reshape((2, -1)) == chain("view(2, -1)")

    def head(x):
        return fusegen.flatten(fusegen.gelu(fusegen.reshape(x, 2, -1)), 1)

    assert chain(head).text == "reshape((2, -1)) | gelu | flatten(1)"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("flatten(2, 1)", "flatten: start_dim 2 is behind end_dim 1; name the first axis first"),
        ("gelu | reshape(-1, -1)", "reshape: got the sizes (-1, -1), wanted -1 once at most"),
        ("unflatten(1, (-2, 3))", "got the sizes (-2, 3), wanted none below 0 but one -1"),
        ("reshape(0, -1)", "reshape: got the sizes (0, -1), where -1 may be anything; write it"),
        ("reshape(2.5)", "reshape: shape wants a tuple of integers, got 2.5"),
        ("reshape(2, y)", "reshape: no place for the constant 'y'"),
        ("reshape", "reshape: shape is missing"),
        ("unflatten(1)", "unflatten: sizes is missing"),
        ("flatten(1.5)", "flatten: start_dim wants an integer, got 1.5"),
    ],
)
def test_a_mistake_in_the_text_has_a_caret(text, message):
    with pytest.raises(ChainError) as caught:
        chain(text)
    first, line, caret = str(caught.value).split("\n")
    assert message in first
    assert line.strip() == text
    assert caret.strip() == "^"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "flatten(1, 5)",
            r"flatten\(1, 5\): end_dim 5 is out of range for a value of shape \(2, 6, 4, 5\) \(4",
        ),
        ("mean(1) | flatten(-4)", r"flatten\(-4\): start_dim -4 is out of range .* \(3 axes\)"),
        (
            "flatten(-1, 1)",
            r"flatten\(-1, 1\): start_dim -1 is behind end_dim 1 in a value of shape \(2, 6",
        ),
        (
            "relu | unflatten(1, (4, -1))",
            r"unflatten\(1, \(4, -1\)\): got a value of shape \(2, 6, 4, 5\), wanted its axis 1 to "
            r"hold a multiple of 4 elements for the sizes \(4, -1\); there are 6",
        ),
        ("unflatten(4, (2, 1))", r"unflatten\(4, \(2, 1\)\): dim 4 is out of range"),
        (
            "relu | reshape(7, 5)",
            r"reshape\(\(7, 5\)\): got a value of shape \(2, 6, 4, 5\), wanted it to hold exactly "
            r"35 elements for the sizes \(7, 5\); there are 240",
        ),
        ("keep(y) | tanh | flatten(1) | add(y)", r"add\(y\): operand 'y' got shape .* broadcast"),
        ("flatten(1) | max_pool2d(2)", r"max_pool2d\(2\): got a value of shape \(2, 120\), wanted"),
    ],
)
def test_a_shape_that_does_not_fit_is_told(text, message):
    fused = fusegen.compile(text)
    with pytest.raises(ArgumentError, match=message):
        fused(torch.ones(SHAPE))
    assert all(not part.plans for way in fused._parts for part in way)


def test_a_condition_is_seen_in_another_shape(device):
    x = torch.randn(SHAPE, device=device)
    # With a cut, and where axes can be followed, without one.
    for text, shape in (
        ("gelu | gt(0) | reshape(8, -1) | where(a, 0.5)", (8, -1)),
        ("gelu | gt(0) | flatten(1) | where(a, 0.5)", (SHAPE[0], -1)),
    ):
        wanted = (torch.nn.functional.gelu(x) > 0).reshape(shape)
        a = torch.randn(wanted.shape, device=device)
        assert torch.equal(fusegen.compile(text)(x, a), torch.where(wanted, a, 0.5))


def test_an_operations_body_cannot_change_the_shape():
    @fusegen.op
    def own_flat(x: fusegen.Expr) -> fusegen.Expr:
        """x, flat."""
        return fusegen.flatten(x, 1)

    with pytest.raises(ChainError, match="flatten: works as a step of a chain only"):
        fusegen.compile("own_flat")(torch.ones(3, 4))


def test_shapes_are_told_through_all_segments():
    parts = segments(chain("tanh | reshape(4, -1) | softmax(0) | flatten"))
    bounds = bind_all(parts, (SHAPE, "float32"), {})
    assert [b.result_shape for b in bounds] == [SHAPE, (240,)]


# In one segment, where the shape allows it.
# Where what is there before meets what is behind along the axes that it lies along, no cut either.
IN_ONE = (
    "tanh | flatten(2) | softmax(-1) | unflatten(2, (4, -1)) | mul(w)",
    "tanh | keep(y) | gelu | flatten(1) | recall(y) | flatten(2) | sum(2)",
    "keep(y) | sum((0, 1)) | flatten | unflatten(0, (4, 5)) | add(y)",
    "mul(w) | flatten(1, 2) | mul(w)",
    "tanh | reshape(4, -1) | softmax(0)",
)


@pytest.mark.parametrize("target", ["cuda", "cpp"])
@pytest.mark.parametrize("text", CHAINS)
def test_its_source_is_there_with_gradients(text, target):
    parts, shapes = CHAINS[text]
    situation = Situation(SHAPE, dict(zip(chain(text).operands, shapes, strict=True)))
    count = 1 if text in IN_ONE else len(parts)
    assert len(sources(chain(text), target, situation, grad=True)) == count


@pytest.mark.parametrize(
    ("text", "operands", "count"),
    [
        ("tanh | flatten(2) | softmax(2) | unflatten(2, (4, 5)) | mul(s)", [(6, 1, 1)], 1),
        ("tanh | flatten(2) | softmax(2) | unflatten(2, (2, 10)) | mul(s)", [(6, 1, 1)], 1),
        ("tanh | flatten(2) | softmax(2) | unflatten(2, (5, 4)) | mul(s)", [(6, 1, 1)], 2),
        ("tanh | flatten(1) | layernorm | unflatten(1, (6, 4, 5)) | mul(s)", [(1, 4, 1)], 1),
        ("tanh | flatten(2) | softmax(2) | unflatten(2, (4, 5)) | sum(2)", [], 1),
        ("tanh | flatten(2) | softmax(2) | unflatten(2, (4, 5)) | max_pool2d(2)", [], 2),
    ],
)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_what_was_made_one_axis_is_parted_again(text, operands, count, layout, device):
    """In one kernel, where the parts are those that there were, or are within them."""
    fused = fusegen.compile(text)
    tensors = [torch.randn(s, dtype=torch.float64, device=device) for s in (SHAPE, *operands)]
    if layout == "channels_last":
        tensors[0] = tensors[0].contiguous(memory_format=torch.channels_last)
    tensors = [t.requires_grad_() for t in tensors]
    ours, eager = outcome(fused, tensors), outcome(fused.reference, tensors)
    for mine, theirs in zip(ours.tensors, eager.tensors, strict=True):
        torch.testing.assert_close(mine, theirs)
    shapes = dict(zip(fused.chain.operands, operands, strict=True))
    assert len(sources(fused.chain, "cpp", Situation(SHAPE, shapes), grad=False)) == count


@pytest.mark.parametrize(
    "text",
    [
        "reshape(7, -1)",
        "reshape(3, 4, 5) | softmax(1)",
        "unflatten(1, (4, -1)) | softmax(2)",
        "unflatten(-1, (3, 7)) | mul(w)",
        "adaptive_avg_pool2d(1) | flatten(1) | mul(w)",
        "max_pool2d(2) | flatten(1) | add(b)",
        "group_norm(4) | unflatten(1, (4, -1)) | softmax(2)",
    ],
)
def test_shapes_that_fit_are_assumed_where_none_are_given(text):
    assert sources(chain(text), "cpp", Situation(), grad=True)


FOLLOWED = [
    # Views at the end of which the last one parts what the first has joined, across its axes.
    ("mean(2) | tanh | reshape((8, 24, 2)) | unflatten(1, (6, 2, 2))", (8, 4, 4, 12), [], 1),
    (
        "keep(y) | tanh | reshape(4, 3, -1) | softmax(1) | reshape(2, 6, 4, 5) | mul(y)",
        SHAPE,
        [],
        1,
    ),
    ("keep(y) | unflatten(1, (2, 3)) | softmax(2) | flatten(1, 2) | add(y)", SHAPE, [], 1),
    ("mul(w) | unflatten(1, (2, 3)) | softmax(2) | mul(w)", SHAPE, [(5,)], 1),
    ("tanh | reshape(-1, 5) | mul(w) | reshape(2, 6, -1) | amax(-1)", SHAPE, [(5,)], 1),
    # Across other places than axes end at.
    ("tanh | reshape(5, -1) | softmax(0) | reshape(2, 6, 4, 5)", SHAPE, [], 2),
    ("keep(y) | tanh | reshape(5, -1) | softmax(0) | reshape(2, 6, 4, 5) | mul(y)", SHAPE, [], 3),
]


@pytest.mark.parametrize(("text", "shape", "operands", "count"), FOLLOWED, ids=str)
def test_axes_are_followed_through_views(text, shape, operands, count, device):
    tensors = [torch.randn(s, dtype=torch.float64, device=device) for s in (shape, *operands)]
    fused = fusegen.compile(text)
    compare(fused, [t.requires_grad_() for t in tensors])
    assert [len(way) for way in fused._parts if way[0].plans] == [count]


def test_explain_tells_of_cuts_and_copies():
    def told(text, **more):
        return explain(chain(text), "cuda", Situation(SHAPE, **more), 1000.0)

    cut = told("tanh | reshape(5, -1) | softmax(0)")
    assert "segment 2 of 2: reshape((5, -1)) | softmax(0), cut here: reshape((5, -1)) sees" in cut
    crossed = Situation((6, 4), {"w": (6, 1)})
    used = explain(chain("mul(w) | flatten(0, 1) | mul(w)"), "cuda", crossed, 1000.0)
    assert "cut here: mul(w) uses 'w', which is there before the shape changes" in used
    pooled = told("tanh | flatten(2) | max_pool1d(2)")
    assert "cut here: max_pool1d(2) wants whole axes, which flatten(2) has made others of" in pooled
    assert "copies" not in cut + used + pooled
    last = told("relu | flatten(1)", layout="channels_last")
    assert "copies out 960 B into contiguous memory, for flatten(1)" in last
    first = told("relu | flatten(1) | layernorm", layout="channels_last")
    assert "copies out 960 B into contiguous memory, for flatten(1)" in first
    for text in (
        "relu | flatten(2) | softmax(1)",
        "mean((2, 3), keepdim=True) | flatten(1)",
    ):
        assert "copies" not in told(text, layout="channels_last")


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize(
    "text",
    [
        "tanh | flatten(1, 2) | group_norm(4)",
        "tanh | flatten(2) | max_pool1d(2)",
        "group_norm(2) | unflatten(1, (3, 2)) | mean(1)",
    ],
)
def test_a_segment_is_told_as_it_is_built(text, layout):
    """From how its x lies: what was flattened may be contiguous, or lie as x did."""
    fused = fusegen.compile(text)
    fused(LAYOUTS[layout](torch.randn(SHAPE)))
    told = modules(fused.chain, "cpp", Situation(SHAPE, layout=layout), grad=False)
    for part, module in zip(fused._parts[-1], told, strict=True):
        (by_program,) = part.modules.values()
        ((_, built_with),) = by_program
        assert built_with == module.signature


def test_autocast_goes_through_the_shapes():
    fused = fusegen.compile("tanh | reshape(4, -1) | avg_pool1d(2) | flatten(0, 1)")
    x = torch.randn(SHAPE, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        found, wanted = fused(x), fused.reference(x)
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)


def test_the_command_knows_views(capsys):
    assert main(["check", "gelu | adaptive_avg_pool2d(1) | flatten(1) | mul(w)"]) == OK
    assert "all within what is allowed" in capsys.readouterr().out
    assert main(["dump", "gelu | reshape(4, -1) | softmax(0)", "--grad"]) == OK
    assert capsys.readouterr().out.count("// fusegen") >= 2
