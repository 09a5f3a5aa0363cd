"""On what a run was made: device, versions, commit, date."""

from __future__ import annotations

import datetime
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from fusegen import __version__

ROOT = Path(__file__).parents[2]


def facts(device: str, commit: str | None) -> dict[str, Any]:
    """The head of a report. `commit` is what is measured, where there is no git to ask."""
    is_cuda = device == "cuda"
    driver = _answer("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "device": torch.cuda.get_device_name() if is_cuda else _cpu_name(),
        "torch": str(torch.__version__),
        "driver": driver.splitlines()[0] if is_cuda and driver else None,
        "threads": torch.get_num_threads(),
        "fusegen": __version__,
        "commit": commit or _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
    }


def _commit() -> str | None:
    """The checkout's commit, `-dirty` where files differ from it; None where it is installed."""
    if not (ROOT / ".git").exists():
        return None
    asked = ("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    return _answer("git", "-C", str(ROOT), *asked) or None


def _answer(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
