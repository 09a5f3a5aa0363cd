import contextlib
import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fusegen.dsl import chain, keep, parse, recall, takes
from fusegen.errors import ChainError
from fusegen.ir import Expr
from fusegen.ops import OPS, Chain, Channel

ROOT = Path(__file__).resolve().parent.parent
CHAIN_A = "leaky_relu(0.2) | add_channel(bias) | clamp(-1, 1) | gelu"

add, add_channel, clamp, gelu = (OPS[n] for n in ("add", "add_channel", "clamp", "gelu"))
layernorm, leaky_relu, mul = (OPS[n] for n in ("layernorm", "leaky_relu", "mul"))
mul_channel, relu, sigmoid = (OPS[n] for n in ("mul_channel", "relu", "sigmoid"))


# --- three ways in ---


def test_text_calls_and_a_function_give_the_same_chain() -> None:
    def function(x: Expr, bias: Channel) -> Expr:
        return gelu(clamp(leaky_relu(x, 0.2) + bias, -1, 1))

    text = parse("leaky_relu(0.2) | add_channel | clamp(-1, 1) | gelu")
    calls = leaky_relu(0.2) | add_channel() | clamp(-1, 1) | gelu()
    assert text == calls == chain(function)
    assert text.hash == calls.hash == chain(function).hash
    assert len({text, calls, chain(function)}) == 1
    assert text.text == CHAIN_A


def test_chain_takes_whatever_describes_one() -> None:
    assert chain(gelu) == chain("gelu") == chain(chain("gelu")) == gelu()
    with pytest.raises(ChainError, match="got a int"):
        chain(3)  # type: ignore[arg-type]


def test_ops_join_chains_without_being_called() -> None:
    assert relu | gelu == chain("relu | gelu")
    assert relu() | gelu | add_channel("b") == chain("relu | gelu | add_channel(b)")
    with pytest.raises(ChainError, match=r"write fusegen.chain\('gelu'\)"):
        relu() | "gelu"  # type: ignore[operator]
    with pytest.raises(TypeError):
        relu() | 3  # type: ignore[operator]


# --- canonical text ---


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("leaky_relu", "leaky_relu"),
        ("leaky_relu()", "leaky_relu"),
        ("leaky_relu(0.01)", "leaky_relu"),
        ("leaky_relu(negative_slope=0.010)", "leaky_relu"),
        ("leaky_relu(2e-1)", "leaky_relu(0.2)"),
        ("leaky_relu(-inf)", "leaky_relu(-inf)"),
        ("leaky_relu(+3.0)", "leaky_relu(3)"),
        ("leaky_relu(-0.0)", "leaky_relu(-0.0)"),
        ("leaky_relu(1e300)", "leaky_relu(1e+300)"),
        ("clamp(-1.0, max=1)", "clamp(-1, 1)"),
        ("clamp(max=1)", "clamp(max=1)"),
        ("clamp(None, 1)", "clamp(max=1)"),
        ("clamp(0)", "clamp(0)"),
        ("gelu(tanh)", "gelu(approximate='tanh')"),
        ("gelu(approximate='none')", "gelu"),
        ("add", "add(other)"),
        ("add(2)", "add(2)"),
        ("add(sum_tensor)", "add(sum_tensor)"),
        ("add(other=2)", "add(2)"),
        ("add_channel", "add_channel(bias)"),
        ("add_channel(axis=-1)", "add_channel(bias, axis=-1)"),
        ("layer_norm(64)", "layernorm(64)"),
        ("layernorm(64, weight, bias)", "layernorm(64, weight, bias)"),
        ("layernorm(weight, bias, normalized_shape=64)", "layernorm(64, weight, bias)"),
        ("layernorm((32, 64), w, b, eps=1e-6)", "layernorm((32, 64), w, b, eps=1e-06)"),
        ("layernorm([32])", "layernorm((32,))"),
        ("layernorm(bias=b)", "layernorm(bias=b)"),
        ("layernorm(w, bias=b, axis=1)", "layernorm(w, b, axis=1)"),
        ("max_pool3d((1, 2, 2), (1, 2, 2))", "max_pool3d((1, 2, 2), (1, 2, 2))"),
        ("gt(0) | where(1, z)", "gt(0) | where(1, z)"),
        ("gt(0) | where(other=1, input=z)", "gt(0) | where(z, 1)"),
        ("(relu) | ((gelu | relu))", "relu | gelu | relu"),
        (" relu\n\t| gelu\r\n", "relu | gelu"),
        ("keep(a) | sigmoid | mul(a)", "keep(y) | sigmoid | mul(y)"),
        ("keep(x) | sigmoid | mul(x)", "keep(y) | sigmoid | mul(y)"),
        ("keep(a) | relu | recall(a)", "keep(y) | relu | recall(y)"),
        ("keep(a) | add(y) | mul(a)", "keep(y_2) | add(y) | mul(y_2)"),
        (
            "keep(a) | relu | keep(a) | gelu | mul(a)",
            "keep(y) | relu | keep(y_2) | gelu | mul(y_2)",
        ),
    ],
)
def test_text_has_one_canonical_form(written: str, canonical: str) -> None:
    assert parse(written).text == canonical
    assert parse(canonical).text == canonical
    assert parse(written) == parse(canonical)


