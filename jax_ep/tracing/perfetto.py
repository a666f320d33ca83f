"""Traces as files in Chrome's trace event format, which Perfetto opens and `Trace.load` reads.

Source: "Trace Event Format", a document of the Chromium project. Files have complete events (phase X), with times in
microseconds, and metadata (phase M), which names a process per device and a thread per program and multiprocessor.
`otherData` holds everything that the format has no field for.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jax_ep.core import json_files
from jax_ep.core.files import write_atomically
from jax_ep.core.json_files import BOOLEAN, OBJECT, array, choice, integer, mapping, optional, record, value_of
from jax_ep.megakernels.kernels.trace_structs import KINDS
from jax_ep.tracing.clocks import Clocks, Timeline
from jax_ep.tracing.events import EVENT, MOST_DEVICES, Launch

_FORMAT = "jax_ep trace 1"
_ORDER = "order: the kernels ran in an interpreter; a microsecond stands for a step, and durations have no meaning"
_TIME = "time: ns of the first device's clock since the first event; error_ns is the error of the other clocks"
_MOST_BYTES = 256 << 20
_LAUNCHES = 0  # the thread of a device that shows its launches


def write(trace: Timeline, path: Path) -> None:
    """Write a trace to a file, see `Trace.save`."""
    data = json.dumps(_content(trace)).encode()
    if len(data) > _MOST_BYTES:
        raise ValueError(
            f"Trace.save: a trace of {len(trace.events)} events takes {len(data) / (1 << 20):.1f} MiB, expected at most"
            f" {_MOST_BYTES >> 20} MiB, which Trace.load reads; save a part of it, such as trace.only(last=1)."
        )
    write_atomically(path, gzip.compress(data) if path.suffix == ".gz" else data)


def _content(trace: Timeline) -> dict[str, Any]:
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


def _ranks(trace: Timeline, device: int) -> str:
    ranks = sorted({launch.rank(device) for (owner, _), launch in trace.launches.items() if owner == device})
    return " or ".join(map(str, ranks)) or "?"


def _tracks(events: np.ndarray, device: int) -> list[tuple[int, int]]:
    """Return multiprocessors and programs of a device, in the order of the tracks."""
    own = events[events["device"] == device]
    return sorted({(int(e["multiprocessor"]), int(e["program"])) for e in own})


def _names(trace: Timeline) -> Iterator[dict[str, Any]]:
    for device in trace.devices:

        def named(kind: str, name: str, tid: int, device: int = device) -> dict[str, Any]:
            return {"ph": "M", "pid": device, "tid": tid, "name": kind, "args": {"name": name}}

        yield named("process_name", f"rank {_ranks(trace, device)} (device {device})", _LAUNCHES)
        yield named("thread_name", "launches", _LAUNCHES)
        for tid, (multiprocessor, program) in enumerate(_tracks(trace.events, device), 1):
            yield named("thread_name", f"SM {multiprocessor}, program {program}", tid)


def _launch_events(trace: Timeline, first: int, scale: int) -> Iterator[dict[str, Any]]:
    events = trace.aligned
    for (device, number), launch in sorted(trace.launches.items()):
        own = events[(events["device"] == device) & (events["launch"] == number)]
        if len(own):
            begin, end = int(own["begin"].min()), int(own["end"].max())
            times = {"ts": (begin - first) / scale, "dur": (end - begin) / scale}
            track = {"ph": "X", "pid": device, "tid": _LAUNCHES}
            yield {**track, "name": launch.kernel, "cat": "launch", **times, "args": {"launch": number}}


def _events(trace: Timeline, first: int, scale: int) -> Iterator[dict[str, Any]]:
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


_DEVICE = integer(0, 10**9 - 1)
_INT32 = integer(-(2**31), 2**31 - 1)
_NS = integer(-(2**61), 2**61)
_ERROR_NS = integer(0, 2**61)
_US = json_files.number(0, 2**33)  # two hours: sums over all events are int64
_ARGS = ("launch", "program", "multiprocessor", "task", "peer", "block")
_KEY = value_of("a device", lambda key: re.fullmatch("[0-9]{1,9}", key))
_FILE = record(
    {
        "traceEvents": array(OBJECT),
        "otherData": record(
            {
                "format": choice((_FORMAT,)),
                "is_ordered_only": BOOLEAN,
                "begin": _NS,
                "clocks": record(
                    {
                        "offset_ns": mapping(_NS, _KEY),
                        "error_ns": mapping(optional(_ERROR_NS), _KEY),
                        "relaxed_ns": _ERROR_NS,
                    }
                ),
                "num_dropped": mapping(integer(0, 2**53), _KEY),
                "launches": array(
                    record(
                        {
                            "device": _DEVICE,
                            "number": _INT32,
                            "kernel": value_of(
                                "a name of letters, digits, spaces and underscores",
                                lambda name: isinstance(name, str) and re.fullmatch(r"[\w ]{1,100}", name, re.ASCII),
                            ),
                            "identity": integer(0, 2**32 - 1),
                            "num_programs": integer(0, 2**31 - 1),
                            "group": array(_DEVICE),
                            "epochs": array(_INT32),
                        }
                    )
                ),
            },
            more=True,
        ),
    },
    more=True,
)
_SHOWN = record(
    {
        "pid": _DEVICE,
        "name": choice(KINDS[1:]),  # members are in otherData.launches
        "ts": _US,
        "dur": _US,
        "args": record(dict.fromkeys(_ARGS, _INT32), more=True),
    },
    more=True,
)


def read(path: Path) -> dict[str, Any]:
    """Read the fields of a `Trace` from a file.

    Raises:
      OSError: the file cannot be read, or is not a regular file.
      ValueError: it is not a trace.
    """
    try:
        return _parsed(json_files.read(path, _MOST_BYTES))
    except OSError as error:
        raise type(error)(
            f"Trace.load: cannot read {path} ({error.strerror}), expected a file of Trace.save; `jax-ep trace moe --out"
            " FILE` records one."
        ) from error
    except ValueError as error:
        raise ValueError(
            f"Trace.load: {path} is not a trace of this package: {error}; expected a file of Trace.save, {_FORMAT!r},"
            f" of at most {_MOST_BYTES >> 20} MiB; record it again."
        ) from error


def _parsed(content: Any) -> dict[str, Any]:
    _FILE(content, "")
    other = content["otherData"]
    clocks = other["clocks"]
    offsets, errors, dropped = map(_by_device, (clocks["offset_ns"], clocks["error_ns"], other["num_dropped"]))
    if not offsets.keys() == errors.keys() == dropped.keys() or len(dropped) > MOST_DEVICES:
        raise ValueError(f"offset_ns, error_ns and num_dropped must be of the same devices, at most {MOST_DEVICES}")
    launches = {(one["device"], one["number"]): _launch(one, dropped) for one in other["launches"]}
    if len(launches) < len(other["launches"]):
        raise ValueError("two launches of the same device and number")
    shown = [
        (f"traceEvents[{i}]", event)
        for i, event in enumerate(content["traceEvents"])
        if event.get("ph") == "X" and event.get("tid") != _LAUNCHES
    ]
    events = np.zeros((len(shown),), EVENT)
    scale = 1 if other["is_ordered_only"] else 1000
    for i, (name, event) in enumerate(shown):
        _SHOWN(event, name)
        args, device = event["args"], event["pid"]
        launch = launches.get((device, args["launch"]))
        if launch is None or args["peer"] not in (-1, *launch.group):
            raise ValueError(f"{name} is of a launch or a peer that otherData.launches does not name")
        begin = round(event["ts"] * scale) + other["begin"] - offsets[device]
        place = (device, args["launch"], args["program"], args["multiprocessor"], KINDS.index(event["name"]))
        what = (args["task"], args["peer"], args["block"])
        events[i] = (*place, *what, begin, begin + round(event["dur"] * scale))
    return {
        "events": events,
        "launches": launches,
        "num_dropped": dropped,
        "is_ordered_only": other["is_ordered_only"],
        "clocks": Clocks(offsets, errors, clocks["relaxed_ns"]),
    }


def _launch(one: dict[str, Any], devices: Container[int]) -> Launch:
    group, epochs = tuple(one["group"]), tuple(one["epochs"])
    of_device = one["device"] in devices and one["device"] in group
    if not (of_device and len(set(group)) == len(group) == len(epochs)):
        raise ValueError(f"launch {one['number']} of device {one['device']} has a group that does not fit")
    return Launch(one["kernel"], one["identity"], one["num_programs"], group, epochs)


def _by_device(found: dict[str, Any]) -> dict[int, Any]:
    """Turn the keys into ints, which JSON does not have as keys."""
    by_device = {int(device): value for device, value in found.items()}
    if len(by_device) < len(found):
        raise ValueError("a device is named twice")
    return by_device
