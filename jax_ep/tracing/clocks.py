"""One time line for several devices, whose clocks differ, from the messages that kernels send each other.

A message is sent before the wait for it ends. So the time of a message on one clock and the time of its wait on another
bound the difference of the two clocks from one side. Messages in the other direction bound it from the other side. The
offset of a clock is the middle of this interval, and half of the width is its error. NTP (RFC 5905, section 8) does the
same with a message and its answer; here the bounds of all messages count, not only those of the fastest one. Bounds of
several devices are difference constraints. Their earliest and latest solutions are longest paths (Cormen et al.,
Introduction to Algorithms, section 22.4), and the middle of the two is a solution too.

Offsets are constant. If clocks drift during the recording, bounds may contradict each other. Then all of them are
relaxed by the smallest number of ns that makes them consistent, which is part of the error.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jax_ep.megakernels.kernels.trace_structs import KINDS, READY
from jax_ep.tracing.events import Launch

_MOST_NS = 1 << 61  # so that aligned times are int64
_ANNOUNCE, _PUBLISH, _WAIT = (KINDS.index(kind) for kind in ("announce", "publish", "wait"))


class Message(NamedTuple):
    """A message from one device, and the end of the wait for it on another: a time on each clock."""

    source: int
    target: int
    sent: int
    seen: int


class Clocks(NamedTuple):
    """Offsets in ns that turn the times of each device into those of the first one."""

    offset_ns: dict[int, int]  # by device
    # The largest error of each; None if no message connects the device with the first one.
    error_ns: dict[int, int | None]
    relaxed_ns: int = 0  # by how much the bounds contradicted each other


def align(devices: Sequence[int], messages: Iterable[Message]) -> Clocks:
    """Compute the offsets to the first device from the messages of a recording."""
    if not devices:
        return Clocks({}, {})
    place = {device: i for i, device in enumerate(devices)}
    bounds = np.full((len(devices), len(devices)), -np.inf)  # [s, t]: t's offset is at least s's plus this
    np.fill_diagonal(bounds, 0)
    for message in messages:
        pair = place[message.source], place[message.target]
        bounds[pair] = max(bounds[pair], message.sent - message.seen)
    relaxed, longest = _relaxed(bounds)
    earliest, latest = longest[0], -longest[:, 0]
    known = np.isfinite(earliest) & np.isfinite(latest)
    offsets, errors = {}, {}
    for device, i in place.items():
        offsets[device] = int((earliest[i] + latest[i]) // 2) if known[i] else 0
        errors[device] = int(np.ceil((latest[i] - earliest[i]) / 2)) if known[i] else None
    if max(map(abs, offsets.values())) > _MOST_NS:
        raise ValueError(f"clocks of devices that differ by more than {_MOST_NS} ns cannot be aligned; record again")
    return Clocks(offsets, errors, relaxed)


def _relaxed(bounds: np.ndarray) -> tuple[int, np.ndarray]:
    """Return by how many ns the bounds must be relaxed to agree, and the longest paths with that."""
    off_diagonal = ~np.eye(len(bounds), dtype=bool)
    finite = bounds[off_diagonal & np.isfinite(bounds)]
    low, high = 0, int(max(0, finite.max(initial=0)))  # with `high` none is positive

    def paths(relaxed: int) -> np.ndarray:
        longest = np.where(off_diagonal, bounds - relaxed, bounds)
        for via in range(len(longest)):
            longest = np.maximum(longest, longest[:, via, None] + longest[None, via, :])
        return longest

    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if np.diagonal(paths(middle)).max() <= 0 else (middle + 1, high)
    return low, paths(low)


class Sent:
    """Send times of ready handshakes and blocks, from events of all devices, and launches by device and number."""

    def __init__(self, events: np.ndarray, launches: Mapping[tuple[int, int], Launch]) -> None:
        self._launches = launches
        self._numbers: dict[tuple[int, int, int, int], int | None] = {}
        for (device, number), launch in launches.items():
            for peer, epoch in zip(launch.group, launch.epochs, strict=True):
                key = (device, peer, launch.identity, epoch)
                # Heaps of several sizes count from zero each: ambiguous launches are left out.
                self._numbers[key] = None if key in self._numbers else number
        self._times: dict[tuple[int, int, int, int], int] = {}
        for event in events[np.isin(events["kind"], (_ANNOUNCE, _PUBLISH))]:
            block = READY if event["kind"] == _ANNOUNCE else int(event["block"])
            sent_key = (int(event["device"]), int(event["launch"]), int(event["peer"]), block)
            begin = int(event["begin"])
            self._times[sent_key] = min(begin, self._times.get(sent_key, begin))

    def time(self, source: int, target: int, number: int, block: int) -> int | None:
        """Return when `source` began to signal a block to `target`, in launch `number` of the target; None: unknown."""
        launch = self._launches[target, number]
        epoch = launch.epochs[launch.rank(source)]
        sent_in = self._numbers.get((source, target, launch.identity, epoch))
        keys = [] if sent_in is None else [(source, sent_in, peer, block) for peer in (target, -1)]
        return min((self._times[key] for key in keys if key in self._times), default=None)

    def awaited(self, wait: np.void) -> list[tuple[int, int]]:
        """Return the devices for which a wait waited, and when each of them began to send."""
        device, peer, number, block = (int(wait[name]) for name in ("device", "peer", "launch", "block"))
        if block < READY:
            return []
        peers = self._launches[device, number].group if peer < 0 else (peer,)
        found = ((source, self.time(source, device, number, block)) for source in peers if source != device)
        return [(source, time) for source, time in found if time is not None]


def messages(events: np.ndarray, sent: Sent) -> Iterator[Message]:
    """Yield a message for each wait of all devices."""
    for wait in events[events["kind"] == _WAIT]:
        for source, time in sent.awaited(wait):
            yield Message(source, int(wait["device"]), time, int(wait["end"]))


@dataclasses.dataclass(frozen=True, eq=False)
class Timeline:
    """Events and launches of several devices; `Trace` documents the fields."""

    events: np.ndarray
    launches: Mapping[tuple[int, int], Launch]
    num_dropped: Mapping[int, int]
    is_ordered_only: bool
    clocks: Clocks

    @functools.cached_property
    def aligned(self) -> np.ndarray:
        """Return `events` with times of the first device's clock."""
        events = self.events.copy()
        for device, offset in self.clocks.offset_ns.items():
            for name in ("begin", "end"):
                events[name][events["device"] == device] += offset
        return events

    @property
    def devices(self) -> list[int]:
        """Return the numbers of the devices with recorded launches."""
        return sorted(self.num_dropped)

    def sent(self) -> Sent:
        """Return what each device sent and when, on one clock."""
        return Sent(self.aligned, self.launches)
