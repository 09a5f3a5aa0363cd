"""Compilers: their identity, their flags, a build with torch's `load_inline`, and the loading.

Why `load_inline` gets a directory and a name of its own for each attempt: torch builds a second
module of one name as `<name>_v1`, and its lock file outlives a killed process. Why it is not asked
to import what it built: the module is loaded from where the cache publishes it.

Generated code includes no torch header and calls nothing in torch, but `load_inline` always links
torch's libraries, and the C++ library, of which what is built for a CPU uses nothing. Empty
archives of the same names, earlier on the search path, keep the link from reading them (40 ms of
300, and 70), the module free of needless dependencies, and let CUDA be compiled beside a torch that
has none.
"""

import contextlib
import functools
import importlib.machinery
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from fusegen import cache, prebuilt, registers
from fusegen.errors import BuildError
from fusegen.locking import open_lock


class Source(Protocol):
    """The text of one module, as `codegen` emits it."""

    @property
    def target(self) -> str:
        """The row of FLAGS that builds it: "cpp" or "cuda"."""

    @property
    def module_name(self) -> str:
        """The identifier whose `PyInit_<module_name>` the text defines."""

    @property
    def text(self) -> str:
        """The kernels."""

    @property
    def binding(self) -> str:
        """The C++ text that tells BINDING of them; with cpp, what follows them in their file."""

    @property
    def chain_text(self) -> str:
        """The chain's canonical text."""

    @property
    def chain_hash(self) -> str:
        """Its sha256, 64 hex digits."""


@dataclass(frozen=True)
class Flags:
    """What each of a target's compilers is told beyond what torch always says."""

    cxx: tuple[str, ...]
    nvcc: tuple[str, ...]
    link: tuple[str, ...]


# -Bsymbolic: two modules may export launchers of one name, and neither may call the other's.
# No jump threading and no elimination across branches: gcc would follow a constant of one `where`
# through the others and leave a maze of masks where vector code needs three selections.
# No exceptions: they would need the C++ library.
# No contraction to FMA, and with cuda the default, correctly rounded division: eager's bits.
# nvcc reads <cmath> three times, and in C++17 libstdc++ has Bessel functions and their like there:
# the include guard of their header leaves them out, and a module takes a quarter less.
FLAGS = {
    "cpp": Flags(
        cxx=(
            "-O3",
            "-march=native",
            "-fopenmp",
            *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
            *("-fno-thread-jumps", "-fno-tree-pre"),
            "-fno-exceptions",
            "-std=gnu++14",
        ),
        nvcc=(),
        link=("-fopenmp", "-Wl,-Bsymbolic"),
    ),
    "cuda": Flags(
        cxx=("-O2", "-std=c++17"),
        nvcc=("-O3", "-fmad=false", "-std=c++17", "-D_GLIBCXX_BITS_SPECFUN_H"),
        link=("-Wl,-Bsymbolic",),
    ),
}

# The binding to Python, the same for every module: compiled once, and linked to each.
BINDING = Path(__file__).parent / "templates" / "binding.cpp"
BINDING_FLAGS = ("-O2", "-std=c++17", "-fPIC", "-fno-exceptions", "-fno-threadsafe-statics")

# What load_inline appends to every link, and what of a link's libraries no module needs.
TORCH_LIBRARIES = ("c10", "c10_cuda", "torch", "torch_cpu", "torch_cuda", "torch_python")
UNUSED_LIBRARIES = {"cpp": (*TORCH_LIBRARIES, "stdc++"), "cuda": TORCH_LIBRARIES}
EMPTY_ARCHIVE = "!<arch>\n"

USUAL_CUDA_HOME = Path("/usr/local/cuda")
COMPILER_WRAPPERS = ("ccache", "sccache", "distcc", "icecc")
CPU_FIELDS = ("vendor_id", "cpu family", "model", "model name", "flags", "Features", "CPU part")
ERROR_LINE = r"^.*(?:\berror\b ?[:#]|\bfatal\b|cannot find -l|undefined reference|No such file).*$"
INSTALL_CXX = "install g++ (Debian, Ubuntu: apt install g++), or name one in CXX, without options"
INSTALL_NVCC = (
    "install the CUDA toolkit of torch's CUDA version, and put its nvcc on PATH or set CUDA_HOME"
)

_load_inline_lock = open_lock()  # load_inline and the names it reads are one a process


def load(source: Source, arch: str | None = None) -> ModuleType:
    """The source's module, from the cache or built now.

    `arch` is the GPU's, such as "sm_90", and None for cpp, which is built for this CPU.
    Raises BuildError and CacheError as `cache.load_or_build` does.
    """
    facts = fingerprint(source.target, arch)
    texts = (source.module_name, source.text, source.binding, BINDING.read_text(), *BINDING_FLAGS)
    about = (source.chain_text, source.chain_hash, source.target)
    entry = prebuilt.entry_of(about, texts, facts)
    return cache.load_or_build(
        entry, partial(build, source, arch), partial(import_module, source.module_name)
    )


