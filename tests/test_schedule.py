"""Which kernels a chain becomes, forward and backward: how many passes there are over memory."""

import math

import pytest

from fusegen import arity, chain, ir
from fusegen.bind import bind
from fusegen.describe import Situation, assumed_shapes, element_type, modules
from fusegen.emission import make_entry
from fusegen.grouping import collapse
from fusegen.holding import signature
from fusegen.ir import Graph
from fusegen.ops import OPS
from fusegen.program import derivative, forward
from fusegen.signature import element_types, with_derivative

X = (8, 6, 10, 12)


def entries(text, x=X, dtype="float32", order=None, target="cpp", **operands):
    """The forward and backward entries of a chain, every input needing a gradient."""
    parsed = chain(text)
    shape, others = assumed_shapes(parsed, Situation(x, operands, dtype, "contiguous"))
    kinds = {name: element_type(parsed, name, dtype) for name in others}
    bound = bind(parsed, (shape, dtype), {n: (s, kinds[n]) for n, s in others.items()})
    program = forward(bound, is_training=True)
    back = derivative(program, range(len(program.graph.inputs)), [0])
    types = element_types(program, bound, [dtype, *[kinds[o.name] for o in bound.operands]])
    types = with_derivative(program, back, types)
    layout = order or tuple(range(-len(bound.domain), 0))
    programs = [program, back.program]
    signed = signature(target, layout, programs, types, bound)
    return [make_entry(p, signed) for p in programs]


def families(text, **arguments):
    return [[k.family for k in entry.kernels] for entry in entries(text, **arguments)]


@pytest.mark.parametrize(
    ("text", "families_of_forward"),
    [
        ("group_norm(2) | tanh | logsumexp(1)", ["inner", "finalise", "column"]),
        ("layernorm | softmax(1)", ["inner", "finalise", "column"]),
        # Of so few elements, those of which fewer kernels are left.
        ("softmax(1) | layernorm", ["column", "inner", "finalise", "pointwise"]),
        # Nothing is used again, but a block has all of a row.
        ("max(1)", ["column"]),
        ("gelu | sum(-1)", ["row"]),
        ("mean | tanh", ["row"]),
        # What a first sum leaves has rows too.
        ("sum(1) | tanh | sum(1)", ["column", "column"]),
        # What is used again at every element comes before what is only left.
        ("softmax(1) | sum((0, 2))", ["column", "outer", "finalise"]),
        ("softmax(1) | mean((2, 3))", ["column", "finalise"]),
        ("layernorm(axis=1) | gelu | mean((2, 3))", ["column", "finalise"]),
        ("layernorm(axis=1) | gelu | amax((2, 3))", ["outer", "finalise", "row"]),
        ("group_norm(2) | max(1)", ["inner", "finalise", "column"]),
        # Each depends on the other: of the first, what is reduced behind the second is left.
        (
            "softmax(1) | softmax(2) | sum(1)",
            [*["outer", "finalise"] * 2, "column", "outer", "finalise"],
        ),
    ],
)
def test_rows_that_are_reduced_last_are_held_on_the_chip(text, families_of_forward):
    ahead, _ = entries(text, target="cuda")
    found = [k.family for k in ahead.kernels]
    held = [k for k in ahead.kernels if k.tier is not None]
    assert len(held) == sum(f in ("row", "column") for f in found)
    assert found == families_of_forward


@pytest.mark.parametrize(
    ("text", "x", "operands"),
    [
        ("silu | group_norm(8, w, b)", (33, 64), {}),
        ("layernorm | mul(s) | add(t)", (4, 9, 64), {"s": (4, 1, 64), "t": (4, 1, 64)}),
        ("add(mask) | softmax(-1)", (4, 6, 9, 64), {"mask": (6, 9, 64)}),
    ],
)
def test_gradients_of_what_some_rows_share_come_with_the_rows(text, x, operands):
    forward, back = families(text, x=x, target="cuda", **operands)
    assert forward == ["row"]
    assert back == ["row", "finalise"]


def test_an_axis_that_x_lacks_is_no_part_of_its_rows():
    text = "group_norm(2) | max(1) | add(wider)"
    found = families(text, target="cuda", wider=(5, 1, 1, 1))[0]
    assert found == ["inner", "finalise", "column", "pointwise"]


