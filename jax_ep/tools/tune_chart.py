"""The chart of `jax-ep tune`: bandwidth by number of programs, with the number that was chosen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Curve(NamedTuple):
    """One exchange.

    Attributes:
      title: what it is.
      bytes_per_s: by number of programs.
      chosen: that number, or None for the package's own, which is `default` bytes per second.
      default: bytes per second of the package's own settings.
    """

    title: str
    bytes_per_s: dict[int, float]
    chosen: int | None
    default: float


def draw(curves: Sequence[Curve], path: Path) -> bool:
    """Writes the chart as PNG; False where matplotlib (`pip install '.[tools]'`) is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(5.5 * len(curves), 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    for place, curve in enumerate(curves, 1):
        axes = figure.add_subplot(1, len(curves), place)
        programs = sorted(curve.bytes_per_s)
        axes.plot(programs, [curve.bytes_per_s[n] / 1e9 for n in programs], marker="o", label="measured")
        axes.axhline(curve.default / 1e9, color="gray", linestyle="--", label="as shipped")
        if curve.chosen in curve.bytes_per_s:
            axes.plot(
                curve.chosen, curve.bytes_per_s[curve.chosen] / 1e9, "D", color="C3", markersize=10, label="chosen"
            )
        axes.set(title=curve.title, xlabel="programs", ylabel="GB/s of the busiest rank", ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)
    return True
