"""Dispatch and combine on GPUs: device time inside jit, beside what XLA offers, in one run.

    python benchmarks/dispatch_combine.py [--tokens 4096 32768] [--routing uniform zipf] [--ranks 2 4] [--processes 4]

Writes results/dispatch_combine.json and a plot; with one process per GPU, dispatch_combine_processes.json. `--quick`
without GPUs runs the kernels in Triton's interpreter.

Times are differences of chains of calls, the longer the fewer tokens there are; each includes the few small launches
that chain the calls, which the variant "chain alone" shows. They matter below about 1000 tokens per rank.
Logical bytes count every (token, other rank) pair once, in bfloat16; wire bytes are what a variant sends: FP8 with its
scales, or padding as well. Both are those that a rank sends, on average over the ranks. The peak is what the copy
engine moves from one GPU to another in the same run; the floor is what the rank that sends or receives most needs at
that peak. The report also says what each GPU sends while the copy engines of all copy to all others.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import harness
import jax
import jax.numpy as jnp
import numpy as np
import processes
from exchange_chains import AXIS, RAGGED, Case, Variant, after, chain, local, stack, variants
from harness import Panel, Report, Timing
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep.layout import round_up
from jax_ep.types import Layout

__all__ = ["after", "local", "stack"]

HIDDEN, NUM_EXPERTS, TOP_K = 7168, 256, 8
PEAK_BYTES = 1 << 30
WORKERS = 8
QUICK_DEVICES = 4


class Model(NamedTuple):
    """Sizes of the layer."""

    hidden: int
    experts: int
    top_k: int


def routing(kind: str, num_tokens: int, model: Model, rng: np.random.Generator) -> np.ndarray:
    """`[num_tokens, top_k]` different experts per token, all alike or by Zipf's law."""
    popularity = np.zeros(model.experts)
    if kind == "zipf":
        popularity = -np.log(1 + rng.permutation(model.experts))
    ids = np.empty((num_tokens, model.top_k), np.int32)
    for start in range(0, num_tokens, 8192):  # Gumbel top-k
        scores = popularity + rng.gumbel(size=(min(8192, num_tokens - start), model.experts))
        ids[start : start + len(scores)] = np.argpartition(-scores, model.top_k, axis=1)[:, : model.top_k]
    return ids


def make_case(mesh: jax.sharding.Mesh, kind: str, tokens: int, dtype: Any, model: Model | None = None) -> Case:
    """Random tokens; the capacity is the most loaded rank's, rounded up."""
    model = model or Model(HIDDEN, NUM_EXPERTS, TOP_K)
    num_ranks = mesh.devices.size
    ids = routing(kind, num_ranks * tokens, model, np.random.default_rng(0))
    owner = ids // (model.experts // num_ranks)
    rows = np.bincount(owner.reshape(-1), minlength=num_ranks).max()
    goes_to = np.stack([(owner == rank).any(1) for rank in range(num_ranks)], 1)
    layout = Layout(num_ranks, model.experts, tokens, model.top_k, round_up(int(rows), 128))
    placed = jax.NamedSharding(mesh, P("expert"))
    make = jax.jit(lambda key: jax.random.normal(key, (num_ranks * tokens, model.hidden), dtype), out_shardings=placed)
    goes_to = goes_to.reshape(num_ranks, tokens, num_ranks)
    return Case(mesh, layout, make(jax.random.key(1)), jax.device_put(ids, placed), goes_to)


def copy_engine_peak(num_bytes: int = PEAK_BYTES) -> float:
    """Bytes per second of one large copy from the first GPU to the second."""
    source, target = jax.devices()[:2]
    data = jax.device_put(jnp.zeros((num_bytes,), jnp.uint8), source)

    def copies(n: int) -> Callable[[], list[jax.Array]]:
        return lambda: [jax.device_put(data, target) for _ in range(n)]

    times = harness.measure_interleaved({1: copies(1), 9: copies(9)}, 8)
    return 8 * num_bytes / (times[9].median - times[1].median)


