"""Dispatch and combine on GPUs: device time inside jit, beside what XLA offers, in one run.

    python benchmarks/dispatch_combine.py [--tokens 4096 32768] [--routing uniform zipf]

Writes results/dispatch_combine.json and a plot. Wire bytes count every (token, remote rank) pair once; the peak is what
the copy engine reaches from one GPU to another in the same run. Below about 1000 tokens per rank the launches of the
chained calls cost more than what they measure.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
from harness import Panel, Report, Timing
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from jax_ep import backends
from jax_ep.dtypes import FP8
from jax_ep.layout import round_up
from jax_ep.types import Handle, Layout

HIDDEN, NUM_EXPERTS, TOP_K = 7168, 256, 8
AXIS = ("expert",)
PEAK_BYTES = 1 << 30


def routing(kind: str, num_tokens: int, rng: np.random.Generator) -> np.ndarray:
    """`[num_tokens, TOP_K]` different experts per token, all alike or by Zipf's law."""
    popularity = np.zeros(NUM_EXPERTS)
    if kind == "zipf":
        popularity = -np.log(1 + rng.permutation(NUM_EXPERTS))
    ids = np.empty((num_tokens, TOP_K), np.int32)
    for start in range(0, num_tokens, 8192):  # Gumbel top-k
        scores = popularity + rng.gumbel(size=(min(8192, num_tokens - start), NUM_EXPERTS))
        ids[start : start + len(scores)] = np.argpartition(-scores, TOP_K, axis=1)[:, :TOP_K]
    return ids


@dataclasses.dataclass(frozen=True)
class Case:
    """Tokens of all ranks with their routing, on the mesh."""

    mesh: jax.sharding.Mesh
    layout: Layout
    x: Array
    ids: Array
    wire_bytes: float

    def shard_map(self, body: Callable[..., Any], num_inputs: int) -> Callable[..., Any]:
        """A per-shard function over the stacked inputs."""
        specs = (P("expert"),) * num_inputs
        return jax.shard_map(body, mesh=self.mesh, in_specs=specs, out_specs=P("expert"), check_vma=False)


