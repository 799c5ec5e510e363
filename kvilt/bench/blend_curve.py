"""Quality against ratio, as a plot of characters."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from string import ascii_uppercase

Point = tuple[str, float, float]  # a method such as "query 15%", its recomputed share, its KL

_WIDE, _HIGH = 64, 14


def series(points: Sequence[Point]) -> dict[str, list[tuple[float, float]]]:
    """The points of each strategy by rising share; the first point of each is plain reuse."""
    reuse = [(share, kl) for name, share, kl in points if name == "reuse"]
    found: dict[str, list[tuple[float, float]]] = {}
    for name, share, kl in points:
        strategy, _, ratio = name.rpartition(" ")
        if strategy and ratio.endswith("%"):
            found.setdefault(strategy, list(reuse)).append((share, kl))
    return {strategy: sorted(mine) for strategy, mine in found.items()}


def curve(points: Sequence[Point]) -> str:
    """KL over the recomputed share, with a letter for each strategy; empty without strategies."""
    lines = series(points)
    if not lines:
        return ""
    top = max(kl for mine in lines.values() for _, kl in mine) or 1.0
    right = max(share for mine in lines.values() for share, _ in mine) or 1.0
    grid = [[" "] * (_WIDE + 1) for _ in range(_HIGH + 1)]
    for mine in lines.values():
        for (x1, y1), (x2, y2) in pairwise(mine):
            for step in range(_WIDE + 1):
                part = step / _WIDE
                _dot(grid, (x1 + (x2 - x1) * part) / right, (y1 + (y2 - y1) * part) / top, "·")
    for letter, mine in zip(ascii_uppercase, lines.values(), strict=False):
        for x, y in mine:
            _dot(grid, x / right, y / top, letter if x else "*")
    rows = [f"{top * (_HIGH - i) / _HIGH:8.3f} │{''.join(row).rstrip()}" for i, row in enumerate(grid)]
    legend = "  ".join(f"{letter} {name}" for letter, name in zip(ascii_uppercase, lines, strict=False))
    scale = f"{'':9}0%{f'{right:.0%} recomputed':>{_WIDE}}"
    return "\n".join([f"KL of the first token, * plain reuse, {legend}", *rows, f"{'':9}└{'─' * _WIDE}", scale])


def _dot(grid: list[list[str]], x: float, y: float, mark: str) -> None:
    row, column = round((1 - y) * _HIGH), round(x * _WIDE)
    if mark != "·" or grid[row][column] == " ":
        grid[row][column] = mark
