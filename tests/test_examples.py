"""Each example runs to its end on the CPU, in a process of its own, and says what it promises."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
MODELS = {
    "conv3d_gelu.py": "leaky_relu(0.2) | add_channel(bias) | clamp(-1, 1) | gelu",
    "conv_transpose3d_layernorm.py": "layernorm(weight, bias) | gelu | mul(0.5)",
    "conv_transpose3d_pool.py": (
        "leaky_relu(0.2) | mul_channel(factor) | leaky_relu(0.2) | max_pool3d(2)"
    ),
}


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",  # waiting threads would starve the other tests' processes
    }
    return subprocess.run(
        [sys.executable, EXAMPLES / name, "--device", "cpu", *arguments],
        env=environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("name", MODELS)
def test_a_fused_model_equals_its_eager_twin(name: str) -> None:
    result = run(name, "--quick")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.startswith(f"{MODELS[name]}\non cpu, x (1, ")
    for line in ("output", "gradient of x", "gradient of conv.weight"):
        assert f"\n  {line} " in result.stdout
    for line in ("chain, forward", "model, forward + backward"):
        assert f"\n  {line} " in result.stdout
    assert "TOO LARGE" not in result.stdout


def test_a_fused_transformer_equals_its_eager_twin() -> None:
    result = run("transformer.py", "--quick")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.startswith("add(stream) | give(y) | rms_norm(weight)\nunflatten(-1, (2, ")
    for line in ("output", "gradient of x", "gradient of blocks.1.gated.weight", "model, forward"):
        assert f"\n  {line}" in result.stdout
    assert "TOO LARGE" not in result.stdout


def test_a_fused_network_learns_as_its_eager_twin_does() -> None:
    result = run("train.py", "--steps", "150")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "largest difference of the losses" in result.stdout
    assert result.stdout.endswith("the curves agree\n")


def test_a_difference_is_noticed(tmp_path: Path) -> None:
    broken = (EXAMPLES / "conv3d_gelu.py").read_text("utf-8").replace("| gelu", "| gelu('tanh')")
    (tmp_path / "broken.py").write_text(broken)
    (tmp_path / "common.py").write_text((EXAMPLES / "common.py").read_text("utf-8"))
    result = run(str(tmp_path / "broken.py"), "--quick")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "TOO LARGE" in result.stdout


def test_every_example_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {
        *MODELS,
        "transformer.py",
        "train.py",
        "common.py",
    }
