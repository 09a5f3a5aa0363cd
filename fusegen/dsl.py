"""The ways to write a chain: text, op calls joined by |, or a Python function.

Text is read by Python's own `ast`, of which only names, calls, constants, signs, tuples and `|` are
let through; nothing is ever evaluated. A mistake is shown in the text with a caret under it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from types import BuiltinFunctionType
from typing import Any, NoReturn

from fusegen.errors import ChainError
from fusegen.ops import (
    ALIASES,
    OPS,
    STRUCTURAL,
    BadArgument,
    BadStep,
    Chain,
    Op,
    Step,
    give,
    keep,
    lookup,
    operand,
    recall,
    takes,
)
from fusegen.ops.matching import gathered, match
from fusegen.trace import trace
from fusegen.unsaid import UNSAID

__all__ = ["chain", "give", "keep", "operand", "parse", "recall", "takes", "trace"]

_WIDTH = 90  # characters of a line that a message shows
_NUMBERS = {"inf": float("inf"), "nan": float("nan")}
_ONE_STEP = "a step is an operation's name, as in gelu or leaky_relu(0.2), and | joins steps"


def chain(source: str | Chain | Op | Callable[..., Any]) -> Chain:
    """The chain that source describes: text, a Chain, an op, or a function of expressions; or that
    of what is compiled already.

    Also a decorator: `@fusegen.chain` on `def f(x, scale: Channel): return x * scale`.
    """
    if isinstance(source, Chain):
        source.require_complete()
        return source
    if isinstance(source, str):
        return parse(source)
    if isinstance(source, Op):
        return source()
    if isinstance(found := getattr(source, "chain", None), Chain):  # of what is compiled already
        return found
    if callable(source):
        name = getattr(source, "__name__", "").removeprefix("special_")
        own = ALIASES.get(name, name)
        is_torchs = str(getattr(source, "__module__", None)).split(".")[0] in ("None", "torch")
        if own in OPS and is_torchs and isinstance(source, BuiltinFunctionType):
            return OPS[own]()  # which has no signature to trace it by
        return trace(source)
    raise ChainError(
        f"a chain is text, op calls joined by | or a function, got a {type(source).__name__}"
    )


def parse(text: str) -> Chain:
    """The chain that a text such as `leaky_relu(0.2) | add_channel | gelu` writes."""
    return _Text(text).chain()


class _Text:
    """A chain's text, with what is needed to point into it."""

    def __init__(self, text: str) -> None:
        self.text = text
        # On one line, so that steps may stand on lines of their own; every offset stays the same.
        self.flat = re.sub(r"[\n\r\t\v\f]", " ", text)
        self.indent = len(self.flat) - len(self.flat.lstrip(" "))

    def fail(self, offset: int, message: str) -> NoReturn:
        """Raise ChainError with the line that offset is in and a caret under it."""
        start = self.text.rfind("\n", 0, offset) + 1
        end = (self.text + "\n").find("\n", start)
        if offset - start > _WIDTH // 2:  # of a long line, what stands around the caret
            start = offset - _WIDTH // 2
        line = self.flat[start : min(end, start + _WIDTH)]
        raise ChainError(f"{message}\n  {line.rstrip()}\n  {' ' * (offset - start)}^") from None

    def at(self, node: ast.expr | ast.keyword) -> int:
        return node.col_offset + self.indent

    def chain(self) -> Chain:
        nodes = self._step_nodes()
        steps = tuple(self._step(node) for node in nodes)
        try:
            made = Chain(steps)
            made.require_complete()
            return made
        except BadStep as error:
            self.fail(self.at(nodes[error.step]), str(error))

    def _step_nodes(self) -> list[ast.expr]:
        strange = re.search(r"[^ -\"$-\[\]-~]", self.flat)  # not ASCII, or # or \
        if strange:
            found = strange.group()
            self.fail(
                strange.start(),
                f"a chain has no use for the character {found!r} (U+{ord(found):04X})",
            )
        if not self.flat.strip():
            self.fail(0, f"the chain is empty; {_ONE_STEP}")
        if self.flat[self.indent] == "|":
            self.fail(self.indent, f"a step is missing before this |; {_ONE_STEP}")
        bar = re.search(r"\| *(\||$)", self.flat)
        if bar:
            self.fail(bar.start(), f"a step is missing after this |; {_ONE_STEP}")
        try:
            pending: list[ast.expr] = [ast.parse(self.flat[self.indent :], mode="eval").body]
        except SyntaxError as error:
            offset = min((error.offset or 1) - 1 + self.indent, len(self.text))
            reason = (error.msg or "").split(". Perhaps")[0]
            self.fail(max(offset, 0), f"this cannot be read: {reason}; {_ONE_STEP}")
        except (ValueError, RecursionError, MemoryError):
            self.fail(self.indent, "the chain is too long or too deeply nested to be read")
        nodes: list[ast.expr] = []
        while pending:
            node = pending.pop()
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
                pending += [node.right, node.left]
            else:
                nodes.append(node)
        return nodes

    def _step(self, node: ast.expr) -> Step:
        function = node.func if isinstance(node, ast.Call) else node
        if isinstance(function, ast.Attribute):
            self.fail(self.at(node), f"write {function.attr} alone; {_ONE_STEP}")
        if not isinstance(function, ast.Name):
            self.fail(self.at(node), f"this is not a step; {_ONE_STEP}")
        args = node.args if isinstance(node, ast.Call) else []
        keywords = node.keywords if isinstance(node, ast.Call) else []
        if function.id in STRUCTURAL:
            return self._structural(node, function.id, args, keywords)
        try:
            definition = lookup(function.id)
        except ChainError as error:
            reason = UNSAID.get(function.id)
            found = f"no operation is called {function.id!r}: {reason}" if reason else str(error)
            self.fail(self.at(node), found)
        offsets = [self.at(arg) for arg in args]
        places: dict[int | str | None, int] = dict(enumerate(offsets))
        by_keyword = {}
        for keyword in keywords:
            if keyword.arg is None or keyword.arg in by_keyword:
                self.fail(self.at(keyword), "a keyword is a name, given once: name=value")
            by_keyword[keyword.arg] = self._value(keyword.value)
            places[keyword.arg] = self.at(keyword)
        values = gathered(definition.parameters, [self._value(arg) for arg in args])
        offsets = offsets[: len(values)]
        try:
            filled = match(function.id, definition.parameters, values, by_keyword)
            # Keywords stand first in it, then what each positional argument fills, in order.
            places.update(zip(list(filled)[len(by_keyword) :], offsets, strict=True))
            return definition.step(values, by_keyword)
        except BadArgument as error:
            self.fail(places.get(error.argument, self.at(node)), str(error))

    def _structural(
        self, node: ast.expr, op: str, args: list[ast.expr], keywords: list[ast.keyword]
    ) -> Step:
        names = [name for arg in args if isinstance(name := self._value(arg), str)]
        is_list = op == "takes"
        if keywords or len(names) != max(len(args), 1) or not (is_list or len(names) == 1):
            wanted = "names, as in takes(weight, bias)" if is_list else f"one name, as in {op}(y)"
            self.fail(self.at(node), f"{op} takes {wanted}")
        if is_list or op == "operand":
            return Step(op, operands=tuple(("", name) for name in names))
        return Step(op, names=tuple(names))

    def _value(self, node: ast.expr) -> object:
        """An argument: a constant, or a name as a string."""
        if isinstance(node, ast.Constant) and isinstance(node.value, float | int | str | None):
            return node.value
        if isinstance(node, ast.Name):
            return _NUMBERS.get(node.id, node.id)
        if isinstance(node, ast.Tuple | ast.List):
            return tuple(self._value(element) for element in node.elts)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
            number = self._value(node.operand)
            if isinstance(number, float | int) and not isinstance(number, bool):
                return -number if isinstance(node.op, ast.USub) else number
        self.fail(self.at(node), "an argument is a number, a name, a tuple or a quoted word")
