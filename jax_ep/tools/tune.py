"""`jax-ep tune`: measures what settings of launches are best on this machine, and its rates, and writes them to a file.

One process, one context. The file is written after each operation, and what has been measured is kept beside it, so
that a second run goes on where the first one stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jax_ep import context, tuning
from jax_ep.core import json_files
from jax_ep.core.files import check_writable
from jax_ep.core.json_files import shown
from jax_ep.formats import STORED
from jax_ep.settings import file
from jax_ep.settings.operations import bucket
from jax_ep.tools.benchmark import harness, inputs
from jax_ep.tools.command import raise_if_interrupted
from jax_ep.tools.tune_chains import Sizes, is_small

PARTS = ("exchange", "exchange-gemm", "low-latency", "grouped-gemm", "fused-moe", "rates")
_PROGRAM_SETTINGS = ("num_communicating_programs", "num_combining_programs")
_LEAST_S = 20.0  # of a group of operations: less would be compiling


def add_command(commands: Any) -> None:
    """Adds `tune` to the command line."""
    summary = "measure the best settings of launches, and the rates of this machine, and write them to a file"
    parser = commands.add_parser(
        "tune",
        help=summary,
        description=f"{summary}, which all operations then look into: see docs/tuning.md. A run that was stopped, or"
        " had too little time, goes on where it was when it is started again.",
    )
    parser.add_argument("what", nargs="*", choices=[*PARTS, "all"], metavar="WHAT", help=f"{', '.join(PARTS)}; or all")
    parser.add_argument("--model", help="sizes of a model, such as deepseek-v3; single ones may still be given")
    parser.add_argument("--tokens", type=int, nargs="+", help="per rank; several are tuned one after another")
    for name, text in (("hidden", "H"), ("intermediate", "I"), ("experts", "E, of all ranks"), ("top-k", "K")):
        parser.add_argument(f"--{name}", type=int, help=text)
    parser.add_argument("--ranks", type=int, help="devices that share the experts (default: all)")
    parser.add_argument("--routing", choices=["uniform", "zipf"], default="uniform")
    parser.add_argument("--formats", nargs="*", choices=STORED, default=[], help="of quantised matrices, to tune too")
    parser.add_argument("--seconds", type=float, default=600.0, help="at most about so long (default: 600)")
    parser.add_argument("--out", type=Path, help="the file (default: where operations look for it)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Tune, and write the file; on CPU devices, whose figures mean nothing, write nothing."""
    harness.require_triton()
    if jax.process_count() > 1:
        raise ValueError("tune: there are several processes; run one, which drives the GPUs of a machine")
    all_sizes = _sizes(args)
    results = _Results(_path(args.out), jax.local_devices()[0].device_kind)
    if is_small():
        results.path = None
    parts = PARTS if not args.what or "all" in args.what else [name for name in PARTS if name in args.what]
    tuning.use(None)  # what is compared with is what is shipped
    with _started(), _Screen(args.seconds) as screen:
        if "rates" in parts:
            from jax_ep.tools import tune_rates

            screen.say("rates of this machine")
            results.rates = tune_rates.measure(quick=jax.default_backend() == "cpu")
            results.write()
        _tune(list(_makers(parts, all_sizes, args.formats)), args.routing, results, screen)
    if not results.outcomes and "rates" not in parts:
        sys.exit("jax-ep tune: nothing measured")
    _show(results)


def _path(out: Path | None) -> Path | None:
    """The file that operations look into, or `out`, after a check that it can be written; None: nowhere."""
    path = out
    if out is None and not is_small():
        path = file.default_path(jax.local_devices()[0].device_kind)
        if path is None:
            raise ValueError("tune: you have no home folder, expected a place for the file; pass --out")
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        check_writable(path)
    return path


def _sizes(args: argparse.Namespace) -> list[Any]:
    """Sizes of the layer, one for each number of tokens."""
    models = inputs.MODELS
    name = ("tiny" if is_small() else "deepseek-v3") if args.model is None else args.model
    if name not in models:
        raise ValueError(f"tune: --model={shown(name)}, expected one of {', '.join(models)}")
    given = {field: getattr(args, field) for field in ("hidden", "intermediate", "experts", "top_k")}
    sizes = models[name]._asdict() | {field: value for field, value in given.items() if value is not None}
    ranks = args.ranks or len(jax.local_devices())
    tokens = args.tokens or ([16] if is_small() else [4096])
    if ranks > len(jax.local_devices()):
        raise ValueError(f"tune: --ranks={ranks}, but there are {len(jax.local_devices())} devices")
    if sizes["experts"] % ranks or sizes["top_k"] > sizes["experts"]:
        raise ValueError(f"tune: {sizes['experts']} experts on {ranks} ranks, {sizes['top_k']} per token; pass --ranks")
    return [Sizes(tokens=number, **sizes, ranks=ranks, routing=args.routing) for number in tokens]