def copy_engines_together(devices: Sequence[jax.Device], num_bytes: int = PEAK_BYTES) -> float:
    """Bytes per second that each GPU sends while every GPU copies to all others, one large copy for each pair."""
    data = [jax.device_put(jnp.zeros((num_bytes,), jnp.uint8), device) for device in devices]
    others = range(1, len(devices))

    def copies(n: int) -> Callable[[], list[jax.Array]]:
        pairs = [(i, (i + step) % len(devices)) for _ in range(n) for step in others for i in range(len(devices))]
        return lambda: [jax.device_put(data[source], devices[target]) for source, target in pairs]

    times = harness.measure_interleaved({1: copies(1), 5: copies(5)}, 8)
    return 4 * len(others) * num_bytes / (times[5].median - times[1].median)


def traffic(case: Case, variant: Variant, peak: float) -> dict[str, float]:
    """What a call sends, and how long the busiest rank needs for it at the peak; nothing for other variants."""
    if variant.wire is None:
        return {}
    remote, layout = case.remote, case.layout
    row = case.row_bytes(variant.wire)
    padded = (layout.num_ranks - 1) * layout.num_tokens * row
    mean, busiest = remote.sum() / layout.num_ranks, max(remote.sum(axis=0).max(), remote.sum(axis=1).max())
    is_padded = variant.wire == "padded"
    return {
        "logical_bytes": float(mean * case.row_bytes("bf16")),
        "wire_bytes": float(padded if is_padded else mean * row),
        "floor_seconds": float((padded if is_padded else busiest * row) / peak),
    }


def chain_lengths(tokens: int, quick: bool) -> tuple[int, int]:
    """Calls of the short and the long chain: their difference must be far above what one launch may take longer."""
    if quick:
        return 1, 2
    return (2, 10) if tokens > 8192 else (4, 36) if tokens > 2048 else (16, 272)


def measure(report: Report, kind: str, case: Case, args: argparse.Namespace, peak: float) -> dict[str, Timing]:
    """Times one case, and adds it to the report."""
    tokens, num_ranks = case.layout.num_tokens, case.layout.num_ranks
    uniform = kind == "uniform"
    todo = variants(case, baselines=uniform, ragged=uniform and tokens in args.ragged_tokens)
    failures: dict[str, str] = {}
    times = harness.measure_chained(
        {name: partial(chain, case, variant) for name, variant in todo.items()},
        args.rounds,
        lengths=chain_lengths(tokens, args.quick),
        title=f"{kind}, {tokens} tokens, {num_ranks} ranks",
        workers=WORKERS,
        failures=failures,
    )
    for name in [name for name, timing in times.items() if timing.median <= 0 and not args.quick]:
        failures[name] = "takes less than what these chains resolve"
        del times[name]
    shape = {"routing": kind, "tokens_per_rank": tokens, "ranks": num_ranks, "hidden": case.x.shape[1]}
    shape["dtype"] = case.x.dtype.name
    for name, error in failures.items():
        report.failed(name, shape, error, processes=jax.process_count())
    for name, timing in times.items():
        found = traffic(case, todo[name], peak)
        if found:
            found["logical_bytes_per_s"] = found["logical_bytes"] / timing.median
            found["wire_bytes_per_s"] = found["wire_bytes"] / timing.median
            found["peak_share"] = found["wire_bytes_per_s"] / peak
        report.add(name, shape, timing, wire=todo[name].wire, **found, processes=jax.process_count())
    show(report, shape, failures)
    return times


