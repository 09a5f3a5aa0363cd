"""README.md and CONTRIBUTING.md are true: code runs, commands answer, lists are complete."""

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from test_architecture import ORDER

from fusegen import ir
from fusegen.autodiff import vjp
from fusegen.bench.markdown import readme_block, reason_of
from fusegen.bench.table import misses
from fusegen.bench.works import BY_NAME
from fusegen.cli import main
from fusegen.errors import ChainError
from fusegen.ops import OPS, Op

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
pytestmark = pytest.mark.usefixtures("restore_registry")
BLOCK = re.compile(
    r"(?:<!-- test: (?P<note>[^>]*) -->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
BENCHMARK = re.compile(r"(<!-- benchmark -->\n).*?(<!-- /benchmark -->)", re.DOTALL)
OPERATIONS = re.compile(r"(<!-- operations -->\n).*?(<!-- /operations -->)", re.DOTALL)


def blocks(path: Path, language: str) -> list[re.Match[str]]:
    return [b for b in BLOCK.finditer(path.read_text("utf-8")) if b["language"] == language]


def test_the_code_of_the_readme_runs_from_top_to_bottom() -> None:
    names: dict[str, object] = {"__name__": "readme"}
    text = README.read_text("utf-8")
    found = blocks(README, "python")
    assert found
    for block in found:
        # In its own place, so that a failure is shown with its line in the document.
        above = "\n" * text.count("\n", 0, block.start("text"))
        exec(compile(above + block["text"], str(README), "exec"), names)


@pytest.fixture(scope="module")
def copy_with_op(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of package and tests to which CONTRIBUTING.md's operation was added as it says."""
    copy = tmp_path_factory.mktemp("with_op")
    for folder in ("fusegen", "templates", "tests"):
        litter = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=litter)
    shutil.copy(ROOT / "pyproject.toml", copy)
    (block,) = blocks(CONTRIBUTING, "python")
    if "quick_gelu" not in OPS:  # somebody may have followed it already
        with (copy / "fusegen/ops/activation.py").open("a", encoding="utf-8") as file:
            file.write("\n\n" + block["text"])
    return copy


def run_in(copy: Path, *arguments: str) -> str:
    result = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_an_operation_added_by_the_letter_of_contributing_is_listed(copy_with_op: Path) -> None:
    assert run_in(copy_with_op, "fusegen", "ops", "quick_gelu").startswith(
        "quick_gelu(slope: float = 1.702)\n"
    )


@pytest.mark.parametrize("target", ["cuda", "cpp"])
def test_it_is_in_both_targets_forward_and_backward(copy_with_op: Path, target: str) -> None:
    text = run_in(
        copy_with_op, "fusegen", "dump", "quick_gelu(1.5) | gelu", "--grad", "--target", target
    )
    forward, _, backward = text.partition("struct BackwardSizes")
    assert "// quick_gelu(1.5)" in forward
    assert "// quick_gelu(1.5)" in backward


def test_it_computes_what_torch_does(copy_with_op: Path) -> None:
    assert "all within what is allowed" in run_in(copy_with_op, "fusegen", "check", "quick_gelu")


def test_the_tests_of_every_operation_cover_it(copy_with_op: Path) -> None:
    files = ("tests/test_ops.py", "tests/test_numbers.py")
    options = ("-q", "-p", "no:cacheprovider", "-m", "not gpu", "-k", "quick_gelu")
    report = run_in(copy_with_op, "pytest", *files, *options)
    passed = re.search(r"(\d+) passed", report)
    assert passed
    assert int(passed[1]) >= 4 + 5 + 5, report  # the op, its accuracy, its special values


def commands(path: Path) -> list[tuple[str, str, str]]:
    """(command line, the output that is shown, the note above the block) for each."""
    found = []
    for block in blocks(path, "console"):
        for part in re.split(r"^\$ ", block["text"], flags=re.MULTILINE)[1:]:
            line, _, shown = part.partition("\n")
            found.append((line, shown, block["note"] or ""))
    return found


@pytest.mark.parametrize(("line", "shown", "note"), commands(README))
def test_a_command_answers_as_shown(line: str, shown: str, note: str) -> None:
    name, *arguments = shlex.split(line)
    assert name == "fusegen"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = main(arguments)
    output = printed.getvalue()
    assert code == (int(note.removeprefix("exit ")) if note.startswith("exit ") else 0), output
    if note == "output varies":
        return
    # A line of three dots stands for any number of lines.
    whole = "\n" + output
    for part in ("\n" + shown).split("\n...\n"):
        before, found, whole = whole.partition(part if part.startswith("\n") else "\n" + part)
        assert found, f"{part}\nis not in\n{output}"
    assert "..." in shown.splitlines() or not before + whole.strip()


def test_there_are_commands_and_an_excerpt_to_compare() -> None:
    assert {line.split()[1] for line, _, _ in commands(README)} == {
        "dump", "check", "bench", "cache", "doctor",
    }  # fmt: skip
    assert any("..." in shown.splitlines() for _, shown, _ in commands(README))


def exactness(op: Op) -> str:
    if op.ulp is None:
        return "as accurate" if op.torch_name else ""
    return "same bits" if op.ulp == 0 else f"{op.ulp} ulp"


def gradients(op: Op) -> str:
    """The orders of derivatives that there are, found by deriving."""
    (step, *_), *_ = (example.steps for example in op.examples)
    everywhere = frozenset(range(-5, 0))
    parameters = [op.parameter(p) for p, _ in step.operands]
    named = {
        p.name: "float32" if p.is_type else ir.tensor(f"operand {p.name}", everywhere, 5, p.kind)
        for p in parameters
    }
    for kind in ("number", "truth"):
        x = ir.tensor("x", everywhere | {1, 2, 3}, 5, kind)
        with contextlib.suppress(ChainError):
            root = op.function(x, **named, **dict(step.attributes))
            break
    if root.kind != "number":
        return "none"
    tensors = [value for value in named.values() if not isinstance(value, str)]
    leaves = [leaf for leaf in (x, *tensors) if leaf.kind == "number"]
    found = vjp([root], [ir.tensor("g", everywhere, 5)], leaves)
    shares = [found[leaf] for leaf in leaves if leaf in found]
    if not shares:
        return "none"
    return "zero" if all(ir.constant(share) == 0.0 for share in shares) else "any order"


def operations() -> str:
    """The table of README.md, from the table of operations."""
    head = ("operation", "what it gives", "in torch", "exactness", "gradients")
    rows = [head, ("---",) * len(head)]
    builtin = (op for op in OPS.values() if op.is_builtin)  # not what a test has registered
    for op in sorted(builtin, key=lambda op: op.name):
        signature = op.signature.replace("|", r"\|").removesuffix("()")
        summary = op.summary.replace("|", r"\|")
        equal = op.torch_name.replace("torch.nn.functional.", "F.").removeprefix("torch.")
        called = f"`{equal}`" if equal else ""
        rows.append((f"`{signature}`", summary, called, exactness(op), gradients(op)))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows).replace("|  |", "| |")


