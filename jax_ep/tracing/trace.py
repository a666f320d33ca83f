"""A recording that has ended: events of several devices on one time line."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jax_ep.core import check
from jax_ep.tracing import clocks, perfetto, picture, summary
from jax_ep.tracing.clocks import Clocks, Sent, Timeline
from jax_ep.tracing.events import EVENT, Launch, Written
from jax_ep.values import cut, type_name


@dataclasses.dataclass(frozen=True, eq=False)
class Trace(Timeline):
    """A recording: what kernels did, program by program.

    Attributes:
      events: `[N]` structured array, one entry per event: `device`, `launch` (its number on the device), `program`,
        `multiprocessor`, `kind` (an index into `jax_ep.tracing.KINDS`), `task`, `peer` (a device, or -1), `block`,
        `begin` and `end`, in ns of the device's own clock. `aligned` has them on one clock.
      launches: by device and number.
      num_dropped: events of each device for which there was no room.
      is_ordered_only: the kernels ran in the interpreter: times are positions in the order of all events, and
        durations have no meaning.
      clocks: offsets and errors of the devices' clocks.
    """

    @classmethod
    def of_devices(cls, written: Mapping[int, Written], *, is_ordered_only: bool = False) -> Trace:
        """Return the trace of these devices, without those that have written nothing."""
        check.instance("Trace.of_devices", "written", written, Mapping, "a dict of what devices have written")
        for one in written.values():
            check.instance("Trace.of_devices", "a value of written", one, Written, "what one device has written")
        written = {device: one for device, one in written.items() if one.launches or one.num_dropped}
        events = np.concatenate([np.zeros((0,), EVENT), *(one.events for one in written.values())])
        launches = {(d, number): launch for d, one in written.items() for number, launch in one.launches.items()}
        dropped = {device: one.num_dropped for device, one in written.items()}
        return _aligned(_ranked(events) if is_ordered_only else events, launches, dropped, is_ordered_only)

    def only(self, *kernels: str, last: int | None = None) -> Trace:
        """Return a trace of the launches of these kernels, or of the last ones on each device.

        Args:
          kernels: names, as `summary` has them; none: all.
          last: how many of the last launches; None: all.

        Raises:
          ValueError: a kernel was not recorded, or `last` is less than 1.
          TypeError: a name is not a str, or `last` not an int.

        Example:
          >>> from jax_ep.tracing import Trace
          >>> Trace.of_devices({}).only(last=1).devices
          []
        """
        if last is not None:
            last = check.integer("Trace.only", "last", last)
        for kernel in kernels:
            check.instance("Trace.only", "a kernel", kernel, str, "a name", remedy="pass names, as only('dispatch')")
        known = {launch.kernel for launch in self.launches.values()}
        if unknown := set(kernels) - known:
            missing, there = (cut(", ".join(sorted(names)), 300) or "nothing" for names in (unknown, known))
            raise ValueError(f"Trace.only: no launch of {missing} was recorded; there is {there}.")
        kept: dict[tuple[int, int], Launch] = {}
        for device in self.devices:
            numbers = [
                number
                for (owner, number), launch in sorted(self.launches.items())
                if owner == device and (not kernels or launch.kernel in kernels)
            ]
            first = 0 if last is None else max(0, len(numbers) - last)
            kept |= {(device, number): self.launches[device, number] for number in numbers[first:]}
        keys = self.events["device"].astype(np.int64) << 32 | self.events["launch"]
        events = self.events[np.isin(keys, [device << 32 | number for device, number in kept])]
        return dataclasses.replace(self, events=_ranked(events) if self.is_ordered_only else events, launches=kept)

    def summary(self) -> dict[str, Any]:
        """Summarize where the time went, by kernel, as values that JSON can hold.

        Returns:
          `unit`: "ns", or "steps" if only the order is known; `step_ns`: the resolution of all times.
          `offset_ns`, `error_ns` and `relaxed_ns`: see `clocks`. `num_dropped`: by device. `kernels`, by name:

          - `launches`: number of launches on all devices; `duration`: median time from first to last event of a launch.
          - `busy`, `waiting`, `idle`: shares of the time of all its programs.
          - `kinds`: for each kind of event the `count`, the `mean` duration and the `share` of all programs' time.
          - `roles`: the same three shares for the programs that only `exchange`, only compute `tiles`, do both, or have
            nothing to do (`none`), and the mean number of such `programs` in a launch.
          - `overlap`: the share of the communication time (pushing, or waiting for a peer) in which some program of
            the device computed tiles; None if one of the two does not occur.
          - `waited_for`: how long all programs waited for each device; a wait for several devices counts for the last
            of them. `slowest_peer`: the device with the longest wait, or None.

        Example:
          >>> from jax_ep.tracing import Trace
          >>> Trace.of_devices({}).summary()["kernels"]
          {}
        """
        return summary.summarize(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file for https://ui.perfetto.dev and chrome://tracing: a process per device, a track per program.

        Args:
          path: a file; it is compressed if its name ends in ".gz". An existing file is replaced.

        Raises:
          ValueError: the file would be larger, before compression, than `load` reads.
          TypeError: `path` is no path.
        """
        perfetto.write(self, check.path("Trace.save", "path", path))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Read a file that `save` has written.

        Raises:
          OSError: the file cannot be read.
          ValueError: it is not such a file.
          TypeError: `path` is no path.
        """
        return cls(**perfetto.read(check.path("Trace.load", "path", path)))

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the time line of every device, one row per program; for few launches: `only(last=1)`.

        Args:
          path: an image file, such as a PNG. An existing file is replaced.

        Raises:
          ImportError: matplotlib is not installed.
          ValueError: there are no events, or the name of the file does not end in the name of a format.
          TypeError: `path` is no path.
        """
        picture.draw(self, check.path("Trace.plot", "path", path))


