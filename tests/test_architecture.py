"""The house rules of DESIGN.md, section 2, read off the source text.

Each rule is a function from one file's text to its complaints, so that the last part of this file
can show every rule a text that breaks it.
"""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "fusegen"
TEMPLATES = ROOT / "templates"

# A module imports only from modules further up.
ORDER = (
    "errors",
    "locking",
    "copying",
    "arity",
    "ir",
    "verification",
    "windowing",
    "ops",
    "unsaid",
    "taking",
    "overwriting",
    "standing",
    "sizes",
    "shaping",
    "moving",
    "refused",
    "asked",
    "composed",
    "parting",
    "uniting",
    "spellings",
    "meeting",
    "assigning",
    "tensorlike",
    "parameters",
    "arranging",
    "trace",
    "inlining",
    "dsl",
    "target",
    "shortshares",
    "tiers",
    "columntiers",
    "promotion",
    "typechecks",
    "axes",
    "fitting",
    "viewing",
    "bound",
    "takingup",
    "stacking",
    "bind",
    "lower",
    "bundling",
    "segments",
    "joining",
    "autocasting",
    "autodiff",
    "patterns",
    "simplify",
    "picking",
    "program",
    "strides",
    "longrows",
    "summedrows",
    "rowfacts",
    "shortruns",
    "signature",
    "grouping",
    "unrolling",
    "kernel",
    "dealing",
    "cut",
    "downcolumns",
    "hoisting",
    "ways",
    "staging",
    "streaming",
    "selecting",
    "carrying",
    "rowaxes",
    "rowwise",
    "windowwise",
    "sharing",
    "flatwise",
    "slidewise",
    "stripwise",
    "bundlewise",
    "spreading",
    "schedule",
    "choices",
    "powers",
    "rewriting",
    "guarding",
    "tails",
    "narrow",
    "statements",
    "indexing",
    "reductionviews",
    "views",
    "flatviews",
    "innerviews",
    "lineviews",
    "mergeviews",
    "bundlestages",
    "bundleviews",
    "stridedviews",
    "stretchviews",
    "passingviews",
    "placeviews",
    "besideviews",
    "aheadviews",
    "summingviews",
    "rowviews",
    "streamedviews",
    "windowviews",
    "slideviews",
    "severalviews",
    "noise",
    "cache",
    "prebuilt",
    "codegen",
    "emission",
    "traffic",
    "rowtiers",
    "holding",
    "describe",
    "explain",
    "registers",
    "toolchain",
    "modules",
    "layouts",
    "arguments",
    "situation",
    "reference",
    "prepared",
    "plan",
    "execution",
    "operators",
    "optional",
    "runtime",
    "drawing",
    "answers",
    "telling",
    "specialised",
    "borrowing",
    "layer",
    "compare",
    "bench",
    "cli",
    "__init__",
    "__main__",
)
TORCH_FREE = ORDER[: ORDER.index("toolchain")]
NEED_TORCH = ORDER[ORDER.index("toolchain") : ORDER.index("cli")]
PACKAGES = ("ops", "bench")  # their files may build on one another

# May import inside a function, with a comment that says why: what would bring torch in too early.
MAY_IMPORT_LATE = (*NEED_TORCH, "cli", "__init__")

# The CLI is let in because `--target cuda` is what its user types, the benchmark because it times
# devices, autocasting because torch has a table for each kind of device.
MAY_SAY_CUDA = (
    "target",
    "autocasting",
    "toolchain",
    "modules",
    "situation",
    "plan",
    "runtime",
    "bench",
    "cli",
)
CUDA_WORD = re.compile(
    r"cuda|__global__|__device__|__shared__|\bthreadIdx\b|\bblockIdx\b", re.IGNORECASE
)

LONGEST_FILE = 400  # lines


def stage_of(module: str) -> str:
    """The entry of ORDER that a dotted name below `fusegen` belongs to: `ops.pooling` -> `ops`."""
    return module.split(".", maxsplit=1)[0]


