"""Timing, reports, tables and command lines that all benchmarks share.

Clocks, power limits and other processes change single timings more than the differences that matter. So the variants of
a comparison alternate, reports have medians and quartiles, and ratios are taken within rounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import math
import os
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast

import jax
import numpy as np
from jax.experimental import multihost_utils

from jax_ep.core.files import check_writable, write_atomically
from jax_ep.tools import command
from jax_ep.tools.command import Default

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results"  # of a source checkout
QUICK_RESULTS = Path("runs/benchmarks")  # quick runs never replace the published figures
CPU_DEVICES = 4
WORKERS = 8  # threads that compile
# Without graphs, short calls would take as long as the host needs to launch them.
GRAPHS: dict[str, Any] = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,WHILE,CONDITIONAL,DYNAMIC_SLICE_FUSION",
    "xla_gpu_graph_min_graph_size": 1,
}
GRAPHS_WITH_COLLECTIVES = GRAPHS | {
    "xla_gpu_enable_command_buffer": f"{GRAPHS['xla_gpu_enable_command_buffer']},COLLECTIVES"
}
_PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "triton", "jax-triton", "numpy")
_MIN_ROUNDS = 3
_BUDGET_S = 15.0
_SHORTEST_S = 1e-9

UNRESOLVED = "takes less than what these chains resolve"

type Factory = Callable[[int], tuple[Callable[..., Any], tuple[Any, ...]]]


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds per call of one variant, one sample per round; and temporary bytes per device of a call, if known.

    Samples are at least a nanosecond: where they are differences of two times, noise can make them negative.
    """

    samples: tuple[float, ...]
    temporary_bytes: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples", tuple(max(sample, _SHORTEST_S) for sample in self.samples))

    @property
    def is_resolved(self) -> bool:
        """Whether most samples exceed the noise of the times whose differences they are."""
        return self.median > _SHORTEST_S

    @property
    def median(self) -> float:
        """The median of the samples."""
        return float(np.median(self.samples))

    def summary(self) -> dict[str, Any]:
        """Return median, quartiles, minimum and the number of samples."""
        q1, median, q3 = (float(q) for q in np.quantile(self.samples, (0.25, 0.5, 0.75)))
        return {"median": median, "q1": q1, "q3": q3, "min": min(self.samples), "rounds": len(self.samples)}

    def microseconds(self) -> list[str]:
        """Format the median, and the quartiles, as two cells of a table."""
        digits = 1 if self.median < 1e-3 else 0
        median, q1, q3 = (f"{1e6 * self.summary()[name]:.{digits}f}" for name in ("median", "q1", "q3"))
        return [median, f"{q1} to {q3}"]

    def ratio_to(self, other: Timing) -> float:
        """Return the median over rounds of this time divided by the other's in the same round."""
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
    """Measure wall-clock times of functions that alternate, each until its results are ready.

    Args:
      variants: functions without arguments, compiled or not; they return arrays.
      rounds: samples of each variant.
      warmup: calls before the first sample; the first one compiles.
      budget_s: a variant whose samples sum to more skips the remaining rounds, once it has three samples.
      settle_s: how long a variant runs before each of its samples. At its power limit, a GPU's clock depends on what
        ran in the last tenth of a second.
      title: of the progress bar.
    """
    together = jax.process_count() > 1
    budget_s = math.inf if together else budget_s  # every process must make the same calls
    for run in list(variants.values()) * warmup:
        jax.block_until_ready(run())
    samples: dict[Key, list[float]] = {name: [] for name in variants}
    for i in progress(range(rounds), title):
        # Every other round runs backwards, so that a variant does not always follow the same one.
        for name in list(variants)[:: 1 if i % 2 == 0 else -1]:
            if len(samples[name]) >= _MIN_ROUNDS and sum(samples[name]) > budget_s:
                continue
            if together:  # otherwise the time includes the wait for other processes
                multihost_utils.sync_global_devices("sample")
            settled = time.perf_counter() + settle_s
            while time.perf_counter() < settled:
                jax.block_until_ready(variants[name]())
            start = time.perf_counter()
            jax.block_until_ready(variants[name]())
            samples[name].append(time.perf_counter() - start)
    return {name: Timing(tuple(times)) for name, times in samples.items()}