def test_repr_is_the_code_that_makes_the_chain() -> None:
    made = chain("gelu(tanh) | add_channel")
    assert repr(made) == "fusegen.chain(\"gelu(approximate='tanh') | add_channel(bias)\")"
    fusegen = type("fusegen", (), {"chain": staticmethod(chain)})
    assert eval(repr(made), {"fusegen": fusegen}) == made


def test_the_hash_is_the_same_in_every_process() -> None:
    program = f"from fusegen.dsl import chain; print(chain({CHAIN_A!r}).hash)"
    for seed in ("1", "2"):
        result = subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert result.stdout.strip() == chain(CHAIN_A).hash


def test_zero_and_minus_zero_are_different_chains() -> None:
    assert chain("mul(0.0)") != chain("mul(-0.0)")


def test_a_chain_cannot_be_changed_and_survives_copy_and_pickle() -> None:
    made = keep("a") | sigmoid() | mul("a") | add_channel()
    with pytest.raises(AttributeError):
        made.written = ()  # type: ignore[misc]
    assert copy.deepcopy(made) == made
    revived = pickle.loads(pickle.dumps(made))
    assert revived == made
    assert revived | mul("a") == made | mul("a")


# --- operands and kept values ---


def test_operands_come_in_the_order_of_the_text() -> None:
    assert chain("mul(b) | add(a) | mul(b)").operands == ("b", "a")
    assert chain("layernorm(bias=b, weight=w)").operands == ("w", "b")
    assert chain("keep(y) | sigmoid | mul(y)").operands == ()


def test_an_unnamed_operand_is_a_new_one() -> None:
    assert chain("add_channel | relu | add_channel").operands == ("bias", "bias_2")
    assert (add_channel() | relu() | add_channel()).operands == ("bias", "bias_2")
    assert (add_channel() | (relu() | add_channel())).operands == ("bias", "bias_2")
    assert chain("add_channel(bias) | add_channel").operands == ("bias", "bias_2")
    assert chain("keep(other) | add | mul(other)").operands == ("other_2",)


@pytest.mark.parametrize(
    ("text", "canonical", "given"),
    [
        ("takes(a, b) | mul(b) | add(a)", None, ("a", "b")),
        ("takes(a) | mul(b) | add(a) | sub(c)", "takes(a, b, c) | mul(b) | add(a) | sub(c)", "abc"),
        ("takes(b, a) | mul(b) | add(a)", "mul(b) | add(a)", ("b", "a")),
        ("mul(b) | takes(c, a) | add(a) | sub(c)", None, ("b", "c", "a")),
        ("takes(bias_2, bias) | add_channel | mul_channel(bias_2)", None, ("bias_2", "bias")),
        ("takes(b, a) | dropout(0.5) | add(a) | mul(b)", None, ("b", "a")),
        ("takes(a) | dropout(0.5) | add(a)", chain("dropout(0.5) | add(a)").text, ("a",)),
    ],
)
def test_takes_lists_the_operands_in_the_order_of_a_call(text, canonical, given) -> None:
    found = chain(text)
    assert found.given == tuple(given)
    assert canonical is None or found.text == canonical
    assert chain(found.text) == found
    assert chain(found.text).operands == found.operands
    assert pickle.loads(pickle.dumps(found)) == found
    assert all(step.op != "takes" for step in found.steps)


def test_takes_wants_names() -> None:
    with pytest.raises(ChainError, match=r"takes takes names, as in takes\('weight', 'bias'\)"):
        takes()


def test_joined_chains_keep_the_order_of_each() -> None:
    joined = takes("a", "b") | mul("b") | add("a") | chain("takes(c, d) | mul(d) | add(c)")
    assert joined.given == ("a", "b", "c", "d")


def test_one_name_is_one_operand() -> None:
    shared = chain("add_channel(b) | relu | mul_channel(b)")
    assert shared.operands == ("b",)
    assert [(step.op, p.name) for step, p in shared.uses("b")] == [
        ("add_channel", "bias"),
        ("mul_channel", "scale"),
    ]


