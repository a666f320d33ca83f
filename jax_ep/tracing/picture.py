"""Picture of a trace: the time line of every device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from jax_ep.megakernels.kernels.trace_structs import KINDS
from jax_ep.tracing.clocks import Timeline
from jax_ep.values import shown

# The palette of Okabe and Ito, for people with color vision deficiency; a wait is pale, because nothing happens.
_COLORS = {
    "announce": "#000000",
    "count": "#f0e442",
    "place": "#b3a500",
    "push": "#d55e00",
    "publish": "#7a3500",
    "wait": "#dddddd",
    "copy": "#e69f00",
    "tile": "#0072b2",
    "sum": "#009e73",
    "zero": "#cc79a7",
}
_WIDTH, _ROW, _LEAST, _MOST = 11.0, 0.035, 1.0, 6.0  # inches: of the picture, a program's row, a device


def require_matplotlib() -> None:
    """Raise an ImportError with the remedy if matplotlib is missing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError(f"Trace.plot needs matplotlib ({error}): pip install '.[tools]'") from error


def draw(trace: Timeline, path: Path) -> None:
    """Draw a trace, see `Trace.plot`."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    events = trace.aligned
    devices = np.unique(events["device"]).tolist()
    if not len(events):
        raise ValueError("Trace.plot: no events; call a function that communicates in the block of `record`.")
    rows = [len(np.unique(events["program"][events["device"] == device])) for device in devices]
    heights = [min(_MOST, max(_LEAST, _ROW * count)) for count in rows]
    figure = Figure(figsize=(_WIDTH, sum(heights) + 1.2), layout="constrained")
    endings = FigureCanvasAgg(figure).get_supported_filetypes()
    if path.suffix[1:].lower() not in endings:  # Without one, matplotlib would write another file.
        raise ValueError(
            f"Trace.plot: path is {shown(str(path))}, expected one that ends in one of {', '.join(sorted(endings))};"
            " pass 'trace.png', for example."
        )
    grid = figure.subplots(len(devices), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})
    first, scale = int(events["begin"].min()), 1 if trace.is_ordered_only else 1000
    for axes, device in zip(grid[:, 0], devices, strict=True):
        _draw_device(axes, events[events["device"] == device], first, scale)
        axes.set_ylabel(f"device {device}\nprograms")
    unit = (
        "place in the order of all events (interpreter: no times)" if trace.is_ordered_only else "time, \N{MICRO SIGN}s"
    )
    grid[-1, 0].set_xlabel(unit)
    names = sorted({launch.kernel for launch in trace.launches.values()})
    figure.suptitle(", ".join(names), fontsize=10)
    handles, labels = _legend(np.unique(events["kind"]))
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)


def _draw_device(axes: Any, events: np.ndarray, first: int, scale: int) -> None:
    """Draw one row per program; programs of one multiprocessor are neighbors."""
    from matplotlib.collections import PolyCollection

    order = np.lexsort((events["program"], events["multiprocessor"]))
    programs = list(dict.fromkeys(events["program"][order].tolist()))
    row = {program: i for i, program in enumerate(programs)}
    for kind in np.unique(events["kind"]):
        own = events[events["kind"] == kind]
        top = np.array([row[program] for program in own["program"].tolist()]) - 0.5
        begin, end = ((own[name] - first) / scale for name in ("begin", "end"))
        corners = [begin, top, end, top, end, top + 1, begin, top + 1]
        bars = np.stack(corners, axis=1).reshape(-1, 4, 2)
        axes.add_collection(PolyCollection(list(bars), facecolors=_COLORS[KINDS[kind]], linewidths=0))
    axes.autoscale_view(scaley=False)
    axes.margins(x=0)
    axes.set_ylim(len(programs) - 0.5, -0.5)
    axes.set_yticks([])


def _legend(kinds: np.ndarray) -> tuple[list[Any], list[str]]:
    from matplotlib.patches import Patch

    labels = [KINDS[kind] for kind in kinds]
    return [Patch(color=_COLORS[label]) for label in labels], labels
