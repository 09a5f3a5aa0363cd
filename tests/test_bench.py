"""The benchmark measures, judges, tells and draws; on tiny shapes, and never how fast."""

import importlib.util
import itertools
import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_chains import CHAINS
from torch._dynamo.utils import counters

import fusegen
from fusegen import dsl
from fusegen.bench import (
    builds,
    command,
    markdown,
    measure,
    precision,
    rivals,
    session,
    table,
    timing,
)
from fusegen.bench.practice import ON_CHIP
from fusegen.bench.sweeps import cliffs, series, worst_points
from fusegen.bench.works import (
    BY_NAME,
    HOST_WORKS,
    MODES,
    SWEEPS,
    WORKS,
    HostWork,
    Sweep,
    Work,
    select,
)
from fusegen.cli import OK, USER_MISTAKE, main
from fusegen.describe import Situation
from fusegen.errors import ArgumentError
from fusegen.explain import explain
from fusegen.target import TARGETS

ROOT = Path(__file__).resolve().parent.parent
ISSUE_KEYS = {
    "device", "torch", "driver", "commit", "date", "copy_gbps", "rows", "host_us", "build_s",
}  # fmt: skip
ISSUE_ROW_KEYS = {
    "work", "shape", "dtype", "layout", "mode", "limit", "eager", "compile", "fusegen", "spread",
    "peak_gib", "max_error", "eager_error",
}  # fmt: skip


def tiny(name: str = "tiny", chain: str = "add_channel | gelu", **more: Any) -> Work:
    shape = more.pop("shape", (6, 5, 8))
    operands = more.pop("operands", (1,))
    return Work(name, chain, None, shape, shape, operands, **more)


def run(*arguments: str) -> int:
    try:
        return main(["bench", *arguments])
    except SystemExit as end:
        return int(end.code or 0)


# --- what is measured ---


def test_what_names_places_gets_no_gradient() -> None:
    chain = "log_softmax(-1) | gather(-1, target)"
    work = tiny(chain=chain, shape=(6, 5), operands=("labels",))
    leaves = rivals.leaves_of(work, rivals.inputs(work, "cpu", 0))
    assert [leaf.requires_grad for leaf in leaves] == [True, False]
    assert 0 <= leaves[1].min() <= leaves[1].max() < 5


def test_every_line_of_the_table_of_targets_has_its_works() -> None:
    layernorms = [
        f"{prefix}{length}{ending}"
        for prefix in ("LN-", "LN-add-gelu-")
        for length in (768, 1024, 4096, 8192, 16384)
        for ending in ("", "-bf16")
    ]
    others = (
        "A A-odd A-channels_last A-bf16 B B' C LN-65536 LN-262144 LN-channel LN-channel-512 "
        "LN-channel-channels_last LN-channel-512-channels_last bias-65536x256 bias-16384x4096 "
        "bias-8192x8192 halves-silu-mul-bf16 halves-rms_norm-bf16 "
        "channels_last-batch_norm-relu-bf16 channels_last-batch_norm-residual-bf16 "
        "channels_last-group_norm-silu-bf16 channels_last-group_norm-logsumexp-bf16"
    )
    vocabularies = [
        f"{op}-{length}{ending}"
        for op in ("softmax", "log_softmax", "cross_entropy", "gather")
        for length in (32000, 50257)
        for ending in ("", "-bf16")
    ]
    named = {work.name for work in WORKS if not work.name.startswith("chain-")}
    assert named == {*layernorms, *others.split(), *vocabularies}
    assert {work.name for work in HOST_WORKS} == {"small-1024", "small-65536"}


def plain(text: str) -> str:
    """A chain's text without what changes nothing in its cost: how a parameter for each channel is
    written, and whether a reduced axis stays.
    """
    text = re.sub(r"(add|mul)_channel(\(\w+\))?", r"\1(p)", fusegen.chain(text).text)
    return text.replace(", keepdim=True", "")


def test_every_chain_that_people_write_has_its_work() -> None:
    works = {plain(work.chain) for work in WORKS}
    assert [text for text, _, _ in CHAINS if plain(text) not in works] == []


@pytest.mark.parametrize("work", select(["chain-*"], quick=False), ids=lambda work: work.name)
def test_a_chain_that_people_write_stands_for_one_of_the_list(work: Work) -> None:
    assert plain(work.chain) in {plain(text) for text, _, _ in CHAINS}
    assert 0.95 < math.prod(work.cuda_shape) / (1 << 26) <= 1.01
    assert len(work.name) <= 28  # the table's width


