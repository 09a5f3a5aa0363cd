"""`fusegen explain`: what a chain becomes, in words and bytes."""

import math
import re
import subprocess
import sys

import pytest

import fusegen
from fusegen.cli import main
from fusegen.describe import Situation
from fusegen.dsl import chain
from fusegen.explain import explain

A = "leaky_relu(0.2) | add_channel | clamp(-1, 1) | gelu"
SHAPE = (8, 64, 16, 32)
FULL = math.prod(SHAPE) * 4


def told(text: str, shape: tuple[int, ...] = SHAPE, bandwidth: float = 1000.0, **more) -> str:
    return explain(chain(text), "cuda", Situation(shape, **more), bandwidth)


def test_a_chain_of_pointwise_steps_is_one_kernel_with_its_bytes() -> None:
    text = told(A)
    forward = text[: text.index("\nbackward")]
    assert forward.count("; at least") == 1
    assert "holds  leaky_relu(0.2) | add_channel(bias) | clamp(-1, 1) | gelu" in forward
    assert "reads  x 1.05 MB, bias 256 B" in forward
    assert "writes out 1.05 MB" in forward
    assert "keeps  x 1.05 MB, bias 256 B" in forward
    assert "recomputes in the backward: leaky_relu(0.2) | add_channel(bias) | clamp(-1, 1)" in text


def test_a_compiled_chain_tells_what_the_command_tells(capsys) -> None:
    assert main(["explain", A, "--shape", "8,64,16,32", "--dtype", "bfloat16"]) == 0
    found = fusegen.compile(A).explain("cuda", "bfloat16", shape=SHAPE)
    assert found == capsys.readouterr().out.rstrip("\n")
    given = fusegen.compile("add(p)").explain("cpp", shape=SHAPE, operands={"p": (64, 1, 1)})
    assert "reads  x 1.05 MB, p_operand 256 B" in given


def test_a_shape_that_is_assumed_is_told(capsys) -> None:
    assert main(["explain", "gelu"]) == 0
    assert capsys.readouterr().out.startswith("gelu\nx is assumed to be of shape (2, 3, 8, 10)\n")
    assert "assumed" not in told("gelu")


def test_an_operand_has_one_shape(capsys) -> None:
    assert main(["explain", "add(b)", "--operand", "b=5", "--operand", "b=4"]) == 2
    assert "operand 'b' is given two shapes, (5,) and (4,)" in capsys.readouterr().err


def test_limits_are_bytes_over_bandwidth() -> None:
    (limit,) = re.findall(r"forward in all: .*, at least ([\d.]+) us", told("relu"))
    assert float(limit) == pytest.approx(2 * FULL / 1e12 * 1e6, rel=0.01)
    (half,) = re.findall(r"forward in all: .*, at least ([\d.]+) us", told("relu", bandwidth=2000))
    assert float(half) == pytest.approx(float(limit) / 2, rel=0.01)
    (narrow,) = re.findall(
        r"forward in all: .*, at least ([\d.]+) us", told("relu", dtype="bfloat16")
    )
    assert float(narrow) == pytest.approx(float(limit) / 2, rel=0.01)


@pytest.mark.parametrize(
    ("text", "shape", "family"),
    [
        ("softmax(-1)", (512, 1024), "row"),
        ("gelu | log_softmax(-1)", (8, 65536), "row"),
        ("keep(y) | amax(-1, keepdim=True) | rsub(y)", (8, 3000), "row"),
        ("softmax(1)", SHAPE, "column"),
    ],
)
def test_rows_are_read_once_for_their_maxima_and_sums(
    text: str, shape: tuple[int, ...], family: str
) -> None:
    said = told(text, shape)
    forward, backward = said[: said.index("\nbackward")], said[said.index("\nbackward") :]
    for name, part in (("forward", forward), ("backward", backward)):
        (kernel,) = re.findall(r"^  (\w+): (?=.*; at least)", part, re.M)
        assert kernel == f"{name}_{family}"
    assert forward.count("reads  x ") == 1


def test_a_kernel_names_every_step_that_it_holds() -> None:
    assert "holds  softmax(1) | layernorm\n" in told("softmax(1) | layernorm", (64, 1024))


def test_positions_are_not_read_from_memory() -> None:
    forward, backward = told("max(1) | tanh").split("\nbackward\n")
    assert "reads  x 1.05 MB\n" in forward
    assert "reads  d_out 16.4 kB, saved_max 16.4 kB\n" in backward
    assert "reads  saved_argmax 16.4 kB, common_scratch 16.4 kB\n" in backward


def test_pooled_tensors_are_counted_pooled() -> None:
    text = told("relu | max_pool2d(2)")
    assert "reads  x 1.05 MB" in text
    assert "writes out 262 kB" in text
    assert "winner_index 65.5 kB" in text
    assert "keeps  none of its inputs" in text


def test_a_gradient_that_is_passed_on_is_told() -> None:
    text = told("mul(gate) | add(residual)", operands={"gate": (32,)})
    assert "d_residual is d_out, as it comes" in text
    assert "writes d_x 1.05 MB" in text
    alone = told("add(residual)")
    assert "d_x is d_out, as it comes" in alone
    assert "no backward" not in alone


def test_a_cut_says_why() -> None:
    text = told("layernorm | max_pool2d(3, 2, 1) | gelu")
    assert "segment 1 of 2: layernorm\n" in text
    wanted = "cut here: max_pool2d(3, 2, 1) takes its windows over the result of layernorm"
    assert wanted in text
    assert "pooling windows that overlap, cross the edge or leave elements over" in text


def test_the_command_needs_no_torch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "gelu", "--shape", "4,5", "--bandwidth", "100"]) == 0
    assert "at 100 GB/s\n" in capsys.readouterr().out
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from fusegen.cli import main\n"
        "sys.exit(main(['explain', 'gelu | dropout(0.1)', '--shape', '4,5']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "noise 8 B" in done.stdout
    assert "at 4290 GB/s, a copy on an H200\n" in done.stdout


@pytest.mark.parametrize("bandwidth", ["0", "-1", "fast", "inf", "nan"])
def test_a_bandwidth_that_is_none_is_told(
    bandwidth: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["explain", "gelu", f"--bandwidth={bandwidth}"])
    assert "wanted GB/s above 0" in capsys.readouterr().err


def test_a_mistake_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "max_pool2d(5)", "--shape", "2,3,4,4"]) == 2
    assert "does not fit" in capsys.readouterr().err


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize(
    ("text", "copies"),
    [
        ("batch_norm(m, v, w, b, training=True) | add(r) | leaky_relu(0.2)", 7),
        ("batch_norm(m, v, w, b, training=True) | add(r) | relu", 7),
        ("instance_norm | add(r) | leaky_relu(0.2)", 7),
        ("keep(y) | mean((2, 3), keepdim=True) | sigmoid | mul(y) | add(r) | relu", 6),
    ],
)
def test_what_a_pass_has_written_is_read_in_the_place_of_what_it_was_made_of(
    text: str, copies: int, layout: str
) -> None:
    """Such as a residual's gradient, which is that of what it was added to."""
    shape = (16, 64, 128, 128)
    said = told(text, shape, layout=layout, operands={"r": shape})
    (amount, unit) = re.search(r"backward in all: ([\d.]+) (\w+)", said).groups()
    moved = float(amount) * {"MB": 1e6, "GB": 1e9}[unit]
    assert moved / (math.prod(shape) * 4) < copies + 0.1
