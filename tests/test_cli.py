import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import fusegen
from fusegen import OPS, cache, toolchain
from fusegen.cli import CANNOT_BUILD, CHECK_FAILED, OK, PIPE_CLOSED, USER_MISTAKE, main
from fusegen.compare import compare
from fusegen.describe import Situation, assumed_shapes
from fusegen.runtime import Fused

ROOT = Path(__file__).resolve().parent.parent
NO_TORCH = "import runpy, sys; sys.modules['torch'] = None; "  # makes every import of it fail
CHAIN_A = "leaky_relu(0.2) | add_channel | clamp(-1, 1) | gelu"


def run(*arguments: str) -> int:
    """The exit code, of argparse's own as well."""
    try:
        return main(arguments)
    except SystemExit as end:
        return int(end.code or 0)


def command(*arguments: str, before: str = "import runpy, sys; ") -> list[str]:
    program = f"{before}sys.argv = {['fusegen', *arguments]!r}; "
    return [sys.executable, "-c", f"{program}runpy.run_module('fusegen', run_name='__main__')"]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


# --- dump ---


@pytest.mark.parametrize("target", ["cuda", "cpp"])
def test_dump_prints_the_source_without_torch_and_at_once(target: str) -> None:
    started = time.perf_counter()
    result = subprocess.run(
        command("dump", CHAIN_A, "--grad", "--target", target, before=NO_TORCH),
        env=environment(),
        capture_output=True,
        text=True,
    )
    print(f"{time.perf_counter() - started:.2f} s")  # 0.5 s is wanted; a busy machine may take more
    assert (result.returncode, result.stderr) == (OK, "")
    assert fusegen.chain(CHAIN_A).text in result.stdout
    assert "backward" in result.stdout


def test_dump_without_a_target_is_for_the_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("dump", "relu") == OK
    assert "__global__" in capsys.readouterr().out


def test_dump_writes_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "relu.cpp"
    assert run("dump", "relu", "--target", "cpp") == OK
    printed = capsys.readouterr().out
    assert run("dump", "relu", "--target", "cpp", "-o", str(path)) == OK
    assert capsys.readouterr().out == ""
    assert path.read_text() == printed


