"""Rows into another GPU's memory by Mosaic GPU's remote references, with few programs, beside `triton`'s dispatch.

    python benchmarks/remote_copies.py [--tokens 4096 32768] [--programs 1 2 4 8 16]

Writes results/remote_copies.json. All tokens of each of two GPUs go to the other one, each once:

  TMA, N programs              a Pallas kernel in which N programs copy rows of a list by TMA, from their own memory to
                               the peer's, several at a time; programs of both GPUs signal each other as they begin
                               and end
  triton, N programs           `triton`'s dispatch with as many communicating programs: the same rows by threads' loads
                               and stores, with flags for each block, and then into expert order
  triton                       the same with the package's number

That is what Mosaic's remote references could be worth for the exchange: they need Pallas and no heap of the package's
own, but have no interpreter. One process drives both GPUs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P

import jax_ep
from lib import copy_engines, harness, inputs
from lib.harness import Report

HIDDEN, WIDTH = 7168, 256  # WIDTH columns are the most that one side of a TMA box has
SLOTS = 12
int32 = jnp.int32


def send_rows(x: Any, order: Any, out: Any, ring: Any, full: Any, *, programs: int) -> None:
    """Row `order[i]` of `x [T, n, WIDTH]` to row i of the peer's `out`; program p takes every so-manieth."""
    program, peer = lax.axis_index("program"), jnp.int32(1) - lax.axis_index("expert")
    remote = plgpu.remote_ref(out, peer)
    began, done = (pl.get_global(plgpu.SemaphoreType.REGULAR) for _ in range(2))
    count = x.shape[0] // programs

    def meet(semaphore: Any) -> None:
        pl.semaphore_signal(semaphore, device_id=peer)
        pl.semaphore_wait(semaphore, value=programs, decrement=False)

    def load(i: Array) -> None:
        slot = lax.rem(i, int32(SLOTS))
        plgpu.copy_gmem_to_smem(x.at[order[i * int32(programs) + program]], ring.at[slot], full.at[slot])

    def first(i: Array, _: None) -> None:
        load(i)

    def send(i: Array, _: None) -> None:
        slot = lax.rem(i, int32(SLOTS))
        plgpu.barrier_wait(full.at[slot])
        plgpu.copy_smem_to_gmem(ring.at[slot], remote.at[i * int32(programs) + program])
        plgpu.wait_smem_to_gmem(SLOTS // 2, wait_read_only=True)
        following = i + int32(SLOTS - SLOTS // 2)
        pl.when((following >= int32(SLOTS)) & (following < int32(count)))(lambda: load(following))

    lax.fori_loop(int32(0), jnp.int32(SLOTS), first, None)
    meet(began)
    lax.fori_loop(int32(0), jnp.int32(count), send, None)
    plgpu.wait_smem_to_gmem(0)
    meet(done)


def by_tma(programs: int) -> Callable[[Array, Array], Array]:
    """`[T, n, WIDTH]` rows of a rank and their order to the peer's."""

    def call(x: Array, order: Array) -> Array:
        ring = plgpu.SMEM((SLOTS, *x.shape[1:]), x.dtype)
        kernel = plgpu.kernel(
            partial(send_rows, programs=programs),
            out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
            scratch_types=[ring, plgpu.Barrier(num_barriers=SLOTS)],
            grid=(programs,),
            grid_names=("program",),
            compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        )
        out: Array = kernel(x, order)
        return out

    return call


def by_triton(programs: int | None) -> Callable[[Array, Array], Array]:
    """Tokens `[T, n, WIDTH]` to the one expert of the other rank."""
    schedule = jax_ep.Schedule(num_communicating_programs=programs)

    def call(x: Array, order: Array) -> Array:
        ids = jnp.zeros((x.shape[0], 1), jnp.int32) + (1 - lax.axis_index("expert"))
        options = {"num_experts": 2, "capacity": x.shape[0], "schedule": schedule, "implementation": "triton"}
        sent = jax_ep.dispatch(x.reshape(x.shape[0], -1), ids, **options)
        return sent.tokens.reshape(x.shape)

    return call


def chain(
    mesh: jax.sharding.Mesh, call: Callable[[Array, Array], Array], x: Array, order: Array, length: int
) -> tuple[Callable[..., Any], tuple[Array, Array]]:
    """So many exchanges, each of what the one before has brought."""

    def body(x: Array, order: Array) -> Array:
        return lax.scan(lambda x, _: (call(x, order), None), x, length=length)[0]

    return jax.shard_map(body, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"), check_vma=False), (x, order)


def check(mesh: jax.sharding.Mesh, x: Array, order: Array) -> None:
    """That one exchange by TMA brings each rank the peer's rows in their order."""
    tokens = x.shape[0] // 2
    fn, arguments = chain(mesh, by_tma(4), x, order, 1)
    out = jax.jit(fn)(*arguments)
    halves = x[:tokens][order[:tokens]], x[tokens:][order[tokens:]]
    if not (jnp.array_equal(out[:tokens], halves[1]) and jnp.array_equal(out[tokens:], halves[0])):
        raise RuntimeError("remote copies brought other rows than they were asked for")


def measure(report: Report, args: argparse.Namespace, mesh: jax.sharding.Mesh, tokens: int) -> None:
    """All variants for so many tokens per rank."""
    x = inputs.on_ranks(mesh, (tokens, HIDDEN // WIDTH, WIDTH), seed=1)
    sharding = jax.NamedSharding(mesh, P("expert"))
    permuted = [jax.random.permutation(jax.random.key(rank), tokens) for rank in range(2)]
    order = jax.device_put(jnp.concatenate(permuted).astype(jnp.int32), sharding)
    check(mesh, x, order)
    variants = {f"TMA, {n} programs": by_tma(n) for n in args.programs}
    variants |= {f"triton, {n} programs": by_triton(n) for n in args.programs} | {"triton": by_triton(None)}
    factories = {name: partial(chain, mesh, call, x, order) for name, call in variants.items()}
    failures: dict[str, str] = {}
    times = harness.measure_chained(
        factories, args.rounds, lengths=(2, 12), title=f"{tokens} tokens", failures=failures, workers=8
    )
    shape = {"tokens_per_rank": tokens, "hidden": HIDDEN, "ranks": 2, "dtype": "bfloat16"}
    sent, table = 2 * tokens * HIDDEN, []
    for name, timing in times.items():
        report.add(name, shape, timing, wire_bytes=sent, wire_bytes_per_s=sent / timing.median)
        table.append([name, *timing.microseconds(1), f"{sent / timing.median / 1e9:.0f}"])
    for name, reason in failures.items():
        report.failed(name, shape, reason)
        table.append([name, reason[:60], "", ""])
    harness.show_table(f"{tokens} tokens per rank to the other", ["variant", "us", "quartiles", "GB/s"], table)


def options() -> argparse.ArgumentParser:
    """The command line."""
    parser = harness.parser(__doc__ or "", rounds=8, tokens="4096")
    parser.add_argument("--programs", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    return parser


def main() -> None:
    """Measures on the first two GPUs and writes the report."""
    args = harness.parse(options())
    if jax.default_backend() != "gpu" or jax.device_count() < 2:
        print("remote_copies: needs two or more GPUs; nothing measured")
        return
    mesh = inputs.expert_mesh(2)
    jax_ep.init(mesh)
    settings = {"rounds": args.rounds, "quick": args.quick, "programs": args.programs}
    report = Report(f"remote_copies{args.suffix}", args.out, settings)
    report.summarise(copy_engine_bytes_per_s=copy_engines.peak(copy_engines.PEAK_BYTES))
    for tokens in args.tokens or [64 if args.quick else 4096]:
        measure(report, args, mesh, tokens)
    print(report.path)


if __name__ == "__main__":
    main()