def _makers(parts: Sequence[str], all_sizes: Sequence[Any], formats: Sequence[str]) -> Iterator[Callable[[], Any]]:
    """Functions that make cases, and the arrays that these need, one group after another."""
    from jax_ep.megakernels.requirements import MOST_LOW_LATENCY_TOKENS
    from jax_ep.tools import tune_cases as cases
    from jax_ep.tools import tune_products as products

    for sizes in all_sizes:
        made: dict[str, list[Callable[..., Any]]] = {
            "exchange": [cases.exchange],
            "exchange-gemm": [cases.exchange_gemm, cases.weight_gradients],
            "grouped-gemm": [products.grouped_gemm, products.grouped_gemm_fp8],
            "fused-moe": [cases.fused_moe],
        }
        if sizes.tokens <= MOST_LOW_LATENCY_TOKENS:
            made["low-latency"] = [cases.low_latency, products.masked_gemm]
        for part in parts:
            for make in made.get(part, ()):
                yield lambda make=make, sizes=sizes: make(sizes)  # type: ignore[misc]
            for name in formats:
                quantized = {"grouped-gemm": products.quantized_gemm, "fused-moe": cases.fused_moe}.get(part)
                if quantized is not None:
                    yield lambda make=quantized, sizes=sizes, name=name: make(sizes, name)  # type: ignore[misc]


def _tune(makers: list[Callable[[], Any]], routing: str, results: _Results, screen: _Screen) -> None:
    """All cases, each with its share of the time that is left."""
    from jax_ep.tools.tune_search import Log

    circumstances = {
        "device": results.kind,
        "kernels": file.kernel_sources(),
        "routing": routing,
        "jax": jax.__version__,
    }
    log = Log(results.path and results.path.with_suffix(".log"), circumstances)
    for number, make in enumerate(makers):
        if screen.left() <= 0:
            screen.note(f"no time left for {len(makers) - number} of {len(makers)} groups; run it again to go on")
            return
        deadline = screen.elapsed() + max(_LEAST_S, screen.left() / (len(makers) - number))
        try:
            cases = list(make())
            for place, case in enumerate(cases):
                share = (deadline - screen.elapsed()) / (len(cases) - place)
                _tune_one(case, log, results, screen, screen.elapsed() + share)
                results.write()
        except (NotImplementedError, RuntimeError, ValueError) as error:  # too large for the memory, or refused
            raise_if_interrupted(error)
            screen.note(f"left out: {' '.join(str(error).split())[:300]}")
            _recover()


def _tune_one(case: Any, log: Any, results: _Results, screen: _Screen, deadline: float) -> None:
    from jax_ep.tools import tune_search

    meter: Any = None

    def measure(*arguments: Any) -> Any:
        nonlocal meter
        meter = meter or tune_search.Meter(case, _recover, is_over)
        return meter.outcomes(*arguments)

    def is_over() -> bool:
        return screen.elapsed() > deadline

    chosen, is_done = tune_search.descend(case, measure, log, is_over, screen.say)
    if not is_done and all(log.find(case, settings) is None for settings in (chosen, case.start) if settings):
        screen.note(f"{case.title}: no time left; run it again to go on")
        return
    last = tune_search.confirm(chosen, measure, log)
    is_better = bool(chosen) and last.relative <= tune_search.WORTH
    results.add(case, chosen if is_better else {}, last, log)
    found = f"{last.relative:.2f} of the time with {tune_search.name_of(chosen)}" if is_better else "as shipped"
    if failed := log.failures(case):
        found += f"; {failed} settings cannot run here, see {log.path}"
    screen.note(f"{case.title}: {found}{'' if is_done else '; not all has been tried: run it again to go on'}")


def _recover() -> None:
    """A context in which a kernel has given up refuses work: the next measurement begins with another."""
    if jax.default_backend() == "cpu":  # the interpreter refuses work after any error
        context.finalize()
        _begin()
        return
    try:
        context.heap("tune")
    except jax.errors.JaxRuntimeError:
        context.finalize()


def _begin() -> None:
    if jax.default_backend() == "cpu":
        auto = (jax.sharding.AxisType.Auto,)
        mesh = jax.make_mesh((len(jax.local_devices()),), ("expert",), axis_types=auto)
        context.init(mesh, transport="shared_memory", timeout_s=300.0)