@pytest.mark.parametrize(
    ("text", "ahead", "back"),
    [
        ("leaky_relu(0.2) | clamp(-1, 1) | gelu", ["pointwise"], ["pointwise"]),
        # A parameter's gradient rides along with dx: one pass, and a small second stage.
        ("leaky_relu(0.2) | add_channel | gelu", ["pointwise"], ["inner", "finalise"]),
        ("add_channel(axis=-1) | gelu", ["pointwise"], ["outer", "finalise"]),
        ("mul(scale) | add(bias) | gelu", ["pointwise"], ["pointwise"]),
        ("layernorm | gelu", ["row"], ["row"]),
        ("layernorm(axis=1) | gelu", ["column"], ["column"]),
        ("mul_channel | leaky_relu(0.2) | max_pool2d(2)", ["window"], ["window", "finalise"]),
    ],
)
def test_a_chain_is_one_kernel_and_its_gradient_one_pass(text, ahead, back):
    forwards, backwards = families(text)
    assert forwards == ahead
    assert backwards == back


@pytest.mark.parametrize("pool", ["avg_pool2d(2)", "max_pool2d(2)"])
def test_statistics_are_found_in_one_pass_whichever_of_them_windows_wait_for(pool):
    forwards, _ = families(f"batch_norm(weight=w, bias=b, training=True) | {pool}")
    assert forwards == ["inner", "finalise", "window"]


@pytest.mark.parametrize("order", [None, (-4, -2, -1, -3)])
def test_a_pooled_chains_gradients_leave_one_kernel_that_reads_each_tensor_once(order):
    _, backward = entries("mul_channel | leaky_relu(0.2) | max_pool2d(2)", order=order)
    window, finalise = backward.kernels
    assert (window.family, finalise.family) == ("window", "finalise")
    assert [b.name for b, _ in window.stores] == ["d_x"]
    assert len(window.sums) == 1
    assert sorted(b.name for _, b in window.inputs) == [
        "d_out",
        "picked_x",
        "scale",
        "winner_index",
    ]


def test_layernorms_gradient_and_its_parameters_are_computed_in_one_pass():
    forwards, backwards = families("layernorm(weight, bias) | gelu", weight=(12,), bias=(12,))
    assert forwards == ["row"]
    assert backwards == ["row", "finalise"]


@pytest.mark.parametrize("target", ["cpp", "cuda"])
def test_what_is_spread_over_other_axes_is_found_by_the_rows_it_is_of(target):
    operands = {"w": (16,), "p": (4, 6, 16)}
    found = families("layernorm(w) | add(p) | gelu", x=(6, 16), target=target, **operands)
    assert found[0] == ["row", "pointwise"]


def test_of_rows_that_are_reduced_further_one_number_each_is_left():
    """The loss of each row, and not the sums that it is made of."""
    text, x = "log_softmax(-1) | mul(t) | sum(-1) | mean", (512, 100)
    ahead, _ = entries(text, x=x, t=x, target="cuda", dtype="bfloat16")
    first = ahead.kernels[0]
    assert first.family == "row"
    assert [b.name for b, _ in first.stores if not b.name.startswith("saved")] == ["common_scratch"]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("log_softmax(1) | mul(t) | sum(1) | mean", 1),
        ("keep(y) | softmax(1) | mul(y) | mean", 1),
        ("sum(1) | keep(s) | square | mean | mul(s)", 1),
        ("sum(1) | keep(s) | mean | keep(m) | recall(s) | square | mean | add(m)", 2),
    ],
)
def test_what_strided_rows_have_once_is_added_up_on_the_way(text, count):
    given = {"t": (4, 19, 8, 16)} if "(t)" in text else {}
    first, second, *_ = entries(text, x=(4, 19, 8, 16), target="cuda", **given)[0].kernels
    assert (first.family, second.family) == ("column", "finalise")
    assert [r.kind for r, _ in first.totals] == ["sum"] * count
    assert [b for _, b in first.totals] == [b for _, b in second.sums]
    # A processor adds up what its cache has.
    (none, *_) = entries(text, x=(4, 19, 8, 16), target="cpp", **given)[0].kernels
    assert not none.totals