def fingerprint(target: str, arch: str | None = None) -> dict[str, str]:
    """All that a module depends on beside its text: compilers, flags, processor, Python, torch.

    A missing compiler is a fact as well: it is `build` that complains.
    """
    # Here, so that the CLI starts without it; and no module may be loaded before torch, whose
    # OpenMP and CUDA runtimes it is to share.
    import torch

    flags = FLAGS[target]
    facts = {
        "target": target,
        "cxx": compiler_version(cxx_path()),
        "cxx_flags": " ".join(flags.cxx),
        "link_flags": " ".join(flags.link),
        "python": importlib.machinery.EXTENSION_SUFFIXES[0],
        "torch": str(torch.__version__),
    }
    if target == "cuda":
        facts |= {
            "nvcc": compiler_version(nvcc_path()),
            "nvcc_host": compiler_version(shutil.which(os.environ.get("CC", "g++"))),
            "nvcc_flags": " ".join(
                (*flags.nvcc, *registers.COMPLAINING, registers.gencode_flag(arch))
            ),
            "nvcc_environment": " | ".join(
                os.environ.get(name, "") for name in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
            ),
        }
    else:
        facts["cpu"] = cpu_features()
    return facts


def build(source: Source, arch: str | None, directory: Path) -> Path:
    """Builds a module in a directory of its own and returns its path; the sources stay beside it.

    Raises BuildError, with the compiler's output in `compiler.log`, or where a tool is missing.
    """
    flags, is_cuda = FLAGS[source.target], source.target == "cuda"
    cuda_home = _check_tools(source)
    stubs = directory / "stubs"
    stubs.mkdir()
    for library in UNUSED_LIBRARIES[source.target]:
        (stubs / f"lib{library}.a").write_text(EMPTY_ARCHIVE)
    cflags = list(flags.cxx)

    def compiled(text: str, complaining: Sequence[str] = ()) -> Path:
        name = f"{source.module_name}_{uuid.uuid4().hex[:8]}"
        path = directory / f"{name}.so"
        nvcc_flags = [*flags.nvcc, *complaining, registers.gencode_flag(arch)] if is_cuda else None
        try:
            with _load_inline_lock, _load_inline_with(cuda_home) as load_inline:
                load_inline(
                    name,
                    cpp_sources=source.binding if is_cuda else text + source.binding,
                    cuda_sources=text if is_cuda else None,
                    extra_cflags=cflags,
                    extra_cuda_cflags=nvcc_flags,
                    extra_ldflags=["stubs/binding.o", *flags.link, "-Lstubs"],
                    build_directory=str(directory),
                    with_cuda=is_cuda,
                    is_python_module=False,
                    no_implicit_headers=True,
                )
        except OSError as error:
            if not path.exists():
                why = f"load_inline failed for {source.chain_text!r}: {error}"
                raise BuildError(why) from error
            # Built, but torch could not open it: import_module says why, in better words.
        return path

    try:
        shutil.copyfile(_binding_object(), stubs / "binding.o")
        if is_cuda:
            module_path = registers.without_spills(source.text, compiled)
        else:
            headers = _headers(source)
            (stubs / "headers.h").write_text(headers)
            (stubs / "headers.h.gch").symlink_to(_precompiled(headers, flags.cxx))
            cflags += ["-include", "stubs/headers.h"]
            module_path = compiled(source.text)
    except RuntimeError as error:
        (directory / "compiler.log").write_text(f"{error}\n")
        raise BuildError(_explain(source, str(error), directory)) from error
    finally:
        shutil.rmtree(stubs)
    for path in directory.iterdir():
        if path != module_path and path.suffix not in (".cpp", ".cu"):
            path.unlink()
    return module_path


def _binding_object() -> Path:
    """BINDING compiled, which the cache keeps; RuntimeError with what the compiler said."""
    return _compiled("binding", BINDING.read_text(), (*BINDING_FLAGS, "-xc++", "-c"))


def _headers(source: Source) -> str:
    """The lines of a source that include the compiler's own headers."""
    return "".join(f"{s}\n" for s in source.text.splitlines() if s.startswith("#include <"))


def _precompiled(headers: str, flags: Sequence[str]) -> Path:
    """Headers as the compiler has read them, which takes it as long as all the rest of a short
    module; the cache keeps them. A compiler that cannot use them reads the headers themselves.
    """
    return _compiled("headers", headers, (*flags, "-fPIC", "-xc++-header"))


def _compiled(stem: str, text: str, flags: Sequence[str]) -> Path:
    """What the C++ compiler makes of a text; RuntimeError with what it said."""
    cxx, include = cxx_path(), f"-I{sysconfig.get_path('include')}"
    assert cxx is not None  # _check_tools saw to that

    def compile_to(path: Path) -> None:
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory) / stem  # of headers to precompile, a pipe will not do
            file.write_text(text)
            command = [cxx, *flags, include, str(file), "-o", str(path)]
            done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: exit {done.returncode}\n{done.stderr}")

    processor = cpu_features() if "-march=native" in flags else ""
    facts = (text, compiler_version(cxx), *flags, include, processor)
    return cache.keep(f"{stem}-{cache.build_key(*facts)}", compile_to)


