"""Search for the best settings of an operation: optimize one setting after another, compared with the defaults.

Clocks change single timings more than settings do. So settings alternate, and the figure of each is the median over
rounds of its time relative to the defaults' time in the same round. The defaults run at both ends of a round and their
better time counts, so that nothing is chosen by chance. A log holds each measurement, which is never repeated.
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

Settings = Mapping[str, Setting]
Run = Callable[[], Any]
LEAST_ROUNDS, ROUNDS, LAST_ROUNDS = 5, 7, 15
WORTH = 0.99
"""Settings are chosen only if they take at most this share of the time of simpler ones."""
_SAMPLE_S = 0.02  # the time of a chain; the scatter of one program launch is small in comparison
_MAX_CALLS = 1000
_MAX_BYTES = 256 << 20


_TIME = json_files.value_of("a time", lambda value: type(value) is float and value > 0)
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
    """The outcome of some settings."""

    relative: float = float("inf")  # time divided by that of the default settings
    seconds: float = float("inf")  # of one call
    error: str = ""  # why there is no time; "" if there is one


_NOTHING_YET = Outcome()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One operation with one set of sizes."""

    operation: str  # one of `settings.operations.OPERATIONS`
    facts: Mapping[str, Any]  # the keys of its settings in the file
    title: str  # description for messages
    candidates: Mapping[str, Sequence[Setting]]  # of each setting, the simplest first, in the order of the search
    make_chain: Callable[[Settings], Callable[[int], Run]]  # of settings, and then of n: n dependent calls
    start: Settings = dataclasses.field(default_factory=dict)  # of the search, without which others have no effect


def name_of(settings: Settings) -> str:
    """Return a text that is equal for equal settings."""
    return json.dumps(dict(sorted(settings.items())))


class Log:
    """Measurements by operation, facts and settings, in a file that is only appended to; path None: no file.

    There is a line before settings are tried, one when they ran, and one with their outcome. Settings that were tried
    twice without running have crashed the process and are skipped; once may have been the user.
    """

    def __init__(self, path: Path | None, circumstances: Mapping[str, Any]) -> None:
        self.path = path
        self._circumstances = dict(circumstances)
        self._found: dict[str, Outcome] = {}
        self._tried: collections.Counter[str] = collections.Counter()
        for line in self._lines():
            try:
                record = json.loads(line)
                _LINE(record, "")
            except (ValueError, RecursionError):  # the process ended within the line
                continue
            if record["circumstances"] == self._circumstances:
                self._take(record["key"], record["state"], Outcome(**record["outcome"]))

    def _lines(self) -> list[bytes]:
        if self.path is None or not self.path.exists():
            return []
        try:
            return read_regular(self.path, _MAX_BYTES).splitlines()
        except ValueError as error:
            raise ValueError(f"tune: {self.path} is {error}; delete it to measure everything again") from error

    def _take(self, key: str, state: str, outcome: Outcome) -> None:
        self._tried[key] = self._tried[key] + 1 if state == "tried" else 0
        if state == "measured":
            self._found[key] = outcome
        elif self._tried[key] > 1:
            self._found[key] = Outcome(error="the process ended while these settings were tried")

    def find(self, case: Case, settings: Settings) -> Outcome | None:
        return self._found.get(self._key(case, settings))

    def failures(self, case: Case) -> int:
        """Return how many settings of a case could not run."""
        return sum(bool(found.error) for key, found in self._found.items() if key.startswith(self._prefix(case)))

    def add(self, case: Case, settings: Settings, state: str, outcome: Outcome = _NOTHING_YET) -> None:
        """Record that settings are about to be "tried", have "run", or are "measured"."""
        key = self._key(case, settings)
        if state == "measured":
            self._found[key] = outcome
        if self.path is None:
            return
        record = {"circumstances": self._circumstances, "key": key, "state": state}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            # The line feed comes first: if an earlier process ended within a line, this one is still whole.
            file.write("\n" + json.dumps(record | {"outcome": dataclasses.asdict(outcome)}))

    def _key(self, case: Case, settings: Settings) -> str:
        return self._prefix(case) + name_of(settings)

    def _prefix(self, case: Case) -> str:
        facts = json.dumps({name: str(value) for name, value in sorted(case.facts.items())})
        return f"{case.operation} {facts} "