def test_what_is_reduced_in_the_same_way_is_merged_at_once():
    text = "log_softmax(-1) | mul(t) | sum(-1)"
    (kernel,) = entries(text, x=(64, 96), target="cuda", t=(64, 96))[0].kernels
    assert [[r.kind for r in stage] for stage in kernel.stages] == [["peak"], ["sum"] * 3]
    # But for what the next stage waits for.
    text = "keep(y) | amax(-1, True) | keep(m) | recall(y) | mean(-1, True) | rsub(y) | square"
    text += " | keep(d) | sum(-1, True) | mul(m) | mul(d)"
    (kernel,) = entries(text, x=(64, 96), target="cuda")[0].kernels
    assert [{r.kind for r in stage} for stage in kernel.stages] == [{"peak", "sum"}, {"sum"}]


def test_strided_rows_too_long_for_a_cache_take_a_pass_for_each_reduction():
    assert families("softmax(0) | tanh", x=(4096, 6)) == [["column"], ["column"]]
    forward, backward = families("softmax(0) | tanh", x=(4097, 6))
    assert forward == ["outer", "finalise", "outer", "finalise", "pointwise"]
    # What is dear of a row is still found once.
    assert backward == ["outer", "finalise", "pointwise"]


@pytest.mark.parametrize("target", ["cpp", "cuda"])
@pytest.mark.parametrize(
    ("text", "extents"),
    [
        ("layernorm(w, b, axis=1) | gelu", {"w": (6,), "b": (6,)}),
        ("softmax(1) | mul(w) | tanh", {"w": (6, 1, 1)}),
    ],
)
def test_strided_rows_and_their_parameters_have_gradients_in_one_pass(text, extents, target):
    _, backward = families(text, target=target, **extents)
    assert backward == ["column", "finalise"]


@pytest.mark.parametrize(
    ("text", "length"),
    [("layernorm(weight, bias) | gelu", 12), ("layernorm(weight, bias, axis=1) | gelu", 6)],
)
@pytest.mark.parametrize("op", ["erf", "exp"])
def test_a_gradient_over_rows_computes_what_is_dear_at_one_stage(op, text, length):
    _, backward = entries(text, weight=(length,), bias=(length,))
    kernel = backward.kernels[0]
    stages = [
        [r.value for r in s] + [e for _, e in h]
        for s, h in zip(kernel.stages, kernel.held, strict=True)
    ]
    stages.append([e for _, e in kernel.stores])
    for (reduction, _), level in zip(kernel.sums, kernel.placed, strict=True):
        stages[level].append(reduction.value)
    assert sum(any(n.op == op for n in ir.topological(s)) for s in stages) == 1


def test_a_backward_reads_x_and_the_cotangent_once():
    _, backward = entries("leaky_relu(0.2) | add_channel | clamp(-1, 1) | gelu")
    whole = [k for k in backward.kernels if k.family != "finalise"]
    assert len(whole) == 1
    assert sorted(b.name for _, b in whole[0].inputs) == ["bias", "d_out", "x"]


@pytest.mark.parametrize("text", ["max(1)", "min(1, keepdim=True) | tanh", "neg | max(1)"])
@pytest.mark.parametrize("target", ["cpp", "cuda"])
def test_the_gradient_of_a_maximum_goes_where_it_stands_and_reads_nothing_of_x(text, target):
    ahead, back = entries(text, target=target)
    assert "saved_argmax" in [b.name for k in ahead.kernels for b, _ in k.stores]
    assert "x" not in [b.name for b in back.arguments]


@pytest.mark.parametrize(
    ("text", "back"),
    [
        ("logsumexp(1, True) | relu", ["pointwise", "pointwise"]),
        ("max(1) | tanh", ["pointwise", "pointwise"]),
        ("max(1) | relu", ["pointwise", "pointwise"]),  # nothing is dear, but less is read
        ("max(1)", ["pointwise"]),
        ("logsumexp(-1, True) | relu", ["pointwise"]),  # a pack's elements have it in common
    ],
)
@pytest.mark.parametrize("target", ["cpp", "cuda"])
def test_what_elements_that_lie_apart_have_in_common_is_found_once_ahead(text, back, target):
    _, backward = entries(text, x=(2, 40, 6), target=target)
    assert [k.family for k in backward.kernels] == back
    assert not any(k.stages or k.sums for k in backward.kernels)


def test_threads_with_whole_strided_rows_find_that_themselves():
    _, backward = entries("logsumexp(1, True) | relu", x=(2, 20, 6), target="cuda")
    assert [k.family for k in backward.kernels] == ["column"]


