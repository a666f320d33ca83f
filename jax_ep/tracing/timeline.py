"""The events of a recording on one time line: the data of a `Trace`, which files, tables and plots read."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import numpy as np

from jax_ep.tracing.clocks import Clocks, Sent
from jax_ep.tracing.events import Launch


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
