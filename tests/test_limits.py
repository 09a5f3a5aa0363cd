"""Devices smaller than the one the kernels were tuned on: what a block may have is kept to."""

import re
import subprocess

import pytest
import torch
from numeric import assert_as_accurate, outcome

import fusegen
from fusegen import modules, prepared, toolchain
from fusegen.cli import main
from fusegen.describe import Situation, sources
from fusegen.target import GPUS, H200

SMALL = GPUS["L4"]
ROOM = SMALL.shared_bytes - (7 << 10)
# Each has a kernel that asks for more of an H200; the others have sums beside what they ask for.
WIDE = [
    ("layernorm(w, b)", (64, 8192), {}),
    ("layernorm(w, b)", (64, 16384), {"dtype": "bfloat16"}),
    ("softmax(-1)", (64, 32000), {}),
    ("softmax(-1)", (64, 50257), {"dtype": "bfloat16"}),
    ("layernorm(w, b)", (9, 65536), {"dtype": "bfloat16"}),
]
OTHERS = [
    ("layernorm(w, b) | mul(a) | layernorm(c, d)", (9, 8192), {"dtype": "float64"}),
    ("gelu | group_norm(8, w, b) | gelu", (16, 64, 32, 32), {}),
    ("group_norm(8, w, b) | gelu", (16, 256, 64, 64), {}),
    ("layernorm(w, b, axis=1) | gelu", (16, 512, 28, 28), {}),
]
ASKED = re.compile(r"resident_blocks\((\w+), \w+,[^;]*?(\d+),\s+device\)")
ENTRY = re.compile(r"Compiling entry function '(\w+)'(.*?)(?=Compiling entry|\Z)", re.DOTALL)


def module_of(text, shape, options, limits):
    """The only module of a chain and its gradients, for a device with these limits."""
    situation = Situation(shape=shape, limits=limits, **options)
    (found,) = sources(fusegen.chain(text), "cuda", situation, grad=True)
    return found.text


def asked(text):
    """The bytes of shared memory that kernels ask for at their launch, by name."""
    return {name: int(most) for name, most in ASKED.findall(text)}


@pytest.mark.parametrize(("text", "shape", "options"), WIDE)
def test_kernels_that_want_more_than_a_device_has_do_with_less(text, shape, options):
    on_large = asked(module_of(text, shape, options, H200))
    on_small = asked(module_of(text, shape, options, SMALL))
    assert max(on_large.values()) > ROOM
    assert on_small
    assert max(on_small.values()) <= ROOM


@pytest.mark.skipif(toolchain.nvcc_path() is None, reason=f"no nvcc; {toolchain.INSTALL_NVCC}")
@pytest.mark.parametrize(("text", "shape", "options"), [*WIDE, *OTHERS])
def test_what_kernels_ask_for_fits_beside_what_the_compiler_gave_them(
    monkeypatch, tmp_path, text, shape, options
):
    source = module_of(text, shape, options, SMALL)
    file = tmp_path / "module.cu"
    file.write_text(source)
    flags = [*toolchain.FLAGS["cuda"].nvcc, "-arch", "sm_89", "-Xptxas", "-v"]
    command = [toolchain.nvcc_path(), "-cubin", *flags, "-o", str(file.with_suffix(".o")), file]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    checked = set()
    for entry, said in ENTRY.findall(done.stderr):
        fixed = re.search(r"(\d+) bytes smem", said)
        for name, most in asked(source).items():
            if f"{len(name)}{name}" in entry:
                assert most + int(fixed[1] if fixed else 0) <= SMALL.shared_bytes, said
                assert " 0 bytes spill stores, 0 bytes spill loads" in said
                checked.add(name)
    assert checked == set(asked(source))


@pytest.mark.parametrize(
    ("text", "shape", "is_wide"),
    [
        ("max_pool2d(2, 1, 0)", (1, 1, 46340, 46340), False),
        ("max_pool2d(2, 1, 1)", (1, 1, 46340, 46340), True),
        ("adaptive_avg_pool2d(50000)", (1, 1, 4, 4), True),
    ],
)
def test_what_windows_add_counts_for_how_wide_offsets_are(text, shape, is_wide):
    source = fusegen.compile(text).source("cuda", shape=shape)
    assert ("64-bit offsets" in source) == is_wide


@pytest.mark.gpu
def test_a_gpu_says_what_it_has():
    device = torch.device("cuda", 0)
    found = modules.limits(device)
    assert found.processors == torch.cuda.get_device_properties(device).multi_processor_count
    assert found.shared_bytes >= 64 << 10


@pytest.mark.gpu
@pytest.mark.parametrize(("text", "shape", "options"), [*WIDE, *OTHERS])
def test_results_are_right_within_smaller_limits(monkeypatch, text, shape, options):
    monkeypatch.setattr(prepared, "limits", lambda device: SMALL)
    dtype = getattr(torch, options.get("dtype", "float32"))
    x = torch.randn(shape, device="cuda", dtype=dtype).requires_grad_()
    length = shape[1]
    count = len(fusegen.chain(text).operands)
    operands = [torch.randn(length, device="cuda", dtype=dtype) for _ in range(count)]
    inputs = [x, *(o.requires_grad_() for o in operands)]
    fused = fusegen.compile(text)
    eager = outcome(fused.reference, inputs)
    exact = outcome(fused.reference, inputs, dtype=torch.float64)
    assert_as_accurate(outcome(fused, inputs), eager, exact)


@pytest.mark.gpu
@pytest.mark.parametrize("gpu", ["here", "L4"])
def test_the_source_told_is_the_one_that_a_call_builds(monkeypatch, capsys, gpu):
    loaded = []
    load = toolchain.load

    def load_and_note(source, arch):
        loaded.append(source.text)
        return load(source, arch)

    monkeypatch.setattr(toolchain, "load", load_and_note)
    monkeypatch.setattr("fusegen.modules._modules", {})
    if gpu != "here":
        monkeypatch.setattr(prepared, "limits", lambda device: GPUS[gpu])
    fused = fusegen.compile("layernorm")
    fused(torch.randn(64, 8192, device="cuda"))
    assert main(["dump", "layernorm", "--shape", "64,8192", "--gpu", gpu]) == 0
    assert capsys.readouterr().out == loaded[0]
    if gpu == "here":
        assert fused.source(shape=(64, 8192)) == loaded[0]
