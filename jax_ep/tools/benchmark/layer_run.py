"""Measure variants of one case of layer.py, and add them to the report."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import jax

from jax_ep.tools.benchmark import harness
from jax_ep.tools.benchmark.harness import Report, Timing
from jax_ep.tools.benchmark.layer_chains import Case, Variant, chain, difference

BUDGET_S = 2.0
_KEY = ("model", "routing", "tokens_per_rank", "ranks")


def shape_of(case: Case) -> dict[str, Any]:
    """Return what a row records of its case."""
    layout, rows = case.layout, case.rows
    return {
        "model": case.name,
        "routing": case.routing,
        "tokens_per_rank": layout.num_tokens,
        "ranks": layout.num_ranks,
        **case.model._asdict(),
        "capacity": layout.capacity,
        "rows_mean": float(rows.mean()),
        "rows_max": int(rows.max()),
        "dtype": "bfloat16",
    }


def label(case: Case) -> str:
    """Return the name of a case in tables and in the summary."""
    return f"{case.name}, {case.layout.num_tokens} tokens/rank, {case.layout.num_ranks} ranks, {case.routing}"


def ratio_to_longer(time: Timing, first: Timing, second: Timing) -> float:
    """Return the median over rounds of a time divided by the longer of two others in the same round."""
    return time.ratio_to(Timing(tuple(max(pair) for pair in zip(first.samples, second.samples, strict=False))))


class Run:
    """A report, its summary and its start.

    Attributes:
      report: the report; with `--add` it starts with the rows of the existing file.
      rounds: samples of each variant.
      summary: ratios by case.
      started: the start by `time.perf_counter`.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        path: Path = args.out / f"moe_layer{args.suffix}.json"
        old = json.loads(path.read_text()) if args.add and path.exists() else None
        if old is not None:
            settings = {"rounds": args.rounds, "quick": args.quick}
            here = {"versions": harness.versions(), "device": harness.device(), "settings": settings}
            there = {name: old[name] for name in here}
            if here != there:
                raise SystemExit(f"--add: {path} was measured with {there}, but this run has {here}; leave out --add.")
        self.report = Report("moe_layer", args)
        self.report.rows.extend([] if old is None else old["rows"])
        self.rounds: int = args.rounds
        self.summary: dict[str, dict[str, float]] = {} if old is None else old["summary"]
        self.report.summarise(**self.summary)
        self.started = time.perf_counter()

    def measure(
        self,
        case: Case,
        direction: str,
        variants: Mapping[str, Variant],
        lengths: tuple[int, int],
        *,
        rounds: int | None = None,
        notes: Mapping[str, dict[str, Any]] | None = None,
        references: Mapping[str, Variant] | None = None,
    ) -> dict[str, Timing]:
        """Measure interleaved variants, and write a row for each; return the times of those that did not fail.

        Args:
          case: the layer and its tokens.
          direction: of the row.
          variants: by name.
          lengths: calls of the short and of the long chain.
          rounds: samples of each variant; None: those of the run.
          notes: more figures of a variant's row.
          references: variants that are not timed, whose results others must match.
        """
        factories = {name: chain(case, variant) for name, variant in variants.items()}
        _tune(factories, variants, lengths[0])
        failures: dict[str, str] = {}
        times = harness.measure_chained(
            factories,
            rounds or self.rounds,
            lengths=lengths,
            budget_s=BUDGET_S,
            title=f"{label(case)}, {direction}",
            workers=harness.WORKERS,
            failures=failures,
        )
        others = {name: chain(case, variant) for name, variant in (references or {}).items()}
        differences = _differences(factories | others, variants, lengths[0], {*times, *others})
        for name, timing in times.items():
            if not differences.get(name, 0.0) < variants[name].largest_difference:
                failures[name] = f"wrong: differs by {differences[name]:.2g} from {variants[name].same_as}"
            elif timing.median <= 0:
                failures[name] = f"too short: chains of {lengths} calls take the same time"
        self.forget(case, direction, variants)
        table = []
        for name, variant in variants.items():
            note = (notes or {}).get(name, {})
            details = note | ({"difference": differences[name]} if name in differences else {})
            if name in failures:
                self.report.failed(name, shape_of(case), failures[name], direction=direction)
                table.append([name, "failed", "", "", failures[name].splitlines()[0][:80]])
            else:
                details |= _rate(variant, times[name])
                self.report.add(name, shape_of(case), times[name], direction=direction, **details)
                table.append(_cells(name, times[name], _rate(variant, times[name]), note))
        _show(case, direction, table)
        return {name: timing for name, timing in times.items() if name not in failures}

    def forget(self, case: Case, direction: str, variants: Collection[str]) -> None:
        """Remove the rows that new ones replace."""
        shape = shape_of(case)

        def is_replaced(row: dict[str, Any]) -> bool:
            same_case = all(row["shape"][key] == shape[key] for key in _KEY)
            return same_case and row["variant"] in variants and row["direction"] == direction

        self.report.rows[:] = [row for row in self.report.rows if not is_replaced(row)]

    def summarise(self, case: Case, **ratios: float) -> None:
        """Add ratios of a case to the summary, and print them."""
        self.summary.setdefault(label(case), {}).update(ratios)
        self.report.summarise(**self.summary)
        for name, ratio in ratios.items():
            print(f"  {name}: {ratio:.3f}")


def _show(case: Case, direction: str, table: list[list[str]]) -> None:
    shape = shape_of(case)
    loads = f"rows {shape['rows_mean']:.0f}, most {shape['rows_max']}, capacity {shape['capacity']}"
    columns = ["variant", "us", "quartiles", "TFLOP/s per GPU", ""]
    harness.show_table(f"{label(case)}, {direction}: {loads}", columns, table)


def _tune(factories: Mapping[str, Callable[[int], Any]], variants: Mapping[str, Variant], n: int) -> None:
    """Compile, one at a time, the variants for which XLA times candidates; later compilations reuse its choices."""
    for name, variant in variants.items():
        if variant.tuned and jax.default_backend() == "gpu":
            with contextlib.suppress(Exception):  # it fails again later, and is reported there
                fn, arguments = factories[name](n)
                fn.lower(*arguments).compile()


def _differences(
    factories: Mapping[str, Callable[[int], Any]],
    variants: Mapping[str, Variant],
    n: int,
    present: Collection[str],
) -> dict[str, float]:
    """Return the differences from the results of the variants that must match, if present."""

    pairs = {name: v.same_as for name, v in variants.items() if name in present and v.same_as in present}
    found = {}
    for name in dict.fromkeys([*pairs, *pairs.values()]):
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # such as a reference that does not fit into memory
            fn, arguments = factories[name](n)
            found[name] = jax.block_until_ready(fn(*arguments))
    return {name: difference(found[name], found[same]) for name, same in pairs.items() if {name, same} <= set(found)}


def _rate(variant: Variant, timing: Timing) -> dict[str, float]:
    return {"tflops": 1e-12 * variant.flops / timing.median} if variant.flops else {}


def _cells(name: str, timing: Timing, rate: dict[str, float], note: Mapping[str, Any]) -> list[str]:
    said = ", ".join(f"{key} {value:.4g}" if isinstance(value, float) else value for key, value in note.items())
    return [name, *timing.microseconds(), f"{rate['tflops']:.0f}" if rate else "", said]
