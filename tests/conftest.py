"""What every test shares: one cache of builds a session, the devices, seeds."""

import os
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fusegen import modules, toolchain
from fusegen.ops import ALIASES, OPS

# Where builds for a CPU are not optimised: what these test is which values and gradients the text
# stands for, and gcc takes longer to optimise it than everything else together. What optimised
# builds compute is seen by the others: every chain that people write in fp32, every operation in
# fp32 and bf16, reductions short and long, and half of the chains at random, which are in fp64.
# Single tests have a mark.
UNOPTIMISED = (
    *("test_anew", "test_assigning", "test_autocast", "test_broadcasting", "test_bundles"),
    *("test_casts", "test_composed", "test_dropout", "test_gaps", "test_giving", "test_gradients"),
    *("test_holding", "test_integer_results", "test_integers", "test_joining", "test_layer"),
    *("test_layouts", "test_losses", "test_masks", "test_mixed", "test_norms", "test_operands"),
    *("test_operators", "test_pooling", "test_second_derivatives", "test_segments"),
    *("test_selecting", "test_shortrows", "test_specialised", "test_stacking", "test_taking"),
    *("test_telling", "test_tensorlike", "test_transforms", "test_unrolling", "test_viewing"),
)


def pytest_addoption(parser):
    parser.addoption("--build-cache", help="keep what tests build in this folder, for the next run")
    parser.addoption(
        "--first-chain", type=int, default=0, help="draw other chains in test_chains_large.py"
    )
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite tests/golden with what is emitted now"
    )


@pytest.fixture(scope="session", autouse=True)
def build_cache(request, tmp_path_factory):
    """One cache for the session, shared by the processes of pytest-xdist."""
    base = tmp_path_factory.getbasetemp()
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    shared = (base.parent if is_worker else base) / "build-cache"
    kept = request.config.getoption("--build-cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSEGEN_CACHE_DIR", str(Path(kept).absolute() if kept else shared))
        patch.delenv("FUSEGEN_NO_BUILD", raising=False)
        yield


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Where a numeric test runs: the CPU; under `-m gpu` the GPU, whose absence is a failure."""
    if request.param == "cuda":
        require_gpu()
    return request.param


@pytest.fixture
def gpu():
    """For tests that only a GPU can run; they carry the marker themselves."""
    require_gpu()
    return "cuda"


def require_gpu():
    """Fail where there is no GPU: a suite that skips itself proves nothing."""
    if not torch.cuda.is_available():
        pytest.fail("the marker `gpu` was asked for, but torch sees no CUDA device", pytrace=False)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def threads():
    """One thread for each process of pytest-xdist: OpenMP's threads wait actively."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)


@contextmanager
def unoptimised():
    """Builds for a CPU without optimising."""
    with pytest.MonkeyPatch.context() as patch:
        flags = toolchain.FLAGS["cpp"]
        fast = tuple("-O0" if flag == "-O3" else flag for flag in flags.cxx)
        patch.setitem(toolchain.FLAGS, "cpp", replace(flags, cxx=fast))
        patch.setattr(modules, "_modules", {})  # else the process keeps them for the others
        yield


@pytest.fixture(scope="module", autouse=True)
def optimisation(request):
    """None for UNOPTIMISED."""
    with unoptimised() if request.module.__name__ in UNOPTIMISED else nullcontext():
        yield


@pytest.fixture(autouse=True)
def optimisation_of_one(request):
    """None for a test that is marked so."""
    with unoptimised() if request.node.get_closest_marker("unoptimised") else nullcontext():
        yield


@pytest.fixture
def golden(request):
    """A function that compares a text with a golden file, or with --update-golden writes it."""

    def compare(name, text):
        path = Path(__file__).parent / "golden" / name
        if request.config.getoption("--update-golden"):
            path.write_text(text, encoding="utf-8")
        assert path.exists(), (
            f"{path} does not exist yet; make it with pytest --update-golden, then read it"
        )
        assert text == path.read_text("utf-8"), (
            "where this is intended: pytest --update-golden, then read git diff"
        )

    return compare


@pytest.fixture
def restore_registry():
    """Operations that a test registers are gone behind it."""
    before = dict(OPS), dict(ALIASES)
    yield
    for table, contents in zip((OPS, ALIASES), before, strict=True):
        table.clear()
        table.update(contents)
