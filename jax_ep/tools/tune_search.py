"""The search for settings: one after another, each among its values, beside the package's own in the same turns.

Clocks move single timings by more than the differences that matter, so settings that are compared run in turns, and
what is kept of each is the median, over rounds, of its time relative to that of the package's own settings in the same
round. Those run at both ends of a round, and their better time counts: what is no better than they are by chance is not
chosen. What has been measured is kept in a log, a line each, and not measured again.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jax_ep.core import json_files
from jax_ep.core.json_files import OBJECT, TEXT, read_regular
from jax_ep.settings.operations import Setting
from jax_ep.tools.command import raise_if_interrupted

Settings = Mapping[str, Setting]
Run = Callable[[], Any]
LEAST_ROUNDS, ROUNDS, LAST_ROUNDS = 5, 7, 15
WORTH = 0.99
"""At most so much of the time of simpler settings makes others worth it."""
_SAMPLE_S = 0.02  # that a chain should take, beside which what a single launch of a program scatters is little
_LONGEST = 1000
_MOST_BYTES = 256 << 20


_TIME = json_files.value_of("a time", lambda value: type(value) in (int, float) and value > 0)
_LINE = json_files.record(
    {
        "circumstances": OBJECT,
        "key": TEXT,
        "state": json_files.choice(("tried", "run", "measured")),
        "outcome": json_files.record({"relative": _TIME, "seconds": _TIME, "error": TEXT}),
    }
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What has become of some settings.

    Attributes:
      relative: time, divided by that of the package's own settings.
      seconds: of one call.
      error: why there is no time; "" where there is one.
    """

    relative: float = float("inf")
    seconds: float = float("inf")
    error: str = ""


_NOTHING_YET = Outcome()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One operation with one set of sizes.

    Attributes:
      operation: one of `settings.operations.OPERATIONS`.
      facts: by which its settings are looked up.
      title: for people.
      candidates: values of each setting, the simpler ones first; in this order they are searched.
      start: from where; settings without which the others have no meaning.
      make_chain: `make_chain(settings) -> compile`, with `compile(n)` the program of n calls, each after another.
      moved_bytes: of one call, where a bandwidth makes sense, that the busiest rank sends or receives; else 0.
    """

    operation: str
    facts: Mapping[str, Any]
    title: str
    candidates: Mapping[str, Sequence[Setting]]
    make_chain: Callable[[Settings], Callable[[int], Run]]
    start: Settings = dataclasses.field(default_factory=dict)
    moved_bytes: float = 0.0


def name_of(settings: Settings) -> str:
    """Settings as a text that is the same for the same ones."""
    return json.dumps(dict(sorted(settings.items())))


class Log:
    """What has been measured, by operation, facts and settings, in a file that only grows; path None: no file.

    A line tells before settings are tried, one that they ran, and one what became of them. Settings that were tried
    twice and did not run have ended the process, and are left out; once may have been the user.
    """

    def __init__(self, path: Path | None, circumstances: Mapping[str, Any]) -> None:
        self.path = path
        self._circumstances = dict(circumstances)
        self._found: dict[str, Outcome] = {}
        self._tried: collections.Counter[str] = collections.Counter()
        for line in read_regular(path, _MOST_BYTES).splitlines() if path and path.exists() else ():
            try:
                record = json.loads(line)
                _LINE(record, "")
            except (ValueError, RecursionError):  # the process ended within the line
                continue
            if record["circumstances"] == self._circumstances:
                self._take(record["key"], record["state"], Outcome(**record["outcome"]))

    def _take(self, key: str, state: str, outcome: Outcome) -> None:
        self._tried[key] = self._tried[key] + 1 if state == "tried" else 0
        if state == "measured":
            self._found[key] = outcome
        elif self._tried[key] > 1:
            self._found[key] = Outcome(error="the process ended while these settings were tried")

    def find(self, case: Case, settings: Settings) -> Outcome | None:
        """What is known of them, or None."""
        return self._found.get(self._key(case, settings))

    def failures(self, case: Case) -> int:
        """How many settings of a case could not run."""
        return sum(bool(found.error) for key, found in self._found.items() if key.startswith(self._prefix(case)))

    def add(self, case: Case, settings: Settings, state: str, outcome: Outcome = _NOTHING_YET) -> None:
        """They are about to be "tried", have "run", or are "measured"."""
        key = self._key(case, settings)
        if state == "measured":
            self._found[key] = outcome
        if self.path is None:
            return
        record = {"circumstances": self._circumstances, "key": key, "state": state}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record | {"outcome": dataclasses.asdict(outcome)}) + "\n")

    def _key(self, case: Case, settings: Settings) -> str:
        return self._prefix(case) + name_of(settings)

    def _prefix(self, case: Case) -> str:
        facts = json.dumps({name: str(value) for name, value in sorted(case.facts.items())})
        return f"{case.operation} {facts} "


class Meter:
    """Times of settings of one case, beside those of the package's own, whose programs it keeps."""

    def __init__(self, case: Case, recover: Callable[[], None], is_over: Callable[[], bool]) -> None:
        self._case, self._recover, self._is_over = case, recover, is_over
        self._lengths, self._own = self._prepare()

    def _prepare(self) -> tuple[tuple[int, int], tuple[Run, Run]]:
        """Lengths of chains that take long enough to be timed, and the chains of the package's own settings."""
        compile_chain, more = self._case.make_chain({}), 1
        short = compile_chain(1)
        while True:
            long = compile_chain(1 + more)
            seconds = _best(long) - _best(short)
            if seconds >= _SAMPLE_S or more >= _LONGEST:
                return (1, 1 + more), (short, long)
            # Of few calls, that difference may be chance.
            wanted = round(more * _SAMPLE_S / max(seconds, 1e-7))
            more = min(max(2 * more, min(wanted, 16 * more)), _LONGEST)

    def outcomes(self, trials: Sequence[Settings], rounds: int, log: Log) -> list[Outcome]:
        """What becomes of each, or of the first ones where the time is over. One that fails is left out."""
        found: dict[int, Outcome] = {}
        chains: dict[int, tuple[Run, Run]] = {}
        for i, settings in enumerate(trials):
            if i and self._is_over():
                break
            log.add(self._case, settings, "tried")
            try:
                compile_chain = self._case.make_chain(settings)
                short, long = map(compile_chain, self._lengths)
                jax.block_until_ready((short(), long()))
                log.add(self._case, settings, "run")
                chains[i] = short, long
            except Exception as error:
                raise_if_interrupted(error)
                found[i] = Outcome(error=f"{type(error).__name__}: {' '.join(str(error).split())[-300:]}")
                self._recover()
        found |= self._in_turns(chains, rounds)
        return [found[i] for i in range(len(found))]

    def _in_turns(self, chains: Mapping[int, tuple[Run, Run]], rounds: int) -> dict[int, Outcome]:
        """Times of chains relative to the better one of the package's own at both ends of their round."""
        samples: dict[int, list[float]] = {i: [] for i in chains}
        own: list[float] = []
        for both in (self._own, *chains.values()):  # clocks fall, and graphs are forgotten, while others are compiled
            jax.block_until_ready([run() for run in both])
        for number in range(rounds):
            if number >= LEAST_ROUNDS and self._is_over():
                break
            before = self._seconds(self._own)
            # Every other round runs backwards, so that none always follows the same neighbour.
            for i in list(chains)[:: 1 if number % 2 == 0 else -1]:
                samples[i].append(self._seconds(chains[i]))
            own.append(min(before, self._seconds(self._own)))
        return {
            i: Outcome(
                statistics.median(mine / beside for mine, beside in zip(times, own, strict=True)),
                statistics.median(times),
            )
            for i, times in samples.items()
        }

    def _seconds(self, chain: tuple[Run, Run]) -> float:
        """Of one call."""
        short, long = chain
        return max((_timed(long) - _timed(short)) / (self._lengths[1] - self._lengths[0]), 1e-9)


