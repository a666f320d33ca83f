"""What benchmarks share: interleaved timing, reports as JSON, tables and command-line options.

Clocks, power limits and other processes move single timings by far more than the differences that matter. So the
variants of one comparison always run in turns, medians and quartiles are reported, and ratios are taken within rounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from jax_ep.core.files import check_writable
from jax_ep.tools import bench, command

RESULTS = Path(__file__).resolve().parents[1] / "results"
QUICK_RESULTS = Path("runs/benchmarks")  # quick figures mean nothing: they never replace the published ones
QUICK_DEVICES = 4
WORKERS = 8  # compilers at a time
# Short calls would be measured as long as their launches take from the host.
GRAPHS: dict[str, Any] = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,WHILE,CONDITIONAL,DYNAMIC_SLICE_FUSION",
    "xla_gpu_graph_min_graph_size": 1,
}
GRAPHS_WITH_COLLECTIVES = GRAPHS | {
    "xla_gpu_enable_command_buffer": f"{GRAPHS['xla_gpu_enable_command_buffer']},COLLECTIVES"
}
_MIN_ROUNDS = 3
_BUDGET_S = 15.0


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds per call of one variant, one sample per round."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return float(np.median(self.samples))

    def summary(self) -> dict[str, Any]:
        """Median, quartiles, minimum and the number of samples."""
        q1, median, q3 = (float(q) for q in np.quantile(self.samples, (0.25, 0.5, 0.75)))
        return {"median": median, "q1": q1, "q3": q3, "min": min(self.samples), "rounds": len(self.samples)}

    def milliseconds(self) -> str:
        """Median and quartiles, for tables."""
        s = self.summary()
        return f"{1e3 * s['median']:.2f} [{1e3 * s['q1']:.2f} {1e3 * s['q3']:.2f}]"

    def microseconds(self, digits: int = 0) -> list[str]:
        """Median, and quartiles, as two cells of a table."""
        median, q1, q3 = (f"{1e6 * self.summary()[name]:.{digits}f}" for name in ("median", "q1", "q3"))
        return [median, f"{q1} to {q3}"]

    def ratio_to(self, other: Timing) -> float:
        """Median over rounds of this time divided by the other's in the same round."""
        return float(np.median([a / b for a, b in zip(self.samples, other.samples, strict=False)]))


def measure_interleaved[Key: Hashable](
    variants: Mapping[Key, Callable[[], Any]],
    rounds: int,
    *,
    warmup: int = 2,
    budget_s: float = _BUDGET_S,
    settle_s: float = 0.0,
    title: str = "measuring",
) -> dict[Key, Timing]:
    """Wall-clock times of functions that run in turns, each until its results are ready.

    Args:
      variants: functions without arguments, compiled or not; they return arrays.
      rounds: samples of each variant.
      warmup: calls before the first sample; the first one compiles.
      budget_s: a variant whose samples sum to more sits out the remaining rounds, once it has three of them.
      settle_s: how long a variant runs before each of its samples: the clock of a GPU at its power limit is the one
        that the last tenth of a second asked for, by whatever ran then.
      title: for the progress bar.
    """
    together = jax.process_count() > 1
    if together:
        budget_s = math.inf  # every process must make the same calls
    for _ in range(warmup):
        for run in variants.values():
            jax.block_until_ready(run())
    samples: dict[Key, list[float]] = {name: [] for name in variants}
    for i in progress(range(rounds), title):
        # Every other round runs backwards, so that no variant always follows the same neighbour.
        for name in list(variants)[:: 1 if i % 2 == 0 else -1]:
            if len(samples[name]) >= _MIN_ROUNDS and sum(samples[name]) > budget_s:
                continue
            if together:  # or one would time how long it waits for another
                multihost_utils.sync_global_devices("sample")
            settled = time.perf_counter() + settle_s
            while time.perf_counter() < settled:
                jax.block_until_ready(variants[name]())
            start = time.perf_counter()
            jax.block_until_ready(variants[name]())
            samples[name].append(time.perf_counter() - start)
    return {name: Timing(tuple(times)) for name, times in samples.items()}


