"""Plots of reports, from their JSON files alone.

All reports of the expert layer share one plot, `layer_by_model.png`.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

type Row = Mapping[str, Any]

LAYER_PLOT = "layer_by_model.png"
OURS = "jax_ep.moe"
DIRECTIONS = ("forward", "forward + backward")
BASELINES = ("jax_ep.moe, implementation xla", "all_to_all + einsum, capacity 1.25", "ragged_all_to_all + ragged_dot")
ORDER = (OURS, *BASELINES)
LONGEST = 2.5  # times our longest bar; longer bars are cut and hatched, with their figure next to them
HEIGHT = 0.28  # of a bar
NAMES = {
    "deepseek-v3": "DeepSeek-V3",
    "deepseek-v3-quarter": "DeepSeek-V3, 64 experts",
    "qwen3-235b": "Qwen3-235B",
    "mixtral-8x7b": "Mixtral 8x7B",
    "qwen3-30b": "Qwen3-30B",
    "gpt-oss-120b": "gpt-oss-120b",
    "glm-4.5": "GLM-4.5",
    "glm-4.5-air": "GLM-4.5-Air",
    "llama-4-maverick": "Llama 4 Maverick",
    "deepseek-v2-lite": "DeepSeek-V2-Lite",
}


# --- times over a number, by report ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Panel:
    """One plot: `curves[name]` has x values and the rows' `seconds` at them."""

    title: str
    xlabel: str
    curves: dict[str, tuple[list[float], list[Mapping[str, float]]]] = dataclasses.field(default_factory=dict)


def _title_of_layer(row: Row) -> str | None:
    if row["variant"].startswith(("one launch", "moe_sort", "a step of the chain")):
        return None  # only default choices are shown, and no parts
    return NAMES.get(row["shape"]["model"], row["shape"]["model"])


REPORTS: dict[str, tuple[str, Callable[[Row], str | None]]] = {
    "scaling": ("ranks", lambda row: f"{row['shape']['scaling']} scaling, {row['part']}"),
    "fused_moe": ("tokens", _title_of_layer),
    "dispatch_combine": (
        "tokens_per_rank",
        lambda row: f"{row['shape']['routing']} routing, {row['shape']['ranks']} ranks",
    ),
    "low_latency": ("tokens_per_rank", lambda row: f"{row['shape']['ranks']} ranks"),
}
"""By the beginning of the report's name: the x in a row's `shape`, and the title of a row's panel or None."""


def panels_of(rows: Iterable[Row], x: str, title_of: Callable[[Row], str | None]) -> list[Panel]:
    """Return the panels of the rows that have a time and a title, in their order."""
    panels: dict[str, Panel] = {}
    timed = [row for row in rows if "seconds" in row]
    for row in sorted(timed, key=lambda row: row["shape"][x]):
        if (title := title_of(row)) is None:
            continue
        panel = panels.setdefault(title, Panel(title, x.replace("_", " ")))
        xs, seconds = panel.curves.setdefault(row["variant"], ([], []))
        xs.append(row["shape"][x])
        seconds.append(row["seconds"])
    return list(panels.values())


def draw(report: Path) -> Path | None:
    """Plot a report next to its JSON; None if it has no plot or matplotlib is not installed."""
    axes = next((axes for name, axes in REPORTS.items() if report.stem.startswith(name)), None)
    panels = [] if axes is None else panels_of(json.loads(report.read_text())["rows"], *axes)
    return plot(report.with_suffix(".png"), panels) if panels else None


def plot(path: Path, panels: Sequence[Panel]) -> Path | None:
    """Plot medians over powers of two, with quartiles as error bars.

    Returns None if matplotlib is not installed.
    """
    mpl = matplotlib()
    if mpl is None:
        return None
    from matplotlib import pyplot

    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure, grid = pyplot.subplots(
        rows, columns, figsize=(7.5 * columns, 4 * rows), squeeze=False, layout="constrained"
    )
    for axes, panel in itertools.zip_longest(grid.flat, panels):
        if panel is None:
            axes.set_axis_off()
        else:
            _curves(axes, panel, mpl.ticker)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def matplotlib() -> Any:
    """Import matplotlib, to draw files; None if it is not installed."""
    try:
        import matplotlib as mpl
    except ImportError:
        print("no plot: matplotlib is not installed", file=sys.stderr)
        return None
    mpl.use("Agg")
    return mpl


def _milliseconds(seconds: Sequence[Mapping[str, float]]) -> tuple[np.ndarray, np.ndarray]:
    """Return medians `[n]`, and the distances of the quartiles from them `[2, n]`."""
    middle = np.array([s["median"] for s in seconds])
    return 1e3 * middle, 1e3 * np.abs(np.array([[s["q1"], s["q3"]] for s in seconds]).T - middle)