def measure_chained(
    factories: Mapping[str, Factory],
    rounds: int,
    *,
    lengths: tuple[int, int] = (1, 3),
    budget_s: float = _BUDGET_S,
    title: str = "measuring",
    failures: dict[str, str] | None = None,
    resolve: bool = False,
    compiler_options: dict[str, Any] | None = None,
) -> dict[str, Timing]:
    """Measure the device time of one call inside jit: the times of two chains of calls, divided by the extra calls.

    The difference excludes the launch of the program, the transfer of its arguments and everything that runs once.
    Temporary bytes are those of the short chain, which include the results of a call.

    Args:
      factories: `make(n)` returns a function, jitted or not, and its arguments. The function makes n calls; each needs
        the result of the previous one, so that XLA cannot merge them.
      rounds: samples of each variant.
      lengths: calls of the short and of the long chain.
      budget_s: see `measure_interleaved`; for each length.
      title: of the progress bar.
      failures: if given, it receives the error of each variant that cannot be compiled or run.
      resolve: also treat a variant whose two chains take the same time as failed.
      compiler_options: of XLA, for all variants; such as `GRAPHS`.
    """
    short, long = lengths
    compiled = compile_chains(factories, lengths, failures, compiler_options)
    runs = {(name, n): run for name, both in compiled.items() for n, run in zip(lengths, both, strict=True)}
    times = measure_interleaved(runs, rounds, warmup=0, budget_s=budget_s, title=title)
    result = {}
    for name, (chain, _) in compiled.items():
        pairs = zip(times[name, short].samples, times[name, long].samples, strict=False)
        memory = cast(jax.stages.Compiled, chain.func).memory_analysis()
        temporary = None if memory is None else memory.temp_size_in_bytes
        result[name] = Timing(tuple((b - a) / (long - short) for a, b in pairs), temporary)
        if resolve and failures is not None and not result[name].is_resolved:
            failures[name] = UNRESOLVED
            del result[name]
    return result


def compile_chains(
    factories: Mapping[str, Factory],
    lengths: tuple[int, ...],
    failures: dict[str, str] | None,
    compiler_options: dict[str, Any] | None = None,
) -> dict[str, list[partial[Any]]]:
    """Compile the chains of all lengths in parallel, then run each of them twice; see `measure_chained`."""

    def compile_all(name: str) -> list[partial[Any]]:
        runs = []
        for n in lengths:
            fn, args = factories[name](n)
            jitted = fn if hasattr(fn, "lower") else jax.jit(fn)
            runs.append(partial(jitted.lower(*args).compile(compiler_options), *args))
        return runs

    # Processes must compile, and enlarge the shared heap, in one order; and no program may run meanwhile.
    with ThreadPoolExecutor(1 if jax.process_count() > 1 else WORKERS) as pool:
        pending = {name: pool.submit(compile_all, name) for name in factories}
    compiled = {}
    for name, future in pending.items():
        try:
            runs = future.result()
            for run in [*runs, *runs]:  # XLA makes a CUDA graph on the second run, if options ask for one
                jax.block_until_ready(run())
            compiled[name] = runs
        except Exception as error:
            if failures is None:
                raise
            failures[name] = f"{type(error).__name__}: {error}"
    return compiled


def largest_difference(got: Sequence[Any], expected: Sequence[Any]) -> float:
    """Return the largest difference of an element, in units of the root mean square of its array of `expected`."""
    pairs = [(np.asarray(a, np.float32), np.asarray(b, np.float32)) for a, b in zip(got, expected, strict=True)]
    return float(np.max([np.abs(a - b).max() / max(np.sqrt(np.mean(b**2)), 1e-30) for a, b in pairs]))  # NaN stays


def norm_of_difference(got: Any, expected: Any) -> float:
    """Return the norm of the difference, in units of that of `expected`."""
    a, b = np.asarray(got, np.float32), np.asarray(expected, np.float32)
    return float(np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1e-30))


def progress[Item](items: Iterable[Item], title: str) -> Iterable[Item]:
    """Return `items`, with a progress bar on a terminal if rich is installed."""
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError:
        return items
    console = Console(stderr=True)
    return track(items, title, console=console, transient=True) if console.is_terminal else items


# --- reports --------------------------------------------------------------------------------------------------------


