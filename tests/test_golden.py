"""The emitted text, byte by byte; `pytest --update-golden tests/test_golden.py` rewrites it."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import fusegen
from fusegen.describe import Situation, sources
from fusegen.target import TARGETS

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = Path(__file__).parent / "golden"
CASES = {
    "pointwise": ("leaky_relu(0.2) | add_channel | clamp(-1, 1) | gelu", Situation()),
    "pointwise_bfloat16": (
        "leaky_relu(0.2) | add_channel | clamp(-1, 1) | gelu",
        Situation(dtype="bfloat16", layout="channels_last"),
    ),
    "pointwise_functions_bfloat16": (
        "gelu('tanh') | elu | softplus | tanh | pow(1.5)",
        Situation(dtype="bfloat16"),
    ),
    "gated": ("keep(y) | sigmoid | mul(y) | mul(gate)", Situation()),
    "bias_over_last_axis": ("add_channel(axis=-1) | relu", Situation()),
    "layernorm_of_last_axis": ("layernorm(64, weight, bias) | gelu | mul(0.5)", Situation()),
    "layernorm_of_channels": (
        "layernorm(weight, bias, axis=1)",
        Situation(shape=(4, 96, 28, 28)),
    ),
    "layernorm_of_few_channels": ("layernorm(weight, bias, axis=1)", Situation()),
    "layernorm_of_short_rows_float16": (
        "layernorm(weight, bias) | gelu",
        Situation(shape=(64, 256), dtype="float16"),
    ),
    "layernorm_of_short_rows_bfloat16": (
        "layernorm(weight, bias)",
        Situation(shape=(64, 256), dtype="bfloat16"),
    ),
    "layernorm_of_short_rows_with_residual": (
        "add(residual) | layernorm(weight, bias) | gelu",
        Situation(shape=(64, 96), operands={"residual": (64, 96)}),
    ),
    "softmax_of_odd_short_rows_bfloat16": (
        "softmax(-1) | mul(weight)",
        Situation(shape=(64, 77), operands={"weight": (77,)}, dtype="bfloat16"),
    ),
    "layernorm_of_8192": ("layernorm(8192, weight, bias)", Situation(shape=(8, 8192))),
    "layernorm_of_16384": ("layernorm(16384, weight, bias)", Situation(shape=(8, 16384))),
    "layernorm_of_65536": ("layernorm(weight, bias)", Situation(shape=(8, 65536))),
    "rms_norm_of_16384_bfloat16": (
        "rms_norm(weight)",
        Situation(shape=(8, 16384), dtype="bfloat16"),
    ),
    "swiglu_bfloat16": (
        "unflatten(-1, (2, -1)) | keep(y) | select(-2, 0) | silu | keep(gate) | recall(y) | "
        "select(-2, 1) | mul(gate)",
        Situation(shape=(8, 4096), dtype="bfloat16"),
    ),
    "rms_norm_of_residual_stream_bfloat16": (
        "add(residual) | give(sum) | rms_norm(weight)",
        Situation(shape=(8, 4096), dtype="bfloat16"),
    ),
    "layernorm_of_residual_stream": (
        "add(residual) | give(sum) | layernorm(weight, bias)",
        Situation(shape=(8, 4096)),
    ),
    "layernorm_of_one_place": (
        "layernorm(weight, bias) | select(1, 0)",
        Situation(shape=(8, 197, 1024)),
    ),
    "layernorm_of_12289": ("layernorm(weight, bias)", Situation(shape=(8, 12289))),
    "layernorm_of_65536_bfloat16": (
        "layernorm(weight, bias)",
        Situation(shape=(8, 65536), dtype="bfloat16"),
    ),
    "group_norm_by_stretches": (
        "group_norm(8, weight, bias) | silu",
        Situation(shape=(16, 64, 16, 16)),
    ),
    "group_norm_of_long_rows": (
        "gelu | group_norm(8, weight, bias)",
        Situation(shape=(16, 64, 66, 66)),
    ),
    "group_norm_shared_by_blocks": (
        "gelu | group_norm(8, weight, bias)",
        Situation(shape=(4, 64, 128, 128)),
    ),
    "batch_norm_pooled": (
        "batch_norm(weight=weight, bias=bias, training=True) | relu | max_pool2d(2)",
        Situation(shape=(64, 64, 32, 32)),
    ),
    "batch_norm_pooled_channels_last": (
        "batch_norm(weight=weight, bias=bias, training=True) | gelu | avg_pool2d(2)",
        Situation(shape=(64, 64, 32, 32), layout="channels_last"),
    ),
    "batch_norm_stem": (
        "batch_norm(weight=weight, bias=bias, training=True) | relu | max_pool2d(3, 2, 1)",
        Situation(shape=(64, 64, 112, 112)),
    ),
    "layernorm_pooled": (
        "add(p) | layernorm(weight, bias) | avg_pool3d(2) | gelu",
        Situation(shape=(32, 64, 32, 64, 64), operands={"p": ()}),
    ),
    "max_pool3d_logsumexp": (
        "max_pool3d(2) | logsumexp(1, keepdim=True) | relu",
        Situation(shape=(2, 64, 32, 128, 128)),
    ),
    "layernorm_of_channels_pooled": (
        "layernorm(weight, bias, axis=1) | gelu | avg_pool2d(2)",
        Situation(shape=(64, 64, 112, 112)),
    ),
    "group_norm_of_short_rows": (
        "group_norm(64, weight, bias) | silu",
        Situation(shape=(256, 4096)),
    ),
    "layernorm_with_bias_and_residual_bfloat16": (
        "add(bias) | add(residual) | layernorm(weight, bias_2) | gelu",
        Situation(
            shape=(64, 1024),
            operands={"bias": (1024,), "residual": (64, 1024)},
            dtype="bfloat16",
        ),
    ),
    "picture_uint8": (
        "to(bfloat16) | div(255) | sub_channel(mean) | div_channel(std)",
        Situation(shape=(64, 3, 224, 224), dtype="uint8"),
    ),
    "cross_entropy_of_long_rows_bfloat16": (
        "cross_entropy(labels)",
        Situation(shape=(2048, 50257), dtype="bfloat16"),
    ),
    "layernorm_of_positions": (
        "add(p) | layernorm(weight, bias)",
        Situation(shape=(4, 197, 768), operands={"p": (197, 768)}),
    ),
    "layernorm_then_mean_bfloat16": (
        "layernorm(weight, bias) | mean(1)",
        Situation(shape=(8, 197, 768), dtype="bfloat16"),
    ),
    "batch_norm_residual_of_small_images_bfloat16": (
        "batch_norm(weight=weight, bias=bias, training=True) | add(residual) | relu",
        Situation(shape=(128, 64, 7, 7), operands={"residual": (128, 64, 7, 7)}, dtype="bfloat16"),
    ),
    "gate_of_small_images_bfloat16": (
        "mul(gate) | silu",
        Situation(shape=(64, 32, 7, 7), operands={"gate": (64, 32, 1, 1)}, dtype="bfloat16"),
    ),
    "group_norm_of_small_images": (
        "group_norm(32, weight, bias) | silu",
        Situation(shape=(16, 1024, 8, 8)),
    ),
    "softmax_of_windows_bfloat16": (
        "add(bias) | add(mask) | softmax(-1)",
        Situation(
            shape=(4, 16, 4, 49, 49),
            operands={"bias": (4, 49, 49), "mask": (16, 1, 49, 49)},
            dtype="bfloat16",
        ),
    ),
    "softmax_behind_a_mask_bfloat16": (
        "mul(0.125) | add(mask) | softmax(-1)",
        Situation(
            shape=(8, 4, 197, 197),
            operands={"mask": (4, 197, 197)},
            dtype="bfloat16",
        ),
    ),
    "layernorm_modulated": (
        "layernorm | mul(scale) | add(shift)",
        Situation(shape=(4, 64, 768), operands={"scale": (4, 1, 768), "shift": (4, 1, 768)}),
    ),
    "layernorm_of_odd_long_rows_float64": (
        "layernorm(weight, bias) | gelu",
        Situation(shape=(8, 65537), dtype="float64"),
    ),
    "layernorm_of_long_rows_with_residual": (
        "add(residual) | layernorm(8192, weight, bias) | gelu",
        Situation(shape=(8, 8192), operands={"residual": (8, 8192)}),
    ),
    "layernorm_of_long_rows_with_residual_bfloat16": (
        "add(residual) | layernorm(16384, weight, bias) | gelu",
        Situation(shape=(8, 16384), dtype="bfloat16", operands={"residual": (8, 16384)}),
    ),
    "layernorm_twice_of_long_rows": (
        "layernorm | gelu | layernorm",
        Situation(shape=(8, 65536)),
    ),
    "layernorm_of_odd_rows_bfloat16": (
        "add(residual) | layernorm(1023, weight, bias) | gelu",
        Situation(shape=(8, 1023), dtype="bfloat16", operands={"residual": (8, 1023)}),
    ),
    "layernorm_of_512_channels": (
        "layernorm(weight, bias, axis=1)",
        Situation(shape=(2, 512, 8, 8)),
    ),
    "layernorm_of_768_channels_one_by_one": (
        "layernorm(weight, bias, axis=1) | gelu",
        Situation(shape=(2, 768, 7, 7)),
    ),
    "bias_over_last_axis_bfloat16": (
        "add_channel(axis=-1) | gelu",
        Situation(shape=(64, 256), dtype="bfloat16"),
    ),
    "layernorm_of_few_long_rows": ("layernorm", Situation(shape=(2, 1 << 20))),
    "softmax_of_rows": (
        "softmax(-1) | mul(weight)",
        Situation(shape=(64, 3000), operands={"weight": (3000,)}),
    ),
    "softmax_of_50257_bfloat16": ("softmax(-1)", Situation(shape=(8, 50257), dtype="bfloat16")),
    "log_softmax_of_65536": ("log_softmax(-1)", Situation(shape=(8, 65536))),
    "less_the_largest_of_65536": (
        "keep(y) | amax(-1, keepdim=True) | rsub(y)",
        Situation(shape=(8, 65536)),
    ),
    "cross_entropy_bfloat16": (
        "cross_entropy(target)",
        Situation(shape=(64, 4096), dtype="bfloat16"),
    ),
    "cross_entropy_of_pixels": ("cross_entropy(target)", Situation(shape=(4, 19, 32, 32))),
    "softmax_of_channels": ("gelu | softmax(1) | add_channel", Situation()),
    "logsumexp_of_rows": ("logsumexp(1) | gelu", Situation(shape=(16, 512))),
    "softmax_of_channels_then_mean": (
        "hardswish | softmax(1) | mean((2, 3))",
        Situation(shape=(4, 16, 29, 31)),
    ),
    "softmax_of_many_channels": (
        "gelu | softmax(1) | add_channel",
        Situation(shape=(4, 96, 28, 28)),
    ),
    "max_of_channels": ("max(1) | tanh", Situation()),
    "group_norm": ("gelu | group_norm(4, weight, bias)", Situation()),
    "batch_norm_down_columns_bfloat16": (
        "batch_norm(running_mean, running_var, weight, bias, training=True) | relu",
        Situation(shape=(32, 64, 28, 28), dtype="bfloat16", layout="channels_last"),
    ),
    # Channels whose runs are no whole packs, in two passes.
    "batch_norm_in_training": (
        "batch_norm(running_mean, running_var, weight, bias, training=True) | gelu",
        Situation(shape=(8, 64, 7, 7)),
    ),
    # Rows that are dealt out, in blocks as large as can be and shared by blocks that read the
    # residual late.
    "batch_norm_in_a_block": (
        "batch_norm(running_mean, running_var, weight, bias, training=True) | relu",
        Situation(shape=(128, 512, 14, 14)),
    ),
    "batch_norm_by_teams": (
        "batch_norm(running_mean, running_var, weight, bias, training=True) | add(residual) | relu",
        Situation(shape=(128, 256, 28, 28), dtype="bfloat16"),
    ),
    "max_pool": ("leaky_relu(0.2) | mul_channel | leaky_relu(0.2) | max_pool3d(2)", Situation()),
    "overlapping_max_pool": (
        "relu | max_pool2d(3, 2, 1) | add_channel",
        Situation(shape=(2, 3, 9, 12)),
    ),
    "avg_pool_between": ("gelu | avg_pool2d(2) | mul_channel | tanh", Situation()),
    "softmax_of_short_groups_bfloat16": (
        "group_norm(16, weight, bias) | softmax(1)",
        Situation(shape=(8, 64, 28, 28), dtype="bfloat16", layout="channels_last"),
    ),
    "dropout": ("gelu | dropout(0.1) | add_channel", Situation(layout="channels_last")),
    "dropout_before_avg_pool": (
        "dropout | avg_pool2d(3, 2, 1, True, False) | add_channel",
        Situation(shape=(2, 8, 6, 16)),
    ),
    "layernorm_then_max_pool": ("layernorm | max_pool2d(2)", Situation()),
    "masked": (
        "sub_channel | masked_fill(mask, 0) | to(bfloat16) | to(float32) | mul_channel",
        Situation(operands={"mask": (8, 10)}),
    ),
    "quantized": (
        "add_channel | quantize(scale, float8_e4m3fn)",
        Situation(dtype="bfloat16", operands={"scale": ()}),
    ),
    "quantized_int8": ("add_channel | quantize(0.05)", Situation(layout="channels_last")),
}
# Views that are dense but for gaps: halves of a projection, rows of every family.
CASES |= {
    # Conditions that are counted, exactly where they are many; and places that are looked up.
    "counted": ("gt(0) | sum(-1)", Situation((40000, 1024))),
    "looked_up": (
        "keep(y) | argmax(-1, True) | keep(i) | recall(y) | log_softmax(-1) | gather(-1, i)",
        Situation((64, 1000), dtype="bfloat16"),
    ),
}
CASES |= {
    "gated_halves": ("silu | mul(up)", Situation((64, 1024), {"up": (64, 1024)}, gaps=("x", "up"))),
    "norm_of_queries_bfloat16": (
        "rms_norm(weight) | mul(second)",
        Situation((256, 128), {"second": (256, 128)}, "bfloat16", gaps=("x", "second")),
    ),
    "layernorm_of_a_part_of_rows": (
        "layernorm(weight, bias)",
        Situation(shape=(4096, 4096), gaps=("x",)),
    ),
    "gate_with_a_bias": (
        "add(b) | unflatten(-1, (2, -1)) | keep(y) | select(-2, 0) | keep(a) | recall(y)"
        " | select(-2, 1) | sigmoid | mul(a)",
        Situation((64, 1024), {"b": (1024,)}),
    ),
    "norm_of_gated_halves_bfloat16": (
        "unflatten(-1, (2, -1)) | keep(y) | select(-2, 0) | silu | keep(a) | recall(y)"
        " | select(-2, 1) | mul(a) | rms_norm(weight)",
        Situation((64, 1024), dtype="bfloat16"),
    ),
    "rotary_embeddings": (
        "keep(y) | unflatten(-1, (2, -1)) | keep(h) | select(-2, 0) | keep(a) | recall(h)"
        " | select(-2, 1) | neg | stack(a, dim=-2) | flatten(-2) | mul(sin) | keep(r) | recall(y)"
        " | mul(cos) | add(r)",
        Situation((8, 16, 64, 128), {"sin": (64, 128), "cos": (64, 128)}),
    ),
    "some_channels": (
        "add_channel | gelu | mean((2, 3))",
        Situation(shape=(8, 32, 16, 16), gaps=("x",)),
    ),
    "norm_of_some_channels": (
        "layernorm(weight, bias, axis=1)",
        Situation(shape=(4, 96, 28, 28), gaps=("x",)),
    ),
    "pooling_of_some_channels": ("mul_channel | max_pool2d(2)", Situation(gaps=("x",))),
}
WITHOUT_GRADIENT = ("counted", "quantized", "quantized_int8")
Compare = Callable[[str, str], None]


ALL = [
    (case, grad) for case in CASES for grad in (False, True)[: 1 + (case not in WITHOUT_GRADIENT)]
]


def emitted(case: str, *, grad: bool) -> dict[str, str]:
    """What the files of tests/golden should hold for a case, by their names."""
    text, situation = CASES[case]
    found = {}
    for target in TARGETS.values():
        modules = sources(fusegen.chain(text), target.name, situation, grad=grad)
        for i, module in enumerate(modules, start=1):
            stage = f".stage_{i}" if len(modules) > 1 else ""
            found[f"{case}{'.grad' * grad}{stage}.{target.source_suffix}"] = module.text
            if module.binding and (case, grad) == ("pointwise", True):
                found[f"{case}.grad.binding.cpp"] = module.binding
    return found


def files_of(case: str, *, grad: bool) -> set[str]:
    """The names of the files that are there for a case."""
    names = {path.name for path in GOLDEN.iterdir() if path.name.split(".")[0] == case}
    return {name for name in names if (name.split(".")[1] == "grad") == grad}


@pytest.mark.parametrize(("case", "grad"), ALL)
def test_the_text_is_golden(case: str, grad: bool, golden: Compare) -> None:
    texts = emitted(case, grad=grad)
    for name, text in texts.items():
        golden(name, text)
    assert files_of(case, grad=grad) == texts.keys()


def test_no_golden_file_is_left_over() -> None:
    found = set().union(*(files_of(case, grad=grad) for case, grad in ALL))
    assert {path.name for path in GOLDEN.iterdir()} == found


def test_every_family_of_kernels_has_a_golden_file() -> None:
    together = "".join(path.read_text("utf-8") for path in GOLDEN.glob("*.cu"))
    for family in ("pointwise", "row", "column", "window", "inner", "outer", "finalise"):
        assert f"ward_{family}" in together


def emit_each_alone() -> None:
    """Print each file's name and the digest of its text, every case in a process of its own."""
    for alone in CASES:
        if os.fork() == 0:
            for case, grad in ALL:
                texts = emitted(case, grad=grad) if case == alone else {}
                for name, text in texts.items():
                    print(name, hashlib.sha256(text.encode()).hexdigest(), flush=True)
            os._exit(0)
        os.wait()


def test_the_text_is_the_same_under_every_hash_seed_and_whatever_was_emitted_before() -> None:
    """Each process of tests has a seed of its own."""
    result = subprocess.run(
        [sys.executable, "-c", "import test_golden; test_golden.emit_each_alone()"],
        env={
            **os.environ,
            "PYTHONHASHSEED": "0",
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(GOLDEN.parent))),
        },
        capture_output=True,
        text=True,
    )
    assert result.stderr == ""
    digests = dict(line.split() for line in result.stdout.splitlines())
    assert digests == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in GOLDEN.iterdir()
    }