def _curves(axes: Any, panel: Panel, ticker: Any) -> None:
    """Draw curves, with the legend next to the axes, where it hides none."""
    lines = ("-", "--", ":")
    for i, (name, (x, seconds)) in enumerate(panel.curves.items()):
        middle, spread = _milliseconds(seconds)
        line = lines[i // 10 % len(lines)]  # colors repeat after ten
        axes.errorbar(x, middle, spread, marker="o", markersize=3, capsize=2, linestyle=line, label=name)
    axes.set(title=panel.title, xlabel=panel.xlabel, ylabel="ms", xscale="log")
    medians = [s["median"] for _, seconds in panel.curves.values() for s in seconds if s["median"] > 0]
    if medians and max(medians) > 4 * min(medians):
        axes.set_yscale("log", nonpositive="mask")
        axes.set_ylim(bottom=0.5e3 * min(medians))  # noise must not set the scale
    elif medians:  # a quick run may have none
        axes.set_ylim(0, 1.5e3 * max(medians))  # from zero, so that noise does not look like a trend
    axes.xaxis.set_major_locator(ticker.LogLocator(base=2))
    axes.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=7, handlelength=3, loc="center left", bbox_to_anchor=(1.01, 0.5))


# --- the layer, by model --------------------------------------------------------------------------------------------


class Layer(NamedTuple):
    """One group of bars."""

    model: str
    ranks: int

    @property
    def label(self) -> str:
        return f"{NAMES.get(self.model, self.model)}\n{self.ranks} GPUs"


def layers_of(rows: Iterable[Row], tokens: int) -> dict[str, dict[Layer, dict[str, float]]]:
    """Return `{direction: {layer: {variant: milliseconds}}}` with uniform routing, of jax_ep and of the baselines."""
    found: dict[str, dict[Layer, dict[str, float]]] = {direction: {} for direction in DIRECTIONS}
    for row in rows:
        shape, variant = row["shape"], row["variant"]
        same = shape["routing"] == "uniform" and shape["tokens_per_rank"] == tokens
        if same and variant in (OURS, *BASELINES) and "seconds" in row:
            times = found[row["direction"]].setdefault(Layer(shape["model"], shape["ranks"]), {})
            times[variant] = 1e3 * row["seconds"]["median"]
    return {
        direction: {layer: times for layer, times in layers.items() if OURS in times and len(times) > 1}
        for direction, layers in found.items()
    }


def draw_layers(folder: Path, tokens: int = 4096) -> Path | None:
    """Draw `LAYER_PLOT` of all reports of layers in a folder that are of the most frequent kind of GPU.

    Returns None if there is no such layer, or matplotlib is not installed.
    """
    contents = [json.loads(path.read_text()) for path in folder.glob("moe_layer*.json")]
    kinds = Counter(content["device"]["kind"] for content in contents)
    most = max(kinds, key=lambda kind: (kinds[kind], kind), default=None)
    reports = sorted((c for c in contents if c["device"]["kind"] == most), key=lambda content: content["date"])
    rows = [row for content in reports for row in content["rows"]]
    found = {direction: layers for direction, layers in layers_of(rows, tokens).items() if layers}
    mpl = matplotlib() if found else None
    if mpl is None:
        return None
    from matplotlib import pyplot

    models = [*NAMES, *sorted({layer.model for layers in found.values() for layer in layers} - NAMES.keys())]
    drawn = {*itertools.chain(*found.values())}
    groups = sorted(drawn, key=lambda layer: (layer.ranks, models.index(layer.model)))
    size = 6.5 * len(found), 1.2 + 0.62 * len(groups)
    figure, grid = pyplot.subplots(1, len(found), figsize=size, sharey=True, squeeze=False, layout="constrained")
    for axes, (direction, layers) in zip(grid.flat, found.items(), strict=True):
        _layers(axes, [(layer.label, layers.get(layer, {})) for layer in groups])
        axes.set(title=f"{direction}, {tokens} tokens per GPU", xlabel="ms per layer")
    variants = [name for name in ORDER if any(name in times for layers in found.values() for times in layers.values())]
    handles = [mpl.patches.Patch(color=f"C{ORDER.index(name)}", label=name) for name in variants]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    path = folder / LAYER_PLOT
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _layers(axes: Any, groups: Sequence[tuple[str, Mapping[str, float]]]) -> None:
    """Draw the bars of each group, ours on top; the others with their ratio to ours."""
    most = LONGEST * max(times.get(OURS, 0) for _, times in groups)
    limit = 1.4 * max(time for _, times in groups for time in times.values() if time <= most)  # space for figures
    for y, (_, times) in enumerate(groups):
        for i, (variant, time) in enumerate(sorted(times.items(), key=lambda item: ORDER.index(item[0]))):
            whole = time <= most
            place, length = y + (i - (len(times) - 1) / 2) * HEIGHT, time if whole else 0.75 * limit
            bar = axes.barh(place, length, HEIGHT, color=f"C{ORDER.index(variant)}", hatch=None if whole else "//")
            ratio = f" ({_ratio(time / times[OURS])} x)" if variant != OURS else ""
            axes.bar_label(bar, [f"{time:.3g}{ratio}{'' if whole else ', bar cut'}"], padding=3, fontsize=8)
    axes.set_yticks(range(len(groups)), [label for label, _ in groups])
    axes.tick_params(axis="y", length=0)
    axes.set(xlim=(0, limit), ylim=(len(groups) - 0.5, -0.5))
    axes.grid(alpha=0.3, axis="x")


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"