def merge(traces: Iterable[Trace]) -> Trace:
    """Merge the traces of several processes into one, with all clocks aligned.

    Args:
      traces: one trace of each process, of the same calls.

    Returns:
      The trace of all devices.

    Raises:
      ValueError: two traces have the same device, or one of several has no times.
      TypeError: one of them is not a `Trace`.

    Example:
      >>> from jax_ep.tracing import Trace, merge
      >>> merge([Trace.of_devices({})]).devices
      []
    """
    check.instance("merge", "traces", traces, Iterable, "a list of Trace")
    if hasattr(traces, "shape"):  # Not all arrays can be iterated over.
        raise TypeError(f"merge: traces is {type_name(traces)}, expected a list of Trace; pass one.")
    parts = list(traces)
    for part in parts:
        check.instance("merge", "one of traces", part, Trace, "a Trace")
    devices = [device for part in parts for device in part.devices]
    if len(parts) == 1:
        return parts[0]
    if len(set(devices)) < len(devices):
        raise ValueError(f"merge: devices {sorted(devices)}, expected each once; pass one trace per process.")
    if any(part.is_ordered_only for part in parts):
        raise ValueError("merge: traces of the interpreter have an order but no times; pass traces of GPUs.")
    events = np.concatenate([np.zeros((0,), EVENT), *(part.events for part in parts)])
    launches = {key: launch for part in parts for key, launch in part.launches.items()}
    dropped = {device: count for part in parts for device, count in part.num_dropped.items()}
    return _aligned(events, launches, dropped, False)


def _aligned(
    events: np.ndarray, launches: Mapping[tuple[int, int], Launch], dropped: Mapping[int, int], is_ordered_only: bool
) -> Trace:
    devices = sorted(dropped)
    if is_ordered_only:
        same = Clocks(dict.fromkeys(devices, 0), dict.fromkeys(devices, 0))
        return Trace(events, launches, dropped, True, same)
    found = clocks.align(devices, clocks.messages(events, Sent(events, launches)))
    return Trace(events, launches, dropped, False, found)


def _ranked(events: np.ndarray) -> np.ndarray:
    """Replace times by positions in their order: the interpreter's times say nothing about a kernel."""
    events = events.copy()
    _, places = np.unique(np.stack([events["begin"], events["end"]]), return_inverse=True)
    events["begin"], events["end"] = places.reshape(2, -1)
    return events
