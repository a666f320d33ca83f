"""The plot of the expert layer by model, `layer_by_model.png`, from all reports of benchmarks/layer.py."""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

type Row = Mapping[str, Any]

LAYER_PLOT = "layer_by_model.png"
OURS, TOKENS = "jax_ep.moe", 4096
DIRECTIONS = ("forward", "forward + backward")
BASELINES = ("jax_ep.moe, implementation xla", "all_to_all + einsum, capacity 1.25", "ragged_all_to_all + ragged_dot")
ORDER = (OURS, *BASELINES)
LONGEST = 2.5  # times our longest bar; longer bars are cut and hatched, with their figure next to them
HEIGHT = 0.28  # of a bar
NAMES = {
    "deepseek-v3": "DeepSeek-V3",
    "deepseek-v3-quarter": "DeepSeek-V3, 64 experts",
    "qwen3-235b": "Qwen3-235B",
    "mixtral-8x7b": "Mixtral-8x7B",
    "qwen3-30b": "Qwen3-30B-A3B",
    "deepseek-v2-lite": "DeepSeek-V2-Lite",
    "gpt-oss-120b": "gpt-oss-120b",
    "glm-4.5": "GLM-4.5",
    "glm-4.5-air": "GLM-4.5-Air",
    "llama-4-maverick": "Llama 4 Maverick",
}


def powers_of_two(*axes: Any) -> None:
    """Label logarithmic axes at powers of two."""
    from matplotlib import ticker

    for axis in axes:
        axis.set_major_locator(ticker.LogLocator(base=2))
        axis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
        axis.set_minor_locator(ticker.NullLocator())


def make_figure(rows: int, columns: int, size: tuple[float, float], **options: Any) -> tuple[Any, Any]:
    """Return a figure to save, and its grid of axes; both are None if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        print(f"no plot: {error}", file=sys.stderr)
        return None, None
    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


class Layer(NamedTuple):
    """One group of bars."""

    model: str
    ranks: int

    @property
    def label(self) -> str:
        return f"{NAMES.get(self.model, self.model)}\n{self.ranks} GPUs"


def layers_of(rows: Iterable[Row]) -> dict[str, dict[Layer, dict[str, float]]]:
    """Return `{direction: {layer: {variant: milliseconds}}}` with uniform routing, of jax_ep and of the baselines."""
    found: dict[str, dict[Layer, dict[str, float]]] = {direction: {} for direction in DIRECTIONS}
    for row in rows:
        shape, variant = row["shape"], row["variant"]
        same = shape["routing"] == "uniform" and shape["tokens_per_rank"] == TOKENS
        if same and variant in (OURS, *BASELINES) and "seconds" in row:
            times = found[row["direction"]].setdefault(Layer(shape["model"], shape["ranks"]), {})
            times[variant] = 1e3 * row["seconds"]["median"]
    return {
        direction: {layer: times for layer, times in layers.items() if OURS in times and len(times) > 1}
        for direction, layers in found.items()
    }


def _found_in(folder: Path) -> dict[str, dict[Layer, dict[str, float]]]:
    """Return `layers_of` the reports in a folder that are of the most frequent kind of GPU."""
    contents = [json.loads(path.read_text()) for path in folder.glob("moe_layer*.json")]
    kinds = Counter(content["device"]["kind"] for content in contents)
    most = max(kinds, key=lambda kind: (kinds[kind], kind), default=None)
    reports = sorted((c for c in contents if c["device"]["kind"] == most), key=lambda content: content["date"])
    rows = [row for content in reports for row in content["rows"]]
    return {direction: layers for direction, layers in layers_of(rows).items() if layers}


def draw_layers(folder: Path) -> Path | None:
    """Draw `LAYER_PLOT` of all reports of layers in a folder that are of the most frequent kind of GPU.

    Returns None without such a layer, with a file that is no report, or if matplotlib is not installed.
    """
    try:
        found = _found_in(folder)
    except (OSError, ValueError, LookupError, TypeError) as error:
        print(f"no plot: not all files moe_layer*.json in {folder} are reports ({error!r})", file=sys.stderr)
        return None
    if not found:
        return None
    models = [*NAMES, *sorted({layer.model for layers in found.values() for layer in layers} - NAMES.keys())]
    drawn = {*itertools.chain(*found.values())}
    groups = sorted(drawn, key=lambda layer: (layer.ranks, models.index(layer.model)))
    size = 6.5 * len(found), 1.2 + 0.62 * len(groups)
    figure, grid = make_figure(1, len(found), size, sharey=True)
    if figure is None:
        return None
    from matplotlib.patches import Patch

    for axes, (direction, layers) in zip(grid.flat, found.items(), strict=True):
        _layers(axes, [(layer.label, layers.get(layer, {})) for layer in groups])
        axes.set(title=f"{direction}, {TOKENS} tokens per GPU", xlabel="ms per layer")
    variants = [name for name in ORDER if any(name in times for layers in found.values() for times in layers.values())]
    handles = [Patch(color=f"C{ORDER.index(name)}", label=name) for name in variants]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    path = folder / LAYER_PLOT
    figure.savefig(path, dpi=120)
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
