"""Low-latency dispatch and combine on GPUs: device time inside jit, beside what XLA offers, in one run.

    python benchmarks/low_latency.py [--tokens 1 8 32 128 256 512] [--ranks 2 4]

Writes results/low_latency.json and a plot. `--quick` without GPUs runs the kernels in Triton's interpreter.

Times are differences of two chains of calls in one program, in which each call takes as input what the one before has
put out, so that nothing runs but the calls: a dispatch gets the ids in the handle of the one before, a round trip the
tokens. A combine is a round trip less its dispatch, within each round. Chains of `xla` have small launches in addition,
which keep it from computing once for all calls what is the same in all.

Bytes are those that the busiest rank sends or receives; the floor is an exchange of one word between all ranks, which
this run measures too, and those bytes at the copy engine's rate. FP8 is with its scales.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import harness
import jax
import jax.numpy as jnp
import numpy as np
from dispatch_combine import HIDDEN, NUM_EXPERTS, QUICK_DEVICES, TOP_K, WORKERS, Model, copy_engine_peak, make_case
from exchange_chains import AXIS, Case
from harness import Panel, Report, Timing
from jax import Array, lax

import jax_ep
from jax_ep.core.dtypes import FP8
from jax_ep.megakernels import low_latency
from jax_ep.megakernels.exchange import all_to_all_i32
from jax_ep.megakernels.launch import group_on

TOKENS = {2: [1, 128, 512], 4: [1, 8, 32, 128, 256, 512]}
WORD = "one word"
LENGTHS, SLOW_LENGTHS, QUICK_LENGTHS = (24, 72), (1, 4), (1, 2)  # first launches wait for the slower host thread
Step = Callable[..., Any]


class Variant(NamedTuple):
    """One thing that is timed.

    Attributes:
      step: `(carry, *constants) -> carry`, of one rank.
      arrays: the first carry and the constants, of all ranks.
      wire_bytes: that the busiest rank sends or receives.
    """

    step: Step
    arrays: tuple[Array, ...]
    wire_bytes: float


def chain(case: Case, variant: Variant, n: int) -> tuple[Callable[..., Any], tuple[Array, ...]]:
    """A function of n steps, and its arguments."""
    step = jax.jit(variant.step)  # traced once

    def body(carry: Array, *constants: Array) -> Array:
        for _ in range(n):
            carry = step(carry, *constants)
        return carry.reshape(-1)[:1]

    return jax.jit(case.shard_map(body, len(variant.arrays))), variant.arrays


class Inputs(NamedTuple):
    """What a case is timed on, beside its tokens and ids."""

    case: Case
    weights: Array
    rows: Array


def make_inputs(mesh: jax.sharding.Mesh, tokens: int, model: Model) -> Inputs:
    """Uniformly routed tokens with equal weights; the rows of the experts are constant."""
    case = make_case(mesh, "uniform", tokens, jnp.bfloat16, model)
    sharding = jax.NamedSharding(mesh, jax.P(*AXIS))
    shape = (model.experts, mesh.size * tokens, model.hidden)
    rows = jax.jit(lambda: jnp.full(shape, 0.5, jnp.bfloat16), out_shardings=sharding)()
    return Inputs(case, case.place(np.full(case.ids.shape, 1 / model.top_k, np.float32)), rows)


def dispatch(case: Case, name: str, x: Array, ids: Array, *, quantize: bool) -> jax_ep.LowLatencyDispatched:
    """One dispatch of a rank."""
    sizes = {"num_experts": case.layout.num_experts, "max_tokens_per_rank": case.layout.num_tokens}
    return jax_ep.low_latency_dispatch(x, ids, **sizes, quantize=quantize, implementation=name)


def ids_step(case: Case, quantize: bool) -> Step:
    """Ids to the same ids, by a dispatch of the kernels, whose handle has them."""

    def step(ids: Array, x: Array) -> Array:
        return dispatch(case, "triton", x, ids, quantize=quantize).handle.own_ids

    return step


def tokens_step(case: Case, name: str) -> Step:
    """Tokens to the same tokens, by a dispatch in FP8 and some small launches."""

    def step(x: Array, ids: Array) -> Array:
        return after(x, dispatch(case, name, x, after(ids, x), quantize=True).tokens)

    return step


def after(array: Array, other: Array) -> Array:
    """The same array, but known only once all of the other one is."""
    first = lax.optimization_barrier(other).reshape(-1)[0].astype(jnp.float32)
    return array + (first == 12345.678).astype(array.dtype)  # never true


def round_trip(case: Case, name: str, quantize: bool, wire_dtype: Any, *, own_rows: bool = False) -> Step:
    """Tokens to sums of their experts' rows, which are given, or with `own_rows` the tokens themselves."""

    def step(x: Array, ids: Array, weights: Array, rows: Array) -> Array:
        ids = after(ids, x) if name == "xla" else ids  # or XLA would plan once for all calls
        d = dispatch(case, name, x, ids, quantize=quantize)
        weights = after(weights, d.tokens) if name == "xla" else weights  # nor would it send what nobody reads
        y = d.tokens if own_rows else rows
        return jax_ep.low_latency_combine(y, ids, weights, d.handle, wire_dtype=wire_dtype, implementation=name)

    return step


