"""The CUDA skeletons, executed on the CPU: every family, its values and gradients."""

import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from emulator import compile_with_runtime, run, translated
from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from strategies import chains, is_accepted

from fusegen import dsl
from fusegen.segments import segments

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to translate for")

_NORM = "layernorm(weight, bias) | gelu"
_CHANNEL = "layernorm(weight, bias, axis=1)"
_SPREAD = "keep(y) | sum({0}) | keep(s) | recall(y) | amin({0}) | mul(s) | mul(y)"
_CHAIN_A = "leaky_relu(0.2) | add_channel | clamp(-1, 1) | gelu"
_LAST = "channels_last"
_IN_16 = {"dtype": "bfloat16"}
_FEW = {"processors": 16}
_LITTLE_ROOM = {"shared_bytes": 99 << 10}
_CAUSAL = "keep(y) | operand(q) | lt(k) | keep(c) | recall(y) | masked_fill(c, -1)"
_OF_IDS, _WHOLE = "keep(y) | operand(m) | keep(k)", {"types": {"m": "int64"}}
_COMPARED = {"types": {"q": "int64", "k": "int32"}}
_ALONE = "keep(y) | operand(q) | sub(k) | mul(3) | keep(d) | abs | add(1) | mul(y) | add(d)"
_COUNTED = "mul(m) | sum(-1) | keep(s) | operand(m) | sum(-1) | clamp(1) | rdiv(s)"
# So many tensors that every row reads do not fit on the chip.
_MANY = f"layernorm(w, b) | {' | '.join(f'add(a{i})' for i in range(9))}"
_TRAINED = "batch_norm(weight=w, bias=b, training=True)"
_POOLED_NORM = f"{_TRAINED} | relu | max_pool2d(2)"
_STEM = "batch_norm(weight=w, bias=b, training=True) | relu | max_pool2d(3, 2, 1)"
_BUNDLED = "layernorm(w, b) | mul(s) | avg_pool3d(2) | gelu"
_MANY_OPERANDS = " | ".join(f"mul(m{i}) | add(a{i})" for i in range(6))
_GROUPED = "add(t) | group_norm(2, w, b) | silu"
_GROUPS = "group_norm(4, weight, bias)"
_LAST_NARROW = {"layout": _LAST, "dtype": "bfloat16"}
_POOL = "leaky_relu(0.2) | mul_channel | max_pool2d(2)"
# chain, x's shape, the operands' shapes, what else; the families that must be in the source
SWIGLU = (
    "unflatten(-1, (2, -1)) | keep(y) | select(-2, 0) | silu | keep(a) | recall(y) | "
    "select(-2, 1) | mul(a)"
)
GLU = (
    "unflatten(1, (2, -1)) | keep(y) | select(1, 0) | keep(a) | recall(y) | select(1, 1) | "
    "sigmoid | mul(a)"
)
ROPE = (
    "unflatten(-1, (2, -1)) | keep(y) | select(-2, 0, keepdim=True) | keep(a) | recall(y) | "
    "select(-2, 1, keepdim=True) | neg | masked_fill(is_second, a) | mul(sin) | keep(turned) | "
    "recall(y) | mul(cos) | add(turned) | flatten(-2)"
)
CASES = [
    # Rows: within a warp, in packs and one by one; over warps; of both sizes of block; too long.
    (_NORM, (300, 64), [(64,)] * 2, {}, "row"),
    (_NORM, (37, 63), [(63,)] * 2, {}, "row"),
    (_NORM, (70, 3), [(3,)] * 2, {}, "row"),
    (_NORM, (9, 1000), [(1000,)] * 2, {}, "row"),
    (_NORM, (9, 1023), [(1023,)] * 2, {}, "row"),
    (_NORM, (4, 8190), [(8190,)] * 2, {}, "row"),
    # Several tensors that become one value: in few packs, the next row's on their way.
    (f"{SWIGLU} | rms_norm(w)", (75, 2048), [(1024,)], _FEW, "row"),
    ("add(r) | silu | layernorm(w, b)", (75, 1000), [(75, 1000), *[(1000,)] * 2], _FEW, "row"),
    (f"{SWIGLU} | layernorm(w, b)", (9, 16384), [(8192,)] * 2, _FEW | _IN_16, "row"),
    ("layernorm(weight, bias)", (4, 16384), [(16384,)] * 2, {}, "row"),
    # Short ones of no whole packs, by way of shared memory: with rows over, of several tensors.
    (_NORM, (301, 65), [(65,)] * 2, {"dtype": "bfloat16"}, "row"),
    (_NORM, (97, 66), [(66,)] * 2, {}, "row"),
    (_MANY, (70, 65), [(65,)] * 11, {}, "row"),
    ("add(r) | softmax(-1) | mul(w)", (45, 7, 49), [(45, 7, 49), (49,)], {}, "row"),
    ("softmax(-1) | mul(y)", (333, 77), [(333, 1)], {"dtype": "bfloat16"}, "row"),
    # Integers: of one byte and of several, by element, by row, in windows, all along x and not.
    ("to(float32) | div(255) | sub_channel(m)", (3, 5, 7, 9), [(5,)], {"dtype": "uint8"}, ""),
    ("mul(s) | layernorm(w)", (9, 1000), [(1000,)] * 2, {"dtype": "int8"}, "row"),
    ("mul(m) | gelu | add(b)", (67, 33), [(67, 1), (33,)], {"types": {"m": "int64"}}, ""),
    ("mul(m) | layernorm(w)", (37, 63), [(37, 63), (63,)], {"types": {"m": "int32"}}, "row"),
    ("layernorm(w) | mul(m)", (9, 8192), [(8192,), (9, 1)], {"types": {"m": "uint8"}}, "row"),
    ("add(m) | softmax(1)", (3, 19, 7, 33), [(3, 19, 7, 33)], {"types": {"m": "int16"}}, "column"),
    ("mul(m) | softmax(1)", (3, 4, 6, 10), [(3, 4, 6, 10)], {"types": {"m": "int64"}}, "column"),
    ("mul(m) | max_pool2d(2)", (2, 8, 6, 16), [(6, 16)], {"types": {"m": "int64"}}, ""),
    ("mul(m) | sum(0)", (70, 96), [(70, 96)], _IN_16 | {"types": {"m": "int64"}}, ""),
    # Integers that are compared with others: by position, element by element, in rows and columns.
    (f"{_CAUSAL} | softmax(-1)", (37, 64), [(37, 1), (64,)], _COMPARED, "row"),
    (f"{_CAUSAL} | gelu", (67, 33), [(67, 33), (67, 33)], _COMPARED, ""),
    (f"{_CAUSAL} | softmax(1)", (3, 19, 7, 33), [(3, 19, 7, 33)] * 2, _IN_16 | _COMPARED, "column"),
    (f"{_CAUSAL} | mul(q) | sum(0)", (70, 96), [(70, 96), (96,)], _COMPARED, ""),
    (f"{_CAUSAL} | max_pool2d(2)", (2, 8, 6, 16), [(6, 16), (8, 6, 16)], _COMPARED, ""),
    # Integers that are computed with: element by element, of narrow types too, in rows and columns.
    (_ALONE, (67, 33), [(67, 33), (67, 1)], _COMPARED, ""),
    (_ALONE, (67, 33), [(33,), (67, 33)], {"types": {"q": "uint8", "k": "int8"}}, ""),
    (f"{_ALONE} | mul(0.001) | softmax(-1)", (37, 64), [(37, 1), (64,)], _COMPARED, "row"),
    (
        f"{_ALONE} | layernorm",
        (9, 1000),
        [(1000,), (9, 1)],
        {"types": {"q": "int16", "k": "uint8"}},
        "row",
    ),
    (
        f"{_ALONE} | mul(0.001) | softmax(1)",
        (3, 19, 7, 33),
        [(19, 1, 1), (7, 33)],
        _IN_16 | _COMPARED,
        "column",
    ),
    (f"{_ALONE} | sum(0)", (70, 96), [(70, 96), (96,)], _COMPARED, ""),
    (_COUNTED, (9, 1000), [(9, 1000)], {"types": {"m": "int64"}}, "row"),
    (_COUNTED, (37, 63), [(63,)], {"types": {"m": "bool"}}, "row"),
    ("keep(y) | gt(0) | sum(1, True) | clamp(1) | rdiv(y)", (3, 19, 7, 33), [], {}, "column"),
    # Where the largest stands, in rows and strided ones.
    ("gelu | argmax(-1)", (37, 63), [], {}, "row"),
    ("argmin(1)", (9, 1000), [], _IN_16, "row"),
    ("argmax(1)", (3, 19, 7, 33), [], {}, "column"),
    ("argmax(1)", (3, 16, 6, 8), [], _LAST_NARROW, "row"),
    # What a label names, of rows and of strided ones, held or not, and of what they are made of.
    ("cross_entropy(t)", (70, 3), [(70,)], {}, "row"),
    ("cross_entropy(t)", (9, 1000), [(9,)], _IN_16, "row"),
    ("cross_entropy(t)", (5, 40000), [(5,)], {}, "row"),
    ("cross_entropy(t)", (4, 20001), [(4,)], _IN_16, "row"),
    ("cross_entropy(t, reduction='none')", (5, 9, 6, 8), [(5, 6, 8)], _IN_16, "column"),
    ("cross_entropy(t)", (3, 19, 7, 33), [(3, 7, 33)], {"dtype": "float16"}, "column"),
    ("cross_entropy(t)", (3, 16, 6, 8), [(3, 6, 8)], _LAST_NARROW, "row"),
    ("log_softmax(-1) | gather(-1, t)", (5, 7, 1000), [(5, 7, 1)], _IN_16, "row"),
    ("log_softmax(1) | gather(1, t) | squeeze(1)", (3, 19, 7, 33), [(3, 7, 33)], {}, "column"),
    # Integers: counted, exact as doubles where they are added up, cut off, and places as labels.
    ("gt(0) | sum(-1)", (37, 63), [], {}, "row"),
    ("gt(0) | to('int32') | sum(1)", (3, 19, 7, 33), [], {}, "column"),
    ("mul(10) | to('int16') | mul(3)", (67, 33), [], {}, "pointwise"),
    ("keep(y) | argmax(-1, True) | keep(i) | recall(y) | gather(-1, i)", (37, 63), [], {}, "row"),
    ("cross_entropy(t, w, label_smoothing=0.1)", (40, 100), [(40,), (100,)], {}, "row"),
    ("cross_entropy(t, w)", (2, 8, 5, 6), [(2, 5, 6), (8,)], {}, "column"),
    # What strided rows have once, added up on the way: by threads alone, several, and beside sums.
    ("keep(y) | softmax(1) | mul(y) | mean", (7, 6, 9, 10), [], {"processors": 2}, "column"),
    ("add_channel(b) | softmax(1) | mul(s)", (5, 8, 8, 8), [(8,), ()], {}, "column"),
    ("add_channel(b) | softmax(1) | mul(s)", (3, 96, 7, 8), [(96,), (1,)], _IN_16, "column"),
    ("sum(1) | tanh | mean", (3, 200, 6, 8), [], {"dtype": "float64"}, "column"),
    ("layernorm(v, axis=1) | gelu | norm(dim=1) | mean", (2, 70, 9, 11), [(70,)], {}, "column"),
    ("logsumexp(1) | keep(z) | square | mean | mul(z)", (3, 700, 5, 8), [], {}, "column"),
    ("add_channel(b) | gelu | cross_entropy(t)", (40, 96), [(96,), (40,)], {}, "row"),
    ("log_softmax(1) | nll_loss(t)", (40, 96), [(40,)], {}, "row"),
    ("masked_fill(m, -1) | layernorm", (33, 21), [(33, 21)], {}, "row"),
    ("softmax(-1) | mul(y)", (33, 80), [(33, 1)], {"dtype": "float16"}, "row"),
    ("silu | layernorm(w)", (33, 21), [(21,)], {"dtype": "float16"}, "row"),
    ("layernorm(w)", (33, 37), [(37,)], {"dtype": "float64"}, "row"),
    # Shared by a team of blocks, in packs and one by one, with and without blocks to spare.
    (_NORM, (3, 20000), [(20000,)] * 2, {}, "row"),
    (_NORM, (5, 9001), [(9001,)] * 2, {}, "row"),
    (_NORM, (4, 8002), [(8002,)] * 2, {"dtype": "float64"}, "row"),
    ("add(r) | layernorm | mul(y)", (3, 20000), [(20000,), (3, 1)], {}, "row"),
    (_NORM, (3, 20008), [(20008,)] * 2, {"dtype": "bfloat16"}, "row"),
    # Of no whole packs: side by side, in one block, in teams; each block's rows begin alike.
    (_NORM, (37, 129), [(129,)] * 2, {}, "row"),
    (_NORM, (75, 101), [(101,)] * 2, {"dtype": "bfloat16"}, "row"),
    (_NORM, (21, 1023), [(1023,)] * 2, {"dtype": "bfloat16"}, "row"),
    (_NORM, (11, 1002), [(1002,)] * 2, {}, "row"),
    ("add(r) | layernorm(w, b) | mul(y)", (9, 515), [(9, 515), *[(515,)] * 3], {}, "row"),
    ("softmax(-1)", (30, 2, 131), [], {"dtype": "bfloat16"}, "row"),
    ("max(1)", (30, 131), [], {}, "row"),
    (_MANY, (9, 9001), [(9001,)] * 11, {"processors": 24, "dtype": "bfloat16"}, "row"),
    ("keep(y) | max(-1, keepdim=True) | mul(y) | mul(w)", (3, 5, 7, 131), [(5, 1, 131)], {}, "row"),
    # What rows share: behind branches, held with the row, kept from row to row, asked for early.
    ("add(p) | layernorm(w, b)", (37, 64), [(64,)] * 3, {}, "row"),
    ("add(p) | add(r) | layernorm(w, b)", (9, 764), [(764,), (9, 764), *[(764,)] * 2], {}, "row"),
    (
        "add(p) | add(r) | layernorm(w, b)",
        (5, 4000),
        [(4000,), (5, 4000), *[(4000,)] * 2],
        {},
        "row",
    ),
    # What some rows share: kept by blocks of as few rows as leave no room, or asked for again.
    ("add(p) | layernorm(w, b)", (9, 37, 768), [(37, 768), (768,), (768,)], {}, "row outer"),
    ("add(p) | layernorm(w, b)", (9, 37, 1024), [(37, 1024), (1024,), (1024,)], {}, "row outer"),
    (
        "add(p) | layernorm(w, b)",
        (5, 19, 776),
        [(19, 776), (776,), (776,)],
        {"dtype": "bfloat16"},
        "row outer",
    ),
    # More sums than are merged at once.
    (_MANY_OPERANDS, (70, 24), [(24,)] * 12, {}, "outer finalise"),
    ("layernorm(w, b) | dropout(0.3)", (9, 7, 137), [(137,)] * 2, {}, "row"),
    (_NORM, (18, 9001), [(9001,)] * 2, {"processors": 16}, "row"),
    (_NORM, (18, 9001), [(9001,)] * 2, {"processors": 16, "dtype": "bfloat16"}, "row"),
    ("add(r) | layernorm | mul(y)", (9, 20001), [(20001,), (9, 1)], {"processors": 24}, "row"),
    # Of which shared memory has no room for as much of the next: a part is asked for as the row
    # begins, and so is what is wanted late, all of it or a part. The same of no whole packs.
    ("log_softmax(-1)", (20, 60004), [], _FEW, "row"),
    ("softmax(-1)", (20, 120008), [], {"dtype": "bfloat16", **_FEW}, "row"),
    ("add(r) | layernorm(w, b)", (20, 30004), [(20, 30004), *[(30004,)] * 2], _FEW, "row"),
    ("log_softmax(-1) | mul(t) | sum(-1)", (20, 30004), [(20, 30004)], _FEW, "row"),
    ("log_softmax(-1) | mul(t) | sum(-1)", (20, 40004), [(20, 40004)], _FEW, "row"),
    ("log_softmax(-1) | mul(t) | sum(-1)", (20, 60004), [(20, 60004)], _FEW, "row"),
    (
        "log_softmax(-1) | mul(t) | mul(u)",
        (20, 90008),
        [(20, 90008)] * 2,
        {**_IN_16, **_FEW},
        "row",
    ),
    ("softmax(-1) | dropout(0.1)", (20, 30004), [], _FEW, "row"),
    ("dropout(0.1) | softmax(-1)", (20, 30004), [], _FEW, "row"),
    ("softmax(-1) | mul(m) | mul(t)", (20, 30004), [(20, 1), (20, 30004)], _FEW, "row"),
    ("add(r) | softmax(-1)", (20, 30001), [(20, 30001)], {"processors": 32}, "row"),
    ("log_softmax(-1)", (40, 60001), [], {"processors": 32}, "row"),
    # Longer than a team may be.
    (_NORM, (3, 25001), [(25001,)] * 2, {}, "inner outer"),
    # More sums by column than a block has room for.
    (f"{_NORM} | mul(s) | add(t) | mul(u)", (2, 8192), [(8192,)] * 5, {}, "row outer"),
    ("add(r) | layernorm(weight, bias) | gelu", (5, 8192), [(5, 8192), *[(8192,)] * 2], {}, "row"),
    (
        "gelu | layernorm(weight, bias) | mul_channel",
        (3, 5, 7, 24),
        [*[(24,)] * 2, (5,)],
        {},
        "row",
    ),
    ("layernorm(weight, bias) | mul(y)", (4, 10, 32), [*[(32,)] * 2, (10, 32)], {}, "row"),
    ("layernorm | mul(w)", (40, 64), [(40, 1)], {}, "row"),
    (_NORM, (9, 1000), [(1000,)] * 2, {"dtype": "float64"}, "row"),
    (
        "sub(t) | layernorm(normalized_shape=(2, 4), bias=b) | tanh",
        (6, 7, 2, 4),
        [(4,), (2, 4)],
        {},
        "row",
    ),
    (
        "mul(t) | layernorm(normalized_shape=(2, 4), bias=b)",
        (6, 7, 2, 4),
        [(4,), (2, 4)],
        {"dtype": "float64"},
        "row",
    ),
    # Strided rows.
    (_CHANNEL, (2, 96, 5, 8), [(96,)] * 2, {}, "column"),
    (f"{_CHANNEL} | gelu", (2, 19, 5, 7), [(19,)] * 2, {}, "column"),
    (_CHANNEL, (2, 200, 6, 6), [(200,)] * 2, {}, "column"),
    (f"{_CHANNEL} | add(r)", (1, 700, 3, 4), [*[(700,)] * 2, (1, 700, 3, 4)], {}, "column"),
    (_CHANNEL, (1, 1500, 3, 4), [(1500,)] * 2, {}, "outer"),
    (_CHANNEL, (2, 96, 5, 8), [(96,)] * 2, {"layout": "channels_last"}, "row"),
    # Strided rows that a thread has to itself; what lies behind them added up on the way.
    (f"{_CHANNEL} | gelu", (3, 5, 7, 9), [(5,)] * 2, {}, "column"),
    (_CHANNEL, (70, 4, 4, 8), [(4,)] * 2, {"processors": 1}, "column"),
    (_CHANNEL, (2, 5, 7, 9), [(5,)] * 2, {"dtype": "float64"}, "column"),
    (f"{_CHANNEL} | add(r)", (2, 7, 5, 9), [*[(7,)] * 2, (2, 7, 5, 9)], {}, "column"),
    ("hardswish | softmax(1) | mul(w)", (2, 11, 7, 9), [(7, 1)], _IN_16, "column"),
    ("softmax(1) | dropout(0.3)", (2, 5, 7, 9), [], {}, "column"),
    (
        "masked_fill(m, -3) | softmax(1) | masked_fill(m, 0)",
        (2, 7, 5, 9),
        [(2, 7, 5, 9)],
        {},
        "column",
    ),
    ("max(1) | tanh", (3, 9, 5, 7), [], {}, "column"),
    ("hardswish | relu | softmax(1) | mean((2, 3))", (5, 7, 19, 29), [], {}, "column finalise"),
    ("softmax(1) | mul(w) | sum((2, 3))", (40, 3, 3, 1), [(3, 1, 1)], {}, "column finalise"),
    (f"{_CHANNEL} | gelu | mean((2, 3))", (3, 4, 9, 64), [(4,)] * 2, {}, "column finalise"),
    ("softmax(1) | mean((2, 3))", (2, 6, 23, 29), [], {"dtype": "bfloat16"}, "column finalise"),
    ("softmax(2) | mean(3) | tanh", (2, 3, 5, 77), [], {}, "column finalise"),
    ("softmax(1) | mean((2, 3))", (3, 6, 9, 7), [], {"layout": "channels_last"}, "row finalise"),
    ("layernorm | gelu | mean(1)", (5, 90, 16), [], {}, "row finalise"),
    ("layernorm(w, b) | mean(1)", (5, 90, 48), [(48,)] * 2, {}, "row finalise"),
    ("layernorm(w, b) | mean(1)", (5, 7, 1000), [(1000,)] * 2, {"dtype": "bfloat16"}, "row"),
    ("layernorm(w, b) | mean((0, 1))", (5, 33, 131), [(131,)] * 2, {}, "row finalise"),
    ("layernorm(w, b) | mean(1)", (5, 33, 131), [(131,)] * 2, {}, "row column"),
    # An affine map that leaves a mean, its moments found by longer shares; the mean's gradient.
    ("layernorm(w, b) | add(c) | mean(1) | tanh", (5, 33, 768), [(768,)] * 3, {}, "row finalise"),
    ("layernorm(w, b) | mean(1)", (5, 33, 768), [(768,)] * 2, _IN_16, "row finalise"),
    ("mul_channel | add_channel | mean((2, 3))", (3, 5, 7, 9), [(5,)] * 2, {}, "row column"),
    (f"{_TRAINED} | mean((2, 3))", (3, 5, 8, 9), [(5,)] * 2, {}, "inner"),
    # Channels of a group that are whole packs long: in rows side by side, in a large block, shared
    # by a team; of packs of four in two bytes; and what is asked for of them before the norm.
    (_GROUPED, (3, 16, 8, 8), [(3, 16, 1, 1), (16,), (16,)], {}, "row"),
    (_GROUPED, (3, 16, 14, 14), [(3, 16, 1, 1), (16,), (16,)], _IN_16, "row"),
    (_GROUPED, (2, 16, 48, 50), [(2, 16, 1, 1), (16,), (16,)], _IN_16, "row"),
    (_GROUPED, (2, 16, 48, 50), [(2, 16, 1, 1), (16,), (16,)], {}, "row"),
    (_GROUPED, (2, 4, 172, 176), [(2, 4, 1, 1), (4,), (4,)], {"processors": 32}, "row"),
    ("rms_norm(w) | sum(0) | tanh", (2, 5, 9001), [(9001,)], {"processors": 24}, "row"),
    ("normalize(2, -1) | mul(s) | mean(1) | layernorm", (5, 90, 48), [(90, 1)], {}, "row finalise"),
    # Sums along rows and down columns.
    (_CHAIN_A, (3, 5, 7, 9), [(5,)], {}, "pointwise inner"),
    (_CHAIN_A, (3, 8, 7, 9), [(8,)], {"layout": "channels_last"}, "pointwise outer"),
    ("add(b) | gelu", (333, 33), [(33,)], {}, "outer"),
    ("add(b) | gelu", (6, 50, 96), [(50, 96)], {}, "outer"),
    # Windows.
    (_POOL, (2, 8, 6, 16), [(8,)], {}, "window"),
    (_POOL, (2, 3, 5, 7), [(3,)], {}, "window"),
    ("tanh | avg_pool2d(2) | gelu | add_channel", (2, 8, 6, 16), [(8,)], {}, "window"),
    # Gradients that are the same for all windows.
    ("avg_pool2d(2) | mean((2, 3))", (2, 3, 9, 7), [], {}, "window"),
    ("avg_pool2d(2) | mean((2, 3))", (2, 3, 8, 16), [], {"layout": _LAST}, "window"),
    (
        "add_channel | avg_pool2d(2) | sum(3)",
        (2, 3, 8, 16),
        [(3,)],
        {"dtype": "bfloat16"},
        "window",
    ),
    # Lines of one window, where those of several do not come out even.
    ("relu | max_pool2d(2) | tanh", (2, 3, 12, 28), [], {"dtype": "bfloat16"}, "window"),
    ("adaptive_avg_pool2d(3) | gelu", (2, 3, 12, 12), [], {"dtype": "bfloat16"}, "window"),
    # Noise, in every family.
    ("gelu | dropout(0.3) | mul_channel", (3, 5, 7, 9), [(5,)], {}, "pointwise inner"),
    ("dropout(0.3) | add(b) | gelu", (333, 33), [(33,)], {}, "outer"),
    (f"dropout(0.5) | {_NORM} | dropout", (300, 64), [(64,)] * 2, {}, "row"),
    (f"{_NORM} | dropout(0.1)", (5, 8192), [(8192,)] * 2, {}, "row"),
    # Drawn where it is used: before and behind a norm, beside others, for whole packs of eight.
    (
        "add(b) | dropout(0.1) | add(r) | layernorm(w)",
        (9, 768),
        [(768,), (9, 768), (768,)],
        _IN_16,
        "row",
    ),
    ("softmax(-1) | dropout(0.1)", (2, 3, 7, 192), [], _IN_16, "row"),
    ("dropout(0.2) | layernorm(w) | dropout(0.1)", (5, 4000), [(4000,)], {}, "row"),
    # The same by blocks that share a row.
    (
        "dropout(0.2) | add(r) | add(q) | mul(s) | add(t) | layernorm",
        (3, 8192),
        [(3, 8192)] * 4,
        {},
        "row",
    ),
    # Packs of whole pairs, where rows begin anywhere, or what is drawn varies along rows alone.
    (
        "add(r) | dropout(0.3) | layernorm(w)",
        (9, 137),
        [(9, 137), (137,)],
        {"dtype": "bfloat16"},
        "row",
    ),
    ("dropout(0.3) | add(r) | gelu | mul(w)", (64,), [(9, 7, 64), (64,)], {}, "finalise"),
    ("dropout(0.3) | add(r) | layernorm(w)", (137,), [(9, 137), (137,)], {}, "row"),
    ("dropout(0.3) | mul(w)", (3, 1, 66), [(5, 1)], {"dtype": "bfloat16"}, "finalise"),
    (f"{_CHANNEL} | dropout(0.1)", (2, 96, 5, 8), [(96,)] * 2, {}, "column"),
    (f"{_CHANNEL} | dropout(0.1)", (2, 96, 5, 8), [(96,)] * 2, {"layout": "channels_last"}, "row"),
    ("dropout(0.2) | max_pool2d(2) | dropout", (2, 8, 6, 16), [], {}, "window"),
    ("dropout2d(0.4) | tanh", (3, 8, 5, 4), [], {"layout": "channels_last"}, "pointwise"),
    (
        "dropout(0.2) | max_pool2d(3, 2, 1) | dropout",
        (2, 3, 7, 9),
        [],
        {"layout": "channels_last"},
        "slide cover",
    ),
    # Windows that overlap, and that cross the edge.
    ("relu | max_pool2d(3, 2, 1)", (2, 3, 7, 9), [], {}, "slide cover"),
    ("relu | max_pool2d(3, 2, 1)", (2, 3, 7, 9), [], {"layout": "channels_last"}, "slide cover"),
    # Neighbours beside each other that no window splits.
    (
        "mul_channel | relu | max_pool2d(3, 2, 1) | add(r)",
        (2, 16, 7, 9),
        [(16,), (2, 16, 4, 5)],
        {"layout": "channels_last", "dtype": "bfloat16"},
        "slide cover",
    ),
    (
        "add_channel | avg_pool2d(3, 1, 1, count_include_pad=False)",
        (2, 16, 9, 11),
        [(16,)],
        {"layout": "channels_last"},
        "slide cover",
    ),
    (
        "add(p) | adaptive_avg_pool2d((3, 4)) | mul(q)",
        (2, 8, 7, 9),
        [(9,), (4,)],
        {"layout": "channels_last"},
        "slide cover",
    ),
    (
        "max_pool2d(3, 2, 0, 2, ceil_mode=True) | tanh",
        (2, 12, 9, 10),
        [],
        {"layout": "channels_last"},
        "slide cover",
    ),
    ("mul(w) | max_pool2d(2, 1, 0, 2)", (2, 3, 5, 6), [(5, 1)], {}, "slide cover"),
    (
        "addcmul(u, v) | avg_pool2d((2, 1), None, (1, 0))",
        (2, 3, 8, 5),
        [(3, 8, 1), (2, 3, 8, 5)],
        {},
        "slide cover",
    ),
    (
        "mul_channel | avg_pool3d(3, 2, 1, True, False) | tanh",
        (1, 2, 4, 5, 6),
        [(2,)],
        {},
        "slide cover",
    ),
    ("adaptive_avg_pool2d((3, 2)) | gelu | add_channel", (2, 3, 7, 5), [(3,)], {}, "slide cover"),
    # Groups whose channels lie innermost, beside windows or rows along all of them.
    (f"{_GROUPS} | relu | max_pool2d(2)", (3, 16, 12, 10), [(16,)] * 2, {"layout": _LAST}, "outer"),
    (f"{_GROUPS} | silu | avg_pool2d(2)", (3, 16, 12, 10), [(16,)] * 2, _LAST_NARROW, "outer"),
    (f"{_GROUPS} | max_pool2d(3, 2, 1)", (3, 8, 11, 9), [(8,)] * 2, {"layout": _LAST}, "outer"),
    (
        f"relu | {_GROUPS} | avg_pool2d(3, 1, 1)",
        (2, 64, 16, 12),
        [(64,)] * 2,
        {"layout": _LAST},
        "outer slide cover",
    ),
    (f"{_GROUPS} | tanh | logsumexp(1)", (3, 16, 9, 7), [(16,)] * 2, _LAST_NARROW, "outer row"),
    (f"softmax(1) | {_GROUPS}", (3, 16, 9, 7), [(16,)] * 2, {"layout": _LAST}, "row outer"),
    (f"layernorm(axis=1) | {_GROUPS}", (3, 8, 9, 7), [(8,)] * 2, _LAST_NARROW, "row outer"),
    (_POOL, (2, 8, 6, 16), [(8,)], {"layout": "channels_last"}, "window"),
    # Innermost in memory is not the last of the pooled axes.
    ("relu | mul(w) | max_pool3d(2)", (3, 4, 6, 8), [(4, 1, 1)], {"layout": _LAST}, "window"),
    ("relu | max_pool3d(2)", (3, 17, 6, 9), [], {"layout": _LAST}, "window"),
    ("mul(w) | avg_pool3d(2) | tanh", (3, 8, 6, 8), [(6, 8)], {"layout": _LAST}, "window"),
    # Maxima of rows: within a warp, over warps, over a team of blocks in one turn and in two.
    ("gelu | softmax(-1) | mul(2)", (9, 70), [], {}, "row"),
    ("softmax(-1)", (70, 3), [], {}, "row"),
    ("log_softmax(-1) | mul(w)", (37, 129), [(129,)], {}, "row finalise"),
    ("softmax(-1) | mul(w)", (5, 3000), [(3000,)], {}, "row finalise"),
    ("gelu | log_softmax(-1)", (4, 8192), [], {}, "row"),
    ("add(r) | softmax(-1)", (3, 20001), [(20001,)], {}, "row"),
    ("logsumexp(-1, True) | rsub(r)", (3, 20000), [(3, 20000)], {}, "row"),
    ("keep(y) | amax(-1, True) | rsub(y)", (5, 20004), [], {}, "row"),
    ("keep(y) | amax(-1, True) | rsub(y)", (4, 8002), [], {"dtype": "float64"}, "row"),
    ("softmax(-1)", (4, 8002), [], {"dtype": "float64"}, "row"),
    ("softmax(-1) | mul(w)", (9, 1023), [(1023,)], {"dtype": "bfloat16"}, "row"),
    ("log_softmax(-1)", (5, 12288), [], {"dtype": "bfloat16"}, "row"),
    ("log_softmax(-1)", (3, 20008), [], {"dtype": "bfloat16"}, "row"),
    # Long rows, each in a block of its own: beyond 32,768 in two bytes, odd ones, and reduced only.
    ("softmax(-1)", (9, 33001), [], {"processors": 64, "dtype": "bfloat16"}, "row"),
    ("softmax(-1) | mul(2)", (9, 32768), [], {"processors": 24}, "row"),
    ("layernorm(w, b) | gelu", (3, 20480), [(20480,)] * 2, {"processors": 24}, "row"),
    ("log_softmax(-1)", (5, 20480), [], {"processors": 24, "dtype": "bfloat16"}, "row"),
    ("layernorm | mul(2)", (3, 24000), [], {"processors": 24, "dtype": "bfloat16"}, "row"),
    # Of these, packs that stay in shared memory: of one tensor, of two, reduced only, in teams.
    ("softmax(-1)", (9, 33001), [], {"processors": 64}, "row"),
    ("softmax(-1)", (3, 66000), [], {"processors": 64, "dtype": "bfloat16"}, "row"),
    ("softmax(-1)", (5, 20484), [], {"processors": 24}, "row"),
    ("log_softmax(-1)", (9, 33001), [], {"processors": 64, "dtype": "bfloat16"}, "row"),
    ("add(r) | rms_norm", (3, 20484), [(3, 20484)], {"processors": 24}, "row"),
    ("layernorm(w, b) | gelu", (3, 33004), [(33004,)] * 2, {"processors": 24}, "row"),
    ("logsumexp(-1)", (5, 33001), [], {"processors": 64}, "row"),
    ("softmax(-1)", (3, 28004), [], {"processors": 24}, "row"),
    # Gradients whose rows are finished a turn later, with what was carried in a tensor's place.
    ("layernorm | gelu", (5, 20480), [], {"processors": 24}, "row"),
    ("gelu | rms_norm", (7, 40000), [], {"processors": 40}, "row"),
    ("softmax(-1) | silu", (9, 65536), [], {"processors": 40}, "row"),
    ("layernorm | mul(2)", (5, 28001), [], {"processors": 64}, "row"),
    ("softmax(-1)", (3, 55560), [], {"processors": 64, "dtype": "bfloat16"}, "row"),
    ("layernorm(w, b)", (5, 9216), [(9216,)] * 2, {"dtype": "bfloat16"}, "row"),
    ("softmax(-1) | mul(y)", (5, 54001), [(5, 1)], {"processors": 64}, "row"),
    ("logsumexp(-1)", (3, 54000), [], {"processors": 64}, "row"),
    # The same where a block has less shared memory: in teams, or without the next row on its way.
    ("softmax(-1)", (9, 32768), [], {"processors": 24, "shared_bytes": 99 << 10}, "row"),
    (
        "softmax(-1)",
        (9, 33001),
        [],
        {"processors": 64, "shared_bytes": 99 << 10, "dtype": "bfloat16"},
        "row",
    ),
    ("layernorm(w, b)", (4, 8192), [(8192,)] * 2, {"shared_bytes": 99 << 10}, "row"),
    ("layernorm(w, b)", (4, 8192), [(8192,)] * 2, {"shared_bytes": 48 << 10}, "row outer"),
    ("add(r) | rms_norm(w)", (3, 20480), [(3, 20480), (20480,)], {"dtype": "bfloat16"}, "row"),
    ("logsumexp(-1)", (3, 20001), [], {}, "inner finalise"),
    ("keep(y) | logsumexp(-1, True) | mul(y)", (3, 20001), [], {}, "row"),
    ("layernorm(w) | softmax(-1)", (4, 3000), [(3000,)], {}, "row"),
    ("softmax(-1) | layernorm(w)", (3, 20000), [(20000,)], {}, "row"),
    # Longer than a team may be.
    ("softmax(-1)", (3, 25001), [], {}, "inner"),
    # A sum and a maximum of the same stage.
    (_SPREAD.format("-1, True"), (9, 1000), [], {}, "row"),
    (_SPREAD.format("-1, True"), (3, 20000), [], {}, "row"),
    (_SPREAD.format("1, True"), (2, 19, 5, 8), [], {}, "column"),
    # Of strided rows.
    ("softmax(1) | add_channel | sigmoid", (2, 19, 5, 7), [(19,)], {}, "column"),
    ("gelu | log_softmax(1)", (2, 200, 6, 6), [], {}, "column"),
    ("softmax(1)", (1, 700, 3, 4), [], {"dtype": "float64"}, "column"),
    ("softmax(1)", (2, 96, 5, 8), [], _IN_16, "column"),
    ("softmax(1)", (1, 1500, 3, 4), [], {}, "outer"),
    # As long as their threads have packs: with threads beyond, and columns beside.
    ("softmax(1) | add_channel", (2, 48, 5, 7), [(48,)], {}, "column"),
    ("softmax(1) | add_channel", (2, 48, 5, 1), [(48,)], {}, "column"),
    ("softmax(1) | add_channel", (2, 208, 5, 1), [(208,)], {}, "column"),
    (_CHANNEL, (2, 40, 6, 6), [(40,), (40,)], {}, "column"),
    (f"add(r) | {_CHANNEL} | gelu", (3, 40, 5, 4), [(3, 40, 5, 4), (40,), (40,)], {}, "column"),
    (_CHANNEL, (5, 384, 3, 4), [(384,), (384,)], _IN_16, "column"),
    ("gelu | logsumexp(1)", (2, 72, 5, 4), [], {}, "column"),
    # Maxima, positions and sums of any axes.
    ("log_softmax(1)", (2, 19, 5, 7), [], {"layout": "channels_last"}, "row"),
    # Groups of which a pack has several, whole ones or parts, in rows of channels.
    *(
        (f"group_norm({groups}, w, b) | {end}", (2, channels, 5, 6), [(channels,)] * 2, more, "row")
        for channels, groups in ((24, 6), (40, 4), (24, 8))
        for end in ("tanh | logsumexp(1)", "softmax(1)")
        for more in ({"layout": _LAST}, {"layout": _LAST, "dtype": "bfloat16"})
    ),
    ("layernorm(normalized_shape=(8, 12)) | mul(s)", (3, 5, 8, 12), [(8, 1)], {}, "row"),
    # Samples that have much of their own in each column.
    (
        "mul(s) | add(t) | silu | mul(u) | add(w)",
        (3, 24, 5, 7),
        [(3, 24, 1, 1), (3, 24, 1, 1), (3, 24, 1, 1), (24, 1, 1)],
        {"layout": _LAST, "dtype": "bfloat16"},
        "outer",
    ),
    (
        "mul(s) | add(t) | mul(u) | add(v) | mul(w)",
        (3, 24, 5, 7),
        [(3, 24, 1, 1), (3, 1, 1, 1), (3, 24, 1, 1), (3, 24, 1, 1), (24, 1, 1)],
        {"layout": _LAST, "dtype": "bfloat16"},
        "outer",
    ),
    # What is reduced lies in short runs: by column first.
    (
        "group_norm(4, weight, bias) | silu",
        (2, 8, 16, 12),
        [(8,), (8,)],
        {"layout": "channels_last"},
        "outer finalise row",
    ),
    (
        "group_norm(4, weight, bias) | silu",
        (2, 64, 24, 23),
        [(64,), (64,)],
        {"layout": "channels_last", "dtype": "bfloat16"},
        "outer finalise row",
    ),
    (
        "add(r) | group_norm(3, weight, bias) | gelu | mul(s)",
        (3, 9, 11, 13),
        [(3, 9, 11, 13), (9,), (9,), (3, 1, 1, 1)],
        {"layout": "channels_last"},
        "outer finalise inner",
    ),
    (
        "gelu | group_norm(2)",
        (2, 8, 7, 9),
        [],
        {"layout": "channels_last"},
        "outer finalise row",
    ),
    ("softplus | std((0, 2))", (90, 3, 4), [], {}, "outer finalise inner"),
    ("mul(p) | amax((0, 2), keepdim=True) | tanh", (90, 3, 4), [(4,)], {}, "outer finalise inner"),
    (
        "batch_norm(weight=weight, bias=bias, training=True) | relu",
        (130, 6, 3),
        [(6,), (6,)],
        {},
        "outer finalise inner",
    ),
    ("logsumexp(1) | gelu", (37, 63), [], {}, "row pointwise"),
    ("max(1) | tanh", (3, 9, 5, 8), [], {}, "column"),
    ("max(1) | tanh", (2, 1030, 3), [], {}, "outer finalise"),
    # Gradients of strided rows that have something dear of their own.
    ("logsumexp(1, True) | relu", (2, 19, 5, 8), [], {}, "column"),
    ("logsumexp(1, True) | relu", (2, 29, 5, 8), [], {}, "column pointwise"),
    ("norm(3, (1, 2)) | log", (3, 4, 2, 5), [], {"layout": _LAST}, "inner pointwise"),
    ("logsumexp(1, True) | relu", (2, 19, 5, 7), [], _IN_16, "column"),
    ("min(1) | gelu | mul(p)", (2, 9, 5, 8), [(8,)], {}, "column"),
    ("max(1) | masked_fill(m, 0) | tanh", (3, 9, 5, 8), [(5, 8)], {}, "column"),
    ("mean(1) | gelu", (2, 300, 5, 4), [], {"dtype": "float64"}, "column"),
    # What they share with rows beside them is asked for while they are on their way.
    ("mul(m) | sum(1) | div(n)", (5, 512, 16), [(5, 512, 1), (5, 1)], {}, "column"),
    ("mul(m) | sum(1)", (3, 499, 40), [(3, 499, 1)], _IN_16, "column"),
    ("add(m) | amax(1)", (3, 500, 2, 4), [(500, 1, 1)], {}, "column"),
    # Losses over long rows: of one tensor, and of two that a block has room for, or not.
    ("log_softmax(-1) | keep(l) | exp | mul(l) | sum(-1)", (3, 20000), [], {}, "row"),
    ("log_softmax(-1) | mul(t) | sum(-1) | neg | mean", (3, 20000), [(3, 20000)], _IN_16, "row"),
    ("softmax(-1) | mul(t) | sum(-1) | mean", (3, 32000), [(3, 32000)], {}, "row"),
    ("softmax(-1) | mul(t) | sum(-1) | mean", (2, 120000), [(2, 120000)], {}, "row finalise"),
    # The longest rows, which only the largest blocks hold, in gradients too, or forward alone.
    ("layernorm | relu", (3, 40000), [], {"processors": 8}, "row"),
    ("layernorm | relu", (3, 120000), [], {"processors": 9}, "row finalise"),
    ("instance_norm(weight=w, bias=b)", (2, 3, 50000), [(3,)] * 2, {"processors": 9}, "row"),
    # Rows of which more is computed before they are reduced, and beside what they share.
    ("gelu | softmax(-1)", (3, 20000), [], {}, "row"),
    ("add(b) | div(3) | log_softmax(-1)", (3, 20000), [(20000,)], _IN_16, "row"),
    # Spread over more axes than are reduced.
    ("layernorm(w) | add(p) | gelu", (6, 64), [(64,), (4, 6, 64)], {}, "row pointwise"),
    # Neighbours of what passes by in pieces, some of which begin between packs.
    ("group_norm(2, w, b) | tanh | logsumexp(1)", (3, 6, 5, 7), [(6,), (6,)], {}, "inner column"),
    ("masked_fill(m, 0.5) | gelu | mul_channel", (3, 5, 7, 8), [(7, 8), (5,)], {}, "inner"),
    ("mul(s) | tanh", (700,), [()], {}, "inner"),
    ("mean | tanh", (9, 40), [], {}, "row"),
    # What columns have of their own beside rows that pass by: for all of those, or for some; some
    # in two types, and in channels that are no whole packs.
    *(
        (
            text,
            (2, c, *image),
            [(2, c, 1, 1), (c, 1, 1)],
            {"layout": _LAST, **more},
            "outer",
        )
        for text, image in (
            ("mul(s) | add(t) | gelu", (5, 6)),
            ("instance_norm | mul(s) | tanh | mul(t)", (33, 32)),
        )
        for more in ({}, {"dtype": "bfloat16"}, {"dtype": "float64"})
        for c in (16, 13)
    ),
    # Many columns in the end.
    ("add(b) | gelu", (9, 4096), [(4096,)], {}, "outer finalise"),
    ("add(b) | gelu", (9, 8192), [(8192,)], {"dtype": "bfloat16"}, "outer finalise"),
    ("min(-1, keepdim=True) | tanh", (3, 9, 33), [], {}, "row"),
    ("amax((1, 3))", (3, 4, 5, 8), [], {}, "inner"),
    ("norm(inf, -1) | tanh", (9, 1000), [], {}, "row"),
    ("max(0)", (700,), [], {}, "row"),
    ("gelu | max(1)", (40, 64), [], {"dtype": "bfloat16"}, "row"),
    ("gelu | max(1)", (40, 63), [], {"dtype": "bfloat16"}, "row"),
    # Reductions along other axes before those of the rows that are held.
    ("group_norm(2, w, b) | tanh | logsumexp(1)", (3, 6, 5, 8), [(6,), (6,)], {}, "inner column"),
    ("layernorm(w) | softmax(1)", (3, 6, 5, 8), [(8,)], {}, "inner column"),
    ("softmax(1) | layernorm(w, b)", (3, 6, 5, 8), [(8,), (8,)], {}, "outer row"),
    ("mul(p) | gelu | add_channel", (3, 5, 7), [(5, 7), (5,)], {}, "pointwise"),
    ("mul(p) | gelu | add_channel", (9, 5, 7), [(5, 7), (5,)], {"dtype": "bfloat16"}, "pointwise"),
    ("mul(p) | add(q)", (3, 5, 251), [(5, 1), (1, 251)], {}, "pointwise"),
    ("mul(p) | add(q)", (3, 5, 251), [(5, 1), (1, 251)], {"dtype": "bfloat16"}, "pointwise"),
    ("add_channel | gelu", (2, 3, 4099), [(3,)], {}, "pointwise"),
    ("keep(y) | softmin(0) | mul(y) | sum((0, 2))", (3, 4, 5, 8), [], {}, "column"),
    ("max", (8, 16), [], {}, "row"),
    ("sum(1, True) | mul(w) | add(o)", (7, 1), [(9, 7, 9), (9,)], {}, "pointwise"),
    ("rpow(0.75) | rdiv(3)", (7, 9), [], {}, "pointwise"),
    # Of what a first sum leaves, other neighbours lie together.
    *(
        ("sum(1) | tanh | sum(1) | mul(q)", (2, 3, 4, 5), [(5,)], more, "column")
        for more in ({}, {"layout": "channels_last"}, {"dtype": "float64"})
    ),
    ("gelu | mean((2, 3)) | tanh", (3, 5, 7, 9), [], {}, "row"),
    ("gelu | mean((2, 3)) | tanh", (2, 2, 131, 157), [], {}, "inner finalise"),
    ("sub(p) | mean(1, keepdim=True) | gelu | add(o)", (6, 70), [(70,), (6, 70)], {}, "row"),
    # Runs too short to be gone through one by one; rows whose gradients have sums of their own.
    ("add_channel | gelu", (33, 8, 7, 7), [(8,)], {}, "outer"),
    ("mul_channel | gelu", (33, 8, 7, 7), [(8,)], {"dtype": "bfloat16"}, "outer"),
    ("batch_norm(weight=w, bias=b, training=True)", (65, 8, 7, 7), [(8,)] * 2, {}, "inner outer"),
    ("batch_norm(weight=w, training=True)", (65, 8, 7, 7), [(8,)], {"dtype": "bfloat16"}, "outer"),
    ("mul(s) | silu", (7, 5, 7, 7), [(7, 5, 1, 1)], {}, "row"),
    ("mul(s) | silu", (7, 5, 10, 10), [(7, 5, 1, 1)], {"dtype": "bfloat16"}, "row"),
    # Elements down columns that have much of their own, whole shares of rows and the end of one.
    *(
        (text, shape, operands, {"dtype": "bfloat16", "layout": _LAST}, "outer")
        for shape in ((1, 64, 41, 43), (1, 8, 33, 65))
        for text, operands in (
            ("sub(m) | mul(v) | add(b) | mul(w) | silu", [(shape[1], 1, 1)] * 4),
            (f"{_TRAINED} | silu", [(shape[1],)] * 2),
        )
    ),
    # Biases of short odd rows, which are read one by one, and so no more than once.
    (
        "add(p) | add(q) | softmax(-1)",
        (4, 3, 5, 49),
        [(3, 5, 49), (4, 1, 1, 49)],
        {"dtype": "bfloat16"},
        "row",
    ),
    # Stretches that few threads add up, and many.
    ("group_norm(2, w, b) | silu", (5, 64, 8, 8), [(64,)] * 2, {}, "row"),
    ("group_norm(2, w, b) | silu", (5, 64, 8, 8), [(64,)] * 2, {"dtype": "bfloat16"}, "row"),
    ("group_norm(4, w, b) | silu", (5, 24, 15, 16), [(24,)] * 2, {}, "row"),
    # Half as many windows side by side as lines of twice the size would have.
    ("silu | max_pool2d(2) | mul(s)", (3, 5, 6, 12), [()], {"dtype": "bfloat16"}, "window"),
    ("silu | avg_pool2d(2) | mean((2, 3))", (3, 5, 8, 28), [], {"dtype": "bfloat16"}, "window"),
    ("group_norm(2, weight, bias) | gelu", (3, 6, 5, 7), [(6,), (6,)], {}, "row"),
    (
        "group_norm(2, weight, bias) | gelu",
        (3, 6, 5, 7),
        [(6,), (6,)],
        {"layout": "channels_last"},
        "row",
    ),
    # Rows that fall into stretches: edges between packs and within; read by teams, some in each
    # block, and one over several.
    ("add_channel | group_norm(2, w, b)", (3, 6, 8, 16), [(6,)] * 3, {}, "row finalise"),
    ("group_norm(2, w, b) | gelu", (3, 8, 7, 11), [(8,)] * 2, {}, "row finalise"),
    ("group_norm(2, w, b) | silu", (3, 6, 7, 11), [(6,)] * 2, {"dtype": "bfloat16"}, "row"),
    ("group_norm(3, w, b) | tanh", (2, 18, 65), [(18,)] * 2, {"dtype": "float64"}, "row"),
    ("group_norm(2, w, b) | mul_channel", (3, 4, 71, 142), [(4,)] * 3, {}, "row finalise"),
    ("gelu | group_norm(1, w, b)", (3, 40, 550), [(40,)] * 2, {}, "row finalise"),
    ("group_norm(1, w, b) | gelu", (2, 2, 9001), [(2,)] * 2, {}, "row finalise"),
    # Gradients of such rows by teams: sums known before the row's and behind, of stretches that are
    # no whole packs, of short ones, and where shared memory has no room for three rows.
    ("add_channel | group_norm(2, w, b) | silu", (3, 6, 56, 60), [(6,)] * 3, {}, "row finalise"),
    ("group_norm(1, w, b) | relu", (7, 2, 71, 142), [(2,)] * 2, {}, "row finalise"),
    ("group_norm(2, w, b) | silu", (2, 32, 24, 24), [(32,)] * 2, {"processors": 40}, "row"),
    # Groups of groups, whose rows fall into parts of parts.
    ("group_norm(4, w, b) | gelu | group_norm(2, v, c)", (3, 8, 5120), [(8,)] * 4, {}, "row"),
    ("mul_channel | group_norm(2, w, b)", (3, 4, 64, 80), [(4,)] * 3, _LITTLE_ROOM, "row finalise"),
    (
        "layernorm(normalized_shape=(3, 5, 20)) | mul(w)",
        (4, 3, 5, 20),
        [(3, 1, 1)],
        {},
        "row finalise",
    ),
    ("tanh | batch_norm(weight=w, bias=b, training=True)", (4, 6, 9), [(6,), (6,)], {}, "inner"),
    ("batch_norm(weight=w, bias=b, training=True)", (50, 24), [(24,), (24,)], {}, "column"),
    ("instance_norm | div(2)", (3, 6, 9, 11), [], {}, "row"),
    ("rms_norm(weight) | silu | mul(o)", (9, 64), [(64,), (9, 64)], {}, "row"),
    ("normalize", (3, 19, 35), [], {}, "column"),
    # Gradients that go to what equals a maximum, which another program found.
    ("gelu | amax(1, True) | mul(2)", (2, 40, 6, 8), [], {}, "column"),
    ("gelu | amax(-1, True) | mul(2)", (6, 40), [], {"dtype": "bfloat16"}, "row"),
    ("gelu | softmax(-1) | amax(-1, True) | mul(2)", (6, 40), [], {}, "row"),
    ("mul(w) | layernorm(w, b) | gelu | amax(-1, True)", (9, 64), [(64,)] * 2, {}, "row"),
    (
        "selu | rms_norm(eps=0.1) | logsigmoid | rms_norm(w, eps=0.1) | amax(1, True) | add(o)",
        (2, 5, 6, 6),
        [(6,), (2, 5, 6, 6)],
        {"dtype": "float64"},
        "inner column",
    ),
    ("mul(w) | layernorm(w, b) | gelu | amax(1, True)", (3, 9, 64), [(64,)] * 2, {}, "column"),
    ("gelu | group_norm(2) | amax(-1, True) | mul(2)", (3, 4, 5, 8), [], {}, "row"),
    # Masks: by element, by row and column, and what the winner of a window saw.
    ("masked_fill(m, 0.5) | gelu | mul_channel", (3, 5, 7, 8), [(3, 5, 7, 8), (5,)], {}, "inner"),
    ("keep(y) | gt(0) | logical_or(m) | where(y, 0.1)", (9, 33), [(33,)], {}, "pointwise"),
    ("masked_fill(n, -1) | sigmoid", (5, 6, 16), [(5, 1, 1)], {}, "pointwise"),
    ("masked_fill(m, 0) | layernorm(weight, bias)", (9, 64), [(9, 1), *[(64,)] * 2], {}, "row"),
    ("masked_fill(m, 0) | layernorm(weight, bias)", (9, 64), [(9, 64), *[(64,)] * 2], {}, "row"),
    ("layernorm(w) | masked_fill(m, 0)", (9, 64), [(64,), (9, 64)], {}, "row"),
    ("masked_fill(m, -1) | softmax(1)", (3, 19, 5), [(3, 19, 5)], {}, "column"),
    ("add(r) | masked_fill(m, 0) | gelu | layernorm", (5, 96), [(5, 96)] * 2, {}, "row"),
    ("masked_fill(m, -1) | max_pool2d(2)", (2, 3, 6, 8), [(2, 3, 6, 8)], {}, "window"),
    # Axes that a step joins or parts.
    ("tanh | flatten(1) | layernorm(weight, bias)", (9, 5, 13), [(65,)] * 2, {}, "row"),
    ("unflatten(1, (3, -1)) | softmax(2) | mul(w)", (2, 12, 35), [(4, 1)], {}, "column"),
    ("max_pool2d(2) | flatten(1) | add(b)", (2, 3, 6, 8), [(36,)], {}, "window"),
    ("reshape(6, -1) | logsumexp(1) | gelu", (3, 4, 33), [], {}, "row"),
    # What rows have of their own, but share with others.
    ("add(b) | group_norm(4, w, v) | gelu", (7, 64), [(64,)] * 3, {}, "row"),
    ("add(b) | group_norm(2, w, v)", (7, 128), [(128,)] * 3, {"dtype": "bfloat16"}, "row"),
    # All rows of a thread are of the same group, whose gradients it adds up.
    ("group_norm(6, w, v) | gelu", (7, 96), [(96,)] * 2, {}, "row"),
    ("group_norm(3, w, v)", (50, 24), [(24,)] * 2, {}, "row"),
    ("silu | group_norm(40, w, v)", (9, 1280), [(1280,)] * 2, {}, "row"),
    ("group_norm(5, w, v)", (30, 500), [(500,)] * 2, {"dtype": "bfloat16"}, "row"),
    # Or of the same sample.
    ("layernorm | mul(s) | add(t)", (3, 9, 64), [(3, 1, 64)] * 2, {}, "row"),
    ("layernorm | mul(s) | add(t)", (5, 70, 1152), [(5, 1, 1152)] * 2, {}, "row"),
    ("rms_norm | mul(s) | gelu", (4, 11, 96), [(4, 1, 96)], {"dtype": "bfloat16"}, "row"),
    ("add(m) | softmax(-1)", (3, 4, 5, 64), [(3, 1, 1, 64)], {}, "row"),
    ("add(m) | softmax(-1)", (3, 4, 5, 48), [(4, 5, 48)], {}, "row"),
    ("layernorm | mul(s)", (600, 2, 36), [(600, 1, 36)], {}, "row"),
    # Rows first, and what is left of them in the general way.
    ("softmax(1) | mul(w) | mean((2, 3))", (3, 40, 5, 6), [(40, 1, 1)], {}, "column inner"),
    ("max(1) | sum(1)", (3, 7, 5, 8), [], {}, "column"),
    ("tanh | sum(0) | max(0)", (3, 5, 8), [], {}, "column pointwise"),
    # Halves of an axis.
    (SWIGLU, (3, 5, 64), [], {}, "column"),
    (SWIGLU, (3, 5, 66), [], _IN_16, "column"),
    (SWIGLU, (3, 7, 32), [], _IN_16, "column"),
    (GLU, (3, 8, 5, 6), [], {}, "column"),
    (GLU, (3, 8, 5, 6), [], {"layout": "channels_last"}, "column"),
    (GLU, (3, 8, 5, 7), [], _IN_16, "column"),
    (SWIGLU.replace("-2, 1)", "-2, -1)"), (3, 5, 64), [], {}, "column"),
    ("gelu | select(1, -2)", (3, 8, 5, 6), [], {}, "pointwise"),
    ("keep(y) | gelu | select(1, -2, keepdim=True) | mul(y)", (3, 8, 5, 6), [], {}, "column"),
    (ROPE, (2, 3, 5, 16), [(2, 1), (5, 2, 8), (5, 2, 8)], {}, "column"),
    (ROPE, (2, 3, 5, 32), [(2, 1), (5, 2, 16), (5, 2, 16)], _IN_16, "column"),
    ("select(-1, 4) | tanh", (5, 70), [], {}, "pointwise"),
    ("keep(y) | select(-1, 2, keepdim=True) | tanh | mul(y)", (5, 70), [], {}, "row"),
    ("tanh | select(0, 1) | mul(w)", (3, 5, 8), [(8,)], {}, "pointwise"),
    ("layernorm(w, b) | select(1, -1)", (9, 5, 96), [(96,), (96,)], {}, "row"),
    ("add(r) | softmax(-1) | select(1, 2)", (9, 5, 64), [(9, 5, 64)], {}, "row"),
    ("masked_fill(m, 0.5) | softmax(-1) | select(1, 3)", (9, 5, 64), [(9, 5, 64)], {}, "row"),
    ("softmax(-1) | select(-1, 3, keepdim=True) | log", (9, 96), [], {}, "row"),
    # Places, and noise, that threads which stay in their columns find once.
    (
        "group_norm(2) | select(1, -1) | logsumexp((0, 1))",
        (2, 8, 15, 9),
        [],
        {"layout": _LAST},
        "outer",
    ),
    ("group_norm(2) | mul(2) | select(2, -1)", (2, 8, 15, 9), [], {"layout": _LAST}, "outer"),
    (
        "keep(a) | mean((2, 3), True) | dropout(0.5) | mul(a) | group_norm(4)",
        (2, 64, 24, 23),
        [],
        {"layout": _LAST, "dtype": "bfloat16"},
        "outer row",
    ),
    ("layernorm(w) | unflatten(-1, (4, -1)) | select(-2, 1)", (9, 96), [(96,)], {}, "row"),
    ("select(1, 20) | add(b)", (3, 40, 5, 6), [(5, 1)], {}, "pointwise"),
    # Several results.
    ("add(r) | give(h) | layernorm(w, b)", (9, 96), [(9, 96), (96,), (96,)], {}, "row"),
    ("add(r) | give(h) | layernorm(w, b)", (3, 20001), [(3, 20001), (20001,), (20001,)], {}, "row"),
    ("add(r) | give(h) | rms_norm(w) | gelu", (9, 1023), [(9, 1023), (1023,)], {}, "row"),
    ("add_channel | give(h) | softmax(1) | mul(2)", (2, 40, 5, 6), [(40,)], {}, "column"),
    ("mul(p) | give(h) | mean((2, 3)) | give(m) | tanh", (2, 3, 6, 7), [(7,)], {}, "row"),
    ("tanh | max_pool2d(2) | give(p) | mul_channel", (2, 3, 6, 8), [(3,)], {}, "window"),
    ("tanh | max_pool2d(3, 2, 1) | give(p) | mul_channel", (2, 3, 8, 9), [(3,)], {}, "slide"),
    ("add_channel | give(h) | gelu | give(k)", (2, 3, 4, 5), [(3,)], {}, "pointwise"),
    # What is left of rows lies otherwise, and so does what is smaller than the result.
    ("mean(2) | softmax(1)", (2, 3, 4, 3, 5), [], {}, "column"),
    ("max(1) | add(p)", (2, 5, 3, 1), [(4,)], {}, "column pointwise"),
    ("softmax(1) | add(p)", (2, 5, 3, 1), [(4,)], {}, "outer"),
    ("layernorm | max(0) | add(w)", (9, 16), [(3, 1)], {}, "inner column"),
    # Packs of eight, and of one.
    (_NORM, (70, 96), [(96,)] * 2, {"dtype": "bfloat16"}, "row"),
    (_NORM, (9, 1023), [(1023,)] * 2, {"dtype": "bfloat16"}, "row"),
    (_NORM, (5, 12288), [(12288,)] * 2, {"dtype": "bfloat16"}, "row"),
    (_NORM, (13, 16384), [(16384,)] * 2, {"dtype": "bfloat16"}, "row"),
    # Rows that begin anywhere, longer than a block has packs: what is beyond comes at their edges.
    (_NORM, (19, 12289), [(12289,)] * 2, {"dtype": "bfloat16"}, "row"),
    (_NORM, (9, 16387), [(16387,)] * 2, {"dtype": "bfloat16"}, "row"),
    (_NORM, (13, 12289), [(12289,)] * 2, {}, "row"),
    (f"{_NORM} | gelu", (11, 12290), [(12290,)] * 2, {"dtype": "bfloat16"}, "row"),
    (f"{_NORM} | gelu", (5, 16384), [(16384,)] * 2, {"dtype": "bfloat16"}, "row"),
    # Several tensors, and sums by column in shared memory beside the next row.
    (f"add(r) | {_NORM} | gelu", (5, 16384), [(5, 16384), *[(16384,)] * 2], _IN_16, "row"),
    (f"add(c) | add(r) | {_NORM}", (5, 9000), [(9000,), (5, 9000), *[(9000,)] * 2], _IN_16, "row"),
    (
        f"add(c) | add(r) | {_NORM}",
        (3, 32000),
        [(32000,), (3, 32000), *[(32000,)] * 2],
        _IN_16,
        "row",
    ),
    (_CHANNEL, (2, 300, 6, 6), [(300,)] * 2, _IN_16, "column"),
    (_CHAIN_A, (3, 5, 7, 9), [(5,)], {"dtype": "bfloat16"}, "pointwise inner"),
    ("tanh | elu | softplus | pow(1.5)", (3, 5, 7, 9), [], {"dtype": "bfloat16"}, "pointwise"),
    ("add(b) | gelu", (333, 64), [(64,)], {"dtype": "bfloat16"}, "outer"),
    (_POOL, (2, 8, 6, 32), [(8,)], {"dtype": "bfloat16"}, "window"),
    # Norms that are pooled: statistics over elements as they lie, by column, and window by window.
    (_POOLED_NORM, (3, 6, 8, 12), [(6,)] * 2, {}, "inner window"),
    (_POOLED_NORM, (3, 6, 8, 12), [(6,)] * 2, {"dtype": "bfloat16"}, "inner window"),
    (_POOLED_NORM, (3, 8, 6, 4), [(8,)] * 2, {"layout": _LAST}, "outer window"),
    ("group_norm(2, w, b) | avg_pool2d(2)", (2, 8, 6, 4), [(8,)] * 2, {}, "inner window"),
    ("instance_norm | avg_pool2d(2)", (2, 8, 6, 4), [], {"layout": _LAST}, "window outer"),
    ("tanh | instance_norm | relu | instance_norm | max_pool1d(3)", (2, 5, 12), [], {}, "inner"),
    # The same where windows share elements: those are summed as they lie.
    (_STEM, (3, 6, 9, 13), [(6,)] * 2, {}, "inner slide cover"),
    (_STEM, (3, 6, 9, 13), [(6,)] * 2, {"dtype": "bfloat16"}, "inner slide cover"),
    (_STEM, (3, 8, 7, 4), [(8,)] * 2, {"layout": _LAST}, "outer slide cover"),
    (_POOLED_NORM, (3, 6, 9, 13), [(6,)] * 2, {}, "inner slide cover"),
    ("group_norm(2, w, b) | silu | avg_pool2d(3, 2, 1)", (2, 8, 6, 5), [(8,)] * 2, {}, "cover"),
    ("gelu | group_norm(2) | avg_pool2d(3, 2)", (2, 8, 6, 5), [], {"layout": _LAST}, "cover"),
    ("instance_norm | relu | instance_norm | max_pool1d(3, 2)", (2, 5, 12), [], {}, "cover"),
    # Several windows a thread, where lines are whole packs and have a window for each stride.
    (_STEM, (3, 6, 8, 16), [(6,)] * 2, {}, "inner slide cover"),
    (_STEM, (3, 6, 8, 16), [(6,)] * 2, {"dtype": "bfloat16"}, "inner slide cover"),
    # Sums over all rows, and over those that are alike.
    ("add(p) | layernorm(w, b)", (6, 7, 96), [(7, 96), (96,), (96,)], {}, "row outer"),
    ("add(p) | layernorm(w, b)", (70, 3, 128), [(3, 128), (128,), (128,)], _IN_16, "row outer"),
    ("layernorm(w, b) | mul(s)", (3, 40, 96), [(96,), (96,), (3, 1, 96)], {}, "row outer"),
    ("rms_norm(w) | mul(s) | add(t)", (3, 50, 5), [(5,), (3, 1, 5), (3, 1, 5)], {}, "row outer"),
    # What one kernel has written is read by the next.
    (f"{_TRAINED} | add(r) | relu", (2, 5, 7, 15), [(5,), (5,), (2, 5, 7, 15)], {}, "inner"),
    (f"{_TRAINED} | add(r) | relu", (2, 6, 5, 7), [(6,), (6,), (2, 6, 5, 7)], _IN_16, "inner"),
    ("add(r) | softmax(-1)", (3, 4, 5, 33), [(4, 1, 33)], {"layout": _LAST}, "column"),
    # Two passes, the first of which writes what the second would read.
    (
        "rms_norm | mul(s) | batch_norm(weight=w, training=True) | sum(2, True) | add(t)",
        (2, 3, 4, 5),
        [(2, 3, 4, 5), (3,), (2, 3, 4, 5)],
        {},
        "inner",
    ),
    (
        "avg_pool3d((1, 2, 3)) | mul(s)",
        (1, 2, 3, 4, 7),
        [(2, 2, 1, 1, 1)],
        {"layout": _LAST},
        "window",
    ),
    # Maxima over more than rows.
    ("group_norm(8, w, b) | min(1, keepdim=True)", (6, 128), [(128,), (128,)], {}, "row"),
    ("layernorm(w, b) | amax((1, 2))", (3, 9, 72), [(72,), (72,)], _IN_16, "row"),
    (
        "layernorm(w, b) | keep(y) | amax((1, 2), True) | rdiv(y)",
        (3, 9, 72),
        [(72,)] * 2,
        {},
        "row",
    ),
    # Rows of what reductions leave.
    ("mean(2, keepdim=True) | softmax(1) | tanh", (2, 5, 3, 70), [], {}, "column"),
    (
        "square | mean((2, 3), True) | keep(g) | mean(1, True) | rdiv(g)",
        (3, 5, 6, 8),
        [],
        {},
        "row",
    ),
    ("amin(2) | softmax(1)", (2, 5, 3, 12), [], _IN_16, "column"),
    ("softmax(-1) | log | sum(-1) | mean((0, 1, 2))", (2, 5, 3, 72), [], {}, "row"),
    # Sums of what is pooled; and averages that stand for all that was averaged.
    ("max_pool2d(2) | hardtanh | mean((2, 3), True) | tanh", (2, 5, 6, 16), [], {}, "window"),
    ("max_pool2d(2) | hardtanh | mean(3)", (2, 5, 6, 16), [], {"dtype": "bfloat16"}, "window"),
    ("mul(p) | max_pool2d(2) | mean((2, 3))", (2, 5, 6, 14), [(5, 1, 1)], {}, "window"),
    ("avg_pool2d(4) | sigmoid | sum((1, 2, 3))", (2, 5, 9, 8), [], {"dtype": "bfloat16"}, "window"),
    ("max_pool2d(2) | hardtanh | mean((2, 3))", (3, 24, 30, 34), [], {"layout": _LAST}, "window"),
    ("max_pool2d(2) | mean((2, 3)) | tanh", (3, 17, 6, 9), [], {"layout": _LAST}, "window"),
    ("mul(s) | avg_pool2d(2)", (3, 24, 30, 34), [(3, 24, 1, 1)], {"layout": _LAST}, "window"),
    ("avg_pool3d(2) | gelu | sum((3, 4))", (2, 8, 4, 6, 8), [], {"layout": _LAST}, "window"),
    (f"{_POOLED_NORM} | mean((2, 3))", (2, 5, 6, 16), [(5,)] * 2, {}, "inner window"),
    ("avg_pool2d(2) | clamp(0, 1) | mul(p)", (2, 5, 6, 8), [(5, 1, 1)], {}, "window"),
    ("relu | max_pool2d(3, 2, 1)", (2, 3, 7, 12), [], {}, "slide cover"),
    ("relu | max_pool2d(3, 2, 1) | add(r)", (2, 3, 7, 12), [(2, 3, 4, 6)], {}, "slide cover"),
    ("mul(w) | relu | max_pool2d(3, 1, 1)", (2, 3, 5, 8), [(5, 1)], {}, "slide cover"),
    ("mul(w) | avg_pool2d(3, 1, 1)", (2, 3, 5, 8), [(3, 5, 8)], {}, "slide cover"),
    (
        "add_channel | relu | avg_pool2d(3, 1, 1, count_include_pad=False) | mul(q)",
        (2, 3, 6, 8),
        [(3,), (8,)],
        {},
        "slide cover",
    ),
    ("max_pool2d(5, 1, 2) | tanh", (2, 3, 6, 8), [], {}, "slide cover"),
    ("max_pool2d(3, 1, 1)", (2, 3, 6, 8), [], {"dtype": "bfloat16"}, "slide cover"),
    ("avg_pool1d(3, 2, 1) | silu", (3, 5, 24), [], {}, "slide cover"),
    ("relu | max_pool3d(3, 2, 1)", (2, 2, 4, 5, 8), [], {}, "slide cover"),
    ("sigmoid | avg_pool3d((1, 3, 2), (1, 1, 2), (0, 1, 0))", (2, 2, 3, 4, 8), [], {}, "cover"),
    ("max_pool2d(3, 2, 1)", (2, 5, 8, 7), [], {"layout": "channels_last"}, "slide cover"),
    # Windows further apart than a pack is long.
    ("instance_norm | max_pool2d(4)", (2, 3, 9, 16), [], {"dtype": "float64"}, "cover"),
    ("instance_norm | max_pool2d(4)", (2, 3, 9, 16), [], {"dtype": "bfloat16"}, "cover"),
    # Rows with the windows across them: within a warp, over several, in several packs and one row.
    (_BUNDLED, (2, 3, 4, 4, 8), [(8,), (8,), ()], {}, "bundle"),
    (_BUNDLED, (2, 3, 4, 4, 64), [(64,), (64,), ()], {"dtype": "bfloat16"}, "bundle"),
    ("layernorm(w, b) | avg_pool2d(2)", (2, 3, 4, 400), [(400,)] * 2, {}, "bundle"),
    ("layernorm(w, b) | max_pool2d(2)", (2, 3, 4, 1000), [(1000,)] * 2, {}, "bundle"),
    ("layernorm(w) | gelu | avg_pool1d(2)", (3, 5, 36), [(36,)], {"dtype": "float64"}, "bundle"),
    ("softmax(1) | max_pool2d(2)", (2, 8, 6, 10), [], {"layout": _LAST}, "bundle"),
    (
        "rms_norm(w) | silu | avg_pool2d((4, 2)) | add(r) | mul(q)",
        (2, 3, 8, 36),
        [(36,), (2, 3, 2, 18), (18,)],
        {},
        "bundle",
    ),
    ("masked_fill(m, 1) | layernorm | max_pool2d(2)", (2, 3, 6, 20), [(2, 3, 6, 20)], {}, "bundle"),
    ("mul(p) | log_softmax(-1) | avg_pool2d(2)", (2, 3, 6, 20), [(2, 3, 1, 1)], {}, "bundle"),
    (
        "keep(y) | mean(-1, True) | mul(s) | rsub(y) | avg_pool2d(2)",
        (2, 3, 4, 16),
        [()],
        {},
        "bundle",
    ),
    (
        "log_softmax(-1) | clamp(-1, 1) | avg_pool2d(2)",
        (1, 2, 4, 8),
        [],
        {"dtype": "bfloat16"},
        "bundle",
    ),
    # The same where rows are strided, in several warps.
    (
        "layernorm(w, b, axis=1) | gelu | avg_pool2d(2) | mul_channel(p)",
        (2, 20, 6, 16),
        [(20,)] * 3,
        {},
        "bundle",
    ),
    ("softmax(1) | max_pool2d(2) | mul(s)", (2, 100, 6, 16), [()], {}, "bundle"),
    ("mul_channel(p) | softmax(1) | avg_pool2d((2, 1))", (2, 8, 6, 12), [(8,)], {}, "bundle"),
    # Integers of one place along a row, beside all of them, of an outer axis, and of two places.
    (f"{_OF_IDS} | select(-1, 0, True) | sub(k) | mul(y)", (6, 9), [(6, 9)], _WHOLE, "pointwise"),
    (f"{_OF_IDS} | select(0, -1, True) | sub(k) | mul(y)", (6, 9), [(6, 9)], _WHOLE, "pointwise"),
    (f"{_OF_IDS} | select(0, 1) | mul(y)", (6, 9), [(6, 9)], _WHOLE, "pointwise"),
    (
        f"{_OF_IDS} | select(-1, 1, True) | keep(z) | recall(k) | select(-1, 2, True) | sub(z)"
        " | mul(y)",
        (6, 9),
        [(6, 9)],
        _WHOLE,
        "",
    ),
    # Rows of what windows leave: several bundles, some beyond the last, and channels beyond a row.
    ("max_pool3d(2) | logsumexp(1, True) | relu", (2, 20, 4, 4, 8), [], {}, "bundle window"),
    (
        "mul(r) | avg_pool2d(2) | layernorm(w, b, axis=1) | gelu | mul_channel(p)",
        (3, 37, 6, 8),
        [(3, 37, 6, 8), *[(37,)] * 3],
        {},
        "bundle",
    ),
    ("max_pool2d(2) | softmax(1)", (2, 70, 4, 16), [], {"dtype": "bfloat16"}, "bundle"),
    # Not of eight bytes, whose sums are found window by window.
    (
        "rsub(p) | avg_pool1d(4) | mul(r) | clamp(-1, 1) | sum(1) | leaky_relu(0.2)",
        (1, 20, 128),
        [(1, 20, 128), (1, 1, 1)],
        {"dtype": "float64", "processors": 2},
        "window",
    ),
    ("gelu | max_pool2d(2) | log_softmax(1) | mul(s)", (2, 9, 6, 12), [()], {}, "bundle"),
    # Rows so many and so short that a block takes several, and some are left over.
    ("batch_norm(weight=w, bias=b, training=True) | tanh", (41, 110, 6), [(110,)] * 2, {}, "inner"),
    ("var((0, 2))", (63, 134, 9), [], {"dtype": "bfloat16"}, "inner"),
    # Numbers of columns beside rows of two bytes, in shared memory in packs twice as wide.
    (
        "batch_norm(weight=w, bias=b, training=True) | softmax(-1)",
        (48, 130),
        [(130,)] * 2,
        {"dtype": "bfloat16", "has_gradients": False, "processors": 24},
        "row outer",
    ),
    # Sums down the columns of what windows leave, element by element.
    ("sub(p) | abs | avg_pool2d(2)", (200, 40, 4), [(40, 1)], {}, "window inner"),
    ("mul(p) | gelu | max_pool2d(2)", (600, 24, 6), [(1, 6)], {}, "window outer"),
    # Strided rows of two bytes, of which a thread has sixteen packs, some beyond the row's end.
    (_CHANNEL, (3, 96, 6, 10), [(96,)] * 2, _IN_16, "column"),
    (f"{_CHANNEL} | gelu", (2, 70, 3, 4), [(70,)] * 2, _IN_16, "column"),
    ("softmax(1)", (3, 200, 5, 8), [], {"dtype": "float16"}, "column"),
    ("rms_norm(w, axis=1)", (2, 509, 4, 4), [(509,)], _IN_16, "column"),
    # Over samples and all their positions, of what each sample's leave; with more than one such.
    (
        "add(b) | add(t) | silu",
        (3, 40, 5, 7),
        [(40, 1, 1), (3, 40, 1, 1)],
        {"layout": "channels_last"},
        "outer finalise",
    ),
    (
        "mul(s) | add(p) | add(b) | gelu",
        (5, 7, 24),
        [(5, 1, 24), (7, 24), (24,)],
        {},
        "outer finalise",
    ),
    # Sums down columns in strips wider and narrower than usual, and of one narrow tensor alone.
    ("add(p)", (70, 3, 2100), [(3, 2100)], {}, "outer"),
    ("add(p)", (9, 3, 5000), [(3, 5000)], {"dtype": "bfloat16"}, "outer"),
    ("add(p) | relu", (70, 1500), [(1500,)], {"processors": 24}, "outer"),
    (_TRAINED, (3, 72, 40, 40), [(72,)] * 2, _LAST_NARROW, "outer"),
    # Groups of channels that a block has room for, and a team of blocks.
    ("gelu | group_norm(2, w, b)", (7, 8, 71, 142), [(8,)] * 2, {"processors": 24}, "row"),
    ("group_norm(2, w, b) | silu", (3, 8, 64, 70), [(8,)] * 2, {"dtype": "bfloat16"}, "row"),
    ("gelu | group_norm(2, w, b)", (3, 8, 142, 142), [(8,)] * 2, {"processors": 24}, "row"),
    # The mean and the variance in one pass, though the windows wait for the mean alone.
    (f"{_TRAINED} | avg_pool2d(2)", (4, 16, 8, 12), [(16,)] * 2, {}, "window"),
    (f"{_TRAINED} | avg_pool2d(2)", (4, 16, 8, 12), [(16,)] * 2, {"layout": _LAST}, "window"),
]


