"""Kernels that nvcc would spill are built for fewer blocks; most tests are of its words alone."""

import re
from pathlib import Path

import pytest
from test_toolchain import BINDING, Source

from fusegen import cache, registers, toolchain
from fusegen.registers import COMPLAINING, roomier, without_spills

KERNELS = """\
template <int kLanes>
__global__ void __launch_bounds__(256, 4)
forward_outer(const float* x) {}
__global__ void __launch_bounds__(256, 3)
forward_outer_2(const float* x) {}
__global__ void __launch_bounds__(512, 1)
backward_row(const float* x) {}
__global__ void __launch_bounds__(512)
forward_finalise(const float* x) {}
"""


def complaint(*functions: str) -> str:
    said = "ptxas error   : Registers are spilled to local memory in function '{}', 8 bytes spill"
    return "\n".join(said.format(f"_ZN12_GLOBAL__N__16{f}EvPKf") for f in functions)


def bounds(text: str) -> list[str]:
    return re.findall(r"__launch_bounds__\((.*)\)", text)


@pytest.mark.parametrize(
    ("functions", "expected"),
    [
        ([], ["256, 4", "256, 3", "512, 1", "512"]),
        (["13forward_outerILi8E"], ["256, 2", "256, 3", "512, 1", "512"]),
        (["13forward_outerILi8E", "13forward_outerILi1E"], ["256, 2", "256, 3", "512, 1", "512"]),
        (["15forward_outer_2"], ["256, 4", "256, 2", "512, 1", "512"]),
        (["12backward_row", "16forward_finalise"], ["256, 4", "256, 3", "512, 1", "512"]),
        (["13forward_column"], ["256, 4", "256, 3", "512, 1", "512"]),
    ],
)
def test_kernels_that_spill_have_blocks_less_and_others_as_many(functions, expected) -> None:
    assert bounds(roomier(KERNELS, complaint(*functions))) == expected


def test_a_source_is_compiled_until_nothing_spills() -> None:
    tried = []

    def compiled(text, flags):
        tried.append((bounds(text)[0], flags))
        if bounds(text)[0] != "64, 10":
            raise RuntimeError(complaint("13forward_outerILi8E"))
        return Path(text)

    text = KERNELS.replace("256, 4", "64, 24")
    assert bounds(str(without_spills(text, compiled)))[0] == "64, 10"
    assert tried == [(f"64, {blocks}", COMPLAINING) for blocks in (24, 16, 10)]


def test_512_threads_are_left() -> None:
    text = KERNELS.replace("256, 3", "256, 2")
    assert roomier(text, complaint("15forward_outer_2")) == text


@pytest.mark.parametrize("said", [complaint("12backward_row"), "x.cu(3): error: expected a ';'"])
def test_what_cannot_be_helped_is_compiled_without_a_complaint(said) -> None:
    tried = []

    def compiled(text, flags):
        tried.append((text, flags))
        if flags:
            raise RuntimeError(said)
        return Path("module.so")

    assert without_spills(KERNELS, compiled) == Path("module.so")
    assert tried == [(KERNELS, COMPLAINING), (KERNELS, ())]


@pytest.mark.skipif(toolchain.nvcc_path() is None, reason="no nvcc on this machine")
@pytest.mark.parametrize(("blocks", "expected"), [(8, "256, 3"), (2, "256, 2")])
def test_nvcc_says_what_it_would_spill(blocks, expected, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FUSEGEN_CACHE_DIR", str(tmp_path))
    text = f"""\
#include <cuda_runtime.h>
__global__ void __launch_bounds__(256, {blocks})
reverse(float* x) {{
  float held[48];
#pragma unroll
  for (int i = 0; i < 48; ++i) held[i] = x[i * 256 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 48; ++i) x[(47 - i) * 256 + threadIdx.x] = held[i];
}}
extern "C" long launch(long x) {{
  reverse<<<1, 256>>>(nullptr);
  return 3 * x;
}}
"""
    module = toolchain.load(Source(text, "cuda", binding=BINDING), "sm_90")
    assert module.call(14) == 42
    (published,) = cache.list_entries()
    assert bounds((published.directory / "cuda.cu").read_text()) == [expected]


def test_the_key_knows_of_it(monkeypatch) -> None:
    before = toolchain.fingerprint("cuda", "sm_90")["nvcc_flags"]
    monkeypatch.setattr(registers, "COMPLAINING", ())
    assert toolchain.fingerprint("cuda", "sm_90")["nvcc_flags"] != before