def measure_chained(
    factories: Mapping[str, Callable[[int], tuple[Callable[..., Any], tuple[Any, ...]]]],
    rounds: int,
    *,
    lengths: tuple[int, int] = (1, 3),
    budget_s: float = _BUDGET_S,
    title: str = "measuring",
    workers: int = 1,
    failures: dict[str, str] | None = None,
    compiler_options: dict[str, Any] | None = None,
) -> dict[str, Timing]:
    """Device time of one call inside jit: a chain of n2 calls less one of n1, divided by n2 - n1.

    The difference leaves out the launch of the program, the transfer of its arguments and whatever runs once.

    Args:
      factories: `make(n)` returns a function, jitted or not, and its arguments; the function makes n calls, each of
        which needs the result of the one before, or XLA would merge them.
      rounds: samples of each variant.
      lengths: n1 and n2.
      budget_s: see `measure_interleaved`; for each length.
      title: for the progress bar.
      workers: variants compiled at a time; one where compilation runs candidates on the device to choose among them.
      failures: where given, a variant that cannot be compiled or run is left out, and its error put here.
      compiler_options: of XLA, for all variants; such as `GRAPHS`.
    """
    short, long = lengths
    compiled = _compile_chains(factories, lengths, workers, failures, compiler_options)
    runs = {(name, n): run for name, both in compiled.items() for n, run in zip(lengths, both, strict=True)}
    times = measure_interleaved(runs, rounds, warmup=0, budget_s=budget_s, title=title)
    result = {}
    for name in compiled:
        pairs = zip(times[name, short].samples, times[name, long].samples, strict=False)
        result[name] = Timing(tuple((b - a) / (long - short) for a, b in pairs))
    return result


def leave_out_unresolved(times: dict[str, Timing], failures: dict[str, str]) -> None:
    """Takes out what seems to take no time, and says so in `failures`."""
    for name in [name for name, timing in times.items() if timing.median <= 0]:
        failures[name] = "takes less than what these chains resolve"
        del times[name]


def _compile_chains(
    factories: Mapping[str, Callable[[int], tuple[Callable[..., Any], tuple[Any, ...]]]],
    lengths: tuple[int, int],
    workers: int,
    failures: dict[str, str] | None,
    compiler_options: dict[str, Any] | None,
) -> dict[str, list[Callable[[], Any]]]:
    """The chains of both lengths, compiled, then tried one after another, twice."""

    def compile_both(name: str) -> list[Callable[[], Any]]:
        runs = []
        for n in lengths:
            fn, args = factories[name](n)
            jitted = fn if hasattr(fn, "lower") else jax.jit(fn)
            runs.append(partial(jitted.lower(*args).compile(compiler_options), *args))
        return runs

    # Processes must compile, and enlarge what they share, in one order; and no program may run meanwhile.
    pool = ThreadPoolExecutor(1 if jax.process_count() > 1 else workers)
    try:
        pending = {name: pool.submit(compile_both, name) for name in factories}
        wait(pending.values())
    finally:
        pool.shutdown(cancel_futures=True)  # Ctrl-C waits for what is being compiled, not for the others
    compiled = {}
    for name, future in pending.items():
        try:
            runs = future.result()
            for run in [*runs, *runs]:  # what runs again XLA makes a CUDA graph of, where options ask for it
                jax.block_until_ready(run())
            compiled[name] = runs
        except Exception as error:
            command.raise_if_interrupted(error)
            if failures is None:
                raise
            failures[name] = f"{type(error).__name__}: {error}"
    return compiled


def progress(items: Iterable[Any], title: str) -> Iterable[Any]:
    """`items`, with a progress bar where rich is installed and somebody watches."""
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError:
        return items
    console = Console(stderr=True)
    return track(items, title, console=console, transient=True) if console.is_terminal else items


