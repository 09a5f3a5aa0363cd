"""What codegen promises of its text, beyond the golden files."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType

import jinja2
import pytest

import fusegen
from fusegen import codegen
from fusegen.codegen import TEMPLATES
from fusegen.describe import Situation, sources
from fusegen.target import H200, code_name

_JINJA = re.compile(r"\{\{.*?\}\}|\{%.*?%\}|\{#.*?#\}", re.DOTALL)
_NOISE = re.compile(r'//[^\n]*|"[^"\n]*"|#(include|pragma|if|endif)[^\n]*')
# A type, then a name: what a skeleton declares.
_DECLARED = re.compile(r"\b[A-Za-z_]\w*[>\*&]*(?: const)?[\*&]* ?\b([a-z]\w*)\s*(?=[=;,({\[\)])")


def _declared_in(template: Path) -> set[str]:
    text = _NOISE.sub(" ", _JINJA.sub(" X ", template.read_text()))
    return set(_DECLARED.findall(text))


# The binding, above the folders of the targets, speaks of no operand.
@pytest.mark.parametrize("template", sorted(TEMPLATES.glob("*/*.jinja")), ids=lambda p: p.name)
def test_an_operand_never_shares_a_name_with_a_local_of_a_skeleton(template: Path) -> None:
    declared = _declared_in(template)
    assert declared or template.name == "common.cu.jinja", "the expression found no declaration"
    clashes = sorted(name for name in declared if code_name(name) == name)
    assert clashes == []


@pytest.mark.parametrize("text", ["mish", "softplus | tanh | keep(y) | mul(y)"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_tanh_of_a_softplus_takes_neither_tanh_nor_logarithm(text: str, dtype: str) -> None:
    for target in ("cuda", "cpp"):
        source = fusegen.compile(text).source(target, dtype, grad=True)
        assert "exp" in source
        assert not re.search(r"\b(tanhf?|log1pf?)\(", source)


def test_an_operand_never_shares_a_name_with_a_local_that_is_put_together() -> None:
    built = ["first_inner", "from_axis_2", "base_outer", "inner_blocks", "at_2", "distance_1"]
    assert [code_name(name) for name in built] == [f"{name}_operand" for name in built]


def test_no_two_operands_share_a_name() -> None:
    names = ("float", "float_operand", "float_operand_operand", "a_row", "a_row_operand")
    assert len({code_name(name) for name in names}) == len(names)


@pytest.fixture
def afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], str]]:
    """Emits a source as a process does that has read no template yet, with a cache of its own."""

    def emitted(root: Path) -> str:
        monkeypatch.setenv("FUSEGEN_CACHE_DIR", str(root))
        codegen._environment.cache_clear()
        (module,) = sources(fusegen.chain("softmax(-1)"), "cuda", Situation((64, 1024)), grad=False)
        return module.text

    yield emitted
    codegen._environment.cache_clear()


def test_templates_are_compiled_once_for_all_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, afresh: Callable[[Path], str]
) -> None:
    text, compiled, jinja = afresh(tmp_path), [], jinja2.Environment.compile

    def compile(self: jinja2.Environment, source: str, name: str, filename: str) -> CodeType:
        compiled.append(name)
        return jinja(self, source, name, filename)

    monkeypatch.setattr(jinja2.Environment, "compile", compile)
    assert afresh(tmp_path) == text
    assert not compiled
    damaged, *_ = (tmp_path / "shared").glob("template-*")
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert afresh(tmp_path) == text
    assert len(compiled) == 1


@pytest.mark.parametrize("root", ["/dev/null/cache", "/a$path"])
def test_a_source_is_emitted_where_there_is_no_cache(
    root: str, tmp_path: Path, afresh: Callable[[Path], str]
) -> None:
    assert afresh(Path(root)) == afresh(tmp_path)


def test_an_ordinary_operand_keeps_its_name() -> None:
    assert [code_name(n) for n in ("bias", "scale", "weight", "residual", "gate")] == [
        "bias",
        "scale",
        "weight",
        "residual",
        "gate",
    ]


def test_a_term_that_takes_many_instructions_is_found_without_a_branch() -> None:
    dear = fusegen.compile("keep(y) | tanh | sum(-1, True) | mul(y)").source("cuda")
    assert "sums_1[0].add_if(is_here, " in dear
    for chain, place in (("rms_norm", 1), ("logsumexp(-1)", 2)):
        assert f"if (is_here) sums_{place}[0].add(" in fusegen.compile(chain).source("cuda")


@pytest.mark.parametrize(
    ("chain", "dtype", "is_light"),
    [
        ("add(r) | layernorm(w, b) | gelu", "bfloat16", True),
        ("add(r) | layernorm(w, b) | gelu", "float32", True),
        ("layernorm(w, b)", "bfloat16", True),
        # What is dear stays in registers until the row is known.
        ("tanh | add(r) | layernorm(w, b)", "bfloat16", False),
        ("add(r) | layernorm(w, b)", "float64", False),
    ],
)
def test_rows_of_light_kernels_are_not_sent_for_ahead(
    chain: str, dtype: str, is_light: bool
) -> None:
    """Where a multiprocessor has many blocks, they hide each other's waits."""
    parsed = fusegen.chain(chain)
    situation = Situation((64, 1024), {"r": (64, 1024)} if "r" in parsed.operands else {}, dtype)
    (module,) = sources(parsed, "cuda", situation, grad=False)
    assert ("send_row" not in module.text) == is_light


