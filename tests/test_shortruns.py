"""Reductions over short runs: which go down columns, and which rows have their sums."""

import pytest

import fusegen
from fusegen import ir
from fusegen.describe import Situation, modules, sources
from fusegen.emission import make_entry
from fusegen.ways import Strips, Way, way_of

_TRAINED = "batch_norm(weight=w, bias=b, training=True) | relu"


def kernels(
    chain: str, *shape: int, grad: bool = True, target: str = "cuda", **more: object
) -> dict[str, list[str]]:
    """The families of each program's kernels but those that merge partials."""
    found = modules(fusegen.chain(chain), target, Situation(shape, **more), grad=grad)
    return {
        program.name: [
            k.family for k in make_entry(program, m.signature).kernels if k.family != "finalise"
        ]
        for m in found
        for program in m.programs
    }


@pytest.mark.parametrize(
    ("shape", "dtype", "family"),
    [
        ((256, 64, 7, 7), "float32", "outer"),
        ((256, 64, 7, 7), "bfloat16", "outer"),
        ((16, 64, 7, 7), "bfloat16", "inner"),  # too few samples to be worth a partial each
        ((256, 64, 8, 8), "bfloat16", "outer"),  # whole packs, but few
        ((256, 64, 8, 8), "float32", "inner"),
        ((256, 64, 17, 17), "float32", "outer"),
        ((32, 64, 17, 17), "bfloat16", "inner"),
        ((256, 64, 33, 33), "float32", "inner"),
        ((256, 3, 7, 7), "float32", "inner"),  # samples of no whole packs
        ((512, 3, 7, 7), "float32", "outer"),  # but there are many
        ((13149, 61, 251), "float32", "inner"),
    ],
)
def test_a_bias_gradient_over_small_images_goes_down_columns(
    shape: tuple[int, ...], dtype: str, family: str
) -> None:
    found = kernels("add_channel | gelu", *shape, dtype=dtype)
    assert (found["forward"], found["backward"][0]) == (["pointwise"], family)


@pytest.mark.parametrize(
    ("shape", "dtype", "forward", "backward"),
    [
        ((256, 64, 7, 7), "bfloat16", "outer", "outer"),
        ((256, 64, 7, 7), "float32", "inner", "outer"),  # moments are dear to keep by column
        ((32, 64, 7, 7), "bfloat16", "inner", "outer"),
        ((256, 64, 15, 15), "bfloat16", "inner", "inner"),
    ],
)
def test_statistics_and_their_gradients_choose_for_themselves(
    shape: tuple[int, ...], dtype: str, forward: str, backward: str
) -> None:
    found = kernels(_TRAINED, *shape, dtype=dtype)
    assert (found["forward"][0], found["backward"][0]) == (forward, backward)


@pytest.mark.parametrize(
    ("shape", "dtype", "family"),
    [
        ((8, 64, 7, 7), "float32", "row"),
        ((8, 64, 8, 8), "float32", "inner"),
        ((8, 64, 14, 14), "bfloat16", "row"),
        ((8, 64, 16, 16), "bfloat16", "inner"),
    ],
)
def test_gates_of_small_images_have_their_gradient_with_the_image_s(
    shape: tuple[int, ...], dtype: str, family: str
) -> None:
    gate = {"s": (*shape[:2], 1, 1)}
    found = kernels("mul(s) | silu", *shape, dtype=dtype, operands=gate)
    assert found == {"forward": ["pointwise"], "backward": [family]}


def test_gates_beside_biases_are_as_they_were() -> None:
    operands = {"s": (64, 64, 1, 1), "p": (64, 1, 1)}
    found = kernels("mul(s) | add(p) | silu", 64, 64, 7, 7, operands=operands)
    assert found["backward"] == ["inner", "outer", "inner"]  # the last of what columns leave


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("pixels", [3, 7, 14])
def test_means_over_small_images_take_one_kernel(pixels: int, dtype: str) -> None:
    found = kernels("relu | mean((2, 3))", 64, 256, pixels, pixels, dtype=dtype, grad=False)
    assert found == {"forward": ["row"]}


