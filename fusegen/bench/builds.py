"""First calls in a new process, cold and from the cache, and what the built kernels take.

A run has a cache of its own, empty at first: one process makes the first calls of some works in
it, one after the other, which builds; a second makes them again, which loads. What other works need
is then built side by side, by torch.compile too, and the run itself uses what is there: of the 502
seconds of a whole run 320 were first calls of torch.compile, one after the other.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from fusegen import cache, toolchain
from fusegen.bench.rivals import compiled, fused_of, gradients_of, inputs, leaves_of
from fusegen.bench.works import MODES, Work
from fusegen.dsl import parse
from fusegen.errors import BuildError, FusegenError
from fusegen.joining import ways

PACKAGE = Path(__file__).parents[1]

# torch and its autograd first, whose own first use takes longer than all of fusegen's.
_PROCESS = """
import sys, time
import torch
x = torch.zeros(1, device=sys.argv[1], requires_grad=True)
torch.autograd.grad(x.exp(), x, torch.ones_like(x))
started = time.perf_counter()
import fusegen.runtime
import_s = time.perf_counter() - started
from fusegen.bench.builds import answer
answer(import_s)
"""
_FUNCTION = re.compile(
    r"Function (?P<name>\S+?):\s+REG:(?P<registers>\d+)\s+STACK:(?P<stack>\d+)\s+"
    r"SHARED:(?P<shared>\d+)\s+LOCAL:(?P<local>\d+)"
)


@dataclass(frozen=True)
class Orders:
    """What a new process is told by whoever starts it."""

    works: Sequence[Work]  # of which fusegen's first calls are timed
    device: str
    modules: Sequence[str]  # the user's, which register operations
    compared: Sequence[Work] = ()  # of which torch.compile's first calls are made as well
    compile_modes: tuple[str, ...] = ()


def build_times(
    works: Sequence[Work], device: str, modules: Sequence[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Seconds of first calls by work and mode, cold and warm, and which work built each module.

    Cold is None where an earlier work had built the same module. `modules` are those of the user,
    which register operations. The seconds of the first work stand at the top, `import fusegen`
    (but not torch's own first use) counted in.
    """
    cold, warm = (_first_calls(Orders(works, device, modules)) for _ in range(2))
    by_work: dict[str, Any] = {}
    for work in works:
        by_work[work.name] = {
            mode: {
                "cold": cold["seconds"][work.name][mode]
                if (work.name, mode) in set(cold["built"].values())
                else None,
                "warm": warm["seconds"][work.name][mode],
            }
            for mode in MODES
        }
    first, training = works[0].name, MODES[1]
    times = {
        "work": first,
        "cold": cold["import_s"] + cold["seconds"][first][training],
        "warm": warm["import_s"] + warm["seconds"][first][training],
        "warm_import": warm["import_s"],
        "works": by_work,
    }
    return times, {key: name for key, (name, _) in cold["built"].items()}


