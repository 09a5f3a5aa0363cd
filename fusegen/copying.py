"""Copies of what is compiled: the same, for it holds no state but caches; and pickled, what it was
compiled from.
"""

from __future__ import annotations

import pkgutil
from typing import Any, Self


class Cached:
    """What holds no state but caches. `_made_of` is a function and its arguments that give the
    like of it; `_otherwise` the same, for where pickle does not find those, or the former.
    """

    _made_of: tuple[Any, ...]
    _otherwise: tuple[Any, ...]

    def __reduce__(self) -> str | tuple[Any, ...]:
        name = getattr(self, "__qualname__", "")
        found = _named(getattr(self, "__module__", ""), name)
        if found is self:  # what it decorates, pickle takes for a function of that name
            return name
        is_found = found is getattr(self, "__wrapped__", found)
        return self._made_of if is_found else self._otherwise

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self


def _named(module: str, name: str) -> object:
    try:
        return pkgutil.resolve_name(f"{module}:{name}")
    except (AttributeError, ImportError, ValueError):
        return None
