"""Quality against ratio as a picture; matplotlib is the extra `plot`."""

from __future__ import annotations

from collections.abc import Sequence

from .blend_curve import Point, series
from .serve_plot import save


def plot(points: Sequence[Point], title: str, path: str) -> None:
    """Plot the curve; the suffix of the file gives the format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for strategy, mine in series(points).items():
        axes.plot([100 * x for x, _ in mine], [y for _, y in mine], marker="o", label=strategy)
    axes.set(xlabel="tokens of documents computed again, %", ylabel="KL of the first token", title=title)
    axes.set_ylim(bottom=0)
    axes.legend()
    save(figure, path)
