"""What every test shares: one cache of builds a session, the devices, seeds."""

import os
from pathlib import Path

import pytest
import torch


def pytest_addoption(parser):
    parser.addoption("--build-cache", help="keep what tests build in this folder, for the next run")


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
    """Where a numeric test runs: on the CPU; under `-m gpu` on the GPU, whose absence is a failure."""
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