def test_an_optional_operand_without_a_name_is_absent() -> None:
    assert chain("layernorm(64)").operands == ()
    assert chain("layernorm(64, w)").operands == ("w",)


def test_a_name_is_an_operand_until_a_step_keeps_it() -> None:
    assert (keep("y") | sigmoid() | mul("y")).operands == ()
    assert (sigmoid() | mul("y")).operands == ("y",)
    assert (keep("y") | sigmoid() | recall("y")).text == "keep(y) | sigmoid | recall(y)"


# --- mistakes ---


@pytest.mark.parametrize(
    ("text", "caret", "message"),
    [
        ("", 0, "the chain is empty"),
        ("  \n ", 0, "the chain is empty"),
        ("relu |", 5, "a step is missing after this |"),
        ("  | relu", 2, "a step is missing before this |"),
        ("relu | | gelu", 5, "a step is missing after this |"),
        (
            "leaky_rleu(0.2) | gelu",
            0,
            "no operation is called 'leaky_rleu'; did you mean 'leaky_relu'?",
        ),
        ("  rellu", 2, "did you mean 'relu'?"),
        ("relu | Gelu", 7, "did you mean 'gelu'?"),
        ("relu | glu(1)", 7, "write a function, def f(x): return F.glu(x, dim)"),
        ("conv2d(w) | relu", 0, "a chain follows a product or a convolution"),
        ("relu | half", 7, "no operation is called 'half': write to('float16')"),
        ("relu | qqqqq", 7, "`fusegen ops` lists them all"),
        ("leaky_relu(negative_slop=1)", 11, "did you mean 'negative_slope'?"),
        ("leaky_relu(zzz=1)", 11, "it is leaky_relu(negative_slope: float = 0.01)"),
        ("leaky_relu(0.2, 3)", 16, "no place for the constant 3"),
        ("relu(bias)", 5, "relu: no place for the constant 'bias'; it is relu()"),
        ("add(a, b)", 7, "no place for the tensor 'b'"),
        ("leaky_relu('a')", 11, "negative_slope wants a number, got 'a'"),
        ("leaky_relu(nan)", 11, "negative_slope wants a number, got nan"),
        ("leaky_relu(True)", 11, "negative_slope wants a number, got True"),
        ("leaky_relu(" + "9" * 400 + ")", 11, "negative_slope wants a number, got 999"),
        ("clamp(0, max=big)", 9, "max wants a number or None, got 'big'"),
        ("gelu(fast)", 5, "approximate wants 'none' or 'tanh', got 'fast'"),
        ("add_channel(3)", 12, "no place for the constant 3"),
        ("add_channel(bias=3)", 12, "bias wants the name of a tensor, got 3"),
        ("add_channel(axis=1.5)", 12, "axis wants an integer, got 1.5"),
        ("layernorm((1, a))", 10, "wants an integer or a tuple of integers or None"),
        ("layernorm(())", 10, "wants an integer or a tuple of integers or None, got ()"),
        ("layernorm(0)", 0, "normalized_shape wants sizes of at least 1, got 0"),
        ("layernorm((2, 3), axis=1)", 0, "axis is one axis"),
        ("clamp", 0, "give min, max or both"),
        ("max_pool3d", 0, "kernel_size is missing"),
        ("max_pool3d(2, stride=0)", 0, "stride wants one size or 3"),
        ("max_pool2d((2, 2, 2))", 0, "kernel_size wants one size or 2"),
        ("relu | keep", 7, "keep takes one name, as in keep(y)"),
        ("keep(1)", 0, "keep takes one name, as in keep(y)"),
        ("relu | recall(y)", 7, "recall(y): no step before it keeps this value"),
        ("batch_norm(m, v, training=True) | add(m)", 34, "a step before it updates 'm'"),
        ("add(m) | batch_norm(m, v, training=True)", 9, "a step before it reads 'm'"),
        ("add_channel | keep(bias)", 14, "bias is the name of an operand of this chain"),
        ("relu | add(x)", 7, "an operand cannot be called 'x'"),
        ("add(out)", 0, "an operand cannot be called 'out'"),
        ("add('a b')", 0, "'a b' is not a name"),
        ("add('class')", 0, "'class' cannot be a name"),
        ("torch.relu", 0, "write relu alone"),
        ("relu()()", 0, "this is not a step"),
        ("3 | relu", 0, "this is not a step"),
        ("relu + gelu", 0, "this is not a step"),
        ("clamp(1/2)", 6, "an argument is a number, a name, a tuple or a quoted word"),
        ("leaky_relu(*a)", 11, "an argument is a number, a name, a tuple or a quoted word"),
        ("relu(**a)", 5, "a keyword is a name, given once"),
        ("leaky_relu(negative_slope=1, negative_slope=2)", 29, "a keyword is a name, given once"),
        ("relu) | (gelu", 4, "unmatched ')'"),
        ("relu | gelu(", 11, "'(' was never closed"),
        ("relu; gelu", 4, "this cannot be read"),
        ("clamp(\N{MINUS SIGN}1, 1)", 6, "no use for the character '\N{MINUS SIGN}' (U+2212)"),
        ("relu # fast", 5, "no use for the character '#'"),
        ("relu\0", 4, "no use for the character '\\x00'"),
    ],
)
def test_a_mistake_is_shown_with_a_caret_under_it(text: str, caret: int, message: str) -> None:
    with pytest.raises(ChainError) as caught:
        parse(text)
    told, shown, pointer = str(caught.value).split("\n")
    assert message in told
    if len(text) < 90:
        assert shown.rstrip() == f"  {text.partition(chr(10))[0]}".rstrip()
    assert pointer == " " * (2 + caret) + "^"