def imports(tree: ast.AST) -> Iterator[tuple[ast.Import | ast.ImportFrom, str, str | None]]:
    """Every import as (node, module, name or None)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name, None
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node, "." * node.level + (node.module or ""), alias.name


def imported_stage(module: str, name: str | None) -> str | None:
    """The stage of fusegen that an import reaches, or None for a library."""
    top, _, below = module.partition(".")
    if top != "fusegen":
        return None
    if below:
        return stage_of(below)
    return name if name in ORDER else "__init__"


def order_complaints(stage: str, text: str) -> list[str]:
    complaints = []
    for node, module, name in imports(ast.parse(text)):
        if module.startswith("."):
            complaints.append(f"line {node.lineno}: a relative import")
            continue
        reached = imported_stage(module, name)
        # The version is a literal that stands first in __init__.py, so reading it closes no circle.
        if reached is None or (module, name) == ("fusegen", "__version__"):
            continue
        if reached not in ORDER:
            complaints.append(f"line {node.lineno}: imports {reached}, which ORDER does not list")
        elif reached == stage and stage in PACKAGES:
            continue
        elif ORDER.index(reached) >= ORDER.index(stage):
            complaints.append(f"line {node.lineno}: {stage} imports {reached}, which is not above")
        elif stage == "__main__" and reached != "cli":
            complaints.append(f"line {node.lineno}: __main__ imports {reached} instead of cli")
    return complaints


def late_import_complaints(stage: str, text: str) -> list[str]:
    lines = text.splitlines()
    functions = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    ]
    complaints = {}
    for node, module, name in (found for function in functions for found in imports(function)):
        is_dear = (
            stage_of(module) == "torch"
            or imported_stage(module, name) in NEED_TORCH
            or (stage == "__init__" and imported_stage(module, name) is not None)
            # What prints text costs 100 ms, which a call that loads from the cache does not need.
            or imported_stage(module, name) in ("emission", "describe", "explain")
        )
        explained = any("#" in line for line in lines[max(node.lineno - 2, 0) : node.end_lineno])
        if stage not in MAY_IMPORT_LATE:
            complaints[node.lineno] = f"line {node.lineno}: an import inside a function"
        elif not is_dear:
            complaints[node.lineno] = f"line {node.lineno}: a late import of what is not dear"
        elif not explained:
            complaints[node.lineno] = f"line {node.lineno}: a late import without its reason"
    return list(complaints.values())


def cuda_complaints(text: str) -> list[str]:
    return [
        f"line {number}: {found.group()}"
        for number, line in enumerate(text.splitlines(), start=1)
        for found in CUDA_WORD.finditer(line)
    ]


def op_name_complaints(text: str, op_names: list[str]) -> list[str]:
    # `std::exp` is C++'s own function, whatever the ops are called.
    word = re.compile(rf"(?<!::)\b(?:{'|'.join(map(re.escape, op_names))})\b")
    return [
        f"line {number}: {found.group()}"
        for number, line in enumerate(text.splitlines(), start=1)
        for found in word.finditer(line)
    ]


def length_complaints(text: str) -> list[str]:
    count = len(text.splitlines())
    return [f"{count} lines, at most {LONGEST_FILE}"] if count > LONGEST_FILE else []


def module_files() -> dict[str, Path]:
    """Dotted name below `fusegen` -> file; `ops/__init__.py` is `ops`, fusegen's own `__init__`."""
    files = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        files[name.removesuffix(".__init__")] = path
    return files


def template_files() -> list[Path]:
    return sorted(path for path in TEMPLATES.rglob("*") if path.is_file())


MODULES = module_files()
TEMPLATE_FILES = template_files()
each_module = pytest.mark.parametrize("module", MODULES)
each_template = pytest.mark.parametrize(
    "path", TEMPLATE_FILES, ids=lambda path: str(path.relative_to(TEMPLATES))
)


