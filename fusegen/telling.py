"""Telling: what a call does, one thing after the other: what torch takes and moves, and what each
chain's kernels do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusegen.answers import Chosen
from fusegen.layouts import dtype_name
from fusegen.runtime import Fused
from fusegen.taking import Other, View


def explained(
    chosen: Chosen, x: str, tensor: Callable[[str], Tensor], target: str | None, bandwidth: float
) -> str:
    """What a call does, where the tensors that the chains neither make nor see in others are told.
    Nothing is computed; bandwidth is in GB/s.
    """
    return "\n\n".join(_Told(chosen, x, tensor, target, bandwidth).lines())


class _Told:
    def __init__(
        self,
        chosen: Chosen,
        x: str,
        tensor: Callable[[str], Tensor],
        target: str | None,
        bandwidth: float,
    ) -> None:
        self.chosen, self.x, self.tensor = chosen, x, tensor
        self.target, self.bandwidth = target, bandwidth
        self.known: dict[str, Tensor] = {}  # without memory
        self.found: list[str] = []

    def lines(self) -> list[str]:
        """A paragraph for each."""
        chosen = self.chosen
        if chosen.drawn is not None:
            self.found.append("torch draws, in each call, what the function draws")
        for name, main, fused in chosen.before:
            first, *_ = self._chain(fused, main or self.x, f"{name}, by a chain: ")
            self.known[name] = first
        results = self._chain(chosen.fused, chosen.main or self.x, "")
        if chosen.seen_as:
            self.known[chosen.seen_as] = results[0]
        for main, fused in chosen.rest:
            self._chain(fused, main, "another result: ")
        for result in chosen.order:
            if isinstance(result, str):
                self._there(result)
        return self.found

    def _chain(self, fused: Fused, main: str, title: str) -> Sequence[Tensor]:
        """Tell of a chain's kernels; what it gives, without memory."""
        x, operands = self._there(main), [self._there(name) for name in fused.chain.given]
        is_last = x.dim() in (4, 5) and not x.is_contiguous()
        told = fused.explain(
            self.target,
            dtype_name(x.dtype),
            shape=tuple(x.shape),
            operands={n: tuple(t.shape) for n, t in zip(fused.chain.given, operands, strict=True)},
            layout="channels_last" if is_last and _is_channels_last(x) else "contiguous",
            bandwidth=self.bandwidth,
        )
        self.found.append(title + told)
        results = fused.reference(x, *operands)
        return results if isinstance(results, tuple) else (results,)

    def _there(self, name: str) -> Tensor:
        """A tensor without memory; of what torch makes of others it is told."""
        if name in self.known:
            return self.known[name]
        view = self.chosen.views.get(name)
        if view is None:
            made = self.chosen.made
            self.known[name] = (made[name] if name in made else self.tensor(name)).to("meta")
            return self.known[name]
        self.known[name] = view.taken(self._there)
        lies = "a copy" if view.is_copy else "a view"
        self.found.append(
            f"{name} = {_text(view)}: {lies}, {tuple(self.known[name].shape)}, by torch"
        )
        return self.known[name]


def _is_channels_last(x: Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.is_contiguous(memory_format=formats[x.dim()])


def _text(view: View) -> str:
    told = [_shown(a) for a in view.args]
    told += [f"{word}={_shown(value)}" for word, value in view.named.items()]
    if view.method == "__getitem__":
        return f"{view.of}[{told[0]}]"
    if view.method == "assigned":
        return f"{view.of} with {told[1]} at [{told[0]}]"
    return f"{view.of}.{view.method}({', '.join(told)})"


def _shown(value: Any) -> str:
    if isinstance(value, Other):
        return value.name
    if isinstance(value, slice):
        ends = ["" if n is None else str(n) for n in (value.start, value.stop, value.step)]
        return ":".join(ends[: 2 + (value.step is not None)])
    if value is Ellipsis:
        return "..."
    if isinstance(value, tuple | list):
        return ", ".join(map(_shown, value))
    return f"a tensor of {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
