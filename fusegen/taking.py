"""Taking: what a call takes of tensors for a chain by torch's own functions, which compute nothing:
views, and elements in other places. Of a value that is computed, it is taken of the result of a
chain that ends there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from fusegen import arity, ir
from fusegen.ir import Expr
from fusegen.ops import Op
from fusegen.unsaid import COPYING


class Other(NamedTuple):
    """Another tensor, by its name, in what a view is told."""

    name: str


class View(NamedTuple):
    """What each call takes anew of a tensor: whose, by which function, and what that is told."""

    of: str
    method: str
    args: tuple[Any, ...]
    named: Mapping[str, Any] = {}

    @property
    def is_copy(self) -> bool:
        """Whether it has memory of its own: elements in other places, or such as are looked up."""
        keys = self.args[:1] if self.method == "__getitem__" else ()
        keys = keys[0] if keys and isinstance(keys[0], tuple) else keys
        is_looked_up = any(isinstance(k, Other | list) or hasattr(k, "dim") for k in keys)
        return self.method in COPYING or is_looked_up

    def taken(self, tensor: Callable[[str], Any]) -> Any:
        """It, where the tensors are told."""
        args = _with_tensors(self.args, tensor)
        named = {word: _with_tensors(value, tensor) for word, value in self.named.items()}
        return _function(self.method)(tensor(self.of), *args, **named)


def _with_tensors(value: Any, tensor: Callable[[str], Any]) -> Any:
    if isinstance(value, Other):
        return tensor(value.name)
    if isinstance(value, tuple | list):
        return type(value)(_with_tensors(each, tensor) for each in value)
    return value


def _function(method: str) -> Callable[..., Any]:
    """A tensor's method, or torch's function, of this name."""
    torch = sys.modules["torch"]
    if method in ("cat", "stack"):
        join = getattr(torch, method)
        return lambda first, others, dim: join([first, *others], dim)
    if method in ("T", "mT"):
        return attrgetter(method)
    if method == "assigned":
        return _assigned
    homes = (torch.Tensor, torch.nn.functional, torch, torch.linalg)
    found: Callable[..., Any] = next(getattr(h, method) for h in homes if hasattr(h, method))
    return found


def _assigned(x: Any, key: Any, value: Any) -> Any:
    """A copy of a tensor, with others of its elements at an index."""
    x = x.clone()
    x[key] = value
    return x


def is_elementwise(value: Expr) -> bool:
    """Whether each of a value's elements is computed of one of its only tensor, in the same place,
    and nothing is drawn.
    """
    nodes = ir.topological([value])
    return len([n for n in nodes if n.op == "input"]) == 1 and all(map(_is_plain, nodes))


def _is_plain(node: Expr) -> bool:
    if node.op != "call":
        return node.op in ("input", "const", *arity.ARITY)
    op, slots = node.attrs[:2]
    if not isinstance(op, Op) or op.shaping != "same" or op.window_axes or op.groups:
        return False
    x = ir.tensor("x", range(-8, 0), 8)
    return not slots and not any(p.is_drawn for p in op.parameters) and _is_pointwise(op, node, x)


def _is_pointwise(op: Op, node: Expr, x: Expr) -> bool:
    """Whether an operation reduces nothing."""
    attributes: dict[str, Any] = dict(node.attrs[2])  # type: ignore[call-overload]
    try:
        found = op.function(x, **attributes)
    except Exception:  # whatever it wants of x or is not given: it is taken behind it
        return False
    return all(n.op in ("input", "const", *arity.ARITY) for n in ir.topological([found]))


class Place(NamedTuple):
    """Where one of several values stands in what a function gives."""

    number: int


class Itself(NamedTuple):
    """A number, or None, in what a function gives."""

    value: Any


def taken_apart(value: Any, values: list[Any]) -> Any:
    """The form of what a function gives: places of values, which are added to a list, in tuples,
    lists and dicts, and numbers and None as they are.
    """
    if isinstance(value, dict):
        return {key: taken_apart(each, values) for key, each in value.items()}
    if isinstance(value, tuple | list):
        found = [taken_apart(each, values) for each in value]
        is_own = type(value).__module__.startswith("fusegen.")  # for one of torch's, such as of max
        if is_own:
            return tuple(found)
        return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)
    if value is None or type(value) in (bool, int, float, str):
        return Itself(value)
    values.append(value)
    return Place(len(values) - 1)


def put_together(form: Any, values: Sequence[Any]) -> Any:
    """Values in such a form; in a tuple, if it is None."""
    if form is None:
        return tuple(values)
    return _filled(form, values)


def _filled(form: Any, values: Sequence[Any]) -> Any:
    if isinstance(form, Place):
        return values[form.number]
    if isinstance(form, Itself):
        return form.value
    if isinstance(form, dict):
        return {key: _filled(each, values) for key, each in form.items()}
    if isinstance(form, tuple | list):
        found = [_filled(each, values) for each in form]
        return type(form)(*found) if hasattr(form, "_fields") else type(form)(found)
    raise AssertionError(form)