def run_python(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


# --- the house as it stands ---


def test_there_is_a_house_to_inspect() -> None:
    assert MODULES, f"no module found in {PACKAGE}"
    assert TEMPLATE_FILES, f"no template found in {TEMPLATES}"


@each_module
def test_a_module_has_its_place_in_the_order(module: str) -> None:
    assert stage_of(module) in ORDER, f"{module}: give it a place in ORDER and in DESIGN.md"


@each_module
def test_a_module_imports_only_from_above(module: str) -> None:
    assert order_complaints(stage_of(module), MODULES[module].read_text("utf-8")) == []


@each_module
def test_imports_stand_at_the_top(module: str) -> None:
    assert late_import_complaints(stage_of(module), MODULES[module].read_text("utf-8")) == []


@each_module
def test_cuda_is_spoken_only_where_it_belongs(module: str) -> None:
    if stage_of(module) not in MAY_SAY_CUDA:
        assert cuda_complaints(MODULES[module].read_text("utf-8")) == []


@each_template
def test_cuda_is_spoken_only_in_its_own_templates(path: Path) -> None:
    if path.relative_to(TEMPLATES).parts[0] != "cuda":
        assert cuda_complaints(path.read_text("utf-8")) == []


@each_template
def test_a_template_names_no_op(path: Path) -> None:
    import fusegen  # late: without it, the rules above still run on a tree that does not import yet

    # A primitive's name is C's own word for it, or nearly: `log`, `where`. So are an accumulator's
    # and a namespace's. Every other sentence has `to`, and Jinja a filter `select`;
    # what lies apart in memory is gathered.
    words = {*fusegen.arity.REDUCE_KINDS, "min", "std", "to", "select", "gather"}
    ours = {name for name, op in fusegen.OPS.items() if not op.is_primitive}
    op_names = sorted(ours - words)
    assert op_names
    assert op_name_complaints(path.read_text("utf-8"), op_names) == []


@each_module
def test_a_module_is_short_enough_to_read(module: str) -> None:
    assert length_complaints(MODULES[module].read_text("utf-8")) == []


@each_template
def test_a_template_is_short_enough_to_read(path: Path) -> None:
    assert length_complaints(path.read_text("utf-8")) == []


def test_everything_above_toolchain_and_the_command_line_import_without_torch() -> None:
    importable = (*TORCH_FREE, "cli", "__init__")
    names = [
        "fusegen" if module == "__init__" else f"fusegen.{module}"
        for module in MODULES
        if stage_of(module) in importable
    ]
    assert names
    program = "import importlib, sys\n"
    for name in names:
        program += f"importlib.import_module({name!r})\n"
        program += f"assert 'torch' not in sys.modules, '{name} imports torch'\n"
    result = run_python(program)
    assert result.returncode == 0, result.stderr


def test_dump_answers_on_a_machine_without_torch() -> None:
    result = run_python(
        "import runpy, sys\n"
        "sys.modules['torch'] = None\n"  # makes every import of torch fail
        "sys.argv = ['fusegen', 'dump', 'relu']\n"
        "runpy.run_module('fusegen', run_name='__main__')\n"
    )
    assert result.returncode == 0, result.stderr
    assert "relu" in result.stdout


# --- every rule can fail ---


@pytest.mark.parametrize(
    ("stage", "text"),
    [
        ("ir", "import fusegen.dsl"),
        ("ir", "from fusegen import dsl"),
        ("ir", "from fusegen.ops.activation import relu"),
        ("ir", "from fusegen import OPS"),
        ("ir", "from fusegen.ir import Expr"),
        ("codegen", "if True:\n    from fusegen.modules import key"),
        ("codegen", "from .target import Target"),
        ("codegen", "from fusegen.helpers import indent"),
        ("__main__", "from fusegen import runtime"),
    ],
)
def test_an_import_from_below_is_noticed(stage: str, text: str) -> None:
    assert len(order_complaints(stage, text)) == 1


@pytest.mark.parametrize(
    ("stage", "text"),
    [
        ("dsl", "import ast\nfrom fusegen.ops import OPS\nfrom fusegen import errors, ir"),
        ("ops", "from fusegen.ops.activation import relu"),
        ("codegen", "from fusegen import __version__"),
        ("__init__", "from fusegen.cli import main"),
        ("__main__", "from fusegen.cli import main"),
    ],
)
def test_an_import_from_above_is_welcome(stage: str, text: str) -> None:
    assert order_complaints(stage, text) == []


@pytest.mark.parametrize(
    ("stage", "text"),
    [
        ("ir", "def f():\n    import torch  # a reason does not help here"),
        ("cli", "def f():\n\n    import torch"),
        ("cli", "def f():\n    import argparse  # late"),
        ("cli", "def f():\n    from fusegen.dsl import parse  # late"),
    ],
)
def test_a_late_import_is_noticed(stage: str, text: str) -> None:
    assert len(late_import_complaints(stage, text)) == 1


@pytest.mark.parametrize(
    ("stage", "text"),
    [
        ("cli", "def f():\n    import torch  # late: dump needs no torch"),
        ("cli", "def f():\n    # late: it imports torch\n    from fusegen import runtime"),
        ("__init__", "def __getattr__(name):\n    from fusegen.runtime import compile  # torch"),
        ("ir", "import math"),
    ],
)
def test_a_late_import_that_spares_torch_is_welcome(stage: str, text: str) -> None:
    assert late_import_complaints(stage, text) == []


@pytest.mark.parametrize("text", ['"""For CUDA."""', "CUDA_TYPES = {}", "x = '__global__ void'"])
def test_a_cuda_word_is_noticed(text: str) -> None:
    assert len(cuda_complaints(text)) == 1


def test_an_op_name_is_noticed_and_its_relatives_are_not() -> None:
    op_names = ["erf", "exp", "gelu"]
    assert op_name_complaints("// the\n// gelu loop", op_names) == ["line 2: gelu"]
    assert op_name_complaints("erff(x) + std::exp(y) + gelu_like", op_names) == []


def test_a_long_file_is_noticed() -> None:
    assert length_complaints("\n" * LONGEST_FILE) == []
    assert len(length_complaints("\n" * (LONGEST_FILE + 1))) == 1
