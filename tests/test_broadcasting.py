"""Tensors of any shapes that broadcast, x itself included: values, and gradients reduced over
exactly the axes that were broadcast.
"""

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from numeric import cotangent_for, outcome

import fusegen

# What people broadcast: (x, the operands).
CASES = {
    "by sample": ((4, 3, 5, 6), [(4, 1, 1, 1)]),
    "by channel": ((4, 3, 5, 6), [(3, 1, 1)]),
    "by row": ((4, 3, 5, 6), [(5, 1)]),
    "by column": ((4, 3, 5, 6), [(6,)]),
    "by position": ((4, 3, 5, 6), [(5, 6)]),
    "by sample and channel": ((4, 3, 5, 6), [(4, 3, 1, 1)]),
    "by sample and position": ((4, 3, 5, 6), [(4, 1, 5, 6)]),
    "by sample and column": ((4, 3, 5, 6), [(4, 1, 1, 6)]),
    "by channel and column": ((4, 3, 5, 6), [(3, 1, 6)]),
    "a number": ((4, 3, 5, 6), [()]),
    "one value of full rank": ((4, 3, 5, 6), [(1, 1, 1, 1)]),
    "of full size": ((4, 3, 5, 6), [(4, 3, 5, 6)]),
    "two at once": ((4, 3, 5, 6), [(4, 1, 1, 1), (5, 6)]),
    "x by channel": ((3, 1, 1), [(4, 3, 5, 6)]),
    "x by sample": ((4, 1, 1, 1), [(4, 3, 5, 6)]),
    "x by column": ((6,), [(4, 3, 5, 6)]),
    "x a number": ((), [(4, 3, 5, 6)]),
    "x one value of full rank": ((1, 1), [(4, 3, 5, 6)]),
    "both ways": ((4, 1, 5, 1), [(3, 1, 6)]),
    "outer product": ((7, 1), [(1, 9)]),
    "widened twice": ((6,), [(5, 1), (4, 3, 1, 1)]),
    "both numbers": ((), [()]),
    "nothing along an axis": ((4, 0, 5), [(4, 1, 5)]),
    "nothing in x": ((0,), [(3, 1)]),
}
STEPS = ("mul({0})", "add({0}) | tanh", "sub({0}) | sigmoid", "maximum({0})", "div({0})")


def check(text, shapes, device="cpu", layouts=()):
    """Result, its layout, and all gradients against eager in fp64."""
    torch.manual_seed(11)
    tensors = [torch.randn(s, dtype=torch.float64, device=device) + 0.1 for s in shapes]
    for i, order in enumerate(layouts):
        tensors[i] = laid_out(tensors[i], order)
    tensors = [t.requires_grad_() for t in tensors]
    fused = fusegen.compile(text)
    ours, eager = outcome(fused, tensors), outcome(fused.reference, tensors)
    assert ours.result.shape == eager.result.shape
    for name, a, b in zip(ours.names, ours.tensors, eager.tensors, strict=True):
        torch.testing.assert_close(
            a, b, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{text} of {shapes}: {n}: {m}"
        )


def laid_out(tensor, order):
    """The same values with the axes in another order in memory."""
    back = sorted(range(tensor.dim()), key=order.__getitem__)
    return tensor.permute(order).contiguous().permute(back)


@pytest.mark.parametrize("case", CASES)
def test_a_shape_that_broadcasts_gives_what_eager_gives(case, device):
    x, operands = CASES[case]
    steps = [STEPS[i].format(f"t{i}") for i in range(len(operands))]
    check(" | ".join(steps), [x, *operands], device)
    check("add(0.5) | mul(t0) | gelu", [x, operands[0]], device)


@pytest.mark.parametrize("case", ["by sample", "by channel", "x by column", "both ways"])
def test_a_step_before_and_after_the_wider_tensor_is_right_too(case, device):
    x, operands = CASES[case]
    check("tanh | keep(y) | mul(t) | add(y) | sigmoid | mul(t)", [x, operands[0]], device)


@pytest.mark.parametrize("case", ["by sample", "by channel", "by row", "by column", "of full size"])
@pytest.mark.parametrize("order", [(0, 2, 3, 1), (3, 1, 2, 0), (1, 0, 2, 3)], ids=str)
def test_any_layout_broadcasts(case, order, device):
    x, operands = CASES[case]
    check("mul(t) | tanh", [x, operands[0]], device, [order])


def test_a_mask_by_which_x_is_widened(device):
    x = torch.randn(3, 1, dtype=torch.float64, device=device, requires_grad=True)
    mask = torch.rand(4, 3, 5, device=device) > 0.5
    fused = fusegen.compile("tanh | masked_fill(mask, 2)")
    ours, eager = outcome(fused, [x, mask]), outcome(fused.reference, [x, mask])
    torch.testing.assert_close(ours.result, eager.result)
    torch.testing.assert_close(ours.gradients[0], eager.gradients[0])


@st.composite
def broadcasts(draw):
    """Shapes of x and one to three operands, of rank 0 to 5, that broadcast in this order."""
    rank = draw(st.integers(0, 5))
    whole = [draw(st.sampled_from((1, 2, 3))) for _ in range(rank)]
    shapes = []
    for _ in range(draw(st.integers(2, 4))):
        kept = whole[draw(st.integers(0, rank)) :]
        shapes.append(tuple(n if draw(st.booleans()) else 1 for n in kept))
    texts = [draw(st.sampled_from(STEPS)).format(f"t{i}") for i in range(len(shapes) - 1)]
    # At times the running value is used again behind what widened it.
    if draw(st.booleans()):
        texts = ["tanh | keep(y)", *texts, "add(y)"]
    order = draw(st.permutations(range(len(shapes[0]))))
    return " | ".join(texts), shapes, order


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate, Phase.shrink],
)
@given(case=broadcasts())
def test_every_pattern_of_broadcasting_gives_what_eager_gives(case):
    text, shapes, order = case
    check(text, shapes, layouts=[order])


def test_the_gradient_of_a_broadcast_is_summed_along_its_axes_alone(device):
    x = torch.randn(4, 3, 5, dtype=torch.float64, device=device, requires_grad=True)
    row = torch.randn(3, 1, dtype=torch.float64, device=device, requires_grad=True)
    result = fusegen.compile("mul(row)")(x, row)
    cotangent = cotangent_for(result)
    d_x, d_row = torch.autograd.grad(result, (x, row), cotangent)
    torch.testing.assert_close(d_x, cotangent * row.detach())
    torch.testing.assert_close(d_row, (cotangent * x.detach()).sum((0, 2), keepdim=False)[:, None])


@pytest.mark.parametrize(
    ("shape", "operand"),
    [((4, 500, 70), (4, 1, 70)), ((3, 900, 300), (3, 1, 300)), ((2000, 513), (513,))],
)
def test_sums_of_many_columns_and_groups_are_merged_each_to_its_own(shape, operand, device):
    check("add(p) | sigmoid", [shape, operand], device)