class Meter:
    """Measure settings of one case relative to the defaults, whose programs it keeps."""

    def __init__(self, case: Case, recover: Callable[[], None], is_over: Callable[[], bool]) -> None:
        self._case, self._recover, self._is_over = case, recover, is_over
        self._lengths, self._own = self._prepare()

    def _prepare(self) -> tuple[tuple[int, int], tuple[Run, Run]]:
        """Return lengths of chains that take long enough, and the chains of the default settings."""
        compile_chain, more = self._case.make_chain({}), 1
        short = compile_chain(1)
        while True:
            long = compile_chain(1 + more)
            seconds = _best(long) - _best(short)
            if seconds >= _SAMPLE_S or more >= _MAX_CALLS:
                return (1, 1 + more), (short, long)
            # The difference of few calls may be chance.
            wanted = round(more * _SAMPLE_S / max(seconds, 1e-7))
            more = min(max(2 * more, min(wanted, 16 * more)), _MAX_CALLS)

    def outcomes(self, trials: Sequence[Settings], rounds: int, log: Log) -> list[Outcome]:
        """Return the outcome of each, or of the first ones if the time is over."""
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
                found[i] = Outcome(error=f"{type(error).__name__}: {' '.join(str(error).split())[-300:]}")
                self._recover()
        found |= self._in_turns(chains, rounds)
        return [found[i] for i in range(len(found))]

    def _in_turns(self, chains: Mapping[int, tuple[Run, Run]], rounds: int) -> dict[int, Outcome]:
        """Measure chains relative to the better time of the defaults at both ends of each round."""
        samples: dict[int, list[float]] = {i: [] for i in chains}
        own: list[float] = []
        for both in (self._own, *chains.values()):  # clocks fall, and graphs are evicted, during compilation
            jax.block_until_ready([run() for run in both])
        for number in range(rounds):
            if number >= LEAST_ROUNDS and self._is_over():
                break
            before = self._seconds(self._own)
            # Every other round runs backwards, so that a chain does not always follow the same one.
            for i in list(chains)[:: 1 if number % 2 == 0 else -1]:
                samples[i].append(self._seconds(chains[i]))
            own.append(min(before, self._seconds(self._own)))
        return {
            i: Outcome(
                statistics.median(mine / default for mine, default in zip(times, own, strict=True)),
                statistics.median(times),
            )
            for i, times in samples.items()
        }

    def _seconds(self, chain: tuple[Run, Run]) -> float:
        """Return the time of one call."""
        short, long = chain
        return max((_timed(long) - _timed(short)) / (self._lengths[1] - self._lengths[0]), 1e-9)


def _best(run: Run) -> float:
    """Return the best of three times of a program, after one run."""
    jax.block_until_ready(run())
    return min(_timed(run) for _ in range(3))


def _timed(run: Run) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


Measure = Callable[[Sequence[Settings], int, Log], list[Outcome]]


def descend(
    case: Case, measure: Measure, log: Log, is_over: Callable[[], bool], say: Callable[[str], None]
) -> tuple[Settings, bool]:
    """Optimize one setting after another until a pass changes none; return the settings, and whether it is complete.

    Among values within 1 % of each other the first one is chosen, which is the simplest.
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
            known = [log.find(case, trial) or Outcome() if trial else Outcome(1.0) for trial in trials]
            least = min(outcome.relative for outcome in known)
            if least < float("inf"):
                best = next(trial for trial, one in zip(trials, known, strict=True) if WORTH * one.relative <= least)
            if len(outcomes) < len(unknown):
                return best, False
        if best == before:
            break
    return best, True
