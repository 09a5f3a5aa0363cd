"""Real builds of tiny modules; what needs no compiler looks at keys and fingerprints alone."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

import fusegen
from fusegen import cache, registers, toolchain
from fusegen.errors import BuildError, CacheError, UnsupportedError

TESTS = Path(__file__).resolve().parent

BINDING = """\
#include <Python.h>
#ifdef _OPENMP
#include <omp.h>
#endif

extern "C" long launch(long x);

static PyObject* call(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  return PyLong_FromLong(launch(PyLong_AsLong(arguments[0])));
}

static PyMethodDef methods[] = {
    {"call", (PyCFunction)(void (*)(void))call, METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "fusegen_test", nullptr, -1, methods};
PyMODINIT_FUNC PyInit_fusegen_test() { return PyModule_Create(&definition); }
"""


@dataclass(frozen=True)
class Source:
    text: str
    target: str = "cpp"
    module_name: str = "fusegen_test"
    binding: str = ""
    chain_text: str = "leaky_relu(0.2) | gelu"
    chain_hash: str = "3f" * 32


def cpp(expression):
    return Source(f'{BINDING}\nextern "C" long launch(long x) {{ return {expression}; }}\n')


CUDA = Source(
    target="cuda",
    binding=BINDING,
    text="""\
#include <cuda_runtime.h>
__global__ void triple(float* x) { x[threadIdx.x] *= 3; }
extern "C" long launch(long x) {
  triple<<<1, 32>>>(nullptr);
  return 3 * x;
}
""",
)


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    path = tmp_path / "a cache"  # with a blank: it ends up in ninja's and the compilers' commands
    monkeypatch.setenv("FUSEGEN_CACHE_DIR", str(path))
    for name in ("FUSEGEN_NO_BUILD", "CXX", "CC", "NVCC_APPEND_FLAGS", "PYTORCH_NVCC"):
        monkeypatch.delenv(name, raising=False)
    return path


def test_a_module_is_built_loaded_from_the_cache_and_called(root):
    module = toolchain.load(cpp("3 * x"))
    assert module.call(14) == 42
    (published,) = cache.list_entries()
    assert Path(module.__file__) == published.directory / "module.so"
    kept = sorted(path.name for path in published.directory.iterdir())
    assert kept == ["main.cpp", "manifest.json", "module.so"]
    assert (published.directory / "main.cpp").read_text() == cpp("3 * x").text
    assert list((root / "building").iterdir()) == []


def test_two_modules_of_one_name_in_one_process_keep_apart():
    one, two = toolchain.load(cpp("x + 1")), toolchain.load(cpp("x + 2"))
    assert (one.call(0), two.call(0)) == (1, 2)


def test_the_launchers_of_two_modules_keep_apart_even_with_global_symbols():
    flags = sys.getdlopenflags()
    sys.setdlopenflags(flags | os.RTLD_GLOBAL)
    try:
        one, two = toolchain.load(cpp("x + 3")), toolchain.load(cpp("x + 4"))
    finally:
        sys.setdlopenflags(flags)
    assert (one.call(0), two.call(0)) == (3, 4)


def test_the_module_shares_torchs_openmp():
    source = cpp("omp_get_max_threads()")
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert toolchain.load(source).call(0) == 3
    finally:
        torch.set_num_threads(threads)
    with open("/proc/self/maps") as maps:
        assert len({line.split()[-1] for line in maps if "libgomp" in line}) == 1


def test_a_later_process_loads_it_without_a_compiler_or_torchs_extension_machinery(monkeypatch):
    toolchain.load(cpp("3 * x"))
    monkeypatch.setenv("FUSEGEN_NO_BUILD", "1")
    program = (
        "import sys\n"
        f"sys.path[:0] = {[str(TESTS.parent), str(TESTS)]}\n"
        "from test_toolchain import cpp, toolchain\n"
        "assert toolchain.load(cpp('3 * x')).call(14) == 42\n"
        "assert 'torch.utils.cpp_extension' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_damaged_module_is_rebuilt_from_the_same_source():
    assert toolchain.load(cpp("5 * x")).call(2) == 10
    (published,) = cache.list_entries()
    path = published.directory / "module.so"
    half = path.read_bytes()[: published.manifest.size_bytes // 2]
    path.unlink()  # this process has the old file mapped, which must not change under it
    path.write_bytes(half)
    with pytest.warns(UserWarning, match="damaged"):
        assert toolchain.load(cpp("5 * x")).call(2) == 10


def test_ninja_is_found_beside_a_python_that_was_never_activated(tmp_path, monkeypatch):
    if not Path(sys.executable).with_name("ninja").exists():
        pytest.skip("this Python's environment has no ninja of its own")
    compiler, linker = shutil.which("c++"), shutil.which("ld")
    monkeypatch.setenv("PATH", f"{Path(compiler).parent}:{Path(linker).parent}")
    before = os.environ["PATH"]
    assert toolchain.load(cpp("7 * x")).call(2) == 14
    assert os.environ["PATH"] == before


def test_a_compiler_that_fails_is_reported_with_chain_complaint_and_kept_source(root):
    with pytest.raises(BuildError) as caught:
        toolchain.load(cpp("x * nonsense"))
    message = str(caught.value)
    assert "'leaky_relu(0.2) | gelu' (cpp) was not built" in message
    assert re.search(r"error: .nonsense. was not declared", message)
    kept = Path(message.rpartition(" are in ")[2])
    assert kept.parent == root / "failed"
    assert f"{kept}/main.cpp:" in message
    assert "x * nonsense" in (kept / "main.cpp").read_text()
    assert "nonsense" in (kept / "compiler.log").read_text()


def test_a_module_that_lacks_a_symbol_is_reported():
    with pytest.raises(BuildError, match=r"does not load: .*undefined symbol: absent"):
        toolchain.load(Source(BINDING.replace("launch", "absent")))


def test_a_missing_compiler_is_reported_with_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=r"gelu' \(cpp\) cannot be built: no C\+\+.*apt install g"):
        toolchain.load(cpp("x"))


def test_a_compiler_named_in_cxx_that_is_missing_is_named(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match=r"no C\+\+ compiler 'no-such-compiler'"):
        toolchain.load(cpp("x"))


def test_a_missing_nvcc_is_reported_with_what_to_install(monkeypatch):
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    with pytest.raises(BuildError, match=r"\(cuda\) cannot be built: no nvcc.*CUDA_HOME"):
        toolchain.load(CUDA, "sm_90")


def test_where_the_compiler_is_missing_what_was_built_with_one_serves(tmp_path, monkeypatch):
    built = Path(toolchain.load(cpp("5 * x")).__file__)
    monkeypatch.setenv("PATH", str(tmp_path))
    again = toolchain.load(cpp("5 * x"))
    assert (Path(again.__file__), again.call(3)) == (built, 15)
    with pytest.raises(BuildError, match=r"no C\+\+ compiler"):
        toolchain.load(cpp("7 * x"))  # another text
    with monkeypatch.context() as patch:
        patch.setattr(toolchain, "cpu_features", lambda: "another processor")
        with pytest.raises(BuildError, match=r"no C\+\+ compiler"):
            toolchain.load(cpp("5 * x"))


def test_no_build_wins_over_a_missing_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("FUSEGEN_NO_BUILD", "1")
    with pytest.raises(CacheError, match="FUSEGEN_NO_BUILD"):
        toolchain.load(cpp("x"))


@pytest.mark.skipif(toolchain.nvcc_path() is None, reason="no nvcc on this machine")
def test_cuda_is_compiled_even_where_torch_has_none(tmp_path):
    directory = tmp_path / "build"
    directory.mkdir()
    path = toolchain.build(CUDA, "sm_90", directory)
    assert path.read_bytes().startswith(b"\x7fELF")
    assert sorted(p.suffix for p in directory.iterdir()) == [".cpp", ".cu", ".so"]
    needed = path.read_bytes()
    assert b"libcudart.so" in needed
    assert b"libtorch" not in needed


def test_a_module_for_a_cpu_needs_neither_torch_nor_the_cpp_library(root):
    chain = fusegen.compile("keep(y) | softmax(1) | mul(y)")
    chain(torch.rand(3, 40, 50, requires_grad=True)).sum().backward()
    (built,) = root.glob("*/*/module.so")
    needed = built.read_bytes()
    assert b"libgomp" in needed
    assert b"libtorch" not in needed
    assert b"libstdc++" not in needed


def test_the_binding_to_python_is_compiled_once(root):
    for expression in ("x + 1", "x + 2"):
        toolchain.load(cpp(expression))
    (binding,) = (root / "shared").glob("binding-*")
    built = binding.stat().st_mtime_ns
    binding.write_bytes(binding.read_bytes()[:-1])  # a damaged one is not linked
    toolchain.load(cpp("x + 3"))
    assert binding.stat().st_mtime_ns > built


@pytest.mark.skipif(
    "clang" in toolchain.compiler_version(toolchain.cxx_path()), reason="-H tells less there"
)
def test_the_compilers_headers_are_read_once(root, tmp_path):
    for expression in ("x + 1", "x + 2"):
        toolchain.load(cpp(expression))
    (headers,) = (root / "shared").glob("headers-*")
    source = cpp("x + 3")
    (tmp_path / "module.cpp").write_text(source.text)
    (tmp_path / "headers.h.gch").symlink_to(headers)
    flags = [*toolchain.FLAGS["cpp"].cxx, "-fPIC", "-include", "headers.h", "-H", "-c"]
    done = subprocess.run(
        [str(toolchain.cxx_path()), *flags, "module.cpp"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.stderr.startswith("! ./headers.h.gch")  # x stands there where it is not used


def test_a_compiler_that_cannot_build_the_binding_is_reported(monkeypatch):
    monkeypatch.setattr(toolchain, "BINDING_FLAGS", ("-fno-such-flag",))
    with pytest.raises(BuildError, match=r"was not built: .*no-such-flag"):
        toolchain.load(cpp("x + 4"))


@pytest.mark.skipif(toolchain.nvcc_path() is None, reason="no nvcc on this machine")
def test_a_cuda_compiler_that_fails_is_reported():
    with pytest.raises(BuildError, match=r"\(cuda\) was not built: .*cuda.cu\(1\): error: "):
        toolchain.load(replace(CUDA, text="nonsense"), "sm_90")


def test_the_toolkit_of_a_script_called_nvcc_is_not_the_scripts_parent(tmp_path, monkeypatch):
    for name in ("local/bin", "cuda/bin", "cuda/lib64"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("local/bin/nvcc", "cuda/bin/nvcc"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(toolchain, "USUAL_CUDA_HOME", tmp_path / "cuda")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "local/bin"))
    assert toolchain.find_cuda_home() == tmp_path / "local"
    (tmp_path / "cuda/lib64/libcudart.so").touch()
    assert toolchain.find_cuda_home() == tmp_path / "cuda"


@pytest.mark.parametrize(
    ("arch", "flag"),
    [
        ("sm_90", "-gencode=arch=compute_90,code=sm_90"),
        ("sm_100a", "-gencode=arch=compute_100a,code=sm_100a"),
    ],
)
def test_machine_code_is_for_the_architecture_asked_for(arch, flag):
    assert registers.gencode_flag(arch) == flag


@pytest.mark.parametrize("arch", [None, "90", "sm_90 -O0", "compute_90"])
def test_an_architecture_of_another_form_is_refused(arch):
    with pytest.raises(UnsupportedError, match="it has to look like 'sm_90'"):
        registers.gencode_flag(arch)


@pytest.fixture
def key_of(monkeypatch):
    monkeypatch.setattr(cache, "load_or_build", lambda entry, build, load: entry)
    return lambda source, arch=None: toolchain.load(source, arch).key


def test_the_key_depends_on_every_part_of_the_text(key_of):
    sources = [
        CUDA,
        replace(CUDA, text=CUDA.text + "\n"),
        replace(CUDA, binding=CUDA.binding + "\n"),
        replace(CUDA, text=CUDA.text + CUDA.binding, binding=""),
        replace(CUDA, module_name="fusegen_other"),
    ]
    assert len({key_of(source, "sm_90") for source in sources}) == len(sources)


def test_the_key_depends_on_the_toolchain(key_of, monkeypatch):
    keys = [key_of(CUDA, "sm_90"), key_of(CUDA, "sm_100"), key_of(cpp("x"))]
    for target, arch, field in (
        ("cuda", "sm_90", "cxx"),
        ("cuda", "sm_90", "nvcc"),
        ("cuda", "sm_90", "link"),
        ("cpp", None, "cxx"),
    ):
        flags = toolchain.FLAGS[target]
        changed = replace(flags, **{field: (*getattr(flags, field), "-g")})
        with monkeypatch.context() as patch:
            patch.setitem(toolchain.FLAGS, target, changed)
            keys.append(key_of(CUDA if target == "cuda" else cpp("x"), arch))
    for owner, name, value in (
        (torch, "__version__", "99.0"),
        (toolchain, "compiler_version", lambda path: "g++ 99"),
        (toolchain, "cpu_features", lambda: "flags: abacus"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            keys.append(key_of(cpp("x")))
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-use_fast_math")
    keys.append(key_of(CUDA, "sm_90"))
    assert len(set(keys)) == len(keys)


def test_the_key_is_the_same_for_the_same_build(key_of):
    assert key_of(cpp("x")) == key_of(cpp("x"))
    assert key_of(CUDA, "sm_90") == key_of(CUDA, "sm_90")


def test_the_fingerprint_names_the_processors_features():
    assert toolchain.cpu_features()
    assert "\n" not in toolchain.cpu_features()


def test_a_compilers_version_is_asked_once_for_each_state_of_its_file(tmp_path, monkeypatch):
    asked = []

    def run(command, **keywords):
        asked.append(command)
        told = f"g++ {len(asked)}\nCopyright\n".encode()
        return subprocess.CompletedProcess(command, 0, stdout=told)

    monkeypatch.setattr(toolchain.subprocess, "run", run)
    path = tmp_path / "g++"
    path.write_bytes(b"\x7fELF")
    for _ in range(2):
        assert toolchain.compiler_version(str(path)) == "g++ 1 (4 bytes)"
        toolchain._ask_version.cache_clear()  # as in a new process
    path.write_bytes(b"\x7fELF, newer")
    assert toolchain.compiler_version(str(path)) == "g++ 2 (11 bytes)"


@pytest.mark.parametrize("text", ["#!/no/such/shell\n", "not a program"])
def test_a_compiler_that_does_not_run_is_told(tmp_path, text):
    path = tmp_path / "g++"
    path.write_text(text)
    path.chmod(0o755)
    with pytest.raises(BuildError, match=r"g\+\+ --version does not run: .*; install g\+\+"):
        toolchain.compiler_version(str(path))


def test_a_script_around_a_compiler_is_asked_in_every_process(tmp_path):
    path, version = tmp_path / "g++", tmp_path / "version"
    path.write_text(f"#!/bin/sh\ncat '{version}'\n")
    path.chmod(0o755)
    for number in ("12.1", "12.2"):
        version.write_text(f"g++ {number}\n")
        assert toolchain.compiler_version(str(path)).startswith(f"g++ {number} ")
        toolchain._ask_version.cache_clear()


def test_nvccs_version_is_read_from_its_last_lines(tmp_path):
    path = tmp_path / "nvcc"
    path.write_text("#!/bin/sh\necho 'nvcc: NVIDIA'\necho Copyright\necho V13.0.88\necho Build 1\n")
    path.chmod(0o755)
    assert toolchain.compiler_version(str(path)).startswith("V13.0.88 Build 1 (")