def test_groups_go_down_columns_beside_rows_along_their_channels() -> None:
    """With channels innermost, group by group each position would leave a partial of its own."""
    chain = "group_norm(16, w, b) | tanh | logsumexp(1)"
    shape, layout = (64, 64, 126, 126), "channels_last"
    found = kernels(
        chain, *shape, dtype="bfloat16", layout=layout, operands={"w": (64,), "b": (64,)}
    )
    assert found["forward"] == ["outer", "row"]  # what columns leave is merged by group
    # What they leave of a gradient has rows of its own: a group's channels.
    assert found["backward"] == ["outer", "row", "outer"]


_CHANNELS = {"w": (512,), "b": (512,)}
_SAMPLES = {"s": (16, 512, 1, 1), "t": (16, 512, 1, 1)}


@pytest.mark.parametrize(
    ("chain", "operands", "backward"),
    [
        ("group_norm(32, w, b) | silu", _CHANNELS, ["outer", "row", "outer"]),
        (
            "group_norm(32, w, b) | mul(s) | add(t) | silu",
            {**_CHANNELS, **_SAMPLES},
            ["outer", "row", "outer"],
        ),
        # The second pass adds up nothing: all that is summed over samples is of the first.
        ("instance_norm(weight=w, bias=b) | silu", _CHANNELS, ["outer", "outer", "outer"]),
        ("instance_norm | mul(s) | add(t)", _SAMPLES, ["outer", "outer"]),
        ("add(b) | add(t) | silu", _SAMPLES, ["outer", "outer"]),
    ],
)
def test_what_columns_leave_is_reduced_apart(
    chain: str, operands: dict[str, tuple[int, ...]], backward: list[str]
) -> None:
    named = {"w": (512, 1, 1), "b": (512, 1, 1), **operands}
    given = {name: named[name] for name in fusegen.chain(chain).operands}
    found = kernels(
        chain, 16, 512, 64, 64, dtype="bfloat16", layout="channels_last", operands=given
    )
    assert found["backward"] == backward


def test_other_images_reduce_what_is_left_in_the_same_way() -> None:
    chain = fusegen.chain("leaky_relu(0.2) | add_channel | gelu")
    for shape in ((128, 64, 2, 2), (256, 64, 7, 7), (64, 64, 3, 5)):
        (module,) = modules(chain, "cuda", Situation(shape), grad=True)
        assert module.signature.strips == ("backward",)
        assert not module.signature.rows


def test_other_numbers_of_samples_reduce_what_is_left_in_the_same_way() -> None:
    chain = fusegen.chain("group_norm(32, w, b) | silu")
    found = set()
    for samples in (1, 2, 3, 7, 16, 33, 128):
        situation = Situation(
            (samples, 320, 64, 64), {"w": (320,), "b": (320,)}, "bfloat16", "channels_last"
        )
        (module,) = modules(chain, "cuda", situation, grad=True)
        found.add(dict(module.signature.rows)["backward"])
    assert len(found) == 1


@pytest.mark.parametrize(
    ("chain", "forward"),
    [
        ("group_norm(8) | relu | max_pool2d(2)", ["outer", "window"]),
        ("group_norm(8) | relu | max_pool2d(3, 2, 1)", ["outer", "slide"]),
        ("layernorm(axis=1) | group_norm(8)", ["row", "outer", "outer"]),
        ("softmax(1) | group_norm(8)", ["row", "outer", "outer"]),
    ],
)
def test_groups_go_down_columns_beside_windows_and_behind_rows(
    chain: str, forward: list[str]
) -> None:
    found = kernels(chain, 64, 64, 56, 56, dtype="bfloat16", layout="channels_last")
    assert found["forward"] == forward
    assert "outer" in found["backward"]


