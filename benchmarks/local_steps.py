"""What one GPU does by itself around an exchange: rows by a list, their sums, and both with FP8 on the way.

    python benchmarks/local_steps.py [--tokens 4096] [--models deepseek-v3 qwen3-30b]

Writes results/local_steps.json. Calls are timed in chains inside jit, all variants of a model in turns:

  permute               dispatch on one rank with a handle, in bfloat16
  permute, FP8          the same of FP8 values and their scales
  permute to FP8        rows by a list, quantised on the way: the local step alone
  unpermute             combine on one rank, in bfloat16
  unpermute to FP8      sums by a list, quantised: the local step alone
  copy                  all rows from memory to memory, by XLA

Each is there by every implementation that has one of its own: `pallas` quantises. The share is that of the bytes which
must move, each row once, in what `copy` moves in the same time. `--quick` runs it on CPU devices, in Mosaic's
interpreter.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import jax_ep
from jax_ep.core import fp8
from jax_ep.core.collectives import known_after
from jax_ep.core.dtypes import FP8
from jax_ep.core.layout import row_tokens
from jax_ep.pallas import local_steps as pallas
from jax_ep.xla import local_steps as xla
from jax_ep.xla.local_steps import Unpermute
from lib import harness, inputs
from lib.harness import Report, Timing

EXCHANGES = ("triton", "xla")
UNPERMUTES: dict[str, Unpermute] = {"pallas": pallas.unpermute, "xla": xla.unpermute}
COPY = "copy"
PERMUTE, PERMUTE_FP8, TO_FP8 = "permute", "permute, FP8", "permute to FP8"
UNPERMUTE, SUM_TO_FP8 = "unpermute", "unpermute to FP8"


class Case(NamedTuple):
    """Tokens `[T, H]`, rows `[R, H]`, ids `[T, K]` and the model that they are of."""

    x: Array
    y: Array
    ids: Array
    model: inputs.Model


class Step(NamedTuple):
    """What is timed: from lists, and rows, to arrays; and the bytes that memory must move for it."""

    lists: Callable[[Case], Any]
    rows: Callable[[Case], Any]
    call: Callable[[Any, Any], Any]
    num_bytes: int


def make_case(model: inputs.Model, tokens: int) -> Case:
    """Random numbers, with uniform routing."""
    mesh = inputs.expert_mesh(1)
    ids = inputs.routing("uniform", tokens, model, np.random.default_rng(0))
    x, y = (inputs.on_ranks(mesh, (n, model.hidden), seed=n) for n in (tokens, ids.size))
    return Case(*(jax.device_put(jax.device_get(a), jax.devices()[0]) for a in (x, y, ids)), model)


def plan(name: str, case: Case) -> Any:
    """The handle of an implementation."""
    options = {"num_experts": case.model.experts, "axis_name": (), "implementation": name}
    return jax.jit(lambda x, ids: jax_ep.dispatch(x, ids, **options).handle)(case.x, case.ids)


def steps_of(case: Case) -> dict[str, Step]:
    """All that is timed, by its name."""
    (tokens, hidden), num_rows = case.x.shape, len(case.y)
    wide, narrow = 2 * hidden, hidden + hidden // 32  # bytes of a row, and of one in FP8 with its scales
    found = {COPY: Step(lambda case: case.ids, lambda case: case.y, _copy, 2 * num_rows * wide)}

    def dispatch(name: str, handle: Any, rows: Any) -> Any:
        options = {"num_experts": case.model.experts, "axis_name": (), "implementation": name}
        return jax_ep.dispatch(rows, None, handle=handle, **options).tokens

    def combine(name: str, handle: Any, rows: Array) -> Array:
        return jax_ep.combine(rows, handle, axis_name=(), implementation=name)

    for name in EXCHANGES:
        handle = partial(plan, name)
        pairs = Step(
            handle, lambda case: fp8.quantize_rows(case.x), partial(dispatch, name), (tokens + num_rows) * narrow
        )
        found[f"{PERMUTE}: {name}"] = Step(
            handle, lambda case: case.x, partial(dispatch, name), (tokens + num_rows) * wide
        )
        found[f"{PERMUTE_FP8}: {name}"] = pairs
        found[f"{UNPERMUTE}: {name}"] = Step(
            handle, lambda case: case.y, partial(combine, name), (tokens + num_rows) * wide
        )

    def by_token(case: Case) -> Array:
        return row_tokens(plan("xla", case))[:, None]

    def by_choice(case: Case) -> Array:
        return plan("xla", case).slot_row.reshape(case.ids.shape)

    for name, unpermute in UNPERMUTES.items():
        call = partial(_to_fp8, unpermute)
        found[f"{TO_FP8}: {name}"] = Step(by_token, lambda case: case.x, call, tokens * wide + num_rows * narrow)
        found[f"{SUM_TO_FP8}: {name}"] = Step(by_choice, lambda case: case.y, call, num_rows * wide + tokens * narrow)
    return found


def _copy(lists: Array, rows: Array) -> Array:
    return rows * (lists[0, 0] >= 0).astype(rows.dtype)


def _to_fp8(unpermute: Unpermute, index: Array, rows: Array) -> Any:
    return unpermute(rows, index, FP8)


def chain(case: Case, step: Step, length: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """So many calls, each with lists that are known after the one before; all results are kept, or XLA made none."""

    def run(lists: Any, rows: Any) -> Any:
        results = []
        for _ in range(length):
            results.append(step.call(lists, rows))
            first = jax.tree.leaves(results[-1])[-1][:1].astype(jnp.float32)
            lists = _after(lists, first)
        return results

    return run, (step.lists(case), step.rows(case))


def _after(lists: Any, earlier: Array) -> Any:
    if isinstance(lists, jax_ep.Handle):
        names = ("row_slot", "slot_row", "group_sizes")
        return dataclasses.replace(lists, **{name: known_after(getattr(lists, name), earlier) for name in names})
    return known_after(lists, earlier)


def measure(report: Report, args: argparse.Namespace, name: str, tokens: int) -> None:
    """All variants of one model."""
    model = inputs.MODELS[name]
    if args.quick:
        model = model._replace(hidden=max(model.hidden, 512))  # the fewest columns that a kernel quantises
    case = make_case(model, tokens)
    steps, failures = steps_of(case), dict[str, str]()
    times = harness.measure_chained(
        {variant: partial(chain, case, step) for variant, step in steps.items()},
        args.rounds,
        lengths=(1, 2) if args.quick else (1, 5),
        title=f"{name}, {tokens} tokens",
        workers=1 if args.quick else harness.WORKERS,
        failures=failures,
    )
    harness.leave_out_unresolved(times, failures)
    shape = {"model": name, "tokens": tokens, "rows": len(case.y), "hidden": model.hidden, "dtype": "bfloat16"}
    for variant, timing in times.items():
        moved = steps[variant].num_bytes
        report.add(variant, shape, timing, bytes=moved, share_of_copy=_share(times, steps, variant))
    for variant, error in failures.items():
        report.failed(variant, shape, error)


def _share(times: dict[str, Timing], steps: dict[str, Step], variant: str) -> float | None:
    """Of the rate of the copy: 1 is as fast as memory is."""
    if COPY not in times:
        return None
    return steps[variant].num_bytes / steps[COPY].num_bytes / times[variant].ratio_to(times[COPY])


def show(report: Report) -> None:
    """One table."""
    rows = []
    for row in report.rows:
        case = [row["shape"]["model"], row["variant"]]
        if "failed" in row:
            rows.append([*case, row["failed"][:70], "", ""])
            continue
        seconds, share = row["seconds"]["median"], row["share_of_copy"]
        rate = f"{row['bytes'] / seconds / 1e9:.0f}"
        rows.append([*case, f"{1e6 * seconds:.1f}", rate, "" if share is None else f"{100 * share:.0f} %"])
    harness.show_table("local steps of one GPU", ["model", "step", "us", "GB/s", "of the copy's rate"], rows)


def main() -> None:
    """Measures what the command line asks for."""
    parser = harness.parser(__doc__ or "", rounds=15, tokens="4096; --quick: 4")
    parser.add_argument("--models", nargs="+", choices=inputs.MODELS, help="default: deepseek-v3 qwen3-30b")
    args = harness.parse(parser)
    jax.config.update("jax_num_cpu_devices", harness.QUICK_DEVICES)  # the interpreter needs so many threads
    if not harness.can_measure("local steps", args, num_devices=1):
        return
    args.models = args.models or ([inputs.QUICK] if args.quick else [inputs.DEFAULT, "qwen3-30b"])
    args.tokens = args.tokens or ([4] if args.quick else [4096])
    names = ("rounds", "quick", "models", "tokens")
    report = Report(f"local_steps{args.suffix}", args.out, {name: getattr(args, name) for name in names})
    for name in args.models:
        for tokens in args.tokens:
            measure(report, args, name, tokens)
    show(report)
    print(report.path)


if __name__ == "__main__":
    main()
