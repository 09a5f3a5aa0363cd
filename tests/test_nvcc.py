"""Every golden CUDA source compiles for each architecture, without warnings and without spills."""

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

import fusegen
from fusegen import toolchain
from fusegen.describe import Situation, sources

GOLDEN = Path(__file__).parent / "golden"
SOURCES = sorted(path.name for path in GOLDEN.glob("*.cu"))
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")

pytestmark = pytest.mark.skipif(
    toolchain.nvcc_path() is None, reason=f"no nvcc; {toolchain.INSTALL_NVCC}"
)

Result = subprocess.CompletedProcess[str]


def compile_with_nvcc(source: Path, output: Path) -> Result:
    """Machine code for all architectures, by the flags of a real build."""
    nvcc = toolchain.nvcc_path()
    assert nvcc is not None
    flags = [*toolchain.FLAGS["cuda"].nvcc, *map(toolchain.gencode_flag, ARCHITECTURES)]
    command = [nvcc, "-fatbin", *flags, "-Xptxas", "-v", "-o", str(output), str(source)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def compiled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Result]]:
    """A function from a golden file's name to what nvcc said of it."""
    folder = tmp_path_factory.mktemp("nvcc")
    # Under pytest-xdist, its processes are the pool.
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    with ThreadPoolExecutor(1 if is_worker else os.cpu_count()) as pool:
        pending: dict[str, Future[Result]] = {}

        def submit(name: str) -> Future[Result]:
            if name not in pending:
                output = folder / f"{name}.fatbin"
                pending[name] = pool.submit(compile_with_nvcc, GOLDEN / name, output)
            return pending[name]

        if not is_worker:
            for item in request.session.items:
                if item.path == Path(__file__) and hasattr(item, "callspec"):
                    submit(item.callspec.params["name"])
        yield lambda name: submit(name).result()


def test_there_is_something_to_compile() -> None:
    assert len(SOURCES) > 10


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_compiles_without_a_warning_or_a_spill(
    name: str, compiled: Callable[[str], Result]
) -> None:
    result = compiled(name)
    said = result.stdout + result.stderr
    assert result.returncode == 0, said
    assert "warning" not in said, said
    spills = SPILLS.findall(said)
    assert len(spills) >= len(ARCHITECTURES), said
    assert all(spill == ("0", "0") for spill in spills), said


_CHANNELS = "mul_channel(p) | instance_norm | clamp(-1, 1) | mul_channel(p) | max(1)"
_GROUPS = "keep(y) | group_norm(16, w, b) | tanh | hardswish | add(y) | logsumexp(1)"
_ROWS, _IMAGES, _LAST = (8192, 8192), (32, 64, 112, 112), "channels_last"
_INSTANCES = "instance_norm(weight=w, bias=b) | gelu"
_NORM = "group_norm(8, w, b)"
_WEIGHTED = "batch_norm(weight=w, bias=b, training=True)"
_BATCH = "batch_norm(m, v, w, b, training=True) | mul(2) | softmax(1)"

_RESIDUAL = "batch_norm(m, v, w, b, training=True) | add(residual) | relu"


@pytest.mark.parametrize(
    ("text", "situation", "grad"),
    [
        # Many tensors that rows have all along, or element by element; names beside functions' own.
        (_BATCH, Situation(_ROWS), True),
        (_CHANNELS, Situation((16, 32, 24, 48, 48)), True),
        ("group_norm(512, w, b) | min(1, keepdim=True)", Situation(_ROWS, dtype="bfloat16"), False),
        ("max_pool2d(2) | hardtanh | mean((2, 3))", Situation(_IMAGES, dtype="bfloat16"), False),
        (_CHANNELS, Situation((16, 32, 15, 63, 63)), False),
        # Rows of which a thread holds some packs in shared memory, beside what they have of a row.
        (_INSTANCES, Situation((16, 32, 32, 48, 48)), True),
        (_INSTANCES, Situation((16, 32, 32, 48, 48), dtype="bfloat16"), True),
        ("amax(-1)", Situation((512, 65536)), True),
        ("softmax(-1)", Situation((1024, 65536)), True),
        # Functions that are called again behind a reduction.
        ("gelu | amax((2, 3))", Situation((64, 256, 56, 56)), True),
        # Columns that have much of their own beside rows that pass by.
        (_CHANNELS, Situation((16, 32, 24, 48, 48), dtype="bfloat16", layout=_LAST), True),
        (_GROUPS, Situation(_IMAGES, dtype="bfloat16", layout=_LAST), True),
        (_RESIDUAL, Situation(_IMAGES, dtype="bfloat16", layout=_LAST), True),
        # Groups down columns, beside windows and behind rows; short rows by two threads.
        (f"{_NORM} | relu | max_pool2d(2)", Situation(_IMAGES, layout=_LAST), True),
        (f"group_norm(1) | {_NORM}", Situation(_IMAGES, layout=_LAST), True),
        (f"layernorm(axis=1) | {_NORM}", Situation(_IMAGES, dtype="bfloat16", layout=_LAST), True),
        ("softmax(1) | mul(r)", Situation((1 << 20, 16), {"r": (1 << 20, 16)}), True),
        ("mish | add(0.5) | hardtanh", Situation(_IMAGES, dtype="float64"), True),
        # Two tensors of two bytes; rows of one place, whose gradient is spread over more; columns
        # that have many tensors beside rows that pass by.
        ("softsign", Situation(_IMAGES, dtype="bfloat16"), True),
        ("softmax(1) | select(0, -1)", Situation((48, 32000)), True),
        (
            f"batch_norm(weight=u, bias=v, training=True) | {_WEIGHTED}",
            Situation((9999, 640)),
            True,
        ),
    ],
)
def test_a_chain_of_real_size_compiles_without_a_spill(
    text: str, situation: Situation, grad: bool, tmp_path: Path
) -> None:
    found = sources(fusegen.chain(text), "cuda", situation, grad=grad)
    source = tmp_path / "chain.cu"
    for part in found:
        source.write_text(part.text)
        result = compile_with_nvcc(source, tmp_path / "chain.fatbin")
        assert result.returncode == 0, result.stderr
        spills = SPILLS.findall(result.stdout + result.stderr)
        assert len(spills) >= len(ARCHITECTURES), result.stderr
        assert all(spill == ("0", "0") for spill in spills), result.stderr


def test_a_spill_would_be_noticed(tmp_path: Path) -> None:
    source = tmp_path / "spilling.cu"
    values = "\n".join(f"  float v{i} = x[{i} * 97 + threadIdx.x];" for i in range(64))
    stores = "\n".join(f"  x[{i} * 89 + threadIdx.x] = v{63 - i};" for i in range(64))
    source.write_text(
        f"__global__ void __launch_bounds__(1024, 2) spilling(float* x) {{\n{values}\n"
        f"  __syncthreads();\n{stores}\n}}\n"
    )
    result = compile_with_nvcc(source, tmp_path / "spilling.fatbin")
    assert result.returncode == 0, result.stderr
    assert any(spill != ("0", "0") for spill in SPILLS.findall(result.stdout + result.stderr))