@pytest.mark.parametrize(
    ("chain", "shape", "operands", "more", "families"),
    CASES,
    ids=[f"{'-'.join(map(str, c[1]))} {c[0]} {' '.join(map(str, c[3].values()))}" for c in CASES],
)
def test_a_cuda_source_computes_what_torch_does(
    chain: str, shape: tuple[int, ...], operands: list, more: dict, families: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    done = run(chain, shape, operands, tmp_path, **more)
    for family in families.split():
        assert re.search(rf"^(\w+_)?{family}\b|^(forward|backward)_{family}", done.text, re.M)
    # Rounding of each of a few operations, relative to the largest value; a gradient that is a sum
    # of what nearly cancels is off by 2.3e-6 in one case, and eager's by 3.6e-6.
    of = {"float64": 1e-14, "float16": 2.0**-11, "bfloat16": 2.0**-8}
    tolerance = of.get(more.get("dtype"), 3e-6)
    for have, want in zip(done.results, done.expected, strict=True):
        error = (have.double() - want).abs().max() / (want.abs().max() + 0.1)
        assert error < tolerance


_LYING_WITH_GAPS = [
    (_CHAIN_A, (5, 16, 8, 13), [(16,)], {}),
    (_CHAIN_A, (5, 8, 6, 16), [(8,)], {"layout": _LAST}),
    (SWIGLU, (7, 128), [], _IN_16),
    (_NORM, (300, 64), [(64,)] * 2, {}),
    (_NORM, (9, 2, 1000), [(1000,)] * 2, {}),
    (_NORM, (9, 16, 1023), [(1023,)] * 2, {}),
    (_NORM, (16, 16, 65), [(65,)] * 2, _IN_16),
    ("add(p) | layernorm(weight, bias)", (5, 4, 768), [(4, 768), (768,), (768,)], {}),
    ("layernorm | mul(s) | add(t)", (3, 7, 768), [(3, 1, 768)] * 2, _IN_16),
    ("softmax(-1)", (3, 32000), [], {}),
    (_CHANNEL, (3, 96, 28, 28), [(96,)] * 2, {}),
    (_CHANNEL, (5, 16, 7, 7), [(16,)] * 2, {}),
    (_GROUPED, (3, 16, 8, 8), [(3, 16, 1, 1), (16,), (16,)], {}),
    (_POOLED_NORM, (4, 16, 8, 12), [(16,)] * 2, {}),
    (_BUNDLED, (2, 3, 4, 6, 64), [(64,), (64,), ()], {}),
    (_POOL, (3, 8, 6, 16), [(8,)], {}),
    ("gelu | mean((2, 3))", (5, 8, 16, 16), [], {}),
    ("mul(s) | silu", (7, 16, 7, 7), [(7, 16, 1, 1)], {}),
    # Gaps of a tensor's own among those between a dealt out row's runs.
    (f"{_TRAINED} | add(r) | relu", (5, 6, 8, 8), [(6,), (6,), (5, 6, 8, 8)], {}),
    (f"{_TRAINED} | relu", (3, 6, 80, 80), [(6,)] * 2, {}),
]


@pytest.mark.parametrize(
    ("chain", "shape", "operands", "more"),
    _LYING_WITH_GAPS,
    ids=[f"{'-'.join(map(str, c[1]))} {c[0]}" for c in _LYING_WITH_GAPS],
)
def test_tensors_may_have_gaps(
    chain: str, shape: tuple[int, ...], operands: list, more: dict, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    done = run(chain, shape, operands, tmp_path, has_gaps=True, **more)
    assert "Pitched<" in done.text
    tolerance = {"bfloat16": 2.0**-8}.get(more.get("dtype"), 3e-6)
    for have, want in zip(done.results, done.expected, strict=True):
        assert (have.double() - want).abs().max() / (want.abs().max() + 0.1) < tolerance


_DEALT_OUT = [
    (f"{_TRAINED} | relu", (4, 6, 4, 8), [(6,)] * 2, {}),
    (f"{_TRAINED} | gelu", (3, 5, 64), [(5,)] * 2, {"dtype": "float64"}),
    # Packs of 8 bytes, where runs have no whole ones of 16.
    (f"{_TRAINED} | relu", (9, 5, 14, 14), [(5,)] * 2, _IN_16),
    (_SPREAD.format("(0, 2, 3), keepdim=True"), (4, 7, 8, 12), [], {}),
    (f"{_TRAINED} | add(r) | relu", (5, 7, 24, 40), [(7,), (7,), (5, 7, 24, 40)], {}),
    # One block as large as can be, and teams of blocks.
    (f"{_TRAINED} | relu", (3, 6, 80, 80), [(6,)] * 2, {}),
    (f"{_TRAINED} | relu", (3, 11, 80, 80), [(11,)] * 2, {"dtype": "bfloat16", "processors": 12}),
    (f"{_TRAINED} | relu", (5, 3, 64, 64), [(3,)] * 2, {"processors": 24}),
    (
        f"{_TRAINED} | add(r) | relu",
        (5, 3, 64, 64),
        [(3,), (3,), (5, 3, 64, 64)],
        {"processors": 24},
    ),
    (
        f"{_TRAINED} | add(r) | relu",
        (7, 3, 64, 60),
        [(3,), (3,), (7, 3, 64, 60)],
        {"dtype": "bfloat16", "processors": 24},
    ),
]


@pytest.mark.parametrize(
    ("chain", "shape", "operands", "more"),
    _DEALT_OUT,
    ids=[f"{'-'.join(map(str, c[1]))} {c[0]} {' '.join(map(str, c[3]))}" for c in _DEALT_OUT],
)
def test_rows_may_be_dealt_out_over_memory(
    chain: str, shape: tuple[int, ...], operands: list, more: dict, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    done = run(chain, shape, operands, tmp_path, **more)
    assert "Place base{" in done.text
    # As above: a few roundings, by the largest value.
    tolerance = {"float64": 1e-14, "bfloat16": 2.0**-8}.get(more.get("dtype"), 3e-6)
    for have, want in zip(done.results, done.expected, strict=True):
        assert (have.double() - want).abs().max() / (want.abs().max() + 0.1) < tolerance


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float64"])
def test_a_quantised_end_has_the_bits_of_torch(dtype: str, kind: str, tmp_path: Path) -> None:
    text = f"mul(4) | quantize(scale, {dtype})"
    done = run(text, (5, 7, 33), [(7, 1)], tmp_path, dtype=kind)
    have, want = (t.double().nan_to_num(7e7) for t in (done.results[0], done.expected[0]))
    # In bf16, eager rounds the quotient before it is quantised.
    assert (have != want).double().mean() <= (0.3 if kind == "bfloat16" else 0.0)
    assert (have - want).abs().max() <= want.abs().max() * (0.25 if kind == "bfloat16" else 0.0)


@pytest.mark.parametrize(
    ("chain", "shape", "operands", "family"),
    [
        ("gt(0) | logical_and(m)", (5, 7, 33), [(33,)], "pointwise"),
        ("mul(p) | le(0.1)", (5, 7, 33), [(7, 1)], "pointwise"),
        ("softmax(-1) | ge(t)", (9, 64), [(9, 1)], "row"),
        ("softmax(1) | lt(0.2)", (2, 7, 5, 8), [], "column"),
        ("max_pool2d(2) | gt(0.5)", (2, 3, 6, 8), [], "window"),
        ("avg_pool2d(3, 1, 1) | le(t)", (2, 3, 6, 8), [(3, 1, 1)], "slide"),
        ("mean(1, True) | gt(0)", (2, 300, 5, 4), [], "column"),
    ],
)
def test_a_result_may_be_a_condition(
    chain: str, shape: tuple[int, ...], operands: list, family: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    done = run(chain, shape, operands, tmp_path)
    assert re.search(rf"^forward_{family}\(", done.text, re.M)
    assert done.results[0].dtype == torch.bool
    assert torch.equal(done.results[0], done.expected[0].bool())


@pytest.mark.parametrize("wanted", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float64"])
def test_a_cast_is_torchs(wanted: str, kind: str, tmp_path: Path) -> None:
    done = run(f"mul(3) | to({wanted}) | add(b)", (5, 7, 33), [(33,)], tmp_path, dtype=kind)
    epsilon = max(torch.finfo(getattr(torch, t)).eps for t in (wanted, kind))
    for have, expected in zip(done.results, done.expected, strict=True):
        error = (have.double() - expected.double()).abs().max() / expected.abs().max()
        assert error <= 2 * epsilon


@pytest.mark.parametrize(
    ("chain", "shape"), [("layernorm", (30, 9)), ("layernorm(axis=1)", (2, 9, 5))]
)
def test_a_constant_row_is_normalised_to_zero(
    chain: str, shape: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "randn", lambda *size, dtype: torch.full(*size, 7.1, dtype=dtype))
    done = run(chain, shape, [], tmp_path)
    assert torch.equal(done.results[0], torch.zeros(shape))


@pytest.mark.parametrize("size", [1e-40, 1e-20, 1.0, 1e37])
@pytest.mark.parametrize(
    ("chain", "shape"),
    [("normalize(1.0, -1, 0.0)", (30, 9)), ("normalize(1.0, 1, 0.0)", (2, 9, 5))],
)
def test_a_quotient_by_a_sum_is_right_where_its_inverse_would_overflow(
    chain: str, shape: tuple[int, ...], size: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "randn", lambda *size_, dtype: torch.full(*size_, size, dtype=dtype))
    done = run(chain, shape, [], tmp_path)
    assert "inverse" in done.text
    torch.testing.assert_close(done.results[0], torch.full(shape, 1 / 9), rtol=1e-6, atol=0)


@pytest.mark.parametrize("chain", ["max_pool2d(3, 2, 1)", "relu | max_pool2d(3, 2, 1)"])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("shape", [(2, 8, 6, 16), (1, 5, 7, 9)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_windows_with_ties_infinities_and_nan_have_torchs_winners(
    chain: str, shape: tuple[int, ...], dtype: str, layout: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    values = torch.tensor([1.0, 1.0, 0.0, torch.nan, -torch.inf, torch.inf, 2.0])
    odds = torch.tensor([4.0, 4.0, 4.0, 0.3, 6.0, 0.3, 4.0])
    drawn = torch.multinomial(odds, math.prod(shape), replacement=True)
    done = run(chain, shape, [], tmp_path, dtype=dtype, layout=layout, x=values[drawn].view(shape))
    # Values are exact; a gradient is a sum of up to four shares, rounded once.
    tolerance = {"float32": 1e-6, "bfloat16": 2.0**-8}[dtype]
    for have, want in zip(done.results, done.expected, strict=True):
        close = {"rtol": tolerance, "atol": tolerance, "equal_nan": True}
        torch.testing.assert_close(have.double(), want, **close)


_LARGEST = (
    "softmax({0})",
    "log_softmax({0})",
    "logsumexp({0}, True) | rsub(r)",
    "keep(y) | amax({0}, True) | rsub(y)",
    "max({0}, True) | mul(r)",
)


@pytest.mark.parametrize("chain", _LARGEST)
@pytest.mark.parametrize(
    ("length", "dtype", "family"),
    [
        (9, "float32", "row"),
        (300, "bfloat16", "row"),
        (20000, "float32", "row"),
        (4002, "float64", "row"),
        (300, "float32", "column"),
    ],
)
def test_a_largest_number_is_torchs_where_there_are_ties_infinities_and_nan(
    chain: str, length: int, dtype: str, family: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, length).bfloat16()
    x[0, [1, length // 2, -1]] = 9.0  # ties, far apart
    x[1, ::3] = -torch.inf
    x[2] = -torch.inf
    x[3, [length // 3, -2]] = torch.nan
    x[4, -1] = torch.inf
    if family == "column":
        x = x.T
    text = chain.format(-1 if family == "row" else 0)
    operands = [tuple(x.shape)] * text.count("(r)")
    done = run(text, tuple(x.shape), operands, tmp_path, dtype=dtype, x=x)
    assert re.search(rf"^backward_{family}\(|^forward_{family}\(", done.text, re.M)
    tolerance = {"float64": 1e-13, "bfloat16": 2.0**-7}.get(dtype, 2e-6)
    # A softmax of a long row is small; a sum along a row loses digits where its terms cancel.
    atol = tolerance * (0.01 if "softmax" in chain else 10)
    for have, want in zip(done.results, done.expected, strict=True):
        torch.testing.assert_close(have.double(), want, rtol=tolerance, atol=atol, equal_nan=True)


@pytest.mark.parametrize("share", range(4))
def test_random_chains_compute_what_torch_does(share: int, tmp_path: Path) -> None:
    done = []

    def check(case) -> None:
        assume(is_accepted(case) and 0 not in case.x and len(segments(dsl.parse(case.text))) == 1)
        torch.manual_seed(3)
        shapes = [shape for _, shape in case.operands]
        found = run(case.text, case.x, shapes, tmp_path / str(len(done)), dtype="float64")
        for have, want in zip(found.results, found.expected, strict=True):
            torch.testing.assert_close(have, want, rtol=1e-9, atol=1e-9)
        done.append(case.text)

    settings(
        max_examples=8,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )(seed(share)(given(case=chains())(check)))()
    assert len(done) >= 4


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        # A barrier that some threads miss.
        (
            "if (threadIdx.x < 7) __syncthreads(); while (threadIdx.x == 7) emulation::yield();",
            "wait for others",
        ),
        # Twice the 64 bytes that are asked for, and no more than those.
        ("emulation::room[threadIdx.x / 4] = uint4();", "written beyond the bytes asked for (64)"),
        ("emulation::room[threadIdx.x / 8] = uint4();", ""),
    ],
    ids=["a barrier", "beyond", "within"],
)
def test_what_a_kernel_may_not_do_is_noticed(body: str, complaint: str, tmp_path: Path) -> None:
    text = f"""
#include <cuda_runtime.h>
__global__ void does() {{ {body} }}
int main() {{
  void* stream = nullptr;
  does<<<1, 32, 64, stream>>>();
}}
"""
    (tmp_path / "does.cpp").write_text(translated(text))
    compile_with_runtime(tmp_path / "does.cpp", tmp_path / "does")
    said = subprocess.run([tmp_path / "does"], capture_output=True, text=True)
    assert said.returncode == (3 if complaint else 0)
    assert complaint in said.stderr
