"""One small run of every kernel family, forward and backward, to be watched by compute-sanitizer.

compute-sanitizer --tool memcheck|racecheck|initcheck python tests/sanitized.py

All of them take minutes; `python tests/sanitized.py cuda 0 3` runs the first third.
"""

import sys

import torch

import fusegen
from fusegen.fitting import holds_labels

_TRAINED_NORM = "batch_norm(weight=weight, bias=bias, training=True)"
_ROTARY = (
    "keep(y) | unflatten(-1, (2, -1)) | keep(h) | select(-2, 0) | keep(a) | recall(h)"
    " | select(-2, 1) | neg | stack(a, dim=-2) | flatten(-2) | mul(sin) | keep(r) | recall(y)"
    " | mul(cos) | add(r)"
)
_GATE = (
    "unflatten(-1, (2, -1)) | keep(y) | select(-2, 0) | silu | keep(a) | recall(y)"
    " | select(-2, 1) | mul(a)"
)
_DISTANCE = (
    "keep(y) | operand(whole_q) | sub(whole_k) | mul(3) | keep(d) | abs | add(1) | mul(y)"
    " | add(d) | mul(0.1)"
)
# chain, the shape of x, the operands' shapes
FAMILIES = [
    ("leaky_relu(0.2) | add_channel | clamp(-1, 1) | gelu", (3, 5, 7, 9), [(5,)]),
    ("add_channel | gelu", (67, 33), [(33,)]),
    ("leaky_relu(0.2) | mul_channel | max_pool2d(2)", (2, 3, 5, 7), [(3,)]),
    ("leaky_relu(0.2) | mul_channel | max_pool2d(2)", (2, 8, 6, 16), [(8,)]),
    ("mul(gate) | max_pool2d(2)", (2, 3, 5, 7), [(7,)]),
    # Rows by warps, by blocks of several sizes, and one by one.
    ("layernorm(weight, bias) | gelu", (37, 128), [(128,), (128,)]),
    ("layernorm(weight, bias) | gelu", (37, 129), [(129,), (129,)]),
    ("layernorm(weight, bias) | gelu", (301, 65), [(65,), (65,)]),
    ("add(residual) | softmax(-1)", (333, 49), [(333, 49)]),
    # What some rows share: asked for by each, and kept by blocks that stay with such rows.
    ("add(p) | layernorm(weight, bias)", (5, 37, 768), [(37, 768), (768,), (768,)]),
    ("add(p) | softmax(-1)", (5, 37, 768), [(37, 768)]),
    ("layernorm | mul(s) | add(t)", (3, 37, 768), [(3, 1, 768), (3, 1, 768)]),
    # So many that a block takes two in turn.
    ("layernorm | mul(s) | add(t)", (3, 1367, 1024), [(3, 1, 1024), (3, 1, 1024)]),
    # Short runs, down columns; rows that have their gradients' sums; stretches that few threads add
    # up; a piece of pooled rows in four turns.
    ("add_channel | gelu", (33, 8, 7, 7), [(8,)]),
    (_TRAINED_NORM, (65, 8, 7, 7), [(8,), (8,)]),
    ("mul(s) | silu", (7, 5, 7, 7), [(7, 5, 1, 1)]),
    # Rows dealt out over memory: by warps, in one large block, and in several.
    (f"{_TRAINED_NORM} | relu", (5, 37, 8, 8), [(37,)] * 2),
    (f"{_TRAINED_NORM} | add(residual) | relu", (9, 5, 14, 14), [(5,), (5,), (9, 5, 14, 14)]),
    (f"{_TRAINED_NORM} | relu", (128, 140, 14, 14), [(140,)] * 2),
    (f"{_TRAINED_NORM} | add(residual) | relu", (9, 3, 64, 64), [(3,), (3,), (9, 3, 64, 64)]),
    # Elements down columns, where the last have two bytes.
    (f"{_TRAINED_NORM} | silu", (130, 24), [(24,)] * 2),
    ("sub(m) | mul(v) | add(b) | mul(w) | silu", (333, 1032), [(1032,)] * 4),
    # In pieces: down columns, element by element, rows, long rows, and rows between channels.
    (f"add(b) | {_GATE}", (333, 96), [(96,)]),
    (f"{_GATE} | rms_norm(weight)", (37, 256), [(128,)]),
    (f"{_GATE} | rms_norm(weight)", (1367, 2048), [(1024,)]),
    ("add(r) | silu | layernorm(w, b)", (1367, 1000), [(1367, 1000), (1000,), (1000,)]),
    (f"layernorm(weight, bias) | {_GATE}", (37, 8192), [(8192,)] * 2),
    (f"amax(0, keepdim=True) | {_GATE} | mean(-1)", (5, 7, 96), []),
    ("unflatten(-1, (3, 2, -1)) | select(2, 0) | rms_norm(weight)", (2, 37, 192), [(32,)]),
    # Side by side: along the axis that has been taken apart, of channels, and one by one.
    (_ROTARY, (2, 3, 37, 64), [(37, 64), (37, 64)]),
    (f"rms_norm(weight) | {_ROTARY}", (2, 3, 37, 64), [(64,), (37, 64), (37, 64)]),
    ("keep(y) | neg | stack(y, dim=1) | flatten(1, 2) | relu", (5, 9, 6, 6), []),
    ("stack(b, c, dim=-1) | softmax(-1)", (333, 7), [(333, 7), (333, 7)]),
    ("relu | mean((2, 3))", (9, 5, 7, 7), []),
    ("group_norm(2, weight, bias) | silu", (5, 64, 8, 8), [(64,), (64,)]),
    ("relu | max_pool2d(2) | mean((2, 3))", (2, 3, 120, 124), []),
    # Rows of what windows leave.
    ("max_pool3d(2) | logsumexp(1, keepdim=True) | relu", (3, 37, 4, 6, 8), []),
    ("relu | avg_pool2d(2) | layernorm(weight, bias, axis=1)", (3, 70, 6, 16), [(70,), (70,)]),
    # An affine map left to the sums; and of stretches that are whole packs long, before a norm.
    ("layernorm(weight, bias) | mean(1)", (5, 37, 768), [(768,), (768,)]),
    ("add(t) | group_norm(2, w, b) | silu", (3, 16, 8, 8), [(3, 16, 1, 1), (16,), (16,)]),
    ("add(t) | group_norm(2, w, b) | silu", (3, 16, 48, 50), [(3, 16, 1, 1), (16,), (16,)]),
    # What elements that lie apart have in common, ahead of them; sums of teams' rows in two passes.
    ("logsumexp(1, True) | relu", (2, 40, 5, 7), []),
    ("batch_norm(training=True) | gelu", (65, 33), []),
    ("layernorm | gelu | sum(-1)", (3, 70001), []),
    # Gradients that are the same for all windows.
    ("avg_pool2d(2) | mean((2, 3))", (2, 3, 5, 7), []),
    # What a row has in common, for sums that go down columns; few rows, and long columns.
    ("mul(0.5) | add(m) | softmax(-1)", (2, 3, 5, 197), [(3, 5, 197)]),
    ("add(p) | gelu", (8, 5, 333), [(5, 333)]),
    ("add(residual) | layernorm(weight, bias) | gelu", (5, 3000), [(5, 3000), (3000,), (3000,)]),
    ("layernorm(weight, bias)", (150, 8192), [(8192,), (8192,)]),
    ("layernorm(weight, bias)", (3, 12288), [(12288,), (12288,)]),
    # Three tensors in a row, whose columns are added up in shared memory.
    ("add(r) | layernorm(weight, bias) | gelu", (150, 12288), [(150, 12288), (12288,), (12288,)]),
    ("add(c) | add(r) | rms_norm(weight)", (150, 9000), [(9000,), (150, 9000), (9000,)]),
    # Of no whole packs, by blocks and by teams.
    ("layernorm(weight, bias) | gelu", (600, 1023), [(1023,), (1023,)]),
    ("layernorm(weight, bias)", (300, 8191), [(8191,), (8191,)]),
    ("layernorm(weight, bias)", (300, 12289), [(12289,), (12289,)]),
    ("layernorm(weight, bias)", (70, 40001), [(40001,), (40001,)]),
    # Shared by a team of blocks, and too long for one.
    ("layernorm(weight, bias) | gelu", (3, 20001), [(20001,), (20001,)]),
    ("layernorm(weight, bias)", (40, 65536), [(65536,), (65536,)]),
    ("layernorm | gelu | layernorm(weight)", (9, 20000), [(20000,)]),
    ("layernorm(weight, bias) | gelu", (2, 600001), [(600001,), (600001,)]),
    ("layernorm(weight, bias, axis=1)", (2, 19, 5, 7), [(19,), (19,)]),
    ("layernorm(weight, bias, axis=1)", (2, 45, 5, 7), [(45,), (45,)]),
    ("layernorm(weight, bias, axis=1) | gelu", (2, 200, 4, 9), [(200,), (200,)]),
    # The same, as long as their threads have packs: with threads beyond, and columns beside.
    ("layernorm(weight, bias, axis=1) | gelu", (2, 40, 5, 4), [(40,), (40,)]),
    ("layernorm(weight, bias, axis=1)", (3, 384, 3, 4), [(384,), (384,)]),
    ("softmax(1) | add_channel", (2, 208, 5, 1), [(208,)]),
    # Strided rows beside each other across samples, and places for more of them at the end.
    ("softmax(1) | add_channel", (5, 144, 7, 7), [(144,)]),
    ("gelu | softmax(1) | mean((2, 3))", (3, 16, 19, 29), []),
    ("layernorm(weight, bias) | mul_channel", (3, 5, 7, 24), [(24,), (24,), (5,)]),
    ("add(residual) | mul(gate)", (5, 6, 7), [(5, 6, 7), (6, 1)]),
    ("add(bias) | gelu", (600, 96), [(96,)]),
    # Maxima: of rows by warps, by a block and by a team, of strided rows, and too long for a team.
    ("softmax(-1) | mul(weight)", (37, 128), [(128,)]),
    ("gelu | log_softmax(-1)", (5, 3000), []),
    ("softmax(-1) | mul(weight)", (3, 20001), [(20001,)]),
    ("log_softmax(-1)", (3, 20001), []),
    ("softmax(-1)", (300, 20000), []),
    ("softmax(-1)", (140, 33001), []),
    ("log_softmax(-1)", (70, 53253), []),
    ("keep(y) | amax(-1, keepdim=True) | rsub(y)", (40, 65536), []),
    ("softmax(-1)", (2, 600001), []),
    ("softmax(1) | mul(0.5)", (4, 37, 6, 5), []),
    ("gelu | log_softmax(1) | add_channel", (2, 200, 4, 9), [(200,)]),
    ("group_norm(4, weight, bias) | silu", (3, 16, 9, 7), [(16,), (16,)]),
    ("add(bias) | group_norm(4, weight, bias_2)", (37, 64), [(64,), (64,), (64,)]),
    ("layernorm(weight) | amin(0)", (37, 64), [(64,)]),
    ("softmax(1) | mean((2, 3))", (5, 7, 3, 4), []),
    ("layernorm | mul(scale) | add(shift)", (3, 9, 64), [(3, 1, 64), (3, 1, 64)]),
    # What rows share: asked for before their sums, held with them, or kept from row to row.
    ("add(p) | layernorm(weight, bias)", (37, 64), [(64,), (64,), (64,)]),
    ("add(p) | add(r) | layernorm(weight, bias)", (37, 764), [(764,), (37, 764), (764,), (764,)]),
    (
        "add(p) | add(r) | layernorm(weight, bias)",
        (9, 4000),
        [(4000,), (9, 4000), (4000,), (4000,)],
    ),
    # Stretches of rows; and a team that holds in place what its rows are finished from.
    ("group_norm(4, weight, bias) | silu", (3, 16, 9, 11), [(16,), (16,)]),
    ("gelu | group_norm(2, weight, bias)", (3, 8, 71, 142), [(8,), (8,)]),
    ("add_channel | group_norm(2, w, b) | silu", (300, 6, 56, 60), [(6,)] * 3),
    ("group_norm(1, w, b) | relu", (300, 2, 71, 142), [(2,), (2,)]),
    ("gelu | group_norm(2, weight, bias)", (3, 8, 142, 142), [(8,), (8,)]),
    ("gelu | layernorm(weight)", (9, 40000), [(40000,)]),
    ("layernorm | gelu", (9, 40000), []),
    ("softmax(-1) | silu", (9, 65536), []),
    (f"{_TRAINED_NORM} | tanh", (41, 110, 6), [(110,), (110,)]),
    (f"{_TRAINED_NORM} | relu", (5, 6, 7, 8), [(6,), (6,)]),
    ("gelu | amax((2, 3))", (3, 5, 9, 7), []),
    # Norms that are pooled where windows fill their axes.
    (f"{_TRAINED_NORM} | relu | max_pool2d(2)", (3, 6, 8, 12), [(6,), (6,)]),
    ("group_norm(2, weight, bias) | avg_pool2d(2)", (2, 8, 6, 4), [(8,), (8,)]),
    (f"{_TRAINED_NORM} | relu | max_pool2d(3, 2, 1)", (3, 6, 9, 13), [(6,), (6,)]),
    ("group_norm(2, weight, bias) | silu | avg_pool2d(3, 2, 1)", (2, 8, 6, 5), [(8,), (8,)]),
    # Rows with the windows across them.
    ("add(s) | layernorm(w, b) | avg_pool3d(2) | gelu", (2, 3, 4, 6, 24), [(), (24,), (24,)]),
    ("layernorm(weight) | max_pool2d(2) | mul_channel", (3, 5, 6, 400), [(400,), (5,)]),
    ("layernorm(w, b, axis=1) | gelu | avg_pool2d(2)", (2, 40, 6, 20), [(40,), (40,)]),
    # Windows that overlap, or end before the chain does.
    ("gelu | max_pool2d(3, 2, 1) | mul_channel", (2, 5, 9, 11), [(5,)]),
    ("relu | avg_pool2d(3, 2, 1) | layernorm", (2, 5, 9, 11), []),
    ("adaptive_avg_pool2d(3) | sigmoid", (2, 5, 8, 10), []),
    ("max_pool1d(2, 1) | softmax(1)", (3, 5, 33), []),
    ("rms_norm(weight) | dropout(0.3) | add(residual)", (7, 130), [(130,), (7, 130)]),
    ("dropout2d(0.3) | prelu | minimum(gate)", (3, 5, 8, 9), [(5,), (8, 1)]),
    # Several results: of rows in a block, in a team, strided ones; of windows.
    ("add(r) | give(h) | layernorm(w, b)", (150, 8192), [(150, 8192), (8192,), (8192,)]),
    ("add(r) | give(h) | rms_norm(w)", (9, 20001), [(9, 20001), (20001,)]),
    ("add_channel | give(h) | softmax(1) | mul(2)", (2, 40, 5, 6), [(40,)]),
    ("tanh | max_pool2d(2) | give(p) | mul_channel", (2, 3, 6, 8), [(3,)]),
    # Halves of an axis, and what lies beside each of their elements.
    (
        "unflatten(-1, (2, -1)) | keep(y) | select(-2, 0) | silu | keep(a) | recall(y) | "
        "select(-2, 1) | mul(a)",
        (5, 7, 48),
        [],
    ),
    (
        "unflatten(-1, (2, -1)) | keep(y) | select(-2, 0, True) | mul(s) | keep(a) | recall(y) | "
        "mul(c) | add(a)",
        (3, 5, 7, 32),
        [(7, 2, 16), (7, 2, 16)],
    ),
    # Short runs far apart: by column first.
    ("mul(p) | var((0, 2))", (90, 3, 4), [(4,)]),
    # Of which one place along an axis is read, in gaps and not.
    ("layernorm(weight, bias) | select(1, -1)", (9, 5, 96), [(96,), (96,)]),
    ("add(p) | gelu | select(1, 2)", (3, 4, 40), [(3, 4, 40)]),
    # What is spread over more axes than are reduced.
    ("layernorm(w, b) | select(1, 0)", (9, 5, 96), [(96,), (96,)]),
    ("layernorm | add(p)", (5, 96), [(7, 5, 96)]),
    # Noise that is drawn where rows use it: side by side, by a block, by a team.
    (
        "add(b) | dropout(0.1) | add(r) | layernorm(w, d)",
        (37, 768),
        [(768,), (37, 768), *[(768,)] * 2],
    ),
    ("softmax(-1) | dropout(0.1)", (75, 129), []),
    ("softmax(-1) | dropout(0.1)", (9, 4100), []),
    ("layernorm(w, b) | dropout(0.3)", (9, 20001), [(20001,)] * 2),
    # What strided rows share, asked for early.
    ("layernorm(w, b) | mul(s) | sum(1)", (5, 37, 96), [(96,), (96,), (5, 37, 1)]),
    ("mul(s) | sum(1)", (5, 197, 768), [(5, 197, 1)]),
    # Losses over a vocabulary.
    ("log_softmax(-1) | mul(t) | sum(-1)", (9, 32000), [(9, 32000)]),
    ("softmax(-1) | mul(t) | sum(-1)", (40, 3001), [(40, 3001)]),
    ("log_softmax(-1) | keep(l) | exp | mul(l) | sum(-1) | neg", (9, 32000), []),
    # Longer than shared memory has room for, and what is wanted late; of more rows than blocks.
    ("log_softmax(-1)", (140, 65536), []),
    ("log_softmax(-1)", (140, 60001), []),
    ("add(r) | softmax(-1)", (140, 32000), [(140, 32000)]),
    ("log_softmax(-1) | mul(t) | sum(-1)", (140, 32000), [(140, 32000)]),
    ("log_softmax(-1) | mul(t) | sum(-1)", (140, 50304), [(140, 50304)]),
    ("log_softmax(-1)", (140, 128256), []),
    ("log_softmax(-1) | mul(t) | sum(-1)", (140, 65536), [(140, 65536)]),
    ("softmax(-1) | mul(t)", (140, 128256), [(140, 128256)]),
    ("softmax(-1) | mul(t)", (140, 65536), [(140, 65536)]),
    # What is computed of long rows before they are reduced, also beside what they share, in a block
    # and in several; sums over all rows of those; and the longest, which only such blocks hold.
    ("gelu | softmax(-1)", (140, 20000), []),
    ("div(30) | tanh | mul(30) | log_softmax(-1)", (70, 50304), []),
    ("add(b) | log_softmax(-1)", (140, 32000), [(32000,)]),
    ("instance_norm(weight=w, bias=b) | relu", (9, 5, 65536), [(5,)] * 2),
    ("layernorm | gelu | layernorm", (140, 20000), []),
    ("layernorm | relu", (6, 1 << 20), []),
    # Fewer elements a thread, where some would be none.
    (
        "add(b) | dropout(0.1) | add(r) | layernorm(w, c)",
        (37, 768),
        [(768,), (37, 768), *[(768,)] * 2],
    ),
    # Noise of each element, drawn behind what is asked for; sums down columns of what others leave.
    ("gelu | dropout(0.1)", (37, 130), []),
    ("mul(s) | add(p) | add(b) | gelu", (5, 37, 96), [(5, 1, 96), (37, 96), (96,)]),
    # Two threads a row, of a pack each where elements have two bytes.
    ("layernorm(weight, bias) | hardswish", (333, 16), [(16,), (16,)]),
]
# The same of an x whose channels are innermost.
CHANNELS_LAST = [
    ("add(b) | add(t) | silu", (5, 24, 9, 7), [(24, 1, 1), (5, 24, 1, 1)]),
    ("group_norm(4, weight, bias) | silu", (2, 8, 16, 12), [(8,), (8,)]),
    ("add_channel | group_norm(3, weight, shift)", (3, 9, 11, 13), [(9,), (9,), (9,)]),
    ("mul_channel | relu | max_pool2d(3, 2, 1) | add(r)", (2, 16, 7, 9), [(16,), (2, 16, 4, 5)]),
    ("add_channel | avg_pool2d(3, 1, 1)", (2, 5, 6, 7), [(5,)]),
    (f"{_TRAINED_NORM} | relu | max_pool2d(2)", (3, 16, 6, 4), [(16,), (16,)]),
    ("instance_norm | avg_pool2d(2)", (2, 8, 6, 4), []),
    (f"{_TRAINED_NORM} | relu | max_pool2d(3, 2, 1)", (3, 8, 7, 4), [(8,), (8,)]),
    ("softmax(1) | max_pool2d(2)", (3, 16, 6, 10), []),
    # Groups down columns, beside windows and rows.
    ("group_norm(4, weight, bias) | relu | max_pool2d(2)", (3, 16, 12, 10), [(16,), (16,)]),
    ("group_norm(4, weight, bias) | max_pool2d(3, 2, 1)", (3, 16, 11, 9), [(16,), (16,)]),
    ("group_norm(4, weight, bias) | silu | avg_pool2d(2)", (3, 16, 12, 10), [(16,), (16,)]),
    ("group_norm(4, weight, bias) | tanh | logsumexp(1)", (3, 16, 9, 7), [(16,), (16,)]),
    ("layernorm(axis=1) | group_norm(4)", (3, 16, 9, 7), []),
    ("group_norm(4, weight, bias) | softmax(1)", (3, 40, 9, 7), [(40,), (40,)]),
    # Columns whose samples have much of their own, in two bytes.
    (
        "mul(s) | add(t) | silu | mul(u) | add(w)",
        (3, 24, 9, 7),
        [(3, 24, 1, 1)] * 3 + [(24, 1, 1)],
    ),
]
# Losses of labels, which come in eight bytes and stand along rows or strided ones, and places.
WHOLE = [
    ("log_softmax(-1) | mul(p) | sum(-1) | neg | mean", (37, 515), [(37, 515)]),
    ("cross_entropy(t)", (37, 130), [(37,)]),
    ("cross_entropy(t)", (7, 20001), [(7,)]),
    ("cross_entropy(t, w, label_smoothing=0.1)", (3, 19, 7, 9), [(3, 7, 9), (19,)]),
    ("cross_entropy(t, reduction='none')", (2, 8, 6, 16), [(2, 6, 16)]),
    ("softmax(1) | keep(y) | argmax(1) | give(i) | recall(y) | amax(1)", (3, 24, 7, 9), []),
    ("argmin(-1)", (37, 1030), []),
    # Integers, which operands called whole are, alone and compared with one another.
    ("mul(whole) | add_channel | gelu", (3, 5, 7, 9), [(7, 9), (5,)]),
    ("add(whole) | layernorm(w)", (37, 1000), [(37, 1000), (1000,)]),
    ("add(whole) | softmax(1)", (3, 19, 7, 33), [(3, 19, 7, 33)]),
    ("mul(whole) | max_pool2d(2)", (2, 8, 6, 16), [(6, 16)]),
    (
        "keep(y) | operand(whole) | eq(whole_row) | keep(c) | recall(y) | masked_fill(c, 0.5)"
        " | gelu",
        (5, 7, 64, 33),
        [(5, 1, 64, 1), (33,)],
    ),
    (
        "keep(y) | operand(whole) | lt(whole_row) | keep(c) | recall(y) | masked_fill(c, -1e4)"
        " | softmax(-1)",
        (5, 7, 64, 64),
        [(5, 1, 64, 1), (5, 1, 1, 64)],
    ),
    # Rows turn by turn.
    ("cross_entropy(t, weight)", (300, 8195), [(300,), (8195,)]),
    ("add(b) | logsumexp(-1)", (1600, 9000), [(9000,)]),
    # Integers that are computed with: element by element, in rows and columns; and added up.
    (f"{_DISTANCE} | gelu", (67, 33), [(67, 33), (67, 1)]),
    (f"{_DISTANCE} | softmax(-1)", (37, 64), [(37, 1), (64,)]),
    (f"{_DISTANCE} | layernorm", (9, 1000), [(1000,), (9, 1)]),
    (f"{_DISTANCE} | softmax(1)", (3, 19, 7, 33), [(19, 1, 1), (7, 33)]),
    (f"{_DISTANCE} | sum(0)", (70, 96), [(70, 96), (96,)]),
    (
        "mul(whole_m) | sum(-1) | keep(s) | operand(whole_m) | abs | sum(-1) | clamp(1) | rdiv(s)",
        (9, 1000),
        [(9, 1000)],
    ),
    ("keep(y) | gt(0) | sum(1, True) | clamp(1) | rdiv(y)", (3, 19, 7, 33), []),
    # What places name along an axis, of rows and of strided ones.
    ("log_softmax(-1) | gather(-1, t)", (37, 130), [(37,)]),
    ("gather(1, t)", (3, 19, 7, 33), [(3, 7, 33)]),
    ("log_softmax(-1) | gather(-1, t)", (7, 20001), [(7,)]),
    # Integers that are results, places that are compared, and labels that are made.
    ("gt(0) | sum(-1)", (37, 130), []),
    ("gt(0) | to('int32') | sum(1)", (3, 19, 7, 33), []),
    ("gt(0) | to('int64') | sum", (333, 1032), []),
    ("mul(10) | to('int16') | mul(3)", (67, 33), []),
    ("argmax(-1) | eq(whole) | to('float32') | mean", (37, 130), [(37,)]),
    (
        "log_softmax(-1) | keep(y) | operand(whole) | clamp(0) | keep(l) | recall(y)"
        " | gather(-1, l)",
        (37, 130),
        [(37, 1)],
    ),
    (
        "keep(y) | operand(whole) | clamp(0, 2) | keep(l) | recall(y) | cross_entropy(l)",
        (37, 130),
        [(37,)],
    ),
]


