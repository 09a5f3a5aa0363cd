"""Registers: kernels that the compiler spills are built for fewer blocks a multiprocessor.

How many registers a thread has follows from how many blocks of its kernel are to be resident, which
views choose by what a thread holds. What the compiler takes beside that only it knows, so where its
assembler complains of a spill the bounds are lowered, and the source is compiled anew. How many
blocks there are is asked of the device at each launch, so nothing else has to know. Fewer than
512 threads are not left: how those do was not timed.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from fusegen.errors import UnsupportedError

# ptxas's flags that make a spill an error.
COMPLAINING = ("-Xptxas=-warn-spills", "-Xptxas=-Werror")
_SPILLED = re.compile(r"spilled to local memory in function '(\w+)'")
_LEAST_THREADS = 512  # of a multiprocessor
_BOUNDS = re.compile(r"__launch_bounds__\((?P<threads>\d+), (?P<blocks>\d+)\)\s+(?P<kernel>\w+)\(")


def gencode_flag(arch: str | None) -> str:
    """nvcc's flag for machine code of one architecture; with it, torch adds none of its own."""
    matched = re.fullmatch(r"sm_(\d+[a-z]?)", arch or "")
    if matched is None:
        raise UnsupportedError(f"the GPU architecture is {arch!r}; it has to look like 'sm_90'")
    return f"-gencode=arch=compute_{matched[1]},code=sm_{matched[1]}"


def roomier(text: str, complaint: str) -> str:
    """A source whose kernels that the compiler's complaint names as spilled leave a thread
    more registers; the same text where none of them has blocks to give up.
    """
    spilled = _SPILLED.findall(complaint)

    def with_fewer_blocks(bounds: re.Match[str]) -> str:
        kernel, fewer = bounds["kernel"], int(bounds["blocks"]) * 2 // 3
        mangled = re.compile(f"{len(kernel)}{kernel}[A-Z]")  # behind it: arguments, or its end
        is_enough = fewer * int(bounds["threads"]) >= _LEAST_THREADS
        if not is_enough or not any(map(mangled.search, spilled)):
            return bounds[0]
        start, end = (at - bounds.start() for at in bounds.span("blocks"))
        return f"{bounds[0][:start]}{fewer}{bounds[0][end:]}"

    return _BOUNDS.sub(with_fewer_blocks, text)


def without_spills(text: str, compiled: Callable[[str, Sequence[str]], Path]) -> Path:
    """What `compiled(text, flags)` makes of a source, or of a roomier one where it raises
    RuntimeError with a complaint; where nothing helps, of one that spills.
    """
    while True:
        try:
            return compiled(text, COMPLAINING)
        except RuntimeError as error:
            found = roomier(text, str(error))
        if found == text:
            return compiled(text, ())
        text = found