def test_the_table_of_operations_says_what_the_operations_do(
    request: pytest.FixtureRequest,
) -> None:
    text = README.read_text("utf-8")
    wanted = OPERATIONS.sub(lambda found: found[1] + operations() + found[2], text)
    if request.config.getoption("--update-golden"):
        README.write_text(wanted, encoding="utf-8")
        text = wanted
    table = OPERATIONS.search(text)
    assert table
    # A new op works before it is listed here; what is listed must be true.
    listed = table[0].splitlines()[1:-1]
    known = OPERATIONS.search(wanted)
    assert known
    assert set(listed) <= set(known[0].splitlines()), (
        "run pytest --update-golden tests/test_readme.py"
    )
    assert len(listed) > 20


def test_the_blocks_of_figures_are_made_from_the_reports_that_they_link_to(
    request: pytest.FixtureRequest,
) -> None:
    text = README.read_text("utf-8")

    def made(shown: re.Match[str]) -> str:
        link = re.search(r"\]\((benchmarks/results/.*?\.json)\)", shown[0])
        assert link
        return shown[1] + readme_block(ROOT / link[1], link[1]) + shown[2]

    wanted, count = BENCHMARK.subn(made, text)
    assert count > 0
    if request.config.getoption("--update-golden"):
        README.write_text(wanted, encoding="utf-8")
        text = wanted
    assert text == wanted, "run pytest --update-golden tests/test_readme.py"


def test_every_miss_that_readme_shows_has_a_reason() -> None:
    reasons = tomllib.loads((ROOT / "benchmarks/reasons.toml").read_text("utf-8"))["reason"]
    assert all(any(fnmatchcase(n, p) for n in BY_NAME) for r in reasons for p in r["works"])
    reports = re.findall(r"\]\((benchmarks/results/\S+?\.json)\)", README.read_text("utf-8"))
    report = json.loads((ROOT / reports[0]).read_text("utf-8"))
    missed = [row for row in report["rows"] if misses(row)]
    assert missed
    assert [(r["work"], r["mode"]) for r in missed if not reason_of(r, reasons)] == []


def test_contributing_lists_every_module_in_the_order_of_imports() -> None:
    house = next(b["text"] for b in blocks(CONTRIBUTING, "text"))
    listed = re.findall(r"^    (\w+)(?:\.py|/) ", house, re.MULTILINE)
    assert tuple(listed) == ORDER


@pytest.mark.parametrize("path", [README, CONTRIBUTING], ids=lambda path: path.name)
def test_every_path_that_is_named_exists(path: Path) -> None:
    text = path.read_text("utf-8")
    links = re.findall(r"\]\((?!http)([^)#]+)\)", text)
    named = re.findall(r"`((?:fusegen|tests|templates|examples|benchmarks)/[\w./]*)`", text)
    for name in [*links, *named]:
        assert (ROOT / name).exists(), name


def test_every_target_of_make_that_is_named_exists() -> None:
    made = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    for path in (README, CONTRIBUTING):
        named = re.findall(r"(?:^|`)make ([a-z-]+)", path.read_text("utf-8"), re.MULTILINE)
        assert named
        assert set(named) <= made