def show(report: Report, shape: dict[str, Any], failures: dict[str, str]) -> None:
    """Prints the rows of one case."""
    table = []
    for row in report.rows:
        if row["shape"] != shape or "failed" in row:
            continue
        s = row["seconds"]
        cells = [row["variant"], f"{1e6 * s['median']:.0f}", f"{1e6 * s['q1']:.0f} to {1e6 * s['q3']:.0f}"]
        if row["wire"]:
            rates = [f"{row[f'{kind}_bytes_per_s'] / 1e9:.0f}" for kind in ("logical", "wire")]
            cells += [*rates, f"{100 * row['peak_share']:.0f} %", f"{1e6 * row['floor_seconds']:.0f}"]
        table.append(cells + [""] * (7 - len(cells)))
    table += [[name, "failed", error[:60], "", "", "", ""] for name, error in failures.items()]
    title = f"{shape['routing']}, {shape['tokens_per_rank']} tokens/rank, {shape['ranks']} ranks"
    columns = ["variant", "us", "quartiles", "logical GB/s", "wire GB/s", "of peak", "floor us"]
    harness.show_table(title, columns, table)


def options() -> argparse.ArgumentParser:
    """The command line."""
    parser = harness.parser(__doc__, rounds=8)
    parser.add_argument("--tokens", type=int, nargs="+", help="tokens per rank (default: 128 1024 4096 32768)")
    parser.add_argument("--routing", nargs="+", default=["uniform", "zipf"], choices=["uniform", "zipf"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="GPUs, the first of the machine")
    parser.add_argument(
        "--ragged-tokens", type=int, nargs="*", default=[4096], help=f"where to measure {RAGGED}, which is slow"
    )
    parser.add_argument("--suffix", default="", help="of the report's name, as _2_gpus")
    processes.add_option(parser)
    return parser


def main() -> None:
    """Measures all cases and writes the report."""
    args = harness.parse(options())
    args.tokens = args.tokens or ([8] if args.quick else [128, 1024, 4096, 32768])
    jax.config.update("jax_num_cpu_devices", QUICK_DEVICES)
    on_gpus = args.processes > 1 or jax.default_backend() == "gpu"
    if not (on_gpus or args.quick) or (args.processes == 1 and jax.device_count() < 2):
        print("dispatch_combine: needs two or more GPUs; nothing measured")
        return
    copied_bytes = PEAK_BYTES if on_gpus else 1 << 22
    peak = processes.enter(args.processes, copy_engine_peak if on_gpus else partial(copy_engine_peak, copied_bytes))
    if peak is None:
        return
    ranks = [n for n in args.ranks if n <= jax.device_count()] if args.processes == 1 else [jax.device_count()]
    model = Model(256, 8, 2) if args.quick else Model(HIDDEN, NUM_EXPERTS, TOP_K)
    lengths = {str(tokens): chain_lengths(tokens, args.quick) for tokens in args.tokens}
    settings = {"rounds": args.rounds, "quick": args.quick, "experts": model.experts, "top_k": model.top_k}
    settings |= {"ranks": ranks, "tokens": args.tokens, "routing": args.routing, "chain_lengths": lengths}
    report = Report(f"dispatch_combine{'_processes' * (args.processes > 1)}{args.suffix}", args.out, settings)
    report.summarise(copy_engine_bytes_per_s=peak)
    panels, together = [], {}
    for num_ranks in ranks:
        devices = jax.devices()[:num_ranks]
        mesh = jax.make_mesh((num_ranks,), AXIS, axis_types=(jax.sharding.AxisType.Auto,), devices=devices)
        if args.processes == 1:
            together[str(num_ranks)] = copy_engines_together(devices, copied_bytes)
            report.summarise(copy_engines_together_bytes_per_s=together)
            jax_ep.finalize()
            jax_ep.init(mesh, transport=None if on_gpus else "shared_memory")
        for kind in args.routing:
            series: dict[str, tuple[list[int], list[dict[str, Any]]]] = {}
            for tokens in args.tokens:
                case = make_case(mesh, kind, tokens, jnp.bfloat16, model)
                for name, timing in measure(report, kind, case, args, peak).items():
                    xs, summaries = series.setdefault(name, ([], []))
                    xs.append(tokens)
                    summaries.append(timing.summary())
            panels.append(Panel(f"{kind} routing, {num_ranks} ranks", "tokens per rank", series))
    harness.plot(report.path.with_suffix(".png"), panels)


if __name__ == "__main__":
    main()