def traffic(case: Case) -> dict[str, float]:
    """Bytes that the busiest rank sends or receives: of a dispatch, and of a combine of sums and of rows."""
    ids = np.asarray(case.ids).reshape(case.layout.num_ranks, case.layout.num_tokens, -1)
    owner = ids // case.layout.num_local_experts
    rows = np.stack([(owner == rank).sum(axis=(1, 2)) for rank in range(len(ids))], axis=1)
    np.fill_diagonal(rows, 0)
    busiest = {"tokens": case.remote, "rows": rows}
    found = {}
    for wire in ("bf16", "fp8"):
        for what, counts in busiest.items():
            found[f"{what} {wire}"] = float(max(counts.sum(0).max(), counts.sum(1).max()) * case.row_bytes(wire))
    return found


def variants(inputs: Inputs) -> dict[str, Variant]:
    """What the kernels do, and NCCL."""
    case, weights, rows = inputs
    num_bytes, num_ranks = traffic(case), case.layout.num_ranks
    _, blocks = low_latency.combine(case.layout, case.layout.num_tokens, case.x.shape[1], case.x.dtype)
    back = "tokens" if blocks["SUMS"] else "rows"
    found = {}
    for wire, quantize in (("fp8", True), ("bf16", False)):
        step, there = ids_step(case, quantize), num_bytes[f"tokens {wire}"]
        found[f"dispatch, {wire}"] = Variant(step, (case.ids, case.x), there)
        trip = round_trip(case, "triton", True, FP8 if wire == "fp8" else None)
        total = num_bytes["tokens fp8"] + num_bytes[f"{back} {wire}"]
        found[f"round trip, {wire} back"] = Variant(trip, (case.x, case.ids, weights, rows), total)
    no_ids = case.place(np.full(case.ids.shape, -1, np.int32))
    found["dispatch of no tokens"] = Variant(ids_step(case, True), (no_ids, case.x), 0.0)
    copies = jax.jit(lambda x: jnp.tile(x, (num_ranks, 1)), out_shardings=case.x.sharding)(case.x)
    shape = (num_ranks, case.layout.num_tokens, case.x.shape[1])
    swap = lambda x: lax.all_to_all(x.reshape(shape), AXIS, 0, 0).reshape(x.shape)  # noqa: E731
    padded = (num_ranks - 1) * case.layout.num_tokens * case.row_bytes("bf16")
    found["all_to_all, padded, bf16"] = Variant(swap, (copies,), float(padded))
    return found


def baselines(inputs: Inputs) -> dict[str, Variant]:
    """The portable implementation, which gathers all tokens everywhere."""
    case, weights, rows = inputs
    return {
        "xla dispatch, fp8": Variant(tokens_step(case, "xla"), (case.x, case.ids), 0.0),
        "xla round trip, bf16 back": Variant(
            round_trip(case, "xla", True, None), (case.x, case.ids, weights, rows), 0.0
        ),
    }


def word(mesh: jax.sharding.Mesh, case: Case) -> Variant:
    """The least that an exchange can be: a word from each rank to each."""

    def step(words: Array) -> Array:
        return all_to_all_i32(words, group_on(AXIS, frozenset()))

    return Variant(step, (case.place(np.zeros((mesh.size * mesh.size, 1), np.int32)),), 0.0)


def check(inputs: Inputs) -> None:
    """Tokens that come back as they went, with weights that sum to one."""
    case, weights, _ = inputs
    step = round_trip(case, "triton", False, None, own_rows=True)
    back = jax.jit(case.shard_map(step, 4))(case.x, case.ids, weights, weights)
    error = float(jnp.max(jnp.abs(back.astype(jnp.float32) - case.x.astype(jnp.float32))))
    if not error < 0.05:
        raise RuntimeError(f"the round trip of {case.layout} is wrong by {error}")


def less(total: Timing, part: Timing) -> Timing:
    """What is left of a time without a part of it, within rounds."""
    return Timing(tuple(a - b for a, b in zip(total.samples, part.samples, strict=False)))


