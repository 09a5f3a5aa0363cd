"""Where a sweep falls under its neighbours: a cliff."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

CLIFF = 0.85  # of the neighbours' mean bandwidth; under it is a cliff
FEWEST_ELEMENTS = 1 << 20  # fewer are all launch


def series(points: Sequence[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """A sweep's points by (mode, dtype), each in order of what is varied."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for point in sorted(points, key=lambda p: p["at"]):
        found.setdefault((point["mode"], point["dtype"]), []).append(point)
    return found


def worst_points(points: Sequence[dict[str, Any]], varied: str) -> list[dict[str, Any]]:
    """In each series, the point with the least part of its two neighbours' mean bandwidth."""
    found = []
    for (mode, dtype), line in series(points).items():
        ratios = [
            (2 * here["gbps"] / (left["gbps"] + right["gbps"]), here["at"])
            for left, here, right in zip(line, line[1:], line[2:], strict=False)
            if varied != "elements" or here["at"] >= FEWEST_ELEMENTS
        ]
        if ratios:
            ratio, at = min(ratios)
            found.append({"mode": mode, "dtype": dtype, "at": at, "of_neighbours": ratio})
    return found