def import_module(name: str, path: Path) -> ModuleType:
    """The extension module of that name in a file, whatever the file is called."""
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None  # it is None only where no loader is given
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def cxx_path() -> str | None:
    """The C++ compiler that load_inline will run, or None."""
    return shutil.which(os.environ.get("CXX", "c++"))


def nvcc_path() -> str | None:
    """The nvcc that load_inline will run, or None."""
    named = os.environ.get("PYTORCH_NVCC")
    if named:
        return shutil.which(named)
    home = find_cuda_home()
    return None if home is None else shutil.which(home / "bin" / "nvcc")


def find_cuda_home() -> Path | None:
    """The CUDA toolkit: CUDA_HOME or CUDA_PATH, else that of the nvcc on PATH, else the usual one.

    An nvcc on PATH may be a script in /usr/local/bin, whose parent is no toolkit; so a directory
    that has the runtime library is preferred.
    """
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    on_path = shutil.which("nvcc")
    if named:
        candidates = [Path(named)]
    else:
        candidates = [Path(on_path).resolve().parent.parent] if on_path else []
        candidates.append(USUAL_CUDA_HOME)
    homes = [home for home in candidates if (home / "bin" / "nvcc").exists()]
    whole = [home for home in homes if any(home.glob("lib*/libcudart.so"))]
    return next(iter(whole + homes), None)


def compiler_version(path: str | None) -> str:
    """The compiler's version line and the size of its file; "missing" for None.

    Asked once for each state of the file and then remembered in the cache: the question costs a
    process, and a warm load has only milliseconds. A wrapper's file says nothing of the compiler
    behind it, so a wrapper is asked in every process.
    """
    if path is None:
        return prebuilt.MISSING
    state = os.stat(path)
    return _ask_version(path, state.st_mtime_ns, state.st_size)


@functools.cache
def _ask_version(path: str, mtime_ns: int, size_bytes: int) -> str:
    def ask() -> str:
        told = {**os.environ, "LC_ALL": "C"}
        try:
            answer = subprocess.run([path, "--version"], capture_output=True, env=told)
        except OSError as error:
            raise BuildError(f"{path} --version does not run: {error}; {INSTALL_CXX}") from error
        told_back = answer.stdout.decode(errors="replace").splitlines()
        lines = [line for line in told_back if line.strip()]
        # g++ and clang++ name their version in the first line, nvcc in the last two.
        chosen = lines[-2:] if lines and lines[0].startswith("nvcc:") else lines[:1]
        return f"{' '.join(chosen)} ({size_bytes} bytes)"

    with open(path, "rb") as file:
        is_script = file.read(2) == b"#!"
    if is_script or Path(path).resolve().name in COMPILER_WRAPPERS:
        return ask()
    return cache.remember(f"version of {path} {mtime_ns} {size_bytes}", ask)


@functools.cache
def cpu_features() -> str:
    """What -march=native depends on: the processor's model and features."""
    try:
        with open("/proc/cpuinfo") as lines:
            first_core = [line.rstrip("\n").partition(":") for line in iter(lines.readline, "\n")]
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    fields = [f"{name.strip()}:{value}" for name, _, value in first_core]
    return ";".join(field for field in fields if field.startswith(CPU_FIELDS))


def _check_tools(source: Source) -> Path | None:
    """The CUDA toolkit's directory, if the source needs one; BuildError where a tool is missing."""
    what = f"{source.chain_text!r} ({source.target}) cannot be built"
    if cxx_path() is None:
        raise BuildError(
            f"{what}: no C++ compiler {os.environ.get('CXX', 'c++')!r} on PATH; {INSTALL_CXX}"
        )
    if source.target != "cuda":
        return None
    home = find_cuda_home()
    if home is not None and nvcc_path() is not None:
        return home
    raise BuildError(f"{what}: no nvcc; {INSTALL_NVCC}")


@contextlib.contextmanager
def _load_inline_with(cuda_home: Path | None) -> Iterator[Callable[..., object]]:
    """torch's load_inline, which finds the very toolkit that the fingerprint describes, and ninja
    beside a Python whose environment was never activated."""
    # Here, so that a module that is in the cache is loaded without it (0.1 s).
    from torch.utils import cpp_extension

    torch_names: Any = cpp_extension
    old_path, old_home = os.environ.get("PATH", os.defpath), torch_names.CUDA_HOME
    if shutil.which("ninja") is None:
        os.environ["PATH"] = os.pathsep.join((old_path, str(Path(sys.executable).parent)))
    if cuda_home is not None:
        torch_names.CUDA_HOME = str(cuda_home)
    try:
        yield torch_names.load_inline
    finally:
        torch_names.CUDA_HOME, os.environ["PATH"] = old_home, old_path


def _explain(source: Source, output: str, directory: Path) -> str:
    """One failed build in the user's terms: the chain, the first complaint, where to look."""
    complaint = re.search(ERROR_LINE, output, re.MULTILINE)
    first = complaint[0] if complaint else output.strip().splitlines()[-1]
    return (
        f"{source.chain_text!r} ({source.target}) was not built: {first.strip()}\n"
        f"its sources and compiler.log are in {directory}"
    )
