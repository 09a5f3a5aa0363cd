"""Chains of the whole table at random, beside norms and reductions: their CUDA source is emitted.

No compiler is needed, and no GPU: what cannot be scheduled shows here.
"""

import random

import pytest
from test_numbers import EXAMPLES

import fusegen
from fusegen.describe import Situation, sources
from fusegen.errors import FusegenError

BESIDE = (
    *("layernorm", "layernorm(axis=1)", "rms_norm", "group_norm(3)", "instance_norm", "normalize"),
    *("batch_norm(training=True)", "softmax(-1)", "log_softmax(1)", "mean(1, keepdim=True)"),
    *("logsumexp(-1, keepdim=True)", "keep({0}) | amax(-1, keepdim=True) | rsub({0})"),
    "keep({0}) | sum((1, 2), keepdim=True) | rsub({0})",
)
SHAPES = ((2, 3, 4, 6, 5), (3, 6, 64), (2, 6, 8, 16), (4, 768), (2, 6, 4096), (3, 20000))
SHARES, A_SHARE = 8, 40


def random_call(generator: random.Random) -> tuple[str, Situation] | None:
    """A chain with a call of it; None where the table does not allow the chain."""
    steps = [
        generator.choice(BESIDE).format(f"y{i}")
        if generator.random() < 0.4
        else generator.choice(EXAMPLES)[2].text
        for i in range(generator.randint(2, 4))
    ]
    text, shape = " | ".join(steps), generator.choice(SHAPES)
    try:
        chain = fusegen.chain(text)
    except FusegenError:
        return None
    layouts = ("contiguous", "channels_last") if len(shape) in (4, 5) else ("contiguous",)
    return text, Situation(
        shape,
        {o: generator.choice((shape, shape[-1:])) for o in chain.operands},
        generator.choice(("float32", "bfloat16", "float64")),
        generator.choice(layouts),
    )


@pytest.mark.parametrize("share", range(SHARES))
def test_a_random_chain_is_emitted_or_refused(share: int) -> None:
    generator = random.Random(share)
    emitted = 0
    while emitted < A_SHARE:
        call = random_call(generator)
        if call is None:
            continue
        text, situation = call
        try:
            modules = list(sources(fusegen.chain(text), "cuda", situation, grad=True))
        except FusegenError:
            continue  # a shape that a step does not take, or a gradient that it does not have
        except Exception as error:
            raise AssertionError(f"{text}, {situation}") from error
        assert modules
        emitted += 1