def prebuild(orders: Orders) -> dict[str, str]:
    """Builds what works need in several processes, and tells which work built each module.

    What fails there is left to the measurement, which can say more of it.
    """
    count = min(len(orders.works), max(1, (os.cpu_count() or 1) // 2))

    def build(part: int) -> dict[str, str]:
        works, compared = (some[part::count] for some in (orders.works, orders.compared))
        try:
            found = _first_calls(replace(orders, works=works, compared=compared))
        except FusegenError:
            return {}
        return {key: name for key, (name, _) in found["built"].items()}

    built_by: dict[str, str] = {}
    if count:
        with ThreadPoolExecutor(count) as pool:
            for found in pool.map(build, range(count)):
                built_by |= found
    return built_by


def _first_calls(orders: Orders) -> dict[str, Any]:
    """What `answer` finds in a new process."""
    path = [str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", _PROCESS, orders.device],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))},
        input=pickle.dumps(orders),
        stdout=subprocess.PIPE,
    )
    if done.returncode:
        raise BuildError(f"the process that times first calls ended with {done.returncode}")
    found: dict[str, Any] = pickle.loads(done.stdout)
    if isinstance(found.get("error"), FusegenError):
        raise found["error"]
    return found


def answer(import_s: float) -> None:
    """The new process: its orders come by stdin, its findings go to stdout."""
    orders: Orders = pickle.load(sys.stdin.buffer)
    out, sys.stdout = sys.stdout, sys.stderr  # whatever else is printed must not get between
    sys.path.insert(0, os.getcwd())
    for name in orders.modules:
        importlib.import_module(name)
    try:
        found = _timed_calls(orders.works, orders.device) | {"import_s": import_s}
        _build_rivals(orders)
    except FusegenError as error:
        found = {"error": error}
    out.buffer.write(pickle.dumps(found))
    out.flush()


def _timed_calls(works: Sequence[Work], device: str) -> dict[str, Any]:
    seconds: dict[str, dict[str, float]] = {}
    built: dict[str, tuple[str, str]] = {}
    for work in works:
        tensors = inputs(work, device, 0)
        leaves = leaves_of(work, tensors)
        seconds[work.name] = {}
        for mode in reversed(MODES):  # the whole first, as a training script would
            fused = fused_of(work)
            before = keys()
            _wait(device)
            started = time.perf_counter()
            if mode == MODES[0]:
                with torch.no_grad():
                    fused(*tensors)
            else:
                gradients_of(fused, leaves)
            _wait(device)
            seconds[work.name][mode] = time.perf_counter() - started
            built |= dict.fromkeys(keys(work.chain) - before, (work.name, mode))
    return {"seconds": seconds, "built": built}


def _build_rivals(orders: Orders) -> None:
    """torch.compile's first calls; what it refuses is told where it is measured."""
    for work in orders.compared:
        leaves = leaves_of(work, inputs(work, orders.device, 0))
        for function in compiled(work, orders.device, orders.compile_modes).values():
            with contextlib.suppress(Exception), torch.no_grad():
                function(*leaves)
            with contextlib.suppress(Exception):
                gradients_of(function, leaves)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def keys(text: str = "") -> set[str]:
    """The build keys that are in the cache; with a text, of that chain: other processes may build
    others there.
    """
    built = [entry.manifest for entry in cache.list_entries()]
    texts = {m.chain_text for m in built}
    if text:
        texts = {s.chain.text for way in ways(parse(text)) for s in way}
    return {manifest.key for manifest in built if manifest.chain_text in texts}


# What the kernels take.


def kernels(built_by: Mapping[str, str]) -> list[dict[str, Any]]:
    """Registers and bytes of each CUDA kernel in the cache, as cuobjdump tells them.

    Shared bytes are those that a kernel declares; a launch may ask for more. `built_by` says which
    work built a module. Empty where there is no module of CUDA, or no cuobjdump.
    """
    tool = _cuobjdump()
    found = []
    for entry in cache.list_entries():
        if tool is None or entry.manifest.target != "cuda":
            continue
        command = [tool, "--dump-resource-usage", str(entry.directory / cache.MODULE_NAME)]
        told = subprocess.run(command, capture_output=True, text=True)
        if told.returncode:
            raise BuildError(f"{' '.join(command)}: {told.stderr.strip()}")
        head = {"work": built_by.get(entry.manifest.key), "chain": entry.manifest.chain_text}
        found += [head | usage for usage in usages(told.stdout)]
    return found


def usages(told: str) -> list[dict[str, Any]]:
    """Each kernel of cuobjdump's answer, with registers a thread and bytes."""
    return [
        {
            "kernel": _plain_name(match["name"]),
            "registers": int(match["registers"]),
            "shared_bytes": int(match["shared"]),
            "stack_bytes": int(match["stack"]),
            "local_bytes": int(match["local"]),
        }
        for match in _FUNCTION.finditer(told)
    ]


def _plain_name(mangled: str) -> str:
    """The last part of a mangled name, which is the kernel's: `_ZN3fooL7forwardEi` -> `forward`."""
    name, rest = mangled, mangled.removeprefix("_ZN").removeprefix("_Z")
    while length := re.match(r"L?(\d+)", rest):
        end = length.end() + int(length[1])
        name, rest = rest[length.end() : end], rest[end:]
    return name


def _cuobjdump() -> str | None:
    """The toolkit's cuobjdump, the one on PATH, or the one that Triton brings."""
    home = toolchain.find_cuda_home()
    places = [] if home is None else [str(home / "bin")]
    places.append(os.environ.get("PATH", ""))
    triton = find_spec("triton")
    if triton is not None and triton.origin is not None:
        places.append(str(Path(triton.origin).parent / "backends" / "nvidia" / "bin"))
    return shutil.which("cuobjdump", path=os.pathsep.join(places))
