"""A recording that has ended: events of several devices on one time line."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jax_ep.tracing import clocks, perfetto, picture, summary
from jax_ep.tracing.clocks import Clocks, Sent
from jax_ep.tracing.events import EVENT, Launch, Written


@dataclasses.dataclass(frozen=True, eq=False)
class Trace:
    """What kernels did, program by program.

    Attributes:
      events: `[N]` structured array, one entry per event: `device`, `launch` (its number on the device), `program`,
        `multiprocessor`, `kind` (a place in `jax_ep.tracing.KINDS`), `task`, `peer` (a device, or -1), `block`,
        `begin` and `end`, in ns of the device's own clock. `aligned` has them on one clock.
      launches: by device and number.
      num_dropped: events of each device for which there was no room.
      is_ordered_only: the kernels ran in the interpreter: times are places in the order of all that happened, and
        durations mean nothing.
      clocks: how the clocks of the devices differ.
    """

    events: np.ndarray
    launches: Mapping[tuple[int, int], Launch]
    num_dropped: Mapping[int, int]
    is_ordered_only: bool
    clocks: Clocks

    @classmethod
    def of_devices(cls, written: Mapping[int, Written], *, is_ordered_only: bool = False) -> Trace:
        """The trace of what these devices have written; those that have written nothing are left out."""
        written = {device: one for device, one in written.items() if one.launches or one.num_dropped}
        events = np.concatenate([np.zeros((0,), EVENT), *(one.events for one in written.values())])
        launches = {(d, number): launch for d, one in written.items() for number, launch in one.launches.items()}
        dropped = {device: one.num_dropped for device, one in written.items()}
        return _aligned(_places(events) if is_ordered_only else events, launches, dropped, is_ordered_only)

    @functools.cached_property
    def aligned(self) -> np.ndarray:
        """`events` with times of the first device's clock."""
        events = self.events.copy()
        for device, offset in self.clocks.offset_ns.items():
            for name in ("begin", "end"):
                events[name][events["device"] == device] += offset
        return events

    @property
    def devices(self) -> list[int]:
        """Numbers of the devices with launches that were recorded."""
        return sorted(self.num_dropped)

    def only(self, *kernels: str, last: int | None = None) -> Trace:
        """The launches of these kernels, or all; the last ones of them on each device.

        Args:
          kernels: names, as `summary` has them; none: all.
          last: how many of the last launches; None: all.

        Raises:
          ValueError: a kernel was not recorded.

        Example:
          >>> from jax_ep.tracing import Trace
          >>> Trace.of_devices({}).only(last=1).devices
          []
        """
        known = {launch.kernel for launch in self.launches.values()}
        if unknown := set(kernels) - known:
            missing, there = (", ".join(sorted(names)) or "nothing" for names in (unknown, known))
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
        return dataclasses.replace(self, events=_places(events) if self.is_ordered_only else events, launches=kept)

    def summary(self) -> dict[str, Any]:
        """Where the time went, by kernel; as JSON has it.

        Returns:
          `unit`: "ns", or "steps" where only the order is known; `step_ns`: what all times are multiples of.
          `offset_ns`, `error_ns` and `relaxed_ns`: see `clocks`. `num_dropped`: by device. `kernels`, by name:

          - `launches`: launches of all devices; `duration`: the median of one, from its first event to its last.
          - `busy`, `waiting`, `idle`: shares of the time of all its programs.
          - `kinds`: of each kind of event the `count`, the `mean` duration and the `share` of all programs' time.
          - `roles`: the same three shares for the programs that only `exchange`, only make `tiles`, do both, or have
            nothing to do (`none`), and how many `programs` of a launch those are, in the mean.
          - `overlap`: which share of the time in which something was pushed, or awaited from a peer, some program of
            the device made tiles; None where one of the two does not occur.
          - `waited_for`: how long all programs waited for each device, a wait for several counted for the last of
            them; `slowest_peer`: the device with the most, or None.

        Example:
          >>> from jax_ep.tracing import Trace
          >>> Trace.of_devices({}).summary()["kernels"]
          {}
        """
        return summary.summarise(self)

    def sent(self) -> Sent:
        """When devices sent what, on one clock."""
        return Sent(self.aligned, self.launches)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a file for https://ui.perfetto.dev and chrome://tracing: a process per device, a track per program.

        Args:
          path: a file; one whose name ends in ".gz" is compressed. What is there is replaced.
        """
        perfetto.write(self, Path(path))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """What `save` has written.

        Raises:
          ValueError: it is no such file.
        """
        return cls(**perfetto.read(Path(path)))

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws the time line of every device, a row per program; for few launches: `only(last=1)`.

        Args:
          path: an image file, such as a PNG. What is there is replaced.

        Raises:
          ImportError: matplotlib is not installed.
          ValueError: there are no events.
        """
        picture.draw(self, Path(path))


def merge(traces: Iterable[Trace]) -> Trace:
    """One trace of the parts that several processes have recorded, with all clocks aligned.

    Args:
      traces: one of each process, of the same calls.

    Returns:
      The trace of all devices.

    Raises:
      ValueError: a device is in two of them, or one of several has no times.

    Example:
      >>> from jax_ep.tracing import Trace, merge
      >>> merge([Trace.of_devices({})]).devices
      []
    """
    parts = list(traces)
    devices = [device for part in parts for device in part.devices]
    if len(parts) == 1:
        return parts[0]
    if len(set(devices)) < len(devices):
        raise ValueError(f"merge: devices {sorted(devices)}, expected each once; pass one trace per process.")
    if any(part.is_ordered_only for part in parts):
        raise ValueError("merge: a trace of the interpreter has an order and no times; pass traces of GPUs.")
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


def _places(events: np.ndarray) -> np.ndarray:
    """Times as places in the order of all of them: how long the interpreter took says nothing about a kernel."""
    events = events.copy()
    _, places = np.unique(np.stack([events["begin"], events["end"]]), return_inverse=True)
    events["begin"], events["end"] = places.reshape(2, -1)
    return events
