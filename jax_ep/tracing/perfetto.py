"""Traces as files: Chrome's trace event format, which Perfetto opens, and from which they can be read again.

Source: "Trace Event Format", the document of the Chromium project. Of it there are complete events (phase X), with
times in microseconds, and metadata (phase M), which name a process per device and a thread per program and
multiprocessor. What the format has no place for is in `otherData`.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jax_ep.megakernels.kernels.structs_trace import KINDS
from jax_ep.tracing.clocks import Clocks
from jax_ep.tracing.events import EVENT, Launch

if TYPE_CHECKING:
    from jax_ep.tracing.trace import Trace

_FORMAT = "jax_ep trace 1"
_ORDER = "order: the kernels ran in an interpreter, a step is shown as a microsecond, and durations mean nothing"
_TIME = "time: ns of the first device's clock, since the first event; error_ns says how well the others are known"
_LAUNCHES = 0  # the thread of a device that shows its launches


def write(trace: Trace, path: Path) -> None:
    """See `Trace.save`."""
    data = json.dumps(_content(trace)).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def _content(trace: Trace) -> dict[str, Any]:
    events = trace.aligned
    first = int(events["begin"].min()) if len(events) else 0
    scale = 1 if trace.is_ordered_only else 1000  # units in a microsecond
    launches = [
        {"device": device, "number": number, **launch._asdict()}
        for (device, number), launch in sorted(trace.launches.items())
    ]
    return {
        "displayTimeUnit": "ns",
        "traceEvents": [*_names(trace), *_launch_events(trace, first, scale), *_events(trace, first, scale)],
        "otherData": {
            "format": _FORMAT,
            "clock": _ORDER if trace.is_ordered_only else _TIME,
            "is_ordered_only": trace.is_ordered_only,
            "begin": first,
            "clocks": trace.clocks._asdict(),
            "num_dropped": trace.num_dropped,
            "launches": launches,
        },
    }


def _ranks(trace: Trace, device: int) -> str:
    ranks = sorted({launch.rank(device) for (owner, _), launch in trace.launches.items() if owner == device})
    return " or ".join(map(str, ranks)) or "?"


def _tracks(events: np.ndarray, device: int) -> list[tuple[int, int]]:
    """Multiprocessors and programs of a device, in the order in which they are shown."""
    own = events[events["device"] == device]
    return sorted({(int(e["multiprocessor"]), int(e["program"])) for e in own})


def _names(trace: Trace) -> Iterator[dict[str, Any]]:
    for device in trace.devices:

        def named(kind: str, name: str, tid: int, device: int = device) -> dict[str, Any]:
            return {"ph": "M", "pid": device, "tid": tid, "name": kind, "args": {"name": name}}

        yield named("process_name", f"rank {_ranks(trace, device)} (device {device})", _LAUNCHES)
        yield named("thread_name", "launches", _LAUNCHES)
        for tid, (multiprocessor, program) in enumerate(_tracks(trace.events, device), 1):
            yield named("thread_name", f"SM {multiprocessor}, program {program}", tid)


def _launch_events(trace: Trace, first: int, scale: int) -> Iterator[dict[str, Any]]:
    events = trace.aligned
    for (device, number), launch in sorted(trace.launches.items()):
        own = events[(events["device"] == device) & (events["launch"] == number)]
        if len(own):
            begin, end = int(own["begin"].min()), int(own["end"].max())
            times = {"ts": (begin - first) / scale, "dur": (end - begin) / scale}
            track = {"ph": "X", "pid": device, "tid": _LAUNCHES}
            yield {**track, "name": launch.kernel, "cat": "launch", **times, "args": {"launch": number}}


def _events(trace: Trace, first: int, scale: int) -> Iterator[dict[str, Any]]:
    events = trace.aligned
    tids = {(device, *track): tid for device in trace.devices for tid, track in enumerate(_tracks(events, device), 1)}
    for event in events:
        device, launch, program, multiprocessor, kind, task, peer, block, begin, end = event.item()
        yield {
            "ph": "X",
            "pid": device,
            "tid": tids[device, multiprocessor, program],
            "name": KINDS[kind],
            "cat": trace.launches[device, launch].kernel,
            "ts": (begin - first) / scale,
            "dur": (end - begin) / scale,
            "args": {
                "launch": launch,
                "program": program,
                "multiprocessor": multiprocessor,
                "task": task,
                "peer": peer,
                "block": block,
            },
        }


def read(path: Path) -> dict[str, Any]:
    """The fields of a `Trace`."""
    data = path.read_bytes()
    try:
        content = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
        found = content["otherData"]["format"]
        if found != _FORMAT:
            raise ValueError(f"its format is {found!r}")
        return _parsed(content)
    except (ValueError, KeyError, TypeError, EOFError, gzip.BadGzipFile) as error:
        raise ValueError(
            f"Trace.load: {path} is no trace of this package ({type(error).__name__}: {error}); expected what"
            f" Trace.save writes, {_FORMAT!r}: record it again."
        ) from error


def _parsed(content: dict[str, Any]) -> dict[str, Any]:
    other = content["otherData"]
    scale = 1 if other["is_ordered_only"] else 1000
    offsets, errors = (_by_device(other["clocks"][name]) for name in ("offset_ns", "error_ns"))
    launches = {
        (one["device"], one["number"]): Launch(
            one["kernel"], one["identity"], one["num_programs"], tuple(one["group"]), tuple(one["epochs"])
        )
        for one in other["launches"]
    }
    shown = [e for e in content["traceEvents"] if e["ph"] == "X" and e["tid"] != _LAUNCHES]
    events = np.zeros((len(shown),), EVENT)
    for i, event in enumerate(shown):
        args, begin = event["args"], round(event["ts"] * scale) + other["begin"] - offsets[event["pid"]]
        place = (event["pid"], args["launch"], args["program"], args["multiprocessor"], KINDS.index(event["name"]))
        what = (args["task"], args["peer"], args["block"])
        events[i] = (*place, *what, begin, begin + round(event["dur"] * scale))
    return {
        "events": events,
        "launches": launches,
        "num_dropped": _by_device(other["num_dropped"]),
        "is_ordered_only": other["is_ordered_only"],
        "clocks": Clocks(offsets, errors, other["clocks"]["relaxed_ns"]),
    }


def _by_device(found: dict[str, Any]) -> dict[int, Any]:
    """JSON has no numbers as keys."""
    return {int(device): value for device, value in found.items()}