def test_what_is_merged_goes_on_as_far_as_elements_have_it_in_common():
    ahead, _ = entries("batch_norm(training=True) | relu", x=(4096, 6), target="cuda")
    merging, elementwise = ahead.kernels[-2:]
    assert [k.family for k in ahead.kernels] == ["outer", "finalise", "pointwise"]
    assert [b.name for b, _ in merging.stores][-2:] == ["common_scratch", "mean_scratch"]
    assert "rsqrt" not in {n.op for n in ir.topological(e for _, e in elementwise.stores)}


def test_what_one_pass_leaves_changes_nothing_of_what_another_is_to_find():
    text = "batch_norm(training=True, weight=w) | sum(2, True) | add(t) | mish"
    shapes = {"w": (3,), "t": (2, 3, 3, 5)}
    _, back = entries(text, x=(2, 3, 3, 5), dtype="float64", target="cuda", **shapes)
    assert sum(k.family == "finalise" for k in back.kernels) > 1
    assert all(k.stores for k in back.kernels if k.family == "finalise")


@pytest.mark.parametrize(
    ("text", "length", "family"),
    [
        ("mean(1)", 512, "column"),
        ("mean(1)", 513, "outer"),  # few threads would lie beside each other
        ("layernorm(axis=1)", 1024, "column"),
    ],
)
def test_long_strided_rows_are_summed_up_by_threads_that_stay_in_their_columns(
    text, length, family
):
    forwards, _ = families(text, x=(2, length, 8), target="cuda")
    assert forwards[0] == family


@pytest.mark.parametrize(
    ("text", "forwards"),
    [
        ("layernorm | gelu | sum(-1)", ["inner", "finalise"] * 2),
        ("softmax(-1) | square | sum(-1)", ["row"]),  # three passes are slower
        ("layernorm | gelu", ["row"]),  # elements are written
    ],
)
def test_a_team_that_writes_nothing_of_its_rows_is_two_passes(text, forwards):
    assert families(text, x=(4, 1 << 17), target="cuda")[0] == forwards


def test_a_team_that_waits_for_other_rows_before_it_writes_is_two_passes():
    text = "batch_norm(training=True) | keep(y) | mean((2, 3), True) | rsub(y)"
    _, backwards = families(text, x=(4, 3, 512, 513), target="cuda")
    assert backwards == [*(["inner", "finalise"] * 2), "pointwise"]


def test_neighbouring_axes_form_one_group():
    forward_entry, _ = entries("leaky_relu(0.2) | add_channel | gelu")
    assert forward_entry.grouping.axes == ((-4,), (-3,), (-2, -1))
    forward_entry, _ = entries("gelu")
    assert forward_entry.grouping.axes == ((-4, -3, -2, -1),)


def test_channels_last_makes_the_channel_the_innermost_group():
    forward_entry, backward = entries("add_channel | gelu", order=(-4, -2, -1, -3))
    assert forward_entry.grouping.axes == ((-4, -2, -1), (-3,))
    assert [k.family for k in backward.kernels] == ["outer", "finalise"]


def test_where_nothing_varies_there_is_still_one_group():
    forward_entry, _ = entries("gelu", x=())
    assert forward_entry.grouping.axes == ((),)


def test_an_input_that_nothing_reads_is_grouped_as_the_others_are():
    x, rows = ir.tensor("x", {-2, -1}, 2), ir.tensor("rows", {-2}, 2)
    regrouped, _, grouping = collapse(Graph((x, rows), (("out", x * 2.0),)), (-2, -1), {})
    assert grouping.axes == ((-2,), (-1,))
    assert [(ir.name_of(i), i.extent) for i in regrouped.inputs] == [("x", {0, 1}), ("rows", {0})]


def test_few_very_long_rows_are_shared_by_many_blocks():
    assert families("layernorm", x=(4096, 64))[0] == ["row"]
    assert "row" not in families("layernorm", x=(2, 1 << 20))[0]


EVERY_EXAMPLE = [
    e
    for op in OPS.values()
    for e in op.examples
    if op.window_axes in (0, 2) and not op.name.startswith("logical_") and op.name != "where"
]


@pytest.mark.parametrize("example", EVERY_EXAMPLE, ids=lambda e: e.text)
def test_what_kernels_write_is_what_was_asked_for(example):
    text = example.text
    if example.steps[0].op in arity.COMPARISONS:
        text = f"{text} | where(yes, no)"
    for entry in entries(text):
        written = [b.name for k in entry.kernels for b, _ in k.stores if b.role == "output"]
        asked = [a.name for a in entry.arguments if a.role == "output"]
        assert sorted(written) == sorted(asked)


