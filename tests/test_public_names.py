import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fusegen
from fusegen import OPS, Expr, Op
from fusegen.cli import main
from fusegen.ops import ALIASES

ROOT = Path(__file__).resolve().parent.parent
NAMES = (
    "__version__ compile chain Chain op OPS Expr Channel Trailing FusegenError keep recall Fused",
    "leaky_relu relu gelu sigmoid tanh silu clamp add sub mul div add_channel mul_channel",
    "layernorm layer_norm max_pool2d max_pool3d where exp log sqrt rsqrt erf abs pow minimum",
    "reduce_mean reduce_sum reduce_variance reduce_max",
)
PROMISED = " ".join(NAMES).split()


@pytest.mark.parametrize("name", PROMISED)
def test_a_promised_name_is_there(name: str) -> None:
    assert getattr(fusegen, name) is not None
    assert name in dir(fusegen)


@pytest.mark.parametrize("name", OPS)
def test_an_operation_is_an_attribute(name: str) -> None:
    assert getattr(fusegen, name) is OPS[name]


def test_no_module_takes_the_name_of_an_operation() -> None:
    modules = {path.stem for path in Path(fusegen.__file__).parent.glob("*.py")}
    assert not modules & {*OPS, *ALIASES}


def test_what_a_star_import_brings_exists_and_spares_pythons_own_abs_and_pow() -> None:
    brought: dict[str, object] = {}
    exec("from fusegen import *", brought)
    assert set(fusegen.__all__) <= set(brought)
    assert not set(brought) & set(OPS)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'fusegen' has no attribute 'geluu'"):
        _ = fusegen.geluu
    assert not hasattr(fusegen, "torch")


def test_importing_fusegen_leaves_torch_alone_until_something_is_compiled() -> None:
    program = (
        "import sys, fusegen\n"
        "chain = fusegen.leaky_relu(0.2) | fusegen.chain('gelu')\n"
        "assert 'torch' not in sys.modules and 'jinja2' not in sys.modules\n"
        "fused = fusegen.compile(chain)\n"
        "assert 'torch' in sys.modules and isinstance(fused, fusegen.Fused)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr


def test_compile_takes_whatever_describes_a_chain() -> None:
    def function(x: Expr) -> Expr:
        return fusegen.gelu(x)

    for source in ("gelu", fusegen.gelu, fusegen.gelu(), function):
        assert fusegen.compile(source).chain == fusegen.chain("gelu")
    with pytest.raises(fusegen.FusegenError):
        fusegen.compile("geluu")


# --- what CONTRIBUTING.md promises: an operation is one function, and nothing else ---


@pytest.fixture
def own_elu() -> Iterator[Op]:
    ops, aliases = dict(OPS), dict(ALIASES)

    @fusegen.op(reference="torch.nn.functional.elu", samples=[(), (0.5,)])
    def own_elu(x: Expr, alpha: float = 1.0) -> Expr:
        """x where x > 0, else alpha * (exp(x) - 1)."""
        return fusegen.where(x > 0, x, alpha * fusegen.expm1(x))

    yield own_elu
    OPS.clear()
    OPS.update(ops)
    ALIASES.clear()
    ALIASES.update(aliases)


def test_a_users_operation_is_listed(own_elu: Op, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops"]) == 0
    assert "own_elu(alpha: float = 1) " in capsys.readouterr().out
    assert main(["ops", "own_elu"]) == 0
    assert own_elu.summary in capsys.readouterr().out


def test_a_users_operation_is_a_name_of_fusegen_and_a_word_of_the_text(own_elu: Op) -> None:
    assert fusegen.own_elu is own_elu
    chain = fusegen.chain("own_elu(0.5) | add_channel | own_elu")
    assert chain == fusegen.own_elu(0.5) | fusegen.add_channel() | fusegen.own_elu
    assert chain.text == "own_elu(0.5) | add_channel(bias) | own_elu"


@pytest.mark.parametrize("target", ["cuda", "cpp"])
def test_a_users_operation_is_in_the_source_forward_and_backward(own_elu: Op, target: str) -> None:
    text = fusegen.compile("own_elu(0.5) | gelu").source(target, grad=True)
    forward, _, backward = text.partition("struct BackwardSizes")
    assert "own_elu(0.5)" in forward
    assert "expm1f(" in forward
    assert "// own_elu(0.5)" in backward
    assert "exp" in backward.partition("// own_elu(0.5)")[2]


@pytest.mark.parametrize(
    "text", ["own_elu", "own_elu(0.5)", "own_elu | mul_channel(s) | own_elu(0.25)"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_users_operation_computes_what_torch_does(
    own_elu: Op, text: str, dtype: torch.dtype
) -> None:
    fused = fusegen.compile(text)
    x = torch.cat([torch.randn(4, 3, 5) * 4, torch.zeros(1, 3, 5), torch.full((1, 3, 5), 200.0)])
    tensors = [x.to(dtype), *(torch.randn(3, dtype=dtype) for _ in fused.chain.operands)]
    tensors = [t.requires_grad_() for t in tensors]
    ours, eager = fused(*tensors), fused.reference(*tensors)
    torch.testing.assert_close(ours, eager)
    cotangent = torch.randn_like(eager)
    gradients = [torch.autograd.grad(y, tensors, cotangent) for y in (ours, eager)]
    torch.testing.assert_close(*gradients)


def test_a_users_operation_is_differentiable_twice(own_elu: Op) -> None:
    fused = fusegen.compile("own_elu(0.5) | mul_channel(s)")
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    s = torch.randn(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(fused, (x, s))
    assert torch.autograd.gradgradcheck(fused, (x, s))


def test_the_reference_of_a_users_operation_is_the_one_it_names(
    own_elu: Op, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(7)
    fused = fusegen.compile("own_elu(0.5)")
    assert torch.equal(fused.reference(x), torch.nn.functional.elu(x, 0.5))
    monkeypatch.setattr(torch.nn.functional, "elu", lambda x, alpha: x)
    assert fused.reference(x) is x