@pytest.mark.parametrize(
    "options",
    [
        ("--dtype", "float64"),
        ("--layout", "channels_last"),
        ("--shape", "2,3,1,1", "--operand", "p=2,3,4,5"),
        ("--operand", "p=3,1,1"),
        ("--grad",),
        ("--gaps", "x", "--gaps", "p"),
    ],
    ids=" ".join,
)
def test_an_option_of_dump_changes_the_source(
    options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for more in ((), options):
        assert run("dump", "add_channel | add(p)", "--target", "cpp", *more) == OK
        texts.append(capsys.readouterr().out)
    assert texts[0] != texts[1]


@pytest.mark.parametrize("command", ["dump", "explain"])
def test_a_smaller_gpu_gets_other_kernels(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    situation = ("group_norm(8)", "--shape", "16,256,64,64", "--dtype", "float64")
    for gpu in ((), ("--gpu", "H200"), ("--gpu", "L4")):
        assert run(command, *situation, *gpu) == OK
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[1] != texts[2]


def test_dump_prints_both_stages_of_pooling_after_a_reduction(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("dump", "layernorm | max_pool2d(2)", "--target", "cpp") == OK
    text = capsys.readouterr().out
    assert text.count('extern "C" int64_t run_forward(') == 2
    assert fusegen.chain("layernorm").hash[:12] in text
    assert fusegen.chain("max_pool2d(2)").hash[:12] in text


CALLS: list[tuple[str, tuple[int, ...], dict[str, tuple[int, ...]]]] = [
    (CHAIN_A, (2, 3, 4, 5, 6), {}),
    ("leaky_relu | mul_channel | max_pool3d(2)", (2, 3, 4, 5, 6), {}),
    ("layernorm(weight, bias) | gelu", (4, 8), {}),
    ("layernorm | max_pool2d(2)", (2, 3, 4, 6), {}),
    ("layernorm | max_pool2d(2)", (2, 1, 4, 6), {}),
    ("layernorm(axis=1) | add(p)", (2, 3, 4, 5), {"p": (3, 1, 1)}),
    ("relu | add(p)", (2, 3, 4, 5), {"p": (7, 1, 1, 1, 1)}),
    ("layernorm", (2, 70000), {}),  # few long rows
    ("add(p)", (3, 1), {"p": (2, 1, 4)}),
]
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


@pytest.mark.parametrize(
    ("chain", "shape", "operands", "layout"),
    [
        (*call, layout)
        for call in CALLS
        for layout in ("contiguous", "channels_last")
        if layout == "contiguous" or len(call[1]) in FORMATS
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("grad", [False, True])
def test_the_text_is_the_one_that_a_call_builds(
    chain: str,
    shape: tuple[int, ...],
    operands: dict[str, tuple[int, ...]],
    dtype: torch.dtype,
    grad: bool,
    layout: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built = texts_built(monkeypatch)
    fused = Fused(fusegen.chain(chain))
    x = torch.randn(shape, dtype=dtype)
    if layout == "channels_last":
        x = x.contiguous(memory_format=FORMATS[x.dim()])
    _, shapes = assumed_shapes(fused.chain, Situation(shape, operands))
    tensors = [x, *(torch.randn(s, dtype=dtype) for s in shapes.values())]
    fused(*(t.requires_grad_(grad) for t in tensors))
    told = fused.source("cpp", dtype, grad=grad, shape=shape, operands=operands, layout=layout)
    assert told == "\n".join(built)


def texts_built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is built from now on: modules that do nothing."""
    built = []

    class Module:
        def launch(self, *arguments: object) -> int:
            return 0  # needs no scratch memory, does nothing

        def plan(self, *arguments: object) -> tuple[Callable[..., None], Callable[..., None]]:
            return (lambda *tensors: None), (lambda tensors: None)

    def load(source: toolchain.Source, arch: str | None) -> Module:
        built.append(source.text)
        return Module()

    monkeypatch.setattr(toolchain, "load", load)
    monkeypatch.setattr("fusegen.modules._modules", {})
    return built


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("gaps", [("x",), ("second",), ("x", "second")])
def test_so_it_is_for_views_with_gaps(
    gaps: tuple[str, ...], grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = texts_built(monkeypatch)
    shape = (4, 6, 32)
    whole = {name: torch.randn(4, 6, 64) for name in ("x", "second")}
    halves = {n: t[..., :32] if n in gaps else torch.randn(shape) for n, t in whole.items()}
    fused = Fused(fusegen.chain("rms_norm(weight) | mul(second)"))
    tensors = [halves["x"], torch.randn(32), halves["second"]]
    fused(*(t.requires_grad_(grad) for t in tensors))
    operands = {"weight": (32,), "second": shape}
    told = fused.source("cpp", grad=grad, shape=shape, operands=operands, gaps=gaps)
    assert [told] == built


# --- ops ---


def test_ops_lists_every_operation_with_its_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("ops") == OK
    printed = capsys.readouterr().out
    for op in OPS.values():
        assert op.signature in printed
        assert op.summary in printed
    assert "keep(name)" in printed
    assert "recall(name)" in printed


def test_ops_tells_more_about_one_by_any_of_its_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("ops", "layer_norm") == OK
    assert OPS["layernorm"].doc in capsys.readouterr().out
    assert run("ops", "keep") == OK
    assert "keep(name)" in capsys.readouterr().out


# --- a user's own operations ---

OWN_OP = """
from fusegen import Expr, op, where
@op
def cli_softsign(x: Expr) -> Expr:
    \"\"\"x / (1 + |x|).\"\"\"
    return x / (1 + where(x > 0, x, -x))
@op
def cli_careless(x: Expr) -> Expr:
    \"\"\"Fails in its body.\"\"\"
    return x.nothing_of_this_name
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "cli_own_ops.py").write_text(OWN_OP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "cli_own_ops", raising=False)
    for name in ("cli_softsign", "cli_careless"):
        monkeypatch.setitem(OPS, name, None)  # so that it is taken out again
        monkeypatch.delitem(OPS, name)
    return "cli_own_ops"


def test_an_imported_module_brings_its_operations(
    own_module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = list(sys.path)
    assert run("ops", "--import", own_module) == OK
    assert "x / (1 + |x|)." in capsys.readouterr().out
    assert run("dump", "cli_softsign | gelu", "--grad", "--import", own_module) == OK
    assert "cli_softsign" in capsys.readouterr().out
    assert sys.path == before


def test_a_mistake_in_an_imported_module_is_told_with_its_place(
    own_module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("dump", "cli_careless", "--import", own_module) == USER_MISTAKE
    told = capsys.readouterr().err
    assert "no attribute 'nothing_of_this_name'" in told
    assert "cli_own_ops.py, line 10)" in told


# --- a user's mistakes ---


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("dump", "relu | geluu"), "did you mean 'gelu'?\n  relu | geluu\n         ^\n"),
        (("dump", "clamp"), "give min, max or both\n  clamp\n  ^\n"),
        (("dump", "relu | leaky_relu('a')"), "\n  relu | leaky_relu('a')\n                    ^\n"),
        (("dump", ""), "the chain is empty"),
        (("dump", "relu |"), "\n  relu |\n       ^\n"),
        (("dump", "where(a, b)"), "wanted a condition"),
        (("dump", "max_pool2d(2, 0) | relu"), "stride wants one size or 2"),
        (("dump", "layernorm(9)", "--shape", "2,3,4,5"), "normalized_shape is (9,)"),
        (("dump", "add_channel", "--operand", "bias=4", "--shape", "2,3"), "wanted (3,)"),
        (("dump", "add(b)", "--operand", "b=4", "--shape", "2,3"), "does not broadcast"),
        (("dump", "add(scale)", "--operand", "scal=4"), "did you mean 'scale'?"),
        (("dump", "relu", "--operand", "b=4"), "it takes none"),
        (("dump", "add(b)", "--operand", "4"), "wanted NAME=SHAPE"),
        (("dump", "relu", "--shape", "2,x"), "wanted sizes"),
        (("dump", "relu", "--dtype", "complex64"), "invalid choice: 'complex64'"),
        (("dump", "relu", "--target", "metal"), "invalid choice: 'metal'"),
        (("dump", "relu", "--gpu", "GTX"), "invalid choice: 'GTX'"),
        (("dump", "relu", "-o", "/nowhere/x.cu"), "/nowhere/x.cu: No such file"),
        (("dump", "relu", "--import", "no_such_module"), "No module named 'no_such_module'"),
        (("dump",), "CHAIN"),
        (("ops", "geluu"), "did you mean 'gelu'?"),
        (("check", "geluu"), "\n  geluu\n  ^\n"),
        (("check", "add_channel(axis=7)", "--shape", "2,3"), "axis 7 is out of range"),
        (("check", "relu", "--device", "nonsense"), "device 'nonsense'"),
        (("check", "relu", "--shape", "2,3", "--layout", "channels_last"), "wanted 4 or 5 axes"),
        (("cache", "burn"), "invalid choice: 'burn'"),
        (("nothing",), "invalid choice: 'nothing'"),
        ((), "COMMAND"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_mistake_is_told_on_stderr_with_its_own_exit_code(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == USER_MISTAKE
    printed = capsys.readouterr()
    assert said in printed.err
    assert "Traceback" not in printed.err
    assert printed.out == ""


def test_a_missing_gpu_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    assert run("check", "relu", "--device", "cuda") == USER_MISTAKE
    assert "device 'cuda'" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["dump", "explain"])
def test_a_missing_gpu_is_told_where_its_limits_are_asked_for(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    assert run(command, "relu", "--gpu", "here") == USER_MISTAKE
    assert "torch finds no GPU here; name one, such as H200" in capsys.readouterr().err


def test_a_missing_torch_is_told_by_check() -> None:
    result = subprocess.run(
        command("check", "relu", before=NO_TORCH),
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert result.returncode == CANNOT_BUILD
    assert result.stderr == "fusegen: this command needs torch; pip install torch\n"


def test_a_missing_compiler_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert run("check", "neg | neg | neg") == CANNOT_BUILD
    assert "install g++" in capsys.readouterr().err


def test_a_forbidden_build_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSEGEN_NO_BUILD", "1")
    assert run("check", "neg | neg | neg") == CANNOT_BUILD
    assert "FUSEGEN_NO_BUILD" in capsys.readouterr().err


def test_a_reader_that_has_enough_is_no_error() -> None:
    process = subprocess.Popen(
        command("dump", CHAIN_A, "--grad"),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (PIPE_CLOSED, b"")


def test_help_tells_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (("--help",), ("check", "--help")):
        assert run(*arguments) == OK
        assert "3  a compiler is missing" in capsys.readouterr().out


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == OK
    assert capsys.readouterr().out == f"fusegen {fusegen.__version__}\n"


# --- check ---


@pytest.mark.parametrize(
    ("arguments", "results"),
    [
        ((CHAIN_A, "--shape", "2,3,4,5"), ("out", "d_x", "d_bias")),
        (
            ("layernorm(weight, bias) | mul(s)", "--operand", "s=3,1", "--shape", "2,3,8"),
            ("out", "d_x", "d_weight", "d_bias", "d_s"),
        ),
        (
            ("batch_norm(m, v, w, training=True, num_batches_tracked=n) | batch_norm(p, q)",),
            ("out", "d_x", "d_w"),
        ),
    ],
)
def test_check_compares_every_result_in_both_types(
    arguments: tuple[str, ...], results: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("check", *arguments) == OK
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    for dtype in ("float32", "float64"):
        assert [row[1] for row in rows if row[:1] == [dtype]] == list(results)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_check_compares_in_the_type_that_is_asked_for(
    dtype: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = ("check", "keep(y) | layernorm(w) | masked_fill(m, 0) | add(y)", "--dtype", dtype)
    assert run(*chain, "--shape", "30,40", "--operand", "m=30,40") == OK
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    told = [row[:2] for row in rows if row and "float" in row[0]]
    assert told == [[dtype, "out"], [dtype, "d_x"], [dtype, "d_w"]]
    honest = Fused.__call__
    # Of the largest value: several times what rounding takes in 16 bits.
    monkeypatch.setattr(Fused, "__call__", lambda self, *t: honest(self, *t) * 1.1)
    assert run(*chain, "--shape", "30,40", "--operand", "m=30,40") == CHECK_FAILED


def test_check_fails_where_fusegen_is_further_off_than_eager(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Fused.__call__

    def careless(self: Fused, *tensors: torch.Tensor) -> torch.Tensor:
        return honest(self, *tensors) * 1.0001

    monkeypatch.setattr(Fused, "__call__", careless)
    assert run("check", "gelu", "--shape", "3,4") == CHECK_FAILED
    printed = capsys.readouterr().out
    assert printed.count("FAILED") == 4
    assert "4 of 4 failed" in printed


def test_check_counts_a_nan_at_another_place_as_a_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("check", "sqrt", "--shape", "3,4") == OK  # NaN in both
    monkeypatch.setattr(Fused, "__call__", lambda self, x: x.abs().sqrt())
    assert run("check", "sqrt", "--shape", "3,4") == CHECK_FAILED
    assert "inf" in capsys.readouterr().out


# --- cache and doctor ---


def test_the_cache_is_shown_and_emptied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSEGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("fusegen.modules._modules", {})

    def said(*arguments: str) -> str:
        assert run("cache", *arguments) == OK
        return capsys.readouterr().out

    assert said("path") == f"{tmp_path}\n"
    assert said("list") == ""
    fused = fusegen.compile("neg | neg")
    fused(torch.ones(3))
    (entry,) = cache.list_entries()
    (line,) = said("list").splitlines()
    assert entry.directory.parent.name in line
    assert line.endswith("neg | neg")
    assert said("clear") == f"removed 1 build from {tmp_path}\n"
    assert said("list") == ""


def test_doctor_tells_what_is_there_and_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("doctor") == OK
    printed = capsys.readouterr().out
    assert str(torch.__version__) in printed
    assert str(cache.cache_root()) in printed
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert run("doctor") == CANNOT_BUILD
    assert f"missing; {toolchain.INSTALL_CXX}" in capsys.readouterr().out


def test_doctor_answers_without_torch() -> None:
    result = subprocess.run(
        command("doctor", before=NO_TORCH), env=environment(), capture_output=True, text=True
    )
    assert (result.returncode, result.stderr) == (CANNOT_BUILD, "")
    assert "pip install torch" in result.stdout


def test_check_is_not_blinded_by_elements_at_a_kink() -> None:
    # Among a million elements float32 puts some on the other side of clamp's bounds: an error of 1.
    chain = fusegen.chain("leaky_relu(0.2) | add_channel | clamp(-1, 1) | gelu")
    rows = compare(chain, Situation((4, 16, 14, 40, 40)), "cpu", 0)
    assert all(row.is_good for row in rows)
    of_x = [row for row in rows if row.result == "d_x"]
    assert [row.allowed_error < 1e-4 for row in of_x] == [True, True]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="has no device that is always full")
def test_an_output_that_cannot_be_written_is_told() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "fusegen", "dump", "gelu"]
        found = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert found.returncode == 2
    assert found.stderr == "fusegen: the output: No space left on device\n"


def test_a_shape_that_no_memory_has_is_told(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["dump", "softmax(-1)", "--shape", "4,9223372036854775807"])
    assert (
        "got '4,9223372036854775807', more elements than any memory has" in capsys.readouterr().err
    )


def test_a_seed_may_be_any_integer() -> None:
    for seed in ("-5", str(10**30)):
        assert main(["check", "relu", "--shape", "3,4", "--seed", seed]) == OK


def test_what_cannot_be_removed_is_told(monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.setenv("FUSEGEN_CACHE_DIR", str(tmp_path))
    fusegen.compile("mul(1.25)")(torch.ones(2))
    monkeypatch.setattr(cache.shutil, "rmtree", lambda *_, **__: None)
    assert main(["cache", "clear"]) == CANNOT_BUILD
    told = capsys.readouterr()
    assert "removed 0 builds" in told.out
    assert "1 cannot be removed; see who may write there" in told.err