@pytest.mark.parametrize(
    ("name", "limits", "targets"),
    [
        ("A", (1.0, 2.5), (1.05, 2.65)),
        ("A-bf16", (1.0, 2.5), (1.15, 3.1)),
        ("C", (0.5625, 1.28), (0.60, 1.45)),
        ("LN-4096-bf16", (1.0, 2.5), (1.1, 2.875)),
        ("LN-add-gelu-8192", (1.5, 3.5), (1.65, 4.025)),
        ("LN-262144", (1.0, 2.5), (1.15, 3.25)),
        ("bias-65536x256", (1.0, 2.5), (1.1, 2.75)),
    ],
)
def test_a_work_has_the_limits_and_targets_that_were_set(
    name: str, limits: tuple[float, float], targets: tuple[float, float]
) -> None:
    work = BY_NAME[name]
    assert isinstance(work, Work)
    assert work.limits == limits
    assert work.targets == pytest.approx(targets)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.name)
def test_a_limit_is_the_bytes_of_each_tensor_once(work: Work, device: str) -> None:
    """But for what is said in the tables: one tensor for the gradients of a sum's two halves, and
    for both halves where the sum is given; statistics of the whole batch, and a backward that needs
    winners, or nothing, in x's place.
    """
    own = Work(**{**vars(work), "limits": None})
    forward, training = rivals.limits_of(own, device)
    assert work.limits is not None
    is_twice = "training=True" in work.chain and work.name[len("chain-") :] not in ON_CHIP
    again = (0.5, 1.5) if is_twice else (0.0, 0.0)
    spared = 0.5 if work.chain.startswith(("add(residual)", "add(second)")) else 0.0
    spared += 0.5 if "give(sum)" in work.chain else 0.0
    # A little more than the limit, for the operands.
    slack = 1.02 if device == "cuda" else 1.8
    assert work.limits[0] * 0.999 <= forward + again[0] < work.limits[0] * slack
    without_x = ("max_pool", "min(", "mean(1, ")
    if not any(op in work.chain for op in without_x) and device == "cuda":
        assert work.limits[1] * 0.999 <= training + again[1] - spared < work.limits[1] * 1.02


@pytest.mark.parametrize("work", select(["chain-*"], quick=False), ids=lambda work: work.name)
def test_a_limit_is_no_more_than_what_the_kernels_move(work: Work) -> None:
    chain = dsl.chain(work.chain)
    shapes = dict(zip(chain.operands, work.operand_shapes("cuda"), strict=True))
    told = explain(chain, "cuda", Situation(work.cuda_shape, shapes), 1.0)
    copy_us = 8 * math.prod(work.cuda_shape) / 1e3
    times = re.findall(r"in all: .* at least ([\d.e+]+) us", told)
    forward, backward = (float(time) / copy_us for time in times)
    assert work.limits is not None
    assert work.limits[0] <= forward * 1.01
    assert work.limits[1] <= (forward + backward) * 1.01


@pytest.mark.parametrize("work", [w for w in WORKS if w.eager], ids=lambda work: work.name)
def test_what_a_user_would_write_is_what_the_chain_means(work: Work) -> None:
    small = {4: (2, 6, 4, 4), 5: (2, 4, 4, 4, 4), 2: (6, 10)}[len(work.cuda_shape)]
    if "normalized_shape" in work.chain:
        chain = f"layernorm(normalized_shape={small[1:]}) | gelu | mul(0.5)"
    else:
        chain = work.chain
    small_work = Work(work.name, chain, work.eager, small, small, work.operands, layout=work.layout)
    tensors = rivals.inputs(small_work, "cpu", 0)
    doubles = [t.double().requires_grad_() for t in tensors]
    ours = rivals.fused_of(small_work).reference(*doubles)
    torch.testing.assert_close(rivals.eager_of(small_work)(*doubles), ours)


@pytest.mark.parametrize("sweep", SWEEPS, ids=lambda sweep: sweep.name)
def test_the_chain_of_a_sweep_fits_all_its_shapes(sweep: Sweep) -> None:
    for device in ("cpu", "cuda"):
        for at, work in sweep.points(device):
            assert rivals.limits_of(work, device) == (1.0, 2.5)
            assert at in (math.prod(work.shape(device)), work.shape(device)[-1])