def test_a_kernel_waits_for_the_one_before_it_before_it_reads() -> None:
    """It may be set up while the other ends, whoever started that; reads that nobody is promised
    not to write under are not moved before the wait.
    """
    chain = fusegen.chain("layernorm(w, b)")
    (module,) = sources(chain, "cuda", Situation((64, 1024)), grad=True)
    kernels = re.split(r"__global__ ", module.text)[1:]
    assert [re.search(r"\b(\w+)\(", k[k.index(")") :])[1] for k in kernels] == [  # type: ignore[index]
        "forward_row",
        "backward_row",
        "backward_finalise",
    ]
    for kernel in kernels:
        first = kernel.split("{", 1)[1].split(";")[0]
        assert first.strip() == "wait_for_kernel_before()"
        assert not re.search(r"const [\w<>]+\* __restrict__", kernel)
    assert module.text.count("follow(backward_finalise") == 1
    assert "<<<" not in module.text


def test_first_kernels_of_strided_rows_are_started_in_their_turn() -> None:
    """They read faster what nobody is promised to write under."""
    chain = fusegen.chain("layernorm(w, b, axis=1)")
    (module,) = sources(chain, "cuda", Situation((4, 64, 32, 32)), grad=True)
    kernels = re.split(r"__global__ ", module.text)[1:]
    waits = ["wait_for_kernel_before()" in k.split("\n}")[0] for k in kernels]
    assert waits == [False, False, True]
    assert "const float* __restrict__ x" in kernels[0]


@pytest.mark.parametrize(
    ("chain", "shape", "operands", "dtype", "kernels"),
    [
        ("softmax(-1)", (600, 32000), {}, "float32", 2),
        ("softmax(-1)", (600, 50257), {}, "bfloat16", 1),
        ("log_softmax(-1)", (600, 32000), {}, "bfloat16", 2),
        ("log_softmax(-1)", (600, 32001), {}, "bfloat16", 2),
        ("layernorm(w, b)", (600, 32000), {"w": (32000,), "b": (32000,)}, "bfloat16", 1),
        ("layernorm(w)", (600, 32001), {"w": (32001,)}, "bfloat16", 0),
        ("softmax(-1) | sum(0)", (600, 32000), {}, "float32", 0),
        ("sum(-1)", (600, 32000), {}, "float32", 0),
        ("gelu | softmax(-1)", (600, 32000), {}, "float32", 2),
        ("softmax(-1)", (600, 32772), {}, "float32", 1),
        ("softmax(-1)", (600, 53252), {}, "float32", 1),  # of a team
        ("layernorm", (600, 53252), {}, "float32", 0),
        ("softmax(-1)", (600, 16384), {}, "float32", 0),
    ],
)
def test_long_rows_have_large_blocks_where_there_is_room(
    chain: str, shape: tuple[int, ...], operands: dict, dtype: str, kernels: int
) -> None:
    situation = Situation(shape, operands, dtype=dtype)
    (module,) = sources(fusegen.chain(chain), "cuda", situation, grad=True)
    assert module.text.count("__launch_bounds__(1024, 1)") == kernels


@pytest.mark.parametrize(
    ("chain", "length", "dtype", "packs"),
    [
        ("log_softmax(-1)", 65536, "float32", "kPacks = 16, kHeld = 6;"),
        ("log_softmax(-1)", 128256, "bfloat16", "kPacks = 16, kHeld = 7;"),
        ("layernorm", 65536, "float32", None),  # a team meets once, and is faster
        ("add(r) | softmax(-1)", 32000, "float32", "kPacks = 8, kHeld = 2;"),
        ("add(r) | layernorm", 64000, "bfloat16", "kPacks = 8, kHeld = 3;"),
        ("add(r) | softmax(-1)", 40000, "float32", None),
        # What is wanted late is asked for as its row begins: all of it, or a part.
        ("log_softmax(-1) | mul(r) | sum(-1)", 32000, "float32", "kPacks = 8, kHeld = 0;"),
        ("log_softmax(-1) | mul(r) | sum(-1)", 50304, "float32", "kHeld = 0, kAsked = 4;"),
        ("softmax(-1) | mul(r)", 32000, "float32", "kPacks = 8, kHeld = 0;"),
        ("rms_norm | mul(r)", 32000, "float32", "kPacks = 8, kHeld = 0;"),
        ("softmax(-1) | mul(r)", 50304, "float32", "kPacks = 13, kHeld = 0, kAsked = 4;"),
        ("softmax(-1) | mul(r)", 102400, "bfloat16", "kPacks = 13, kHeld = 0, kAsked = 4;"),
        ("softmax(-1) | mul(r)", 65536, "float32", "kPacks = 16, kHeld = 6;"),
        ("log_softmax(-1) | mul(r) | sum(-1)", 65536, "float32", "kPacks = 16, kHeld = 5;"),
    ],
)
def test_a_row_may_lie_in_registers_and_in_shared_memory(
    chain: str, length: int, dtype: str, packs: str | None
) -> None:
    operands = {"r": (600, length)} if "r)" in chain else {}
    situation = Situation((600, length), operands, dtype=dtype)
    (module,) = sources(fusegen.chain(chain), "cuda", situation, grad=False)
    assert (packs is None) == ("blockIdx.x % blocks" in module.text)
    assert packs is None or packs in module.text