def run(text, shape, operand_shapes, dtype, device, is_last=False):
    fused = fusegen.compile(text)
    tensors = [torch.randn(s, device=device, dtype=dtype) for s in (shape, *operand_shapes)]
    if is_last:
        tensors[0] = tensors[0].contiguous(memory_format=torch.channels_last)
    for i, name in enumerate(fused.chain.operands, start=1):
        if holds_labels(fused.chain, name):
            tensors[i] = torch.randint(shape[1], operand_shapes[i - 1], device=device)
        elif name.startswith("whole"):
            tensors[i] = torch.randint(-3, 4, operand_shapes[i - 1], device=device)
    tensors = [t.requires_grad_(t.is_floating_point()) for t in tensors]
    found = fused(*tensors)
    results = found if isinstance(found, tuple) else (found,)
    results = [r for r in results if r.requires_grad]
    if not results:
        return
    learning = [t for t in tensors if t.requires_grad]
    gradients = torch.autograd.grad(results, learning, [torch.randn_like(r) for r in results])
    with torch.no_grad():
        fused(*tensors)
    assert all(torch.isfinite(g).all() for g in gradients)


def main(device="cuda", share="0", shares="1"):
    families = [(*family, False) for family in FAMILIES]
    families += [(*family, True) for family in CHANNELS_LAST]
    families += [(*family, False) for family in WHOLE]
    for text, shape, operand_shapes, is_last in families[int(share) :: int(shares)]:
        for dtype in (torch.float32, torch.bfloat16):
            run(text, shape, operand_shapes, dtype, device, is_last=is_last)
    print(f"ran share {share} of {shares} of every family")


if __name__ == "__main__":
    main(*sys.argv[1:])
