"""Events that kernels have written, as tables; kernels/trace_structs.py has the layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jax_ep.megakernels.kernels.trace_structs import (
    AREA_LAUNCHES,
    AREA_LOST,
    AREA_PROGRAMS,
    AREA_ROOM,
    KINDS,
    NUM_HEADER,
    NUM_WORDS,
)

EVENT = np.dtype(
    [
        ("device", np.int32),
        ("launch", np.int32),
        ("program", np.int32),
        ("multiprocessor", np.int32),
        ("kind", np.int32),
        ("task", np.int32),
        ("peer", np.int32),
        ("block", np.int32),
        ("begin", np.int64),
        ("end", np.int64),
    ]
)
"""One event: `kind` is a place in KINDS, `peer` a device or -1, `launch` a number on this device, times are in ns."""

_MEMBER = KINDS.index("member")
MOST_DEVICES = 0xFFF  # device numbers have 12 bits of a word


class Launch(NamedTuple):
    """One launch as one device saw it."""

    kernel: str  # name of the kernel
    identity: int  # `Heap.LAUNCH`, equal on all devices of the launch
    num_programs: int  # number of programs
    group: tuple[int, ...]  # devices in the order of their ranks
    epochs: tuple[int, ...]  # for each of them, the number of the launch among those of this device with that one

    def rank(self, device: int) -> int:
        return self.group.index(device)


class Written(NamedTuple):
    """Events and launches that one device has written."""

    events: np.ndarray  # of type EVENT, sorted by launch, program and time
    launches: dict[int, Launch]  # by their number; launches that had not ended with the recording are left out
    num_dropped: int  # events without room, or of a launch that could not be recorded for lack of room


def area_header(num_programs: int, events_per_program: int) -> tuple[np.ndarray, int]:
    """Return the first words of a trace area, and its number of words."""
    header = np.zeros((NUM_HEADER,), np.int64)
    header[AREA_ROOM], header[AREA_PROGRAMS] = events_per_program, num_programs
    return header, NUM_HEADER + num_programs * _region_words(events_per_program)


def read(words: np.ndarray, number: int, kernels: dict[int, str], device_ids: Sequence[int] | None = None) -> Written:
    """Read the trace area of a device.

    Args:
      words: of the area.
      number: of the device, as kernels know it.
      kernels: names by `Heap.LAUNCH`.
      device_ids: ids of the devices by their numbers; None: equal to the numbers.
    """
    room, num_programs, num_launches = (int(words[i]) for i in (AREA_ROOM, AREA_PROGRAMS, AREA_LAUNCHES))
    regions = words[NUM_HEADER:].reshape(num_programs, _region_words(room))
    counts = np.minimum(regions[:, 0], room)
    num_dropped = int(words[AREA_LOST] + (regions[:, 0] - counts).sum())
    program = np.repeat(np.arange(num_programs), counts)
    rows = [
        region[NUM_HEADER:][: n * NUM_WORDS].reshape(n, NUM_WORDS) for region, n in zip(regions, counts, strict=True)
    ]
    raw = np.concatenate(rows)
    launch, kind = raw[:, 4] >> 32, raw[:, 2] >> 32 & 0xFF
    # The last entry stands for no device.
    ids = np.array([*(range(MOST_DEVICES) if device_ids is None else device_ids), -1], np.int32)
    launches = _launches(raw[kind == _MEMBER], kernels, ids)
    kept = (kind != _MEMBER) & np.isin(launch, list(launches))
    num_dropped += int(((kind != _MEMBER) & ~kept & (launch < num_launches)).sum())
    program, raw, launch, kind = program[kept], raw[kept], launch[kept], kind[kept]
    events = np.zeros((len(raw),), EVENT)
    events["device"], events["launch"], events["program"], events["kind"] = ids[number], launch, program, kind
    events["multiprocessor"] = raw[:, 2] >> 40 & 0xFFF
    events["peer"] = ids[(raw[:, 2] >> 52 & 0xFFF) - 1]
    events["task"], events["block"] = (raw[:, i].astype(np.int32) for i in (2, 3))
    events["begin"], events["end"] = raw[:, 0], raw[:, 1]
    return Written(_one_after_another(events), launches, num_dropped)


def _one_after_another(events: np.ndarray) -> np.ndarray:
    """Sort events, and let each begin no earlier than the previous one of its program ended.

    If tiles are in one loop with later work, the compiler loads the operands of the next tile during a GEMM, and reads
    the clock as early.
    """
    events = events[np.lexsort((events["end"], events["program"], events["launch"]))]
    before, after = events[:-1], events[1:]
    same = (before["program"] == after["program"]) & (before["launch"] == after["launch"])
    after["begin"] = np.where(same, np.maximum(after["begin"], before["end"]), after["begin"])
    return events


def _region_words(events_per_program: int) -> int:
    return NUM_HEADER + NUM_WORDS * events_per_program


def _launches(members: np.ndarray, kernels: dict[int, str], ids: np.ndarray) -> dict[int, Launch]:
    found = {}
    for number in np.unique(members[:, 4] >> 32):
        rows = members[members[:, 4] >> 32 == number]
        task = rows[:, 2].astype(np.int32)
        if len(rows) < task[0] >> 16:
            continue  # some members had no room
        rows = rows[np.argsort(task)]
        identity = int(rows[0, 4] & 0xFFFFFFFF)
        group, epochs = ids[(rows[:, 2] >> 52 & 0xFFF) - 1], rows[:, 3] >> 32
        kernel = kernels.get(identity, f"operation {identity & 0xFF}")
        num_programs = int(rows[0, 3] & 0xFFFFFFFF)
        found[int(number)] = Launch(kernel, identity, num_programs, tuple(group.tolist()), tuple(epochs.tolist()))
    return found
