"""`jax-ep tune`: measure the best settings of the kernels on this machine, and its rates, and write them to a file.

It runs in one process. The file is written after each operation, and a log of the measurements next to it, so that a
second run resumes where the first one stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import functools
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jax_ep import context, tuning
from jax_ep.core import json_files
from jax_ep.core.files import check_writable
from jax_ep.formats import STORED
from jax_ep.settings import file
from jax_ep.settings.operations import bucket
from jax_ep.tools import tune_search
from jax_ep.tools.command import Default, fill_in
from jax_ep.tools.tune_search import Case, Log, Outcome, Settings
from jax_ep.values import shown

PARTS = ("exchange", "exchange-gemm", "low-latency", "grouped-gemm", "fused-moe", "rates")
_MIN_S = 20.0  # per group of operations; less would be spent on compilation


def add_command(commands: Any) -> None:
    """Add `tune` to the command line."""
    summary = "autotune the kernels for this machine, measure its rates, and write both to a file"
    parser = commands.add_parser(
        "tune",
        help=summary,
        description=f"{summary}. Every operation picks the file up: see docs/tuning.md. A run that was stopped, or that"
        " ran out of time, resumes when it is started again.",
    )
    parser.add_argument("what", nargs="*", choices=[*PARTS, "all"], metavar="WHAT", help=f"{', '.join(PARTS)}; or all")
    model = "sizes of a model (default: %(default)s); the options below override single ones"
    parser.add_argument("--model", default=Default("deepseek-v3", "tiny"), help=model)
    tokens, text = Default([4096], [16]), "per rank (default: %(default)s); several are tuned one after another"
    parser.add_argument("--tokens", type=int, nargs="+", default=tokens, help=text)
    for name, text in (("hidden", "H"), ("intermediate", "I"), ("experts", "E, of all ranks"), ("top-k", "K")):
        parser.add_argument(f"--{name}", type=int, help=text)
    parser.add_argument("--ranks", type=int, help="devices that share the experts (default: all)")
    parser.add_argument("--routing", choices=["uniform", "zipf"], default="uniform")
    parser.add_argument("--formats", nargs="*", choices=STORED, default=[], help="formats of weights to tune as well")
    parser.add_argument("--seconds", type=float, default=600.0, help="approximate limit (default: 600)")
    parser.add_argument("--out", type=Path, help="the file (default: where operations look for it)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Tune and write the file; on CPU devices, whose times have no meaning, write nothing."""
    from jax_ep.tools.benchmark import harness

    harness.require_triton()
    if jax.process_count() > 1:
        raise ValueError("tune: there are several processes; run one process, which drives all GPUs of a machine")
    from jax_ep.tools import tune_cases
    from jax_ep.tools.benchmark import rates

    if tune_cases.is_small() and jax.config.jax_platforms != "cpu":
        raise ValueError(
            "tune: JAX has no GPU here, expected one, since times of CPU devices mean nothing; run jax-ep doctor, or"
            " set JAX_PLATFORMS=cpu to try the command in Triton's interpreter"
        )
    is_small = tune_cases.is_small()
    fill_in(args, quick=is_small)
    all_sizes, path = _sizes(args), _path(args.out)
    with _locked(None if is_small else path):
        results = _Results(path, jax.local_devices()[0].device_kind)
        if is_small:
            results.path = None
            print("CPU devices: the figures mean nothing, and no settings file is written", flush=True)
        parts = PARTS if not args.what or "all" in args.what else [name for name in PARTS if name in args.what]
        tuning.use(None)  # compare with the defaults
        _begin()
        try:
            clock = _Clock(args.seconds)
            if "rates" in parts:
                clock.say("rates of this machine")
                results.rates = rates.measure()
                results.write()
            _tune(list(tune_cases.makers(parts, all_sizes, args.formats)), args.routing, results, clock)
        finally:
            context.finalize()
    if not results.outcomes and "rates" not in parts:
        sys.exit("jax-ep tune: nothing measured")
    _show(results)