def versions() -> dict[str, str]:
    """Versions of what decides about speed; packages that are not installed are left out."""
    found = {"python": platform.python_version()}
    for package in ("jax", "jaxlib", "jax-cuda13-plugin", "triton", "jax-triton", "numpy"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def device() -> dict[str, Any]:
    """Platform, kind and number of the devices that the benchmark sees."""
    first = jax.devices()[0]
    return {"platform": first.platform, "kind": first.device_kind, "count": jax.device_count(), "cores": os.cpu_count()}


class Report:
    """Rows of one benchmark run, written to `NAME.json` after each addition, so that an abort keeps the others."""

    made: ClassVar[list[Report]] = []  # of this process, for the exit status

    def __init__(self, name: str, folder: Path, settings: Mapping[str, Any]) -> None:
        self.path = folder / f"{name}.json"
        folder.mkdir(parents=True, exist_ok=True)
        check_writable(self.path)
        self.made.append(self)
        self._content: dict[str, Any] = {
            "name": name,
            "script": f"benchmarks/{Path(sys.argv[0]).name}",
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "versions": versions(),
            "device": device(),
            "settings": dict(settings),
            "summary": {},
            "rows": [],
        }

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self._content["rows"]

    @property
    def summary(self) -> dict[str, Any]:
        return self._content["summary"]

    def add(self, variant: str, shape: Mapping[str, Any], timing: Timing, **details: Any) -> None:
        """One row: a variant, the shape it ran on, its time, and whatever else belongs to it."""
        self.rows.append({"variant": variant, "shape": dict(shape), "seconds": timing.summary(), **details})
        self._write()

    def failed(self, variant: str, shape: Mapping[str, Any], error: str, **details: Any) -> None:
        """One row for a variant that cannot run this shape, with the reason."""
        command.raise_if_interrupted(error)
        self.rows.append({"variant": variant, "shape": dict(shape), "failed": error, **details})
        self._write()

    def summarise(self, **figures: Any) -> None:
        """The few figures that the benchmark is about."""
        self._content["summary"].update(figures)
        self._write()

    def _write(self) -> None:
        self.path.write_text(json.dumps(self._content, indent=1) + "\n")


def show_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table on the console, by rich where it is installed."""
    cells = [[str(cell) for cell in row] for row in rows]
    try:
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table
    except ImportError:
        widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
        print(f"\n{title}")
        for row in [list(columns), *cells]:
            print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
        return
    table = Table(title=escape(title))
    for i, column in enumerate(columns):
        table.add_column(escape(column), justify="left" if i == 0 else "right")
    for row in cells:
        table.add_row(*map(escape, row))
    # A pipe has no width, and rich would fold columns to 80 characters.
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def parser(description: str, *, rounds: int, tokens: str = "") -> argparse.ArgumentParser:
    """The options that all benchmarks have, with `tokens` the one for numbers of tokens; read them with `parse`."""
    result = command.Parser(
        prog=bench.program_name(), description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--out", type=Path, help=f"folder of the JSON and PNG files (default: {RESULTS.name}/ here)")
    result.add_argument("--rounds", type=int, help=f"samples of each variant (default: {rounds})")
    result.add_argument("--quick", action="store_true", help=f"tiny shapes, to try it out; writes to {QUICK_RESULTS}")
    result.add_argument("--suffix", default="", help="of the report's name, as _4_gpus")
    if tokens:
        result.add_argument("--tokens", type=int, nargs="+", help=f"tokens per rank (default: {tokens})")
    result.set_defaults(default_rounds=rounds)
    return result


def parse(options: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses, and fills in the defaults that depend on `--quick`."""
    args = options.parse_args(arguments)
    args.rounds = args.rounds or (_MIN_ROUNDS if args.quick else args.default_rounds)
    args.out = args.out or (QUICK_RESULTS if args.quick else RESULTS)
    if args.rounds < _MIN_ROUNDS:
        options.error(f"--rounds={args.rounds}: quartiles need at least {_MIN_ROUNDS}")
    return args


def chosen[Variant](variants: Mapping[str, Variant], only: Sequence[str] | None) -> dict[str, Variant]:
    """Those whose names hold one of `only`; all, where it is None or empty."""
    return {name: variant for name, variant in variants.items() if not only or any(part in name for part in only)}


def run(main: Callable[[], None]) -> None:
    """Run a script, by itself or for a command; a report without a measured row ends it with status 1."""
    if bench.program_name() is None:
        command.run(Path(sys.argv[0]).name, partial(_measure, main))
    _measure(main)


def _measure(main: Callable[[], None]) -> None:
    Report.made.clear()
    main()
    for report in Report.made:
        if all("failed" in row for row in report.rows):
            sys.exit(f"{report.path}: nothing measured")


def can_measure(args: argparse.Namespace, num_devices: int) -> bool:
    """Whether there are so many GPUs, or with `--quick` so many devices of any kind."""
    return (jax.default_backend() == "gpu" or args.quick) and jax.device_count() >= num_devices


def require_devices(what: str, args: argparse.Namespace, *, num_devices: int = 2) -> None:
    """End the run with status 1 where there are too few devices."""
    if not can_measure(args, num_devices):
        sys.exit(f"{what}: needs {'two or more GPUs' if num_devices == 2 else 'a GPU'}; nothing measured")
