"""Output of a run: progress on the terminal, a JSON of its metrics, and a plot of its curves."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from jax_ep.core import json_files
from jax_ep.core.files import check_writable, write_atomically
from jax_ep.core.json_files import array, integer, record

if TYPE_CHECKING:
    import numpy as np

_BARS = "▁▂▃▄▅▆▇█"


@contextlib.contextmanager
def doing(console: Console, what: str) -> Iterator[None]:
    """Show on a terminal what the block does and for how long; leave a line with its seconds."""
    began = time.perf_counter()
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task(what)
        yield
    console.print(f"{what}: {time.perf_counter() - began:.0f} s", style="dim", highlight=False)


def load_bars(load: np.ndarray) -> str:
    """Draw one bar per expert; a full bar is at least twice the fair share."""
    import numpy as np

    relative = np.asarray(load, np.float64) / max(float(np.mean(load)), 1e-9)
    levels = np.clip(relative / 2 * len(_BARS), 0, len(_BARS) - 1).astype(int)
    return "".join(_BARS[level] for level in levels)


def _read(path: Path) -> dict[str, Any]:
    """Read the metrics of an earlier run."""
    rows = array(record({"step": integer(0, 2**31)}, more=True))
    try:
        saved: dict[str, Any] = json_files.read(path, 1 << 30)
        record({"train": rows, "held_out": rows}, more=True)(saved, "")
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): remove it, or begin anew with --restart") from error
    return saved


class History:
    """Metrics of all steps so far, as plain lists; a resumed run continues the lists of the file."""

    def __init__(self, path: Path, *, resume_at: int) -> None:
        check_writable(path)
        self._path = path
        self.has_grown = False
        self.metrics: dict[str, list[Any]] = {"train": [], "held_out": []}
        if resume_at and path.exists():
            saved = _read(path)
            # The interrupted run may have passed its last checkpoint: those steps run again.
            self.metrics = {key: [row for row in saved[key] if row["step"] <= resume_at] for key in self.metrics}

    def add(self, kind: str, row: dict[str, Any]) -> None:
        """Append a row to `train` or `held_out`; numbers that are not finite end the run before they are saved."""
        import numpy as np

        if wrong := [name for name, value in row.items() if not np.isfinite(value).all()]:
            raise ValueError(
                f"step {row['step']}: {kind} has {', '.join(wrong)} that is not finite; pass a smaller --learning-rate,"
                " to continue from the newest checkpoint, or with --restart from the start"
            )
        self.metrics[kind].append(row)
        self.has_grown = True

    def write(self, **summary: Any) -> dict[str, Any]:
        """Write everything together with `summary`; return what was written."""
        content = summary | self.metrics
        write_atomically(self._path, (json.dumps(content) + "\n").encode())  # A run may be killed at any time.
        return content


class TrainingBar:
    """A progress bar with the loss, the speed, and the load of each expert over all layers."""

    def __init__(self, console: Console, *, total: int, done: int) -> None:
        texts = "loss {task.fields[loss]:.3f}", "{task.fields[speed]:,.0f} tokens/s", "load {task.fields[load]}"
        columns = [MofNCompleteColumn(), *(TextColumn(text) for text in texts), TimeRemainingColumn(compact=True)]
        # Narrower than rich's default, so that everything fits in 80 columns.
        self._progress = Progress(BarColumn(bar_width=16), *columns, console=console, refresh_per_second=4)
        self._task = self._progress.add_task(
            "train", total=total, completed=done, loss=float("nan"), speed=0.0, load=""
        )
        self._last = time.perf_counter()

    def __enter__(self) -> Self:
        self._progress.start()
        self._last = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def advance(self, loss: float, tokens: int, load: np.ndarray) -> float:
        """Show one more step; return its tokens per second."""
        now = time.perf_counter()
        speed = tokens / (now - self._last)
        self._last = now
        self._progress.update(self._task, advance=1, loss=loss, speed=speed, load=load_bars(load.sum(axis=0)))
        return speed

    def pause(self) -> None:
        """Exclude the time since the last step from the next one's speed."""
        self._last = time.perf_counter()


def plot(path: Path, metrics: dict[str, list[Any]], entropy: float) -> None:
    """Plot the loss, the experts' shares of the load and the busiest rank over the steps, as a PNG."""
    import numpy as np

    # Imported here, because only plots need it; the figure draws without a display.
    from matplotlib.figure import Figure

    train, held_out = metrics["train"], metrics["held_out"]
    balanced = [row for row in train if "rows_before" in row]
    figure = Figure(figsize=(15 if balanced else 10, 4), layout="constrained")
    losses, loads, *others = figure.subplots(1, 3 if balanced else 2)
    losses.plot([row["step"] for row in train], [row["loss"] for row in train], label="training", linewidth=1)
    losses.plot([row["step"] for row in held_out], [row["loss"] for row in held_out], "o-", label="held out")
    losses.axhline(entropy, color="grey", linestyle="--", label="unigram entropy")
    losses.set(xlabel="step", ylabel="nats per byte", title="Loss", ylim=(0, None))
    losses.legend()
    load = np.array([row["load"] for row in train], np.float64).sum(axis=1)
    share = load / load.sum(axis=1, keepdims=True)
    for expert in range(share.shape[1]):
        loads.plot([row["step"] for row in train], share[:, expert], label=str(expert), linewidth=1)
    loads.axhline(1 / share.shape[1], color="grey", linestyle="--")
    loads.set(xlabel="step", ylabel="share of the assignments", title="Load per expert, all layers", ylim=(0, None))
    loads.legend(ncols=4, fontsize="small", title="expert")
    for ranks in others:
        for name, label in (("rows_before", "experts on their ranks"), ("rows_after", "with copies of hot experts")):
            by_rank = [np.array(row[name], np.float64) for row in balanced]  # [layers, ranks] each
            busiest = [(rows.max(axis=1) / rows.mean(axis=1)).max() for rows in by_rank]
            ranks.plot([row["step"] for row in balanced], busiest, label=label, linewidth=1)
        ranks.set(xlabel="step", ylabel="rows over the mean", title="Busiest rank, worst layer", ylim=(0, None))
        ranks.legend()
    figure.savefig(path, dpi=120)