def test_the_line_of_the_mistake_is_shown() -> None:
    with pytest.raises(ChainError) as caught:
        parse("relu\n| leaky_relu(slope=1)\n| gelu")
    assert str(caught.value).split("\n")[1:] == ["  | leaky_relu(slope=1)", "  " + " " * 13 + "^"]


def test_of_a_long_line_the_part_around_the_mistake_is_shown() -> None:
    with pytest.raises(ChainError) as caught:
        parse("relu | " * 50 + "rellu | " + "relu | " * 50 + "relu")
    _, shown, pointer = str(caught.value).split("\n")
    assert len(shown) <= 92
    assert shown[pointer.index("^") :].startswith("rellu")


def test_a_chain_too_long_to_read_is_told() -> None:
    with pytest.raises(ChainError):
        parse("(" * 500 + "relu" + ")" * 500)
    with pytest.raises(ChainError):
        parse("relu | " * 100_000 + "relu")


@pytest.mark.parametrize("name", ["", "1a", "a b", "größe", "class", 3])
def test_a_name_must_be_one(name: object) -> None:
    with pytest.raises(ChainError):
        keep(name)  # type: ignore[arg-type]


def test_a_tensor_in_place_of_its_name_is_told() -> None:
    with pytest.raises(ChainError, match="no place for the constant a object"):
        add_channel(object())  # type: ignore[call-overload]
    with pytest.raises(ChainError, match="bias wants the name of a tensor, got a object"):
        add_channel(bias=object())


OTHER_WORDS = (
    "keep recall y bias x axis eps min max normalized_shape inf nan None lambda if 1 0.5 1e999 1_0 "
    "0x1 f'{1}' ( ) , | = - * ** . : ; ' \" [ ] \\ # \u00e9"
)
words = st.sampled_from([*OPS, *OTHER_WORDS.split(), " ", "\n", "\0"])


@given(st.one_of(st.text(max_size=30), st.lists(words, max_size=14).map("".join)))
@example("relu\f| gelu")
@example("\ufeffrelu")
@example("\ud800")
def test_any_text_is_a_chain_or_a_chain_error(text: str) -> None:
    try:
        made = parse(text)
    except ChainError:
        return
    assert parse(made.text) == made


numbers = st.floats(allow_nan=False)
names = st.sampled_from(["a", "b", "y", "y_2", "bias"])
steps = st.one_of(
    st.builds(leaky_relu, numbers),
    st.builds(lambda a, b: clamp(a, b), numbers, st.none() | numbers),
    st.builds(add, names | numbers | st.integers()),
    st.builds(lambda n: add_channel(n) if n else add_channel(), st.none() | names),
    st.builds(
        lambda w, b, e: layernorm(weight=w, bias=b, eps=e),
        st.none() | names,
        st.none() | names,
        numbers,
    ),
    st.builds(keep, names),
    st.sampled_from([gelu(), gelu("tanh"), add_channel(), mul_channel()]),
)


@given(st.lists(steps, min_size=1, max_size=8))
def test_canonical_text_reads_back_as_the_same_chain(parts: list[Chain]) -> None:
    made = parts[0]
    for part in parts[1:]:
        with contextlib.suppress(ChainError):  # a value kept under an operand's name
            made = made | part
    again = chain(made.text)
    assert again == made
    assert again.text == made.text
    assert again.operands == made.operands