def _log_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.log")


@contextlib.contextmanager
def _locked(path: Path | None) -> Iterator[None]:
    """Hold a lock on the log of a file: two runs would overwrite each other's entries, and slow each other down."""
    if path is None:
        yield
        return
    check_writable(_log_path(path))
    with _log_path(path).open("ab") as log:
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"tune: another run writes {path}, expected one at a time; wait until it has ended, or pass another"
                " --out"
            ) from error
        yield


def _path(out: Path | None) -> Path | None:
    """Return `out`, or the file that operations read, after a check that it can be written; None: write nothing."""
    path = out
    if out is None and jax.default_backend() != "cpu":
        path = file.default_path(jax.local_devices()[0].device_kind)
        if path is None:
            raise ValueError("tune: you have no home folder, expected a place for the file; pass --out")
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        check_writable(path)
    return path


def _sizes(args: argparse.Namespace) -> list[Any]:
    """Return the sizes of the layer, for each number of tokens."""
    from jax_ep.tools.benchmark.inputs import MODELS
    from jax_ep.tools.tune_cases import Sizes

    if args.model not in MODELS:
        raise ValueError(f"tune: --model={shown(args.model)}, expected one of {', '.join(MODELS)}")
    given = {field: getattr(args, field) for field in ("hidden", "intermediate", "experts", "top_k")}
    model = MODELS[args.model]._replace(**{field: value for field, value in given.items() if value is not None})
    ranks = args.ranks or len(jax.local_devices())
    if ranks > len(jax.local_devices()):
        raise ValueError(f"tune: --ranks={ranks}, expected at most {len(jax.local_devices())}, the devices; pass fewer")
    if model.experts % ranks or model.top_k > model.experts:
        raise ValueError(
            f"tune: {model.experts} experts on {ranks} ranks, {model.top_k} per token, expected ranks that divide the"
            " experts, and at most all experts per token; pass --experts, --ranks or --top-k"
        )
    return [Sizes(number, model, ranks, args.routing) for number in args.tokens]


def _tune(makers: Sequence[Any], routing: str, results: _Results, clock: _Clock) -> None:
    """Tune all cases, each in its share of the remaining time."""
    circumstances = {
        "device": results.kind,
        "kernels": file.kernel_sources(),
        "routing": routing,
        "jax": jax.__version__,
    }
    log = Log(results.path and _log_path(results.path), circumstances)
    for number, make in enumerate(makers):
        if clock.left() <= 0:
            print(f"no time left for {len(makers) - number} of {len(makers)} groups; run it again to resume")
            return
        deadline = clock.elapsed() + max(_MIN_S, clock.left() / (len(makers) - number))
        try:
            cases = list(make())
            for place, case in enumerate(cases):
                share = (deadline - clock.elapsed()) / (len(cases) - place)
                _tune_one(case, log, results, clock, clock.elapsed() + share)
                results.write()
        except (NotImplementedError, RuntimeError, ValueError, MemoryError) as error:  # too large, or not supported
            print(f"left out: {' '.join(str(error).split())[:300]}")
            _recover()


def _tune_one(case: Case, log: Log, results: _Results, clock: _Clock, deadline: float) -> None:
    def is_over() -> bool:
        return clock.elapsed() > deadline

    # Made with the first measurement: if all are known, nothing is compiled.
    meter = functools.cache(lambda: tune_search.Meter(case, _recover, is_over))

    def measure(trials: Sequence[Settings], rounds: int, log: Log) -> list[Outcome]:
        return meter().outcomes(trials, rounds, log)

    chosen, is_done = tune_search.descend(case, measure, log, is_over, clock.say)
    if not is_done and all(log.find(case, settings) is None for settings in (chosen, case.start) if settings):
        print(f"{case.title}: no time left; run it again to resume")
        return
    last = measure([chosen], tune_search.LAST_ROUNDS, log)[0] if chosen else Outcome(1.0)
    is_better = bool(chosen) and last.relative <= tune_search.WORTH
    results.outcomes.append((case, chosen if is_better else {}, last))
    found = f"{last.relative:.2f} of the time with {tune_search.name_of(chosen)}" if is_better else "the default"
    if failed := log.failures(case):
        found += f"; {failed} settings cannot run here, see {log.path}"
    print(f"{case.title}: {found}{'' if is_done else '; the search is not complete: run it again to resume'}")