def measure(inputs: Inputs, args: argparse.Namespace, mesh: jax.sharding.Mesh) -> tuple[dict[str, Timing], Any]:
    """Times of everything on one case, and the bytes that each variant sends."""
    case = inputs.case
    check(inputs)
    fast = variants(inputs) | {WORD: word(mesh, case)}
    slow = baselines(inputs) if case.layout.num_tokens <= args.most_xla_tokens else {}
    times: dict[str, Timing] = {}
    title = f"{case.layout.num_tokens} tokens, {mesh.size} ranks"
    for todo, lengths in ((fast, LENGTHS), (slow, SLOW_LENGTHS)):
        factories = {name: partial(chain, case, variant) for name, variant in todo.items()}
        lengths = QUICK_LENGTHS if args.quick else lengths
        times |= harness.measure_chained(factories, args.rounds, lengths=lengths, title=title, workers=WORKERS)
    num_bytes = {name: variant.wire_bytes for name, variant in (fast | slow).items()}
    for wire in ("fp8", "bf16"):
        name, trip, sent = f"combine, {wire}", f"round trip, {wire} back", "dispatch, fp8"
        times[name] = less(times[trip], times[sent])
        num_bytes[name] = num_bytes[trip] - num_bytes[sent]
    if slow:
        times["xla combine, bf16"] = less(times["xla round trip, bf16 back"], times["xla dispatch, fp8"])
        num_bytes["xla combine, bf16"] = 0.0
    return times, num_bytes


def show(
    report: Report, case: Case, times: dict[str, Timing], num_bytes: dict[str, float], peak: float, *, quick: bool
) -> None:
    """Adds one case to the report, and prints it."""
    shape = {"tokens_per_rank": case.layout.num_tokens, "ranks": case.layout.num_ranks}
    shape |= {"hidden": case.x.shape[1], "dtype": case.x.dtype.name}
    table = []
    for name, timing in sorted(times.items()):
        if timing.median <= 0 and not quick:
            report.failed(name, shape, "takes less than what these chains resolve")
            continue
        wire = num_bytes[name]
        launches = 2 if "round trip" in name else 1
        floor = launches * times[WORD].median + wire / peak
        found = {"wire_bytes": wire, "floor_seconds": floor, "wire_bytes_per_s": wire / timing.median}
        report.add(name, shape, timing, **found)
        s = timing.summary()
        cells = [name, f"{1e6 * s['median']:.1f}", f"{1e6 * s['q1']:.1f} to {1e6 * s['q3']:.1f}"]
        rate = found["wire_bytes_per_s"]
        rates = [f"{rate / 1e9:.0f}", f"{100 * rate / peak:.0f} %", f"{1e6 * floor:.1f}"] if wire else [""] * 3
        table.append(cells + rates)
    title = f"{case.layout.num_tokens} tokens/rank, {case.layout.num_ranks} ranks"
    harness.show_table(title, ["variant", "us", "quartiles", "wire GB/s", "of peak", "floor us"], table)


def options() -> argparse.ArgumentParser:
    """The command line."""
    parser = harness.parser(__doc__, rounds=8)
    parser.add_argument("--tokens", type=int, nargs="+", help=f"tokens per rank (default, by ranks: {TOKENS})")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="GPUs, the first of the machine")
    parser.add_argument("--most-xla-tokens", type=int, default=128, help="up to how many to time `xla`, which is slow")
    return parser


def main() -> None:
    """Measures all cases and writes the report."""
    args = harness.parse(options())
    jax.config.update("jax_num_cpu_devices", QUICK_DEVICES)
    on_gpus = jax.default_backend() == "gpu"
    if not (on_gpus or args.quick) or jax.device_count() < 2:
        print("low_latency: needs two or more GPUs; nothing measured")
        return
    model = Model(256, 8, 2) if args.quick else Model(HIDDEN, NUM_EXPERTS, TOP_K)
    peak = copy_engine_peak() if on_gpus else copy_engine_peak(1 << 22)
    ranks = [n for n in args.ranks if n <= jax.device_count()]
    tokens = {n: args.tokens or ([2] if args.quick else TOKENS.get(n, TOKENS[4])) for n in ranks}
    settings = {"rounds": args.rounds, "quick": args.quick, "experts": model.experts, "top_k": model.top_k}
    settings |= {"tokens": {str(n): counts for n, counts in tokens.items()}, "lengths": [LENGTHS, SLOW_LENGTHS]}
    report = Report("low_latency", args.out, settings)
    report.summarise(copy_engine_bytes_per_s=peak)
    panels = []
    for num_ranks, counts in tokens.items():
        devices = jax.devices()[:num_ranks]
        mesh = jax.make_mesh((num_ranks,), AXIS, axis_types=(jax.sharding.AxisType.Auto,), devices=devices)
        jax_ep.finalize()
        jax_ep.init(mesh, transport=None if on_gpus else "shared_memory")
        series: dict[str, tuple[list[int], list[dict[str, Any]]]] = {}
        for count in counts:
            inputs = make_inputs(mesh, count, model)
            times, num_bytes = measure(inputs, args, mesh)
            show(report, inputs.case, times, num_bytes, peak, quick=args.quick)
            for name, timing in times.items():
                xs, summaries = series.setdefault(name, ([], []))
                xs.append(count)
                summaries.append(timing.summary())
        panels.append(Panel(f"{num_ranks} ranks", "tokens per rank", series))
    harness.plot(report.path.with_suffix(".png"), panels)


if __name__ == "__main__":
    main()