def test_a_sweep_over_elements_has_powers_of_two_and_sizes_that_are_multiples_of_nothing() -> None:
    sizes = sorted({at for at, _ in SWEEPS[0].points("cuda")})
    assert {1 << exponent for exponent in range(16, 29)} <= set(sizes)
    assert sum(size % 2 == 1 or size % 64 != 0 for size in sizes) >= 10
    assert all(b < 1.7 * a for a, b in itertools.pairwise(sizes))


def test_works_are_chosen_by_patterns_in_the_order_of_the_table() -> None:
    assert [item.name for item in select(["C", "A*"], quick=False)] == [
        "A", "A-odd", "A-channels_last", "A-bf16", "C",
    ]  # fmt: skip
    assert len(select([], quick=False)) == len(BY_NAME)
    assert [item.name for item in select([], quick=True)] == [
        "A", "B", "C", "LN-channel", "bias-65536x256",
    ]  # fmt: skip


def test_the_list_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--list") == OK
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(BY_NAME)


# --- mistakes ---


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["LN-chanel"], "no work is called 'LN-chanel'; did you mean 'LN-channel'?"),
        (["*nothing*"], "no work is called '*nothing*'; `fusegen bench --list` names them"),
        (["relu | gelu"], "no work is called 'relu | gelu'; a chain needs its --shape as well"),
        (["--shape", "4,5"], "--shape goes with one chain, got 0"),
        (["relu", "gelu", "--shape", "4,5"], "--shape goes with one chain, got 2"),
        (["geluu", "--shape", "4,5"], "did you mean 'gelu'?"),
        (["relu", "--shape", "4,0"], "--shape: got (4, 0), which holds nothing"),
        (["relu", "--shape", "4", "--operand", "p=3"], "has no operand 'p'"),
        (["A", "--dtype", "float16"], "--dtype, --operand and --layout go with a chain"),
        (["A", "--layout", "channels_last"], "--dtype, --operand and --layout go with a chain"),
        (["A", "--time", "0"], "got '0', wanted a number of seconds above 0"),
        (["A", "--time", "soon"], "got 'soon', wanted a number of seconds above 0"),
        (["--table"], "name it with --read FILE"),
        (["--read", "missing.json"], "missing.json: No such file or directory"),
        (["A", "--read", str(ROOT / "README.md")], "got 'A' beside it"),
        (["--read", str(ROOT / "README.md")], "README.md: not a report of `fusegen bench`"),
        (["A", "--no-compile", "--max-autotune"], "not allowed with argument"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_told(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == USER_MISTAKE
    assert told in capsys.readouterr().err


def test_a_gpu_that_is_not_there_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run("A", "--device", "cuda") == USER_MISTAKE
    assert "got cuda, but torch sees no GPU here" in capsys.readouterr().err


def test_matplotlib_is_missed_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert run("--plot", str(tmp_path)) == USER_MISTAKE
    assert "--plot needs matplotlib; pip install 'fusegen[bench]'" in capsys.readouterr().err


# --- a run ---


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """A report of one tiny work, one that fails, a host work and a sweep; and its file."""
    path = tmp_path_factory.mktemp("bench") / "deep" / "run.json"
    shapes = ((3, 5), (4, 7), (2, 40))
    sweep = Sweep("sweep-tiny", "row length", "relu", "relu", (), shapes, shapes, ("float32",))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(rivals.EAGER, "relu", torch.relu)  # type: ignore[arg-type]
        patch.setattr("fusegen.bench.measure._HOST_CALLS", 5)
        chosen = [
            tiny(targets=(1.0, 2.0)),
            HostWork("small", (1, 2, 3, 4, 4), (6.0, 12.0, None)),
            sweep,
        ]
        settings = session.Settings("cpu", True, (), "abc", path)
        return session.run(chosen, settings), path


def test_a_report_goes_where_a_link_leads_and_takes_no_devices_place(tmp_path: Path) -> None:
    report: Any = {"rows": []}
    link, pipe = tmp_path / "link.json", tmp_path / "pipe"
    link.symlink_to(tmp_path / "run.json")
    session._write(report, link)
    assert link.is_symlink()
    assert json.loads((tmp_path / "run.json").read_text()) == report
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    session._write(report, pipe)
    assert json.loads(os.read(reader, 1 << 16)) == report
    os.close(reader)
    assert pipe.is_fifo()


def test_a_report_has_what_was_agreed(measured: tuple[dict[str, Any], Path]) -> None:
    report, path = measured
    assert json.loads(path.read_text()) == report
    assert set(report) >= ISSUE_KEYS
    assert report["commit"] == "abc"
    assert report["is_complete"]
    assert report["copy_gbps"] > 0
    assert [row["mode"] for row in report["rows"]] == list(MODES)
    for row in report["rows"]:
        assert set(row) >= ISSUE_ROW_KEYS
        assert row["work"] == "tiny"
        assert row["shape"] == [6, 5, 8]
        assert (row["dtype"], row["layout"], row["compile"]) == ("float32", "contiguous", None)
        assert row["fusegen"] > 0
        assert row["eager"] > 0
        assert 0 <= row["max_error"] < 1e-5
        assert set(row["errors"]) == {"out", "d_x", "d_bias"}
        assert row["is_right"]
        assert row["target"] is None  # the targets are for one GPU
    assert report["rows"][0]["limit"] == 1.0
    assert report["rows"][1]["moved_bytes"] == 2.5 * 2 * 4 * 6 * 5 * 8
    assert session.is_right(report)


def test_first_calls_are_timed_cold_and_from_the_cache(
    measured: tuple[dict[str, Any], Path],
) -> None:
    build = measured[0]["build_s"]
    assert build["work"] == "tiny"
    for mode in MODES:
        times = build["works"]["tiny"][mode]
        assert times["warm"] < times["cold"]  # a compiler ran in one of them
    assert build["warm_import"] < build["warm"] < build["cold"]


def test_host_times_of_every_mode_are_there(measured: tuple[dict[str, Any], Path]) -> None:
    found = {entry["mode"]: entry for entry in measured[0]["host_us"]}
    assert list(found) == ["forward", "forward, with grad", "forward+backward"]
    for entry in found.values():
        assert {"one eager operation", "eager", "fusegen"} <= set(entry)
        assert entry["fusegen"] > 0


def test_a_sweep_is_in_the_report(measured: tuple[dict[str, Any], Path]) -> None:
    (entry,) = measured[0]["sweep"]
    assert [(p["at"], p["mode"]) for p in entry["points"]] == [
        (at, mode) for at in (5, 7, 40) for mode in MODES
    ]
    assert all(p["is_right"] and p["gbps"] > 0 and p["copy_gbps"] > 0 for p in entry["points"])
    assert {(w["mode"], w["at"]) for w in entry["worst"]} == {(mode, 7) for mode in MODES}


def test_a_report_is_shown_again_as_its_run_printed_it(
    measured: tuple[dict[str, Any], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    report, path = measured
    assert run("--read", str(path)) == OK
    shown = capsys.readouterr().out
    assert table.heading(report) in shown
    for row in report["rows"]:
        assert table.line(row) in shown
    assert "first call of tiny" in shown
    assert "small" in shown
    assert "3 points" not in shown  # a point for each mode
    assert "6 points over row length" in shown


def test_a_work_that_fails_is_told_and_the_rest_is_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    failing = tiny("failing", "layernorm(normalized_shape=7)", operands=())
    report = session.run([failing, tiny()], session.Settings("cpu", True, ()))
    assert list(report["failed"]) == ["failing"]
    assert "ArgumentError" in report["failed"]["failing"]
    assert "failed" in report["build_s"]
    assert {row["work"] for row in report["rows"]} == {"tiny"}
    assert not session.is_right(report)
    assert "FAILED: ArgumentError" in capsys.readouterr().out


def test_masks_and_running_statistics_have_no_gradient_and_leave_results_alone() -> None:
    running = "running_mean, running_var, weight, bias, training=True, num_batches_tracked=n"
    chain = f"masked_fill(mask, 0.5) | batch_norm({running}) | batch_norm(mean, var)"
    work = tiny("statistics", chain, operands=((5, 8), 1, 1, 1, 1, (), 1, 1))
    fused, eager = rivals.fused_of(work), rivals.eager_of(work)
    found = precision.precision(work, fused, eager, "cpu")
    assert list(found.ours) == ["out", "d_x", "d_weight", "d_bias"]
    assert found.is_right
    tensors = rivals.inputs(work, "cpu", 0)
    first, second = fused(*tensors), fused(*tensors)
    assert torch.equal(first, second)


def test_what_there_was_no_time_for_is_left_out_by_name() -> None:
    report = session.run([HOST_WORKS[0]], session.Settings("cpu", True, (), budget_s=1e-9))
    assert report["left_out"] == ["small-1024"]
    assert not report["is_complete"]
    assert "left out, for want of time: small-1024" in table.closing_lines(report)


def test_the_cache_of_a_run_is_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FUSEGEN_CACHE_DIR", str(tmp_path))
    with session._own_cache():
        assert fusegen.cache.cache_root() != tmp_path
    assert fusegen.cache.cache_root() == tmp_path


@pytest.mark.gpu
def test_torch_compile_finds_what_was_built_beforehand() -> None:
    work = tiny()
    with session._own_cache():
        builds.prebuild(builds.Orders([work], "cuda", (), [work], ("compile",)))
        counters.clear()
        (function,) = rivals.compiled(work, "cuda", ("compile",)).values()
        rivals.gradients_of(function, rivals.leaves_of(work, rivals.inputs(work, "cuda", 0)))
        assert counters["aot_autograd"]["autograd_cache_hit"] == 1
        assert counters["inductor"]["fxgraph_cache_miss"] == 0


def test_a_chain_with_its_shape_is_measured_beside_its_reference(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["add_channel | gelu", "--shape", "4,3,6,6", "--layout", "channels_last"]
    assert run(*arguments, "--quick", "--device", "cpu", "--dtype", "bfloat16") == OK
    assert "add_channel(bias) | gelu" in capsys.readouterr().out


def test_a_result_may_be_one_number(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("gelu | mean", "--shape", "4,3", "--quick", "--device", "cpu") == OK
    assert "gelu | mean" in capsys.readouterr().out


def test_a_reference_is_recorded_so_that_torch_can_compile_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Without Inductor, whose build takes half a minute, and which the runs above go through.
    without_inductor = partial(torch.compile, backend="aot_eager", dynamic=False)
    monkeypatch.setattr(torch, "compile", lambda function, **_: without_inductor(function))
    work = tiny(chain="keep(y) | sigmoid | mul(y) | add_channel", shape=(3, 4, 5))
    compiled = rivals.compiled(work, "cpu", ("compile",))["compile"]
    tensors = [t.requires_grad_() for t in rivals.inputs(work, "cpu", 0)]
    eager = rivals.eager_of(work)
    torch.testing.assert_close(compiled(*tensors), eager(*tensors))
    gradients = [
        torch.autograd.grad(f(*tensors), tensors, torch.ones(3, 4, 5)) for f in (compiled, eager)
    ]
    torch.testing.assert_close(*gradients)


def test_a_refusal_of_torch_compile_costs_only_its_own_column(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*tensors: torch.Tensor) -> torch.Tensor:
        raise ValueError("too much shared memory\nand a long explanation")

    monkeypatch.setattr(measure, "compiled", lambda *_: {"compile": refuse})
    effort = measure.Effort(0.0, 4, ("compile",))
    for found in measure.rows(tiny(), "cpu", timing.cpu_timer, effort):
        assert found["compile"] is None
        assert found["refused"] == {"compile": "ValueError: too much shared memory"}
        assert found["fusegen"] > 0


# --- timing ---


def samples(*seconds: float) -> list[timing.Sample]:
    return [timing.Sample(s, s / 2) for s in seconds]


def test_rivals_take_turns_and_every_one_of_them_begins() -> None:
    calls: list[tuple[str, int]] = []

    def timer(run: timing.Run, turn: int) -> timing.Sample:
        run(turn)
        return timing.Sample(1.0, 1.0)

    def rival(name: str) -> timing.Run:
        return lambda turn: calls.append((name, turn))

    found = timing.measure(timer, {name: rival(name) for name in "abc"}, 0.0, 4)
    assert {name: len(taken) for name, taken in found.items()} == {"a": 4, "b": 4, "c": 4}
    rounds = calls[-12:]
    assert [name for name, _ in rounds] == [*"abc", *"bca", *"cab", *"abc"]
    assert [turn for _, turn in rounds] == sorted([0, 1, 2, 3] * 3)


def test_a_multiple_is_the_median_of_what_each_round_gives() -> None:
    taken = {"copy": samples(1.0, 2.0, 4.0), "fusegen": samples(1.5, 3.0, 40.0)}
    assert timing.multiple(taken, "fusegen") == 1.5
    assert timing.median_s(taken["copy"]) == 2.0
    assert timing.median_host_s(taken["copy"]) == 1.0
    assert timing.spread(samples(1.0, 1.0, 1.0, 1.0)) == 0.0


# --- correctness ---


def scaled(function: Callable[..., torch.Tensor], by: float) -> Callable[..., torch.Tensor]:
    return lambda *tensors: function(*tensors) * by


@pytest.mark.parametrize("slice_elements", [precision._SLICE_ELEMENTS, 40])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_error_is_found_in_whatever_slices_the_reference_runs(
    monkeypatch: pytest.MonkeyPatch, slice_elements: int, dtype: str
) -> None:
    monkeypatch.setattr(precision, "_SLICE_ELEMENTS", slice_elements)
    work = tiny(dtype=dtype)
    eager = rivals.eager_of(work)
    right = precision.precision(work, rivals.fused_of(work), eager, "cpu")
    assert right.is_right
    assert set(right.ours) == {"out", "d_x", "d_bias"}
    wrong = precision.precision(work, scaled(eager, 1.2), eager, "cpu")
    assert not wrong.is_right
    assert wrong.ours["out"] == pytest.approx(0.2, rel=0.1)
    assert wrong.ours["d_bias"] == pytest.approx(0.2, rel=0.1)
    missing = precision.precision(work, scaled(eager, math.nan), eager, "cpu")
    assert not missing.is_right


def test_what_names_places_is_sliced_with_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_SLICE_ELEMENTS", 10)
    chain = "log_softmax(-1) | gather(-1, target)"
    work = tiny(chain=chain, shape=(6, 5), operands=("labels",))
    eager = rivals.eager_of(work)
    assert precision.precision(work, rivals.fused_of(work), eager, "cpu").is_right
    assert not precision.precision(work, scaled(eager, 1.2), eager, "cpu").is_right


def test_a_sum_may_have_an_element_at_a_kink_on_either_side() -> None:
    work = tiny()
    edge = rivals.inputs(work, "cpu", 0)[0].abs().median()

    def above(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return x + bias[:, None] * (x.detach().abs() > edge)

    def not_below(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        # The result without a jump, as that of a kink has none.
        slope = (bias - bias.detach())[:, None]
        return above(x, bias.detach()) + slope * (x.detach().abs() >= edge)

    found = precision.precision(work, not_below, above, "cpu")
    assert found.ours["d_bias"] > 1e-4
    assert found.is_right
    assert not precision.precision(work, scaled(not_below, 1.01), above, "cpu").is_right


def test_an_element_at_a_kink_may_fall_on_eagers_side_but_not_elsewhere() -> None:
    exact = torch.zeros(5000, dtype=torch.float64)
    exact[0] = 1.0
    eager = exact.float()
    eager[7] = 0.5  # rounding took it over a kink
    ours = eager.clone()
    assert precision._distances(ours, eager, exact) == (0.0, 0.0)
    ours[7] = 0.9
    assert precision._distances(ours, eager, exact)[0] == pytest.approx(0.4)
    many = exact.float() + 0.5
    assert precision._distances(many, many, exact)[0] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("chain", "operands", "answer"),
    [
        ("add_channel | gelu", (1,), True),
        ("layernorm(weight, bias)", (-1, -1), True),
        ("layernorm(axis=1)", (), True),
        ("layernorm(axis=0)", (), False),
        ("layernorm(normalized_shape=(6, 5, 8))", (), False),
        ("add(p)", ((2, 6, 5, 8),), False),
        ("layernorm | max_pool2d(2)", (), True),
    ],
)
def test_a_reference_is_sliced_only_along_a_batch(
    chain: str, operands: tuple[Any, ...], answer: bool
) -> None:
    assert rivals.is_batched(tiny(chain=chain, operands=operands), "cpu") is answer


# --- verdicts ---


def row(**more: Any) -> dict[str, Any]:
    plain = {
        "work": "A", "mode": MODES[0], "limit": 1.0, "target": 1.05, "eager": 4.6, "compile": 1.06,
        "fusegen": 1.04, "spread": 0.01, "copy_ms": 0.8, "max_error": 1e-7, "eager_error": 1e-7,
        "is_right": True,
    }  # fmt: skip
    return plain | more


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, "OK"),
        ({"fusegen": 1.10, "compile": 1.2}, "MISS: 4.8% over the target"),
        ({"compile": 1.03}, "OK"),  # level
        ({"compile": 1.0}, "MISS: 4.0% behind torch.compile"),
        ({"compile": None}, "OK"),
        ({"is_right": False}, "WRONG"),
        ({"target": None, "compile": None}, ""),
        (
            {"mode": MODES[1], "limit": 2.5, "target": 2.7, "fusegen": 2.65, "compile": 3.3},
            "MISS: 1.25 times as fast as torch.compile, not 1.3",
        ),
        # The limit leaves no room for 1.3.
        ({"mode": MODES[1], "limit": 2.5, "target": 2.7, "fusegen": 2.6, "compile": 3.2}, "OK"),
        ({"mode": MODES[1], "limit": 2.5, "target": None, "fusegen": 3, "compile": 3.3}, "OK"),
    ],
)
def test_a_row_is_judged_by_its_target_and_by_torch_compile(
    more: dict[str, Any], said: str
) -> None:
    assert table.verdict(row(**more)) == said
    assert table.line(row(**more)).endswith(said)


def test_an_older_report_is_judged_by_the_targets_of_the_table() -> None:
    older = row(fusegen=1.06)
    del older["target"]
    assert table.verdict(older) == "MISS: 1.0% over the target"
    assert table.target({"work": "relu", "mode": MODES[0]}) is None


def test_what_torch_compile_refused_is_told() -> None:
    refused = row(compile=None, refused={"compile": "OutOfResources: shared memory"})
    assert "compile: OutOfResources: shared memory" in table.line(refused)


@pytest.mark.parametrize(("us", "said"), [(5.9, "OK"), (7.5, "MISS: 1.5 us over the target")])
def test_host_time_is_judged(us: float, said: str) -> None:
    entry = {"work": "small-1024", "mode": "forward", "target": 6.0, "fusegen": us}
    assert table.host_verdict(entry) == said
    assert table.host_line(entry).endswith(f"target 6: {said}")


def point(at: int, gbps: float, mode: str = MODES[0]) -> dict[str, Any]:
    return {
        "at": at, "mode": mode, "dtype": "float32", "gbps": gbps, "copy_gbps": 100.0,
        "is_right": True,
    }  # fmt: skip


def test_the_worst_point_of_a_sweep_is_the_furthest_under_its_neighbours() -> None:
    points = [point(at, gbps) for at, gbps in ((64, 100), (63, 90), (65, 60), (100, 100))]
    (worst,) = worst_points(points, "row length")
    assert (worst["at"], worst["of_neighbours"]) == (65, 0.6)
    assert worst["copy_of_neighbours"] == 1.0
    assert cliffs(points, "row length") == [worst]
    (_, line) = table.sweep_lines(
        {"sweep": "s", "varied": "row length", "points": points, "worst": [worst]}
    )
    assert line.endswith("MISS: a cliff")
    assert [p["at"] for p in series(points)[MODES[0], "float32"]] == [63, 64, 65, 100]


def test_sizes_that_are_all_launch_are_no_cliff() -> None:
    small = [point(1 << exponent, 10.0**exponent) for exponent in (16, 17, 18, 19)]
    assert worst_points(small, "elements") == []
    large = [point(1 << exponent, 100.0) for exponent in (20, 21)]
    (worst,) = worst_points([*small, *large], "elements")
    assert worst["at"] == 1 << 20


# --- kernels ---

RESOURCES = """\
Resource usage:
 Common:
  GLOBAL:0
 Function _ZN44_GLOBAL__N__3fb7ea2a_11_bench_ln_cu_bff35fa611forward_rowEPKfS1_S1_PfNS_5SizesE:
  REG:28 STACK:0 SHARED:4096 LOCAL:0 CONSTANT[0]:400 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function plain_c:
  REG:255 STACK:40 SHARED:0 LOCAL:8 CONSTANT[0]:400 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


def test_registers_and_bytes_of_each_kernel_are_read() -> None:
    first, second = builds.usages(RESOURCES)
    assert first == {
        "kernel": "forward_row", "registers": 28, "shared_bytes": 4096, "stack_bytes": 0,
        "local_bytes": 0,
    }  # fmt: skip
    assert (second["kernel"], second["registers"], second["stack_bytes"]) == ("plain_c", 255, 40)


@pytest.mark.gpu
def test_a_run_on_the_gpu_tells_kernels_peaks_and_host_times(gpu: str) -> None:
    report = session.run([tiny(shape=(64, 16, 32))], session.Settings(gpu, True, ()))
    assert session.is_right(report)
    assert {k["kernel"] for k in report["kernels"]} >= {"forward_pointwise"}
    assert all(0 < k["registers"] < 256 and k["work"] == "tiny" for k in report["kernels"])
    for found in report["rows"]:
        assert found["peak_gib"]["fusegen"] > 0
        assert found["host_us"]["fusegen"] > 0


# --- README's block and the plots ---


def test_the_block_of_the_readme_has_a_line_for_each_work_and_stars_for_misses() -> None:
    report = {
        "device": "H200", "torch": "2.11", "date": "2026-11-20T16:21:35+00:00",
        "rows": [row(), row(mode=MODES[1], limit=2.5, target=2.65, fusegen=2.7, compile=3.6)],
        "host_us": [
            {"work": "small-1024", "mode": "forward", "target": 6.0, "fusegen": 7.0,
             "one eager operation": 5.0}
        ],
        "build_s": {"work": "A", "cold": 1.4, "warm": 0.06, "warm_import": 0.05},
        "sweep": [
            {"sweep": "s", "varied": "elements", "points": [],
             "worst": [{"mode": MODES[0], "dtype": "float32", "at": 63, "of_neighbours": 0.9}]}
        ],
    }  # fmt: skip
    text = markdown.block(report, "results/run.json", ["results/run-forward.svg"])
    chain = r"`leaky_relu(0.2) \| add_channel \| clamp(-1, 1) \| gelu`"
    assert (
        f"| A: {chain} | 1.00 / 2.50 | 1.05 / 2.65 | 1.04 / 2.70* | 1.06 / 3.60 | 4.6 / 4.6 |"
        in text
    )
    assert "[results/run.json](results/run.json)" in text
    assert "![Every work, forward, in multiples of a copy of x](results/run-forward.svg)" in text
    assert "1 of 2 figures miss" in text
    assert "- A, forward+backward: 1.9% over the target." in text
    assert "7.0 us of host time a call (a miss)" in text
    assert "in 1.4 s; from the cache it takes 60 ms" in text
    assert "Over elements, no cliff: the worst point, 63 (float32, forward), has 90% of" in text


def test_plots_are_drawn_in_both_formats_and_the_same_each_time(
    measured: tuple[dict[str, Any], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("matplotlib comes with the extra `bench` only")
    _, path = measured
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        assert run("--read", str(path), "--plot", str(folder)) == OK
    names = ["run-forward", "run-forward-backward", "run-sweep"]
    wanted = sorted(f"{name}.{suffix}" for name in names for suffix in ("svg", "png"))
    assert sorted(p.name for p in folders[0].iterdir()) == wanted
    for name in wanted:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()
    picture = (folders[0] / "run-forward.svg").read_text()
    assert "tiny" in picture
    assert "limit: the bytes alone" in picture
    assert str(folders[0] / "run-sweep.svg") in capsys.readouterr().out


def test_the_block_links_to_the_plots_that_lie_beside_the_report(
    measured: tuple[dict[str, Any], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(measured[1].read_bytes())
    for name in ("run-sweep.svg", "run-forward-backward.svg", "run-forward.svg"):
        (tmp_path / name).touch()
    assert run("--read", str(path), "--table") == OK
    links = [line for line in capsys.readouterr().out.splitlines() if line.startswith("![")]
    assert [link.rpartition("/")[2] for link in links] == [
        "run-forward.svg)", "run-forward-backward.svg)", "run-sweep.svg)",
    ]  # fmt: skip


def test_a_name_that_is_nearly_a_works_is_offered() -> None:
    for typed, meant in (("bias-8192x8129", "bias-8192x8192"), ("ln-channl", "LN-channel")):
        with pytest.raises(ArgumentError, match=f"did you mean '{meant}'"):
            select([typed], quick=False)


def test_a_build_is_told_by_its_chain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FUSEGEN_CACHE_DIR", str(tmp_path))
    for text in ("relu | mul(3.125)", "sigmoid | max_pool1d(2) | softmax(1)"):
        fusegen.compile(text)(torch.ones(2, 3, 4))
    assert len(builds.keys()) == 3
    assert len(builds.keys("relu | mul(3.125)")) == 1
    assert len(builds.keys("sigmoid | max_pool1d(2) | softmax(1)")) == 2


def test_builds_of_joined_and_of_cut_segments_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FUSEGEN_CACHE_DIR", str(tmp_path))
    text = "batch_norm(training=True) | mul(3.875) | relu | max_pool2d(2)"
    monkeypatch.setitem(TARGETS, "cpp", replace(TARGETS["cpp"], joins_from=2**8))
    fusegen.compile(text)(torch.ones(2, 3, 8, 8))
    assert len(builds.keys(text)) == 1
    fusegen.compile(text)(torch.ones(2, 3, 4, 4))
    assert len(builds.keys(text)) == 3