def make_case(mesh: jax.sharding.Mesh, kind: str, tokens: int, dtype: Any) -> Case:
    """Random tokens; the capacity is the most loaded rank's, rounded up."""
    num_ranks = mesh.devices.size
    ids = routing(kind, num_ranks * tokens, np.random.default_rng(0))
    owner = ids // (NUM_EXPERTS // num_ranks)
    rows = np.bincount(owner.reshape(-1), minlength=num_ranks).max()
    goes_to = np.stack([(owner == rank).any(1) for rank in range(num_ranks)], 1)
    remote = goes_to & (np.arange(num_ranks * tokens)[:, None] // tokens != np.arange(num_ranks))
    layout = Layout(num_ranks, NUM_EXPERTS, tokens, TOP_K, round_up(int(rows), 128))
    placed = jax.NamedSharding(mesh, P("expert"))
    make = jax.jit(lambda key: jax.random.normal(key, (num_ranks * tokens, HIDDEN), dtype), out_shardings=placed)
    return Case(mesh, layout, make(jax.random.key(1)), jax.device_put(ids, placed), remote.sum() / num_ranks)


def after(handle: Handle, previous: Array) -> Handle:
    """The handle, but known only once `previous`, a zero, is."""
    if handle.group is not None:
        return dataclasses.replace(handle, group=handle.group + previous)
    return dataclasses.replace(handle, row_slot=handle.row_slot + previous, slot_row=handle.slot_row + previous)


def chained(case: Case, step: Callable[[Handle, Array, Array], Array], handle: Handle, rows: Array, n: int) -> Any:
    """n steps, each of which needs a number from the one before, through the handle's small arrays."""

    def body(rows: Array, handle: Handle) -> Array:
        previous = jnp.zeros((), jnp.int32)
        for _ in range(n):
            # Barriers keep XLA from making one call of several equal ones, and from computing only what is used.
            rows, handle, previous = lax.optimization_barrier((rows, handle, previous))
            result = lax.optimization_barrier(step(after(handle, previous), rows, previous))
            # Never true, but only the device knows: the next call cannot start before this one.
            previous = (result.reshape(-1)[0].astype(jnp.float32) == 12345.678).astype(jnp.int32)
        return previous[None]

    return case.shard_map(body, 2), (rows, handle)


def variants(case: Case) -> dict[str, Callable[[int], Any]]:
    """Everything that is timed on one case, by name."""
    found: dict[str, Callable[[int], Any]] = {}
    for name in ("triton", "xla"):
        run = backends.get(name)
        plan = jax.jit(case.shard_map(lambda ids, run=run: stack(run.plan(ids, case.layout, AXIS)), 1))
        handle = plan(case.ids)

        def rows_of(h: Handle, x: Array, previous: Array, run: Any = run) -> Array:
            return run.send_tokens(x, local(h), AXIS, None)

        def sums_of(h: Handle, y: Array, previous: Array, run: Any = run) -> Array:
            return run.return_tokens(y, local(h), AXIS, None)

        def planned(h: Handle, ids: Array, previous: Array, run: Any = run) -> Array:
            planned = run.plan(ids + previous, case.layout, AXIS)
            return lax.optimization_barrier(jax.tree.leaves(planned))[0].astype(jnp.float32)

        y = jax.jit(case.shard_map(lambda x, h, f=rows_of: f(h, x, jnp.int32(0)), 2))(case.x, handle)
        found[f"{name} dispatch to rows"] = partial(chained, case, rows_of, handle, case.x)
        found[f"{name} combine"] = partial(chained, case, sums_of, handle, y)
        found[f"{name} plan"] = partial(chained, case, planned, handle, case.ids)
        if name == "triton":

            def delivered(h: Handle, x: Array, previous: Array, run: Any = run) -> Array:
                return run.deliver(x, local(h), AXIS)

            def complete(h: Handle, x: Array, previous: Array, run: Any = run) -> Array:
                ids = local(h).ids[lax.axis_index(AXIS)] + previous
                return run.deliver(x, run.plan(ids, case.layout, AXIS), AXIS)

            def rows_fp8(h: Handle, x: Array, previous: Array, run: Any = run) -> Array:
                return run.send_tokens(x, local(h), AXIS, FP8)

            def sums_fp8(h: Handle, y: Array, previous: Array, run: Any = run) -> Array:
                return run.return_tokens(y, local(h), AXIS, FP8)

            found["triton dispatch, cached handle"] = partial(chained, case, delivered, handle, case.x)
            found["triton dispatch complete"] = partial(chained, case, complete, handle, case.x)
            found["triton dispatch to rows, FP8 wire"] = partial(chained, case, rows_fp8, handle, case.x)
            found["triton combine, FP8 wire"] = partial(chained, case, sums_fp8, handle, y)
    found["all_to_all, padded"] = partial(chained, case, all_to_all(case), handle, case.x)
    return found


def stack(handle: Handle) -> Handle:
    """A handle whose arrays have a leading axis of one, for out_specs."""
    return jax.tree.map(lambda leaf: leaf[None], handle)


def local(handle: Handle) -> Handle:
    """The inverse of `stack`."""
    return jax.tree.map(lambda leaf: leaf[0], handle)


def all_to_all(case: Case) -> Callable[[Handle, Array, Array], Array]:
    """What users do today: the same tokens in slots of fixed capacity, exchanged by NCCL."""
    num_ranks = case.layout.num_ranks

    def step(h: Handle, x: Array, previous: Array) -> Array:
        blocks = jnp.broadcast_to(x[None] * (1 + previous).astype(x.dtype), (num_ranks, *x.shape))
        return lax.all_to_all(blocks, AXIS, 0, 0)

    return step


def copy_engine_peak() -> float:
    """Bytes per second of one large copy from the first GPU to the second."""
    source, target = jax.devices()[:2]
    data = jax.device_put(jnp.zeros((PEAK_BYTES,), jnp.uint8), source)

    def copies(n: int) -> Callable[[], list[Array]]:
        return lambda: [jax.device_put(data, target) for _ in range(n)]

    times = harness.measure_interleaved({1: copies(1), 9: copies(9)}, 8)
    return 8 * PEAK_BYTES / (times[9].median - times[1].median)


def main() -> None:
    """Measures all cases and writes the report."""
    parser = harness.parser(__doc__, rounds=8)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 32768])
    parser.add_argument("--routing", nargs="+", default=["uniform", "zipf"], choices=["uniform", "zipf"])
    args: argparse.Namespace = harness.parse(parser)
    if jax.default_backend() != "gpu" or jax.device_count() < 2:
        print("dispatch_combine: needs two or more GPUs of one process; nothing measured")
        return
    mesh = jax.make_mesh((jax.device_count(),), AXIS, axis_types=(jax.sharding.AxisType.Auto,))
    settings = {"rounds": args.rounds, "quick": args.quick, "experts": NUM_EXPERTS, "top_k": TOP_K}
    report = Report("dispatch_combine", args.out, settings)
    peak = copy_engine_peak()
    report.summarise(copy_engine_bytes_per_s=peak)
    panels = []
    for kind in args.routing:
        series: dict[str, tuple[list[int], list[dict[str, Any]]]] = {}
        for tokens in args.tokens:
            case = make_case(mesh, kind, tokens, jnp.bfloat16)
            wire = case.wire_bytes * HIDDEN * 2
            times = harness.measure_chained(variants(case), args.rounds, lengths=(2, 10), title=f"{kind} {tokens}")
            show(report, kind, case, times, wire, peak)
            for name, timing in times.items():
                xs, summaries = series.setdefault(name, ([], []))
                xs.append(tokens)
                summaries.append(timing.summary())
        panels.append(Panel(f"{kind} routing", "tokens per rank", series))
    harness.plot(report.path.with_suffix(".png"), panels)


def show(report: Report, kind: str, case: Case, times: dict[str, Timing], wire: float, peak: float) -> None:
    """Adds one case to the report and prints it."""
    shape = {"routing": kind, "tokens_per_rank": case.layout.num_tokens, "ranks": case.layout.num_ranks}
    shape |= {"hidden": HIDDEN, "dtype": "bfloat16"}
    floor = wire / peak
    table = []
    for name, timing in times.items():
        rate = wire / timing.median if "plan" not in name else None
        report.add(name, shape, timing, wire_bytes=wire, wire_bytes_per_s=rate, floor_seconds=floor)
        share = "" if rate is None else f"{rate / 1e9:.0f} GB/s, {100 * rate / peak:.0f} % of peak"
        table.append([name, f"{1e6 * timing.median:.0f}", share])
    title = f"{kind}, {case.layout.num_tokens} tokens/rank, {case.layout.num_ranks} ranks, floor {1e6 * floor:.0f} us"
    harness.show_table(title, ["variant", "us", "wire"], table)


if __name__ == "__main__":
    main()