@pytest.mark.parametrize("target", ["cpp", "cuda"])
def test_kernels_read_only_what_is_there_by_then(target):
    for text in (
        "layernorm(weight, bias) | add_channel | gelu",
        "layernorm(axis=1) | layernorm | mul(other)",
        "add(other) | max_pool2d(2)",
        "mul(a) | tanh | layernorm(b, axis=1) | layernorm(c, axis=2)",
        "instance_norm(weight=weight, bias=bias) | tanh",
        "group_norm(2, weight, bias) | softmax(1)",
        "batch_norm(training=True) | layernorm(weight, bias) | group_norm(2)",
        "layernorm(weight, bias) | amax((1, 2))",
    ):
        for entry in entries(text, target=target):
            ready = {a.name for a in entry.arguments if a.role == "input"}
            partials = set()
            for kernel in entry.kernels:
                for _, buffer in kernel.inputs:
                    assert buffer.name in ready, f"{text}: {kernel.name} reads {buffer.name}"
                mine = {buffer.name for _, buffer in kernel.sums}
                if kernel.family == "finalise":
                    assert mine <= partials
                else:
                    assert not mine & partials
                    partials |= mine
                stored = {buffer.name for buffer, _ in kernel.stores}
                assert not stored & ready
                ready |= stored


def test_sums_pass_through_memory_in_fp32_at_least():
    for dtype, wanted in (("float16", "float32"), ("bfloat16", "float32"), ("float64", "float64")):
        for entry in entries("add_channel | layernorm(weight)", dtype=dtype):
            for kernel in entry.kernels:
                scratch = [b for b, _ in kernel.stores if b.role == "scratch"]
                for buffer in [*scratch, *(b for _, b in kernel.sums)]:
                    assert buffer.dtype == wanted


def test_names_are_the_same_in_every_run():
    one, other = (entries("layernorm(weight) | add_channel | gelu") for _ in range(2))
    assert one == other


def test_collapsing_keeps_the_number_of_elements():
    parsed = chain("mul(a) | add(b) | layernorm")
    bound = bind(parsed, (X, "float32"), {"a": ((6, 1, 1), "float32"), "b": ((10, 12), "float32")})
    program = forward(bound, is_training=False)
    for order in ((-4, -3, -2, -1), (-4, -2, -1, -3), (-1, -2, -3, -4)):
        _, _, grouping = collapse(program.graph, order, {})
        axes = [a for group in grouping.axes for a in group]
        assert sorted(axes) == [-4, -3, -2, -1]
        assert math.prod(X[a] for a in axes) == math.prod(X)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_one_kernel_has_written_is_read_by_the_next(dtype):
    text = "batch_norm(weight=w, bias=b, training=True) | add(r) | relu"
    shapes = {"w": (8,), "b": (8,), "r": (4, 8, 7, 7)}
    situation = Situation((4, 8, 7, 7), operands=shapes, dtype=dtype)
    (module,) = modules(chain(text), "cuda", situation, grad=True)
    *_, last = make_entry(module.programs[1], module.signature).kernels
    read = {buffer.name for _, buffer in last.inputs}
    assert {"x", "d_r_operand"} <= read
    assert not {"r_operand", "d_out"} & read


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_a_row_has_in_common_is_found_by_its_own_kernel(dtype):
    # Not the row's sum, which nothing else reads, is left for the mask's gradient.
    text = "mul(0.5) | add(m) | softmax(-1) | neg"
    _, back = entries(text, (64, 4, 197, 197), dtype, target="cuda", m=(4, 197, 197))
    row, outer = back.kernels[:2]
    assert (row.family, outer.family) == ("row", "outer")
    (left,) = [(b, e) for b, e in row.stores if b.role == "scratch"]
    assert left[1].op in ("div", "narrow_div")
    assert left[0] in [b for _, b in outer.inputs]


def test_what_would_be_rounded_is_computed_again():
    text = "batch_norm(weight=w, bias=b, training=True) | add(r) | gelu"
    shapes = {"w": (8,), "b": (8,), "r": (4, 8, 6, 6)}
    situation = Situation((4, 8, 6, 6), operands=shapes, dtype="bfloat16")
    (module,) = modules(chain(text), "cuda", situation, grad=True)
    *_, last = make_entry(module.programs[1], module.signature).kernels
    assert "d_r_operand" not in {buffer.name for _, buffer in last.inputs}
