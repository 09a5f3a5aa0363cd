"""Every golden CUDA source compiles for each architecture, without warnings and without spills."""

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

import fusegen
from fusegen import registers, toolchain
from fusegen.describe import Situation, sources

GOLDEN = Path(__file__).parent / "golden"
SOURCES = sorted(path.name for path in GOLDEN.glob("*.cu"))
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
# Sources that nvcc compiles as one: alone, each would have CUDA's headers read for each of these.
_TOGETHER = 8
_BATCHES = range(-(-len(SOURCES) // _TOGETHER))
_SPILLS = re.compile(
    r"Function properties for (\w+)\s+\d+ bytes stack frame, "
    r"(\d+) bytes spill stores, (\d+) bytes spill loads"
)

pytestmark = pytest.mark.skipif(
    toolchain.nvcc_path() is None, reason=f"no nvcc; {toolchain.INSTALL_NVCC}"
)


def assert_compiles(texts: Mapping[str, str], folder: Path) -> None:
    """Sources by name, each in a namespace of its own, compile to machine code for all
    architectures, by the flags of a real build, without a warning or a spill.
    """
    nvcc = toolchain.nvcc_path()
    assert nvcc is not None
    includes = {line for text in texts.values() for line in _includes(text)}
    named = enumerate(texts.items())
    spaces = [f'namespace source_{i}_ {{\n#line 1 "{n}"\n{_alone(t)}}}\n' for i, (n, t) in named]
    source = folder / "together.cu"
    source.write_text("\n".join([*sorted(includes), *spaces]))
    flags = [*toolchain.FLAGS["cuda"].nvcc, *map(registers.gencode_flag, ARCHITECTURES)]
    command = [nvcc, "-fatbin", *flags, "-Xptxas", "-v", "-o", f"{source}.fatbin", str(source)]
    result = subprocess.run(command, capture_output=True, text=True)
    said = result.stdout + result.stderr
    assert result.returncode == 0, said
    assert "warning" not in said, said
    found = _SPILLS.findall(said)
    for i, name in enumerate(texts):
        mine = [(s, loads) for mangled, s, loads in found if f"source_{i}_" in mangled]
        assert len(mine) >= len(ARCHITECTURES), f"{name}: {said}"
        assert all(spill == ("0", "0") for spill in mine), f"{name} spills: {said}"


def _includes(text: str) -> list[str]:
    return re.findall(r"^#include .*$", text, re.MULTILINE)


def _alone(text: str) -> str:
    """Without what can be said only once for several: headers, and names without a namespace."""
    return re.sub(r"^#include .*$", "", text, flags=re.MULTILINE).replace('extern "C" ', "")


def test_there_is_something_to_compile() -> None:
    assert len(SOURCES) > 10


@pytest.mark.parametrize("batch", _BATCHES)
def test_sources_compile_without_a_warning_or_a_spill(batch: int, tmp_path: Path) -> None:
    names = SOURCES[batch :: len(_BATCHES)]
    assert_compiles({name: (GOLDEN / name).read_text() for name in names}, tmp_path)


def test_each_of_several_maxima_begins_at_minus_infinity(tmp_path: Path) -> None:
    text = (
        "keep(y) | amax(1, keepdim=True) | keep(a) | recall(y) | neg | amax(1, keepdim=True)"
        " | mul(a)"
    )
    source, ptx = tmp_path / "maxima.cu", tmp_path / "maxima.ptx"
    source.write_text(fusegen.compile(text).source("cuda", shape=(5, 7, 96)))
    command = [str(toolchain.nvcc_path()), "-ptx", "-arch=sm_90", *toolchain.FLAGS["cuda"].nvcc]
    subprocess.run([*command, "-o", str(ptx), str(source)], check=True)
    begun = re.findall(r"mov\.f32\s+%f\d+, (0f\w+);", ptx.read_text())
    assert begun
    assert set(begun) == {"0fFF800000"}


_CHANNELS = "mul_channel(p) | instance_norm | clamp(-1, 1) | mul_channel(p) | max(1)"
_GROUPS = "keep(y) | group_norm(16, w, b) | tanh | hardswish | add(y) | logsumexp(1)"
_ROWS, _IMAGES, _LAST = (8192, 8192), (32, 64, 112, 112), "channels_last"
_INSTANCES = "instance_norm(weight=w, bias=b) | gelu"
_NORM = "group_norm(8, w, b)"
_WEIGHTED = "batch_norm(weight=w, bias=b, training=True)"
_BATCH = "batch_norm(m, v, w, b, training=True) | mul(2) | softmax(1)"
_GATED = (
    "unflatten(-1, (2, -1)) | keep(y) | select(-2, 0) | silu | keep(g) | recall(y) | select(-2, 1) "
    "| mul(g)"
)
_TURNED = (
    "unflatten(2, (16, -1)) | rms_norm(weight) | keep(y) | mul(cos) | keep(a) | recall(y) | "
    "unflatten(-1, (2, -1)) | select(-2, 1) | neg"
)
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
        # Columns of two bytes with four tensors of their own; more of each strided row a thread.
        ("batch_norm(m, v, w, b) | relu", Situation(_IMAGES, dtype="bfloat16", layout=_LAST), True),
        ("layernorm(w, b, axis=1) | gelu", Situation((8, 96, 56, 56), dtype="bfloat16"), True),
        # No rows pass by whole; and no kernel of the backward reads an operand.
        (f"add(b) | {_GATED}", Situation((8, 256, 1024), {"b": (1024,)}, "bfloat16"), True),
        (_TURNED, Situation((8, 256, 2048), {"cos": (256, 1, 128)}, "bfloat16"), True),
    ],
)
def test_a_chain_of_real_size_compiles_without_a_spill(
    text: str, situation: Situation, grad: bool, tmp_path: Path
) -> None:
    found = sources(fusegen.chain(text), "cuda", situation, grad=grad)
    assert_compiles({f"part {i}": part.text for i, part in enumerate(found)}, tmp_path)


def test_a_spill_would_be_noticed(tmp_path: Path) -> None:
    values = "\n".join(f"  float v{i} = x[{i} * 97 + threadIdx.x];" for i in range(64))
    stores = "\n".join(f"  x[{i} * 89 + threadIdx.x] = v{63 - i};" for i in range(64))
    spilling = (
        f"__global__ void __launch_bounds__(1024, 2) spilling(float* x) {{\n{values}\n"
        f"  __syncthreads();\n{stores}\n}}\n"
    )
    fine = (GOLDEN / SOURCES[0]).read_text()
    with pytest.raises(AssertionError, match=r"^spilling\.cu spills"):
        assert_compiles({SOURCES[0]: fine, "spilling.cu": spilling}, tmp_path)