def heading(name: str, script: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the beginning of a report: its name and settings, the date, the versions that matter, and the devices."""
    first, cores = jax.devices()[0], os.cpu_count()
    return {
        "name": name,
        "script": f"benchmarks/{script}.py",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": command.versions(_PACKAGES),
        "device": {"platform": first.platform, "kind": first.device_kind, "count": jax.device_count(), "cores": cores},
        "settings": settings,
    }


COLUMNS: dict[str, tuple[str, str, float]] = {
    "logical_bytes_per_s": ("logical GB/s", "{:.0f}", 1e-9),
    "wire_bytes_per_s": ("wire GB/s", "{:.0f}", 1e-9),
    "peak_share": ("of peak", "{:.0%}", 1),
    "floor_seconds": ("floor us", "{:.1f}", 1e6),
    "bytes_per_s": ("TB/s of weights", "{:.2f}", 1e-12),
    "of_read_rate": ("of read rate", "{:.0%}", 1),
    "of_floor": ("of floor", "{:.0%}", 1),
    "tflops": ("TFLOP/s", "{:.0f}", 1),
    "of_cublas": ("of cuBLAS", "{:.1%}", 1),
    "tokens_per_s": ("tokens/s", "{:,.0f}", 1),
    "dropped": ("dropped", "{:.1%}", 1),
    "temporary_bytes": ("temporary GB", "{:.2f}", 1e-9),
    "difference": ("difference", "{:.2g}", 1),
    "error": ("error", "{:.2g}", 1),
}
"""Figures of rows that tables show: title, format and factor."""
_RATES = COLUMNS.keys() - {"floor_seconds", "dropped", "temporary_bytes", "difference", "error"}


def figures(row: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Format figures of a row as cells of a table, by `COLUMNS`; empty where the row lacks one."""
    found = [(row.get(name), *COLUMNS[name][1:]) for name in names]
    return ["" if figure is None else text.format(figure * factor) for figure, text, factor in found]


class Report:
    """Rows of one run, written to `NAME.json` after each addition, so that an abort keeps the others.

    Args:
      name: of the file, without the suffix of the command line.
      args: the command line, as `parse` returns it.
      settings: other settings than rounds and quick.
    """

    made: ClassVar[list[Report]] = []  # of this process, for `measured`

    def __init__(self, name: str, args: argparse.Namespace, settings: Mapping[str, Any] | None = None) -> None:
        self.path: Path = args.out / f"{name}{args.suffix}.json"
        args.out.mkdir(parents=True, exist_ok=True)
        check_writable(self.path)
        self.made.append(self)
        self._content: dict[str, Any] = {
            **heading(
                name + args.suffix, args.script, {"rounds": args.rounds, "quick": args.quick, **(settings or {})}
            ),
            "summary": {},
            "rows": [],
        }

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows so far."""
        return self._content["rows"]

    def by(self, key: str) -> dict[Any, list[dict[str, Any]]]:
        """Return the rows by a value of their shape."""
        groups: dict[Any, list[dict[str, Any]]] = {}
        for row in self.rows:
            groups.setdefault(row["shape"][key], []).append(row)
        return groups

    @property
    def summary(self) -> dict[str, Any]:
        """The few figures that the benchmark is about."""
        return self._content["summary"]

    def add(self, variant: str, shape: Mapping[str, Any], timing: Timing, **details: Any) -> None:
        """Add a row: a variant, the shape it ran on, its time, and other figures, without rates of no measured time."""
        if not timing.is_resolved:
            details = {name: figure for name, figure in details.items() if name not in _RATES}
        self.rows.append({"variant": variant, "shape": dict(shape), "seconds": timing.summary(), **details})
        self._write()

    def failed(self, variant: str, shape: Mapping[str, Any], error: str, **details: Any) -> None:
        """Add a row for a variant that cannot run this shape, with the reason."""
        self.rows.append({"variant": variant, "shape": dict(shape), "failed": error, **details})
        self._write()

    def record(
        self,
        title: str,
        shape: Mapping[str, Any],
        times: Mapping[str, Timing],
        failures: Mapping[str, str],
        details: Callable[[str, Timing], Mapping[str, Any]] = lambda name, timing: {},
        **common: Any,
    ) -> None:
        """Add and print the rows of one comparison.

        Args:
          title: of the table.
          shape: of all rows.
          times: by variant.
          failures: reasons why other variants have no time.
          details: figures of a variant's row; the table shows those of `COLUMNS`.
          common: figures of all rows.
        """
        first = len(self.rows)
        for name, timing in times.items():
            self.add(name, shape, timing, **details(name, timing), **common)
        for name, reason in failures.items():
            self.failed(name, shape, reason, **common)
        shown = [key for key in COLUMNS if any(row.get(key) is not None for row in self.rows[first:])]
        table = []
        for row in self.rows[first:]:
            cells = figures(row, shown)
            if "failed" in row:
                table.append([row["variant"], "failed", row["failed"].splitlines()[0][:80], *cells])
            else:
                table.append([row["variant"], *times[row["variant"]].microseconds(), *cells])
        if table:
            show_table(title, ["variant", "us", "quartiles", *(COLUMNS[key][0] for key in shown)], table)

    def summarize(self, **figures: Any) -> None:
        """Add figures to the summary."""
        self.summary.update(figures)
        self._write()

    def _write(self) -> None:
        write_atomically(self.path, (json.dumps(self._content, indent=1) + "\n").encode())


def show_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table, formatted by rich if it is installed."""
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


# --- command lines --------------------------------------------------------------------------------------------------


def parser(
    description: str | None, script: str, *, rounds: int, tokens: Default | None = None, prog: str | None = None
) -> argparse.ArgumentParser:
    """Make a parser with the options that all benchmarks have; `parse` reads them.

    Args:
      description: the benchmark's docstring.
      script: file in `benchmarks/`, without its ending, that runs the benchmark.
      rounds: default of `--rounds`.
      tokens: of `--tokens`; None: no such option.
      prog: the command that `usage:` shows, such as "jax-ep bench moe"; None: the script.
    """
    result = command.Parser(prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, out = result.add_argument, Default(RESULTS, QUICK_RESULTS)
    add("--out", type=Path, default=out, help=f"folder of the JSON and PNG files (default: {RESULTS.name}/ here)")
    rounds = Default(rounds, _MIN_ROUNDS)
    add("--rounds", type=int, default=rounds, help="samples of each variant (default: %(default)s)")
    add("--quick", action="store_true", help=f"tiny shapes, to try it; writes to {QUICK_RESULTS}")
    add("--suffix", default="", help="of the report's name, such as _4_gpus")
    if tokens is not None:
        add("--tokens", type=int, nargs="+", default=tokens, help="tokens per rank (default: %(default)s)")
    result.set_defaults(script=script, prog=result.prog)
    return result


def parse(options: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse a command line, and fill in the defaults that depend on `--quick`."""
    args = options.parse_args(arguments)
    command.fill_in(args, quick=args.quick)
    if args.rounds < _MIN_ROUNDS:
        options.error(f"--rounds={args.rounds}: quartiles need at least {_MIN_ROUNDS}")
    return args


def start(
    options: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    *,
    num_devices: int = 2,
    cpu_devices: int = CPU_DEVICES,
) -> argparse.Namespace:
    """Parse a command line, and check that there are enough devices; without GPUs, make virtual ones."""
    args = parse(options, arguments)
    jax.config.update("jax_num_cpu_devices", cpu_devices)
    require_devices(args, num_devices=num_devices)
    return args


def chosen[Variant](variants: Mapping[str, Variant], only: Sequence[str] | None) -> dict[str, Variant]:
    """Return the variants whose names contain one of `only`; all if it is None or empty."""
    return {name: variant for name, variant in variants.items() if not only or any(part in name for part in only)}


def run(main: Callable[[], object]) -> None:
    """Run a script and end the process with its exit status."""
    command.run(Path(sys.argv[0]).name, partial(measured, main))


def measured(main: Callable[[], object]) -> None:
    """Run a benchmark, and print the paths of its reports; exit with status 1 if one has no measured row."""
    Report.made.clear()
    main()
    for report in Report.made:
        print(report.path)
        if all("failed" in row for row in report.rows):
            sys.exit(f"{report.path}: nothing measured")


def require_devices(args: argparse.Namespace, *, num_devices: int) -> None:
    """Exit with status 1 if there are too few GPUs, or with `--quick` too few devices of any kind."""
    if not (jax.default_backend() == "gpu" or args.quick) or jax.device_count() < num_devices:
        wanted = {1: "a GPU", 2: "two or more GPUs"}.get(num_devices, f"{num_devices} or more GPUs")
        sys.exit(f"{args.prog}: needs {wanted}; nothing measured")


def require_triton() -> None:
    """Raise an ImportError that names the remedy if Triton is not installed."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise ImportError(f"the kernels need Triton ({error}): pip install '.[cuda13]', or triton on CPUs") from error
