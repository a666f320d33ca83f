"""Profile a program on the first GPU: its kernels and copies, run by run, and idle gaps.

`jax.profiler.trace` writes a `*.trace.json.gz` in Chrome's format. Metadata events name its processes, which are
devices ("/device:GPU:0") and hosts, and their threads, which are streams ("Stream #13(Compute)") and summaries that XLA
derives from them ("XLA Ops", "XLA Modules"). An event of phase "X" on a stream is a kernel or a copy. Times are in
microseconds.

A program runs several times in one trace, with a pause after each run that is far longer than any gap inside.
"""

from __future__ import annotations

import gzip
import itertools
import json
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_ep.tools.benchmark import harness

_PAUSE_S = 0.005  # far longer than any gap inside a run


class Event(NamedTuple):
    """One kernel or copy."""

    name: str
    start: float
    end: float

    @property
    def duration(self) -> float:
        return self.end - self.start


def load(folder: Path) -> list[dict[str, Any]]:
    """Return the events of the trace in a folder."""
    path = next(folder.rglob("*.trace.json.gz"), None)
    if path is None:
        raise ValueError(f"the profiler wrote no trace to {folder}")
    with gzip.open(path, "rt") as file:
        return json.load(file)["traceEvents"]


def kernels(trace: Sequence[Mapping[str, Any]]) -> list[Event]:
    """Return the kernels and copies of the first GPU, by start time."""
    metadata = [event for event in trace if event.get("ph") == "M"]
    names = {e["pid"]: e["args"]["name"] for e in metadata if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in metadata if e["name"] == "thread_name"}
    pids = {pid for pid, name in names.items() if re.match(r"/device:GPU:0\b", name)}
    streams = {key for key, name in threads.items() if key[0] in pids and name.startswith("Stream #")}
    found = [
        Event(e["name"], float(e["ts"]), float(e["ts"]) + float(e["dur"]))
        for e in trace
        if e.get("ph") == "X" and (e["pid"], e["tid"]) in streams
    ]
    if not found:
        there = sorted(f"{names.get(pid)}: {name}" for (pid, _), name in threads.items())
        raise ValueError(f"no event on a stream of /device:GPU:0; the trace has {there or sorted(names.values())}")
    return sorted(found, key=lambda event: (event.start, event.end))


def split_runs(events: Sequence[Event], count: int) -> list[list[Event]]:
    """Split events, sorted by start time, into `count` runs at the longest gaps."""
    if len(events) < count:
        raise ValueError(f"{len(events)} events cannot belong to {count} runs")
    ends = itertools.accumulate((event.end for event in events), max)  # an early kernel may outlast later ones
    gaps = [later.start - end for later, end in zip(events[1:], ends, strict=False)]
    longest = sorted(range(len(gaps)), key=gaps.__getitem__)[len(gaps) - (count - 1) :]
    bounds = [0, *(i + 1 for i in sorted(longest)), len(events)]
    return [list(events[first:last]) for first, last in itertools.pairwise(bounds)]


def span(run: Sequence[Event]) -> float:
    """Return the time from the first start to the last end."""
    return max(event.end for event in run) - min(event.start for event in run)


def busy(run: Iterable[Event]) -> float:
    """Return the time in which at least one event ran."""
    total, until = 0.0, -np.inf
    for event in sorted(run, key=lambda event: event.start):
        total += max(0.0, event.end - max(event.start, until))
        until = max(until, event.end)
    return total


def summarize(runs: Sequence[Sequence[Event]]) -> dict[str, Any]:
    """Return medians over runs; kernels are sorted by time, and their shares are of the busy time.

    The sum of the shares exceeds 1 if kernels overlap. `same_calls` is false if runs differ in their kernels: then the
    program itself differs, or the runs were not split correctly.
    """
    calls = [Counter(event.name for event in run) for run in runs]
    return {
        "span_us": _median(map(span, runs)),
        "busy_us": _median(map(busy, runs)),
        "idle_us": _median(span(run) - busy(run) for run in runs),
        "same_calls": all(counts == calls[0] for counts in calls),
        "kernels": sorted((_kernel(name, runs) for name in set().union(*calls)), key=lambda k: (-k["us"], k["name"])),
    }


def _kernel(name: str, runs: Sequence[Sequence[Event]]) -> dict[str, Any]:
    times = [[event.duration for event in run if event.name == name] for run in runs]
    return {
        "name": name,
        "calls": _median(map(len, times)),
        "us_per_call": _median(itertools.chain(*times)),
        "us": _median(map(sum, times)),
        "share": _median(sum(of_run) / busy(run) for of_run, run in zip(times, runs, strict=True)),
    }


def _median(values: Iterable[float]) -> float:
    return float(np.median(list(values)))


def trace(run: Callable[[], Any], rounds: int) -> list[list[Event]]:
    """Return the kernels of the first GPU in each of `rounds` runs."""
    options = jax.profiler.ProfileOptions()
    # A trace holds a million events; those of the host would fill it.
    options.python_tracer_level, options.host_tracer_level = 0, 1
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(rounds):
                jax.block_until_ready(run())
                time.sleep(_PAUSE_S)
        return split_runs(kernels(load(Path(folder))), rounds)


def show_groups(title: str, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Print the milliseconds of each group of kernels of the rows that have been profiled."""
    profiled = {label: row for label, row in rows.items() if "groups_ms" in row}
    if not profiled:
        return
    cells = [
        [label, *(f"{ms:.2f}" for ms in (*row["groups_ms"].values(), row["idle_ms"]))]
        for label, row in profiled.items()
    ]
    names = next(iter(profiled.values()))["groups_ms"]
    harness.show_table(title, ["variant", *names, "idle"], cells)