def test_what_registers_have_no_room_for_stays_in_shared_memory() -> None:
    (module,) = sources(fusegen.chain("softmax(-1)"), "cuda", Situation((600, 50257)), grad=True)
    assert "kPacks = 13, kHeld = 7" in module.text
    # The next row's packs are sent there once the last pass has read this row's.
    last = module.text.split("for (int p = kPacks - 1; p >= 0; --p)")[1]
    assert last.index("x_in[p] = x_next[p * 1024];") < last.index(
        "send_packs(first + stride, p, p + 1)"
    )
    (module,) = sources(fusegen.chain("softmax(-1)"), "cuda", Situation((600, 32000)), grad=False)
    assert "kHeld" not in module.text


def test_what_a_full_block_carries_takes_the_place_of_what_was_read() -> None:
    (module,) = sources(fusegen.chain("softmax(-1)"), "cuda", Situation((600, 50257)), grad=False)
    assert "x_in[p].at[lane] = carried_value;" in module.text
    assert "if (p >= kHeld) x_next[p * 1024] = x_in[p];" in module.text
    assert "x_edge = carried_value;" in module.text


@pytest.mark.parametrize(
    ("chain", "is_sent"),
    [
        ("softmax(-1) | layernorm(w, b)", False),
        ("layernorm(w, b) | mul(s) | softmax(-1) | add(t)", True),  # asks for much at each place
    ],
)
def test_rows_of_several_reductions_that_ask_for_little_send_nothing_ahead(
    chain: str, is_sent: bool
) -> None:
    parsed = fusegen.chain(chain)
    given = dict.fromkeys(parsed.operands, (1024,)) | ({"t": (65536, 1024)} if is_sent else {})
    situation = Situation((65536, 1024), given)
    (module,) = sources(parsed, "cuda", situation, grad=False)
    assert ("wait_for_sent" in module.text) == is_sent


@pytest.mark.parametrize(("groups", "length", "is_long"), [(2, 123039, True), (1, 3200, False)])
def test_a_share_in_two_long_stretches_reads_their_values_once(
    groups: int, length: int, is_long: bool
) -> None:
    chain = fusegen.chain(f"silu | group_norm({groups}, w, b)")
    situation = Situation((4, 8, length), {"w": (8,), "b": (8,)})
    (module,) = sources(chain, "cuda", situation, grad=False)
    assert ("share_edge" in module.text) == is_long
    assert "kCells" in module.text, "rows of this length are shared by a team"


@pytest.mark.parametrize(
    ("chain", "kernels"),
    [("gelu | dropout(0.1)", 2), ("softmax(-1) | dropout(0.1)", 2)],
)
def test_noise_is_bits_that_leave_packs_as_wide_as_memory_has_them(
    chain: str, kernels: int
) -> None:
    situation = Situation((600, 1024), dtype="bfloat16")
    texts = [m.text for m in sources(fusegen.chain(chain), "cuda", situation, grad=True)]
    text = "".join(texts)
    assert text.count("kLanes = 8, kPacks") == kernels
    assert "noise >= 429496832u" in text  # a tenth of 2^32
    assert "uniform" not in text


def test_noise_of_each_element_is_drawn_while_others_are_on_their_way() -> None:
    situation = Situation((600, 1024))
    (module,) = sources(fusegen.chain("dropout(0.1) | add(r)"), "cuda", situation, grad=False)
    loads, behind = module.text.split("if (i >= count) return;")
    assert "r_operand_in[p] = load<kLanes>(r_operand + i);" in loads
    assert "= draw<kLanes>(noise + i, noise_seed);" in behind


@pytest.mark.parametrize("length", [4096, 8192, 20000, 32000, 50257, 128256])
@pytest.mark.parametrize(
    "chain", ["dropout(0.1) | softmax(-1)", "dropout(0.1) | add(r) | rms_norm | dropout(0.2)"]
)
def test_noise_that_rows_hold_has_room_in_shared_memory(chain: str, length: int) -> None:
    situation = Situation((600, length), dtype="bfloat16")
    texts = [m.text for m in sources(fusegen.chain(chain), "cuda", situation, grad=True)]
    rooms = re.findall(r"resident_blocks\(\w+, \w+, \d+, (\d+)", "".join(texts))
    assert rooms
    assert max(map(int, rooms)) <= H200.shared_bytes - (7 << 10)  # beside what is of fixed size
