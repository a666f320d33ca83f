"""Summary of a recording: where the time went."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np

from jax_ep.megakernels.kernels.trace_structs import KINDS
from jax_ep.tracing.clocks import Sent, Timeline
from jax_ep.tracing.events import Launch

_WAIT, _TILE = (KINDS.index(kind) for kind in ("wait", "tile"))
_EXCHANGE = [KINDS.index(kind) for kind in KINDS if kind not in ("member", "wait", "tile", "zero")]
_TRAVEL = [KINDS.index(kind) for kind in ("push", "publish")]


def summarize(trace: Timeline) -> dict[str, Any]:
    """Summarize a trace, see `Trace.summary`."""
    sent = trace.sent()
    kernels: dict[str, _Kernel] = defaultdict(_Kernel)
    for launch, events in _by_launch(trace):
        kernels[launch.kernel].add(launch, events, sent)
    return {
        "unit": "steps" if trace.is_ordered_only else "ns",
        "step_ns": None if trace.is_ordered_only else _step(trace.events),
        **trace.clocks._asdict(),
        "num_dropped": dict(trace.num_dropped),
        "kernels": {name: kernels[name].summary() for name in sorted(kernels)},
    }


def _by_launch(trace: Timeline) -> Iterator[tuple[Launch, np.ndarray]]:
    """Yield every launch of every device, with its events, if it has any."""
    events = trace.aligned
    events = events[np.argsort(events, order=("device", "launch"), kind="stable")]
    starts = np.flatnonzero(np.diff(events["device"]) | np.diff(events["launch"])) + 1
    for part in np.split(events, starts) if len(events) else ():
        yield trace.launches[int(part["device"][0]), int(part["launch"][0])], part


class _Kernel:
    """Sums over the launches of one kernel on all devices."""

    def __init__(self) -> None:
        self._durations: list[int] = []
        self._counts: Counter[int] = Counter()
        self._totals: Counter[int] = Counter()
        self._roles: dict[str, Counter[str]] = defaultdict(Counter)
        self._waited_for: Counter[int] = Counter()
        self._travel = self._covered = 0
        self._has_tiles = False

    def add(self, launch: Launch, events: np.ndarray, sent: Sent) -> None:
        durations = events["end"] - events["begin"]
        span = int(events["end"].max() - events["begin"].min())
        self._durations.append(span)
        for kind in np.unique(events["kind"]):
            self._counts[int(kind)] += int((events["kind"] == kind).sum())
            self._totals[int(kind)] += int(durations[events["kind"] == kind].sum())
        order = np.argsort(events["program"], kind="stable")
        programs = np.split(order, np.flatnonzero(np.diff(events["program"][order])) + 1)
        for own in programs:
            self._add_program(_role(events["kind"][own]), events["kind"][own], durations[own], span)
        unseen = max(0, launch.num_programs - len(programs))
        self._roles["none"].update(programs=unseen, time=unseen * span)
        self._add_overlap(events)
        for wait in events[events["kind"] == _WAIT]:
            if awaited := sent.awaited(wait):
                last, _ = max(awaited, key=lambda pair: pair[1])
                self._waited_for[last] += int(wait["end"] - wait["begin"])

    def _add_program(self, role: str, kinds: np.ndarray, durations: np.ndarray, span: int) -> None:
        waiting = int(durations[kinds == _WAIT].sum())
        self._roles[role].update(programs=1, time=span, waiting=waiting, busy=int(durations.sum()) - waiting)

    def _add_overlap(self, events: np.ndarray) -> None:
        """Add the time of communication, and the part of it in which tiles run."""
        for_peers = (events["kind"] == _WAIT) & (events["block"] >= 0)
        travel, tiles = events[np.isin(events["kind"], _TRAVEL) | for_peers], events[events["kind"] == _TILE]
        travelling = _covered(travel)
        self._travel += travelling
        self._covered += travelling + _covered(tiles) - _covered(np.concatenate([travel, tiles]))
        self._has_tiles |= bool(len(tiles))

    def summary(self) -> dict[str, Any]:
        whole: Counter[str] = sum(self._roles.values(), Counter())
        slowest = max(self._waited_for, key=self._waited_for.__getitem__, default=None)
        return {
            "launches": len(self._durations),
            "duration": float(np.median(self._durations)),
            **_shares(whole),
            "kinds": {
                KINDS[kind]: {
                    "count": count,
                    "mean": self._totals[kind] / count,
                    "share": _ratio(self._totals[kind], whole["time"]),
                }
                for kind, count in sorted(self._counts.items())
            },
            "roles": {
                role: {"programs": sums["programs"] / len(self._durations), **_shares(sums)}
                for role, sums in sorted(self._roles.items())
                if sums["programs"]
            },
            "overlap": self._covered / self._travel if self._travel and self._has_tiles else None,
            "waited_for": dict(sorted(self._waited_for.items())),
            "slowest_peer": slowest,
        }


def _step(events: np.ndarray) -> int:
    """Return the greatest common divisor of all times, relative to the first one of their device."""
    own = [events[events["device"] == device] for device in np.unique(events["device"])]
    times = [np.concatenate([e["begin"], e["end"]]) - e["begin"].min() for e in own]
    return int(np.gcd.reduce(np.concatenate([np.zeros((1,), np.int64), *times])))


def _role(kinds: np.ndarray) -> str:
    exchanges, multiplies = np.isin(kinds, _EXCHANGE).any(), (kinds == _TILE).any()
    if exchanges and multiplies:
        return "exchange and tiles"
    return "exchange" if exchanges else "tiles" if multiplies else "other"


def _shares(sums: Counter[str]) -> dict[str, float]:
    busy, waiting = _ratio(sums["busy"], sums["time"]), _ratio(sums["waiting"], sums["time"])
    return {"busy": busy, "waiting": waiting, "idle": max(0.0, 1 - busy - waiting)}


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _covered(events: np.ndarray) -> int:
    """Return the time in which at least one of the events ran."""
    if not len(events):
        return 0
    events = events[np.argsort(events["begin"])]
    ends = np.maximum.accumulate(events["end"])
    begins = np.maximum(events["begin"][1:], ends[:-1])
    return int(events["end"][0] - events["begin"][0] + np.maximum(0, events["end"][1:] - begins).sum())
