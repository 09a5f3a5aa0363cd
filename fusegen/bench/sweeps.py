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
    lines = _beside_neighbours(points, varied)
    return [min(line, key=lambda point: point["of_neighbours"]) for line in lines if line]


def cliffs(points: Sequence[dict[str, Any]], varied: str) -> list[dict[str, Any]]:
    """All points that are cliffs, series by series."""
    lines = _beside_neighbours(points, varied)
    return [point for line in lines for point in line if point["of_neighbours"] < CLIFF]


def _beside_neighbours(points: Sequence[dict[str, Any]], varied: str) -> list[list[dict[str, Any]]]:
    """In each series, what part of its two neighbours' mean bandwidth each point has."""
    return [
        [
            {
                "mode": mode,
                "dtype": dtype,
                "at": triple[1]["at"],
                "of_neighbours": _of_neighbours(triple),
                "copy_of_neighbours": _of_neighbours(triple, "copy_gbps"),
            }
            for triple in zip(line, line[1:], line[2:], strict=False)
            if varied != "elements" or triple[1]["at"] >= FEWEST_ELEMENTS
        ]
        for (mode, dtype), line in series(points).items()
    ]


def _of_neighbours(triple: Sequence[dict[str, Any]], what: str = "gbps") -> float:
    left, here, right = (float(point[what]) for point in triple)
    return 2 * here / (left + right)