def _recover() -> None:
    """Replace a context in which a kernel has timed out, since it rejects further work."""
    if jax.default_backend() == "cpu":  # the interpreter rejects work after any error
        context.finalize()
        _begin()
        return
    try:
        context.heap("tune")
    except jax.errors.JaxRuntimeError:
        context.finalize()


def _begin() -> None:
    """On CPU devices, initialize a context that runs kernels in Triton's interpreter."""
    if jax.default_backend() == "cpu":
        auto = (jax.sharding.AxisType.Auto,)
        mesh = jax.make_mesh((len(jax.local_devices()),), ("expert",), axis_types=auto)
        context.init(mesh, transport="shared_memory", timeout_s=300.0)


@dataclasses.dataclass
class _Results:
    """The results, and the previous content of the file; path None: write nothing."""

    path: Path | None
    kind: str
    rates: file.Rates | None = None
    outcomes: list[tuple[Case, Settings, Outcome]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self._before: list[file.Entry] = []
        if self.path is None or not self.path.exists():
            return
        try:
            content = json_files.read(self.path, file.MOST_BYTES)
            kind = content["device_kind"]
            if kind == self.kind and content["kernels"] == file.kernel_sources():  # those of others are of no use
                self.rates = file.read(self.path, self.kind).rates
                self._before = [file.Entry(**entry) for entry in content["entries"]]
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{self.path} exists and is not a file of tuned settings; delete it, or pass another --out"
            ) from error
        if kind != self.kind:
            raise ValueError(f"{self.path} is for {shown(kind)}, the device here is {self.kind!r}; pass another --out")

    def write(self) -> None:
        """Write the file: new entries replace those for the same sizes; there is none if the defaults are best."""
        if self.path is None:
            return
        entries = {_name(entry.operation, entry.facts): entry for entry in self._before}
        for case, chosen, last in self.outcomes:
            name = _name(case.operation, case.facts)
            entries.pop(name, None)
            if chosen:
                measured = {"seconds": last.seconds, "relative_to_shipped": last.relative, "of": case.title}
                entries[name] = file.Entry(case.operation, case.facts, chosen, measured)
        file.write(self.path, self.kind, list(entries.values()), self.rates)


def _name(operation: str, facts: Mapping[str, Any]) -> str:
    return f"{operation} {sorted((name, bucket(name, value)) for name, value in facts.items())}"


class _Clock:
    """The elapsed and the remaining time."""

    def __init__(self, seconds: float) -> None:
        self._start, self._seconds = time.monotonic(), seconds

    def elapsed(self) -> float:
        return time.monotonic() - self._start

    def left(self) -> float:
        return self._seconds - self.elapsed()

    def say(self, text: str) -> None:
        print(f"  {text}, {max(0.0, self.left()):.0f} s left", flush=True)


def _show(results: _Results) -> None:
    """Print a table of the results, and the file."""
    from jax_ep.tools.benchmark import harness

    rows = []
    for case, chosen, last in results.outcomes:
        text = ", ".join(f"{name}={value}" for name, value in chosen.items()) or "default"
        rows.append([case.title, f"{last.relative:.2f}" if chosen else "1.00", text])
    if rows:
        harness.show_table("tuned settings", ["operation", "time, default 1", "settings"], rows)
    if results.rates is not None:
        for name, value in dataclasses.asdict(results.rates).items():
            print(f"{name}: {'not measured' if value is None else f'{value:.3g}'}")
    if results.path is not None:
        print(f"written: {results.path}")