@pytest.mark.parametrize(
    ("channels", "size", "dtype", "forward"),
    [
        (1280, 8, "bfloat16", ["outer", "outer"]),
        (1280, 16, "bfloat16", ["outer", "outer"]),
        (1280, 16, "float32", ["inner", "pointwise"]),
        (2048, 8, "bfloat16", ["outer", "outer"]),
        (2048, 7, "bfloat16", ["inner", "pointwise"]),  # too few positions
        (4096, 16, "bfloat16", ["inner", "pointwise"]),  # groups of 256 bytes
    ],
)
def test_short_groups_of_two_bytes_go_down_columns(
    channels: int, size: int, dtype: str, forward: list[str]
) -> None:
    found = kernels(
        "group_norm(32) | silu", 64, channels, size, size, dtype=dtype, layout="channels_last"
    )
    assert found["forward"] == forward


@pytest.mark.parametrize(
    ("kind", "axes", "way"),
    [
        ("mean", {1, 3}, Way("outer", (0,), (2, 3), frozenset({3}))),
        ("sum", {1, 3}, Way("inner", (), (), frozenset())),  # in two steps before
        ("sum", {0, 1}, Way("outer", (), (2, 3), frozenset())),
        # Columns of a result that are all there are, or do not lie beside each other.
        ("variance", {1, 2, 3}, Way("inner", (), (), frozenset())),
        ("variance", {1, 2}, Way("outer", (0,), (3,), frozenset())),
        ("mean", {3}, Way("inner", (), (), frozenset())),
    ],
)
def test_what_merges_moments_takes_columns_beside_each_other(
    kind: str, axes: set[int], way: Way
) -> None:
    x = ir.tensor("x", frozenset(range(4)), 0)
    strips = Strips((0, 1, 2, 3), frozenset({1}), (2, 3))
    assert way_of(ir.reduce(kind, axes, x), strips) == way
    assert way_of(ir.reduce(kind, axes, x), None).within == frozenset()


def test_a_group_of_all_channels_before_others_is_reduced_along_them() -> None:
    found = kernels("group_norm(1) | group_norm(4)", 64, 64, 56, 56, layout="channels_last")
    assert found["forward"] == ["inner", "outer", "outer"]


@pytest.mark.parametrize(
    ("chain", "shape", "layout", "family"),
    [
        ("group_norm(32, w, b) | silu", (4, 320, 16, 16), "channels_last", "outer"),
        ("group_norm(8, w, b) | silu", (4, 320, 16, 16), "channels_last", "inner"),  # runs of 40
        ("group_norm(32, w, b) | silu", (4, 320, 4, 4), "channels_last", "inner"),  # few of them
        ("group_norm(32, w, b) | silu", (4, 320, 16, 16), "contiguous", "row"),
        (_TRAINED, (64, 512, 7, 7), "contiguous", "inner"),
    ],
)
def test_on_a_cpu_runs_that_would_leave_lines_empty_go_down_columns(
    chain: str, shape: tuple[int, ...], layout: str, family: str
) -> None:
    found = kernels(chain, *shape, layout=layout, target="cpp")
    assert found["forward"][0] == family
    assert (found["backward"][0] == "outer") == (family == "outer")


def test_on_a_cpu_what_groups_have_is_a_line_for_all_rows_that_pass_by() -> None:
    shapes = {"w": (320,), "b": (320,)}
    situation = Situation((4, 320, 16, 16), shapes, "bfloat16", "channels_last")
    (source,) = sources(fusegen.chain("group_norm(32, w, b)"), "cpp", situation, grad=False)
    written = source.text[source.text.index("forward_outer_2(") :]
    before, _, rows = written.partition("for (Index row")
    for name in ("mean", "variance", "w_operand", "b_operand"):
        assert f"{name}_beside[kBeside]" in before
        assert f"{name}_line = {name}_beside" in rows
    assert rows.count("load<1>(") == 1  # x's
