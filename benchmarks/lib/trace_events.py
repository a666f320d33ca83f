"""What the profiler's trace says about one GPU: its kernels and copies, run by run, and where the time goes.

`jax.profiler.trace` leaves a `*.trace.json.gz` in Chrome's format. Metadata events name its processes, which are
devices ("/device:GPU:0") and hosts, and their threads, which are streams ("Stream #13(Compute)") and summaries that XLA
derives from them ("XLA Ops", "XLA Modules"). An event of phase "X" on a stream is a kernel or a copy. Times are in
microseconds.
"""

from __future__ import annotations

import gzip
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class Event(NamedTuple):
    """One kernel or copy."""

    name: str
    start: float
    end: float

    @property
    def duration(self) -> float:
        return self.end - self.start


def load(folder: Path) -> list[dict[str, Any]]:
    """The events of the newest trace below a folder."""
    found = sorted(folder.rglob("*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ValueError(f"the profiler has left no trace in {folder}")
    with gzip.open(found[-1], "rt") as file:
        return json.load(file)["traceEvents"]


def kernels(trace: Sequence[Mapping[str, Any]], device: int = 0) -> list[Event]:
    """Kernels and copies of one GPU, in the order in which they start."""
    metadata = [event for event in trace if event.get("ph") == "M"]
    names = {e["pid"]: e["args"]["name"] for e in metadata if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in metadata if e["name"] == "thread_name"}
    pids = {pid for pid, name in names.items() if re.match(rf"/device:GPU:{device}\b", name)}
    streams = {key for key, name in threads.items() if key[0] in pids and name.startswith("Stream #")}
    found = [
        Event(e["name"], float(e["ts"]), float(e["ts"]) + float(e["dur"]))
        for e in trace
        if e.get("ph") == "X" and (e["pid"], e["tid"]) in streams
    ]
    if not found:
        there = sorted(f"{names.get(pid)}: {name}" for (pid, _), name in threads.items())
        raise ValueError(
            f"no event on a stream of /device:GPU:{device}; the trace has {there or sorted(names.values())}"
        )
    return sorted(found, key=lambda event: (event.start, event.end))


def split_runs(events: Sequence[Event], count: int) -> list[list[Event]]:
    """Events of `count` runs of a program, in order of their starts, split where nothing ran for longest."""
    if len(events) < count:
        raise ValueError(f"{len(events)} events cannot belong to {count} runs")
    ends = itertools.accumulate((event.end for event in events), max)  # an early kernel may outlast later ones
    gaps = [later.start - end for later, end in zip(events[1:], ends, strict=False)]
    longest = sorted(range(len(gaps)), key=gaps.__getitem__)[len(gaps) - (count - 1) :]
    bounds = [0, *(i + 1 for i in sorted(longest)), len(events)]
    return [list(events[first:last]) for first, last in itertools.pairwise(bounds)]


def span(run: Sequence[Event]) -> float:
    """From the first start to the last end."""
    return max(event.end for event in run) - min(event.start for event in run)


def busy(run: Iterable[Event]) -> float:
    """How long anything ran: what overlaps, on several streams, counts once."""
    total, until = 0.0, -np.inf
    for event in sorted(run, key=lambda event: event.start):
        total += max(0.0, event.end - max(event.start, until))
        until = max(until, event.end)
    return total


def summarise(runs: Sequence[Sequence[Event]]) -> dict[str, Any]:
    """Medians over runs; kernels by their part of a run, `us_per_call` over all calls, shares of the busy time.

    Shares add up to more than one where kernels overlap. Where `same_calls` is false, runs differ in what they called
    and how often: then the program does so, or they were not split where one ended.
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
