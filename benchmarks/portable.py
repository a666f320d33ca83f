"""The three ways of `xla`'s exchange beside each other: tokens to all ranks, ragged, and in rounds.

    python benchmarks/portable.py [--ranks 2 4] [--tokens 128 1024 4096] [--model deepseek-v3] [--routing uniform]

Writes results/portable.json. What is timed is a round trip, dispatch and combine with one handle, in chains inside jit;
of the throughput path with `capacity` for the most loaded rank, and of the low-latency path up to 512 tokens. The
summary has what a byte costs in the ragged way, in bytes to all ranks; RAGGED_COST and ROUNDS_COST of
jax_ep/xla/exchange.py are such costs.
"Ragged, decomposed" is the same program with XLA's decomposer of ragged exchanges. `--quick` runs it on CPU devices,
which have no ragged exchange.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep.core.layout import round_up
from jax_ep.xla import exchange
from lib import harness, inputs
from lib.harness import Report

ALL, RAGGED, DECOMPOSED, ROUNDS = "to all ranks", "ragged", "ragged, decomposed", "rounds"
WAYS: dict[str, dict[str, Any]] = {
    ALL: {"GATHERED_BYTES": 1 << 62},
    RAGGED: {"GATHERED_BYTES": 0, "RAGGED_COST": 0, "RAGGED_PLATFORMS": ("cuda",)},
    DECOMPOSED: {"GATHERED_BYTES": 0, "RAGGED_COST": 0, "RAGGED_PLATFORMS": ("cuda",)},
    ROUNDS: {"GATHERED_BYTES": 0, "ROUNDS_COST": 0},
}
"""What makes `xla` choose each."""
OPTIONS = {DECOMPOSED: {"xla_gpu_unsupported_enable_ragged_all_to_all_decomposer": True}}
PATHS = ("throughput", "low latency")
MOST_DECODED = 512


def round_trip(path: str, model: inputs.Model, capacity: int, ids: Array) -> Callable[[Array], Array]:
    """Tokens `[T, H]` of a rank there and back, as their mean over experts."""
    if path == "throughput":
        options: dict[str, Any] = {"num_experts": model.experts, "implementation": "xla"}

        def call(x: Array) -> Array:
            sent = jax_ep.dispatch(x, ids, capacity=capacity, **options)
            return jax_ep.combine(sent.tokens, sent.handle, implementation="xla") / ids.shape[1]

        return call
    weights = jnp.full(ids.shape, 1 / ids.shape[1], jnp.float32)

    def decode(x: Array) -> Array:
        sizes = {"num_experts": model.experts, "max_tokens_per_rank": len(x), "quantize": False}
        sent = jax_ep.low_latency_dispatch(x, ids, implementation="xla", **sizes)
        return jax_ep.low_latency_combine(sent.tokens, ids, weights, sent.handle, implementation="xla")

    return decode


def chain(
    way: str, path: str, model: inputs.Model, capacity: int, mesh: jax.sharding.Mesh, x: Array, ids: Array, length: int
) -> tuple[Any, tuple[Array, Array]]:
    """So many round trips, each of the result of the one before."""

    def body(x: Array, ids: Array) -> Array:
        call = round_trip(path, model, capacity, ids)
        with mock.patch.multiple(exchange, **WAYS[way]):  # the choice is made while this is traced
            return lax.scan(lambda x, _: (call(x).astype(x.dtype), None), x, length=length)[0]

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"), check_vma=False)
    return jax.jit(mapped, compiler_options=OPTIONS.get(way)), (x, ids)


def sent_bytes(way: str, pairs: np.ndarray, tokens: int, row_bytes: int) -> float:
    """Of tokens, one way, of the rank that sends most; `pairs` `[W, W]` count those from one rank to another."""
    num_ranks = len(pairs)
    if way == ALL:
        return float((num_ranks - 1) * tokens * row_bytes)
    if way == ROUNDS:
        size = -(-tokens // (4 * num_ranks))
        return float((num_ranks - 1) * size * -(-pairs.max() // size) * row_bytes)
    return float((pairs.sum(axis=1) - np.diag(pairs)).max() * row_bytes)


def measure_case(report: Report, args: argparse.Namespace, num_ranks: int, tokens: int) -> None:
    """All ways of both paths."""
    model, mesh = inputs.MODELS[args.model], inputs.expert_mesh(num_ranks)
    ids = inputs.routing(args.routing, num_ranks * tokens, model, np.random.default_rng(0))
    owners = (ids // (model.experts // num_ranks)).reshape(num_ranks, tokens, -1)
    capacity = round_up(int(np.bincount(owners.reshape(-1)).max()), 128)
    pairs = np.stack([(owners == rank).any(axis=-1).sum(axis=-1) for rank in range(num_ranks)], axis=1)
    x = inputs.on_ranks(mesh, (tokens, model.hidden), seed=1)
    placed = jax.device_put(ids, jax.NamedSharding(mesh, P("expert")))
    for path in PATHS[: 1 + (tokens <= MOST_DECODED)]:
        failures = (
            {} if jax.default_backend() == "gpu" else dict.fromkeys((RAGGED, DECOMPOSED), "CPU devices have none")
        )
        ways = [way for way in WAYS if way not in failures]
        make = {way: partial(chain, way, path, model, capacity, mesh, x, placed) for way in ways}
        times = harness.measure_chained(
            make,
            args.rounds,
            lengths=(1, 2) if args.quick else (2, 10),
            title=f"{path}, {num_ranks} ranks, {tokens} tokens",
            failures=failures,
        )
        shape = {"path": path, "model": args.model, "routing": args.routing, "tokens_per_rank": tokens}
        shape |= {"ranks": num_ranks, "hidden": model.hidden, "dtype": "bfloat16"}
        for way, timing in times.items():
            report.add(way, shape, timing, wire_bytes=sent_bytes(way, pairs, tokens, 2 * model.hidden))
        for way, error in failures.items():
            report.failed(way, shape, error)
    report.summarise(ragged_cost=ragged_costs(report))


def ragged_costs(report: Report) -> list[dict[str, Any]]:
    """Seconds per byte of the faster ragged way over those to all ranks, for each shape that has both."""
    found: dict[str, dict[str, Any]] = {}
    for row in report.rows:
        if "seconds" in row and row["wire_bytes"]:
            per_byte = row["seconds"]["median"] / row["wire_bytes"]
            found.setdefault(str(row["shape"]), {"shape": row["shape"]})[row["variant"]] = per_byte
    ragged = {key: [ways[way] for way in (RAGGED, DECOMPOSED) if way in ways] for key, ways in found.items()}
    return [
        {"shape": ways["shape"], "cost": min(ragged[key]) / ways[ALL]}
        for key, ways in found.items()
        if ALL in ways and ragged[key]
    ]


def show(report: Report) -> None:
    """One table."""
    rows = []
    for row in report.rows:
        case = [row["shape"][name] for name in ("path", "ranks", "tokens_per_rank")]
        if "failed" in row:
            rows.append([*case, row["variant"], row["failed"][:60], ""])
        else:
            figures = f"{1e6 * row['seconds']['median']:.0f}", f"{row['wire_bytes'] / 1e6:.1f}"
            rows.append([*case, row["variant"], *figures])
    columns = ["path", "ranks", "tokens", "way", "us per round trip", "MB of a rank, one way"]
    harness.show_table("ways of the exchange of xla", columns, rows)


def main() -> None:
    """Measures what the command line asks for."""
    parser = harness.parser(__doc__ or "", rounds=9, tokens="128 1024 4096; --quick: 16")
    parser.add_argument("--model", choices=inputs.MODELS, help=f"default: {inputs.DEFAULT}; --quick: {inputs.QUICK}")
    parser.add_argument("--routing", choices=("uniform", "zipf"), default="uniform", help="default: uniform")
    parser.add_argument("--ranks", type=int, nargs="+", help="numbers of GPUs (default: all)")
    args = harness.parse(parser)
    jax.config.update("jax_num_cpu_devices", harness.QUICK_DEVICES)
    if not harness.can_measure("the ways of the portable exchange", args):
        return
    args.model = args.model or (inputs.QUICK if args.quick else inputs.DEFAULT)
    args.tokens = args.tokens or ([16] if args.quick else [128, 1024, 4096])
    args.ranks = args.ranks or [jax.device_count()]
    for num_ranks in args.ranks:
        if not 2 <= num_ranks <= jax.device_count() or inputs.MODELS[args.model].experts % num_ranks:
            parser.error(f"--ranks {num_ranks}: expected 2 to {jax.device_count()}, which divide the experts")
    names = ("rounds", "quick", "model", "routing", "ranks", "tokens")
    report = Report(f"portable{args.suffix}", args.out, {name: getattr(args, name) for name in names})
    for num_ranks in args.ranks:
        for tokens in args.tokens:
            measure_case(report, args, num_ranks, tokens)
    show(report)
    print(report.path)


if __name__ == "__main__":
    main()