def _best(run: Run) -> float:
    """Seconds of a program that has been run before, at best of three times."""
    jax.block_until_ready(run())
    return min(_timed(run) for _ in range(3))


def _timed(run: Run) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


Measure = Callable[[Sequence[Settings], int, Log], list[Outcome]]


def descend(
    case: Case,
    measure: Measure,
    log: Log,
    is_over: Callable[[], bool],
    say: Callable[[str], None],
) -> tuple[Settings, bool]:
    """The best settings found: of each in turn the best value, until a pass changes none, or the time is over.

    Of values that are equal up to a hundredth the first is taken, which is the simplest one. And whether the search
    came to its end.
    """
    best: Settings = dict(case.start)
    for _ in range(3):
        before = best
        for name, values in case.candidates.items():
            trials = [best, *({**best, name: value} for value in values if best.get(name) != value)]
            unknown = [trial for trial in trials if trial and log.find(case, trial) is None]
            if unknown and is_over():
                return best, False
            say(f"{case.title}: {name}, {len(unknown)} to measure")
            outcomes = measure(unknown, ROUNDS, log) if unknown else []
            for trial, outcome in zip(unknown, outcomes, strict=False):
                log.add(case, trial, "measured", outcome)
            relative = [1.0 if not trial else _known(log, case, trial).relative for trial in trials]
            least = min(relative)
            if least < float("inf"):
                best = next(trial for trial, value in zip(trials, relative, strict=True) if WORTH * value <= least)
            if len(outcomes) < len(unknown):
                return best, False
        if best == before:
            break
    return best, True


def _known(log: Log, case: Case, settings: Settings) -> Outcome:
    return log.find(case, settings) or Outcome()


def confirm(chosen: Settings, measure: Measure, log: Log) -> Outcome:
    """The chosen settings once more, in turns with the package's own; better only if `relative` is at most `WORTH`."""
    if not chosen:
        return Outcome(1.0)
    return measure([chosen], LAST_ROUNDS, log)[0]