@contextlib.contextmanager
def _started() -> Iterator[None]:
    """On CPU devices kernels run in Triton's interpreter, in a context that says so."""
    _begin()
    try:
        yield
    finally:
        context.finalize()


@dataclasses.dataclass
class _Results:
    """What has been found, and what the file had before; path None: nothing is written."""

    path: Path | None
    kind: str
    rates: file.Rates | None = None
    outcomes: list[tuple[Any, Mapping[str, Any], Any]] = dataclasses.field(default_factory=list)
    curves: list[Any] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self._before: list[file.Entry] = []
        if self.path is None or not self.path.exists():
            return
        try:
            content = json_files.read(self.path, file.MOST_BYTES)
            kind, kernels = content["device_kind"], content["kernels"]
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{self.path} is there, and no file of tuned settings; delete it, or pass another --out"
            ) from error
        if kind != self.kind:
            raise ValueError(f"{self.path} is of {shown(kind)}, the device here is {self.kind!r}; pass another --out")
        if kernels == file.kernel_sources():  # entries of other kernels are of no use
            self.rates = file.read(self.path, self.kind).rates
            self._before = [file.Entry(**entry) for entry in content["entries"]]

    def add(self, case: Any, chosen: Mapping[str, Any], last: Any, log: Any) -> None:
        """The outcome of a case, and its curve where it has a bandwidth."""
        self.outcomes.append((case, chosen, last))
        names = [name for name in _PROGRAM_SETTINGS if name in case.candidates]
        if not case.moved_bytes or not names:
            return
        from jax_ep.tools.tune_chart import Curve

        known = {n: log.find(case, {names[0]: n}) for n in case.candidates[names[0]]}
        fine = {n: outcome for n, outcome in known.items() if outcome is not None and not outcome.error}
        if fine:
            default = case.moved_bytes * sum(o.relative / o.seconds for o in fine.values()) / len(fine)
            rates = {n: case.moved_bytes / outcome.seconds for n, outcome in fine.items()}
            self.curves.append(Curve(case.title, rates, chosen.get(names[0]), default))

    def write(self) -> None:
        """The file, with new entries in the place of those for the same sizes; none where the shipped ones are best."""
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


class _Screen:
    """What a person sees: a bar with the time that is left, by rich where somebody watches, and notes."""

    def __init__(self, seconds: float) -> None:
        self._start, self._seconds = time.monotonic(), seconds
        self._progress: Any = None

    def __enter__(self) -> _Screen:
        with contextlib.suppress(ImportError):
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            console = Console(stderr=True)
            if console.is_terminal:
                columns = (
                    BarColumn(),
                    TimeElapsedColumn(),
                    TextColumn("{task.fields[left]}"),
                    TextColumn("{task.description}"),
                )
                self._progress = Progress(*columns, console=console, transient=True)
                self._task = self._progress.add_task("", total=self._seconds, left="")
                self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def left(self) -> float:
        """Seconds of the budget."""
        return self._seconds - self.elapsed()

    def say(self, text: str) -> None:
        """What is done now."""
        if self._progress is None:
            print(f"  {text}", flush=True)
            return
        left = f"{max(0.0, self.left()):.0f} s left"
        self._progress.update(self._task, completed=self.elapsed(), description=text, left=left)

    def note(self, text: str) -> None:
        """What stays."""
        print(text, flush=True) if self._progress is None else self._progress.console.print(text, markup=False)


def _show(results: _Results) -> None:
    """A table of what was found, the file, and the chart."""
    rows = []
    for case, chosen, last in results.outcomes:
        text = ", ".join(f"{name}={value}" for name, value in chosen.items()) or "as shipped"
        rows.append([case.title, f"{last.relative:.2f}" if chosen else "1.00", text])
    if rows:
        harness.show_table("tuned settings", ["operation", "time, shipped 1", "settings"], rows)
    if results.rates is not None:
        for name, value in dataclasses.asdict(results.rates).items():
            print(f"{name}: {'not measured' if value is None else f'{value:.3g}'}")
    if results.path is None:
        print("CPU devices: these figures mean nothing, and no settings file is written")
        return
    print(f"written: {results.path}")
    if results.curves:
        from jax_ep.tools import tune_chart

        chart = results.path.with_suffix(".png")
        drawn = tune_chart.draw(results.curves, chart)
        print(f"chart: {chart}" if drawn else "no chart: pip install '.[tools]'")
