"""Variants of the all-to-all of low_latency.py: chains of dispatches and of round trips."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import jax_ep
from jax_ep.core.dtypes import FP8
from jax_ep.tools.benchmark.chains import after
from jax_ep.tools.benchmark.exchange_chains import Case, make_case
from jax_ep.tools.benchmark.inputs import AXIS, Model
from jax_ep.types import Schedule

Step = Callable[..., Any]


class Variant(NamedTuple):
    """A variant.

    Attributes:
      step: `(carry, *constants) -> carry`, of one rank.
      arrays: the first carry and the constants, of all ranks.
      wire_bytes: that the busiest rank sends or receives.
    """

    step: Step
    arrays: tuple[Array, ...]
    wire_bytes: float


def chain(case: Case, variant: Variant, n: int) -> tuple[Callable[..., Any], tuple[Array, ...]]:
    """Return a function of n steps, and its arguments."""
    step = jax.jit(variant.step)  # traced once

    def body(carry: Array, *constants: Array) -> Array:
        for _ in range(n):
            carry = step(carry, *constants)
        return carry.reshape(-1)[:1]

    return jax.jit(case.shard_map(body, len(variant.arrays))), variant.arrays


class Inputs(NamedTuple):
    """A case with its router weights and expert rows."""

    case: Case
    weights: Array
    rows: Array


def make_inputs(mesh: jax.sharding.Mesh, tokens: int, model: Model) -> Inputs:
    """Make uniformly routed tokens with equal weights; the rows of the experts are constant."""
    case = make_case(mesh, "uniform", tokens, jnp.bfloat16, model)
    sharding = jax.NamedSharding(mesh, jax.P(*AXIS))
    shape = (model.experts, mesh.size * tokens, model.hidden)
    rows = jax.jit(lambda: jnp.full(shape, 0.5, jnp.bfloat16), out_shardings=sharding)()
    return Inputs(case, case.place(np.full(case.ids.shape, 1 / model.top_k, np.float32)), rows)


def dispatch(case: Case, name: str, x: Array, ids: Array, *, quantize: bool) -> jax_ep.types.LowLatencyDispatched:
    """Dispatch the tokens of a rank."""
    sizes = {"num_experts": case.layout.num_experts, "max_tokens_per_rank": case.layout.num_tokens}
    return jax_ep.low_latency_dispatch(x, ids, **sizes, quantize=quantize, implementation=name)


def ids_step(case: Case, quantize: bool) -> Step:
    """Return a step that maps ids to the same ids, through the handle of a dispatch."""

    def step(ids: Array, x: Array) -> Array:
        return dispatch(case, "triton", x, ids, quantize=quantize).handle.own_topk_idx

    return step


def tokens_step(case: Case, name: str) -> Step:
    """Return a step that maps tokens to the same tokens, through a dispatch in FP8 and some small kernels."""

    def step(x: Array, ids: Array) -> Array:
        return after(x, dispatch(case, name, x, after(ids, x), quantize=True).tokens)

    return step


def round_trip(case: Case, name: str, quantize: bool, wire_dtype: Any, *, own_rows: bool = False) -> Step:
    """Return a step that maps tokens to sums of the given rows, or with `own_rows` of the dispatched tokens."""

    def step(x: Array, ids: Array, weights: Array, rows: Array) -> Array:
        ids = after(ids, x) if name == "xla" else ids  # otherwise XLA hoists the plan
        d = dispatch(case, name, x, ids, quantize=quantize)
        weights = after(weights, d.tokens) if name == "xla" else weights  # otherwise XLA removes the dispatch
        y = d.tokens if own_rows else rows
        return jax_ep.low_latency_combine(
            y, ids, weights, d.handle, schedule=jax_ep.Schedule(wire_dtype=wire_dtype), implementation=name
        )

    return step


def traffic(case: Case) -> dict[str, float]:
    """Return the bytes that the busiest rank sends or receives: in a dispatch, and in a combine of sums and of rows."""
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
    """Return the variants of the kernels and of NCCL."""
    case, weights, rows = inputs
    num_bytes, num_ranks = traffic(case), case.layout.num_ranks
    back = "tokens" if _sends_sums(case) else "rows"
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
    """Return the variants of `xla`, which gathers all tokens everywhere."""
    case, weights, rows = inputs
    return {
        "xla dispatch, fp8": Variant(tokens_step(case, "xla"), (case.x, case.ids), 0.0),
        "xla round trip, bf16 back": Variant(
            round_trip(case, "xla", True, None), (case.x, case.ids, weights, rows), 0.0
        ),
    }


def _sends_sums(case: Case) -> bool:
    """Whether combine of `triton` sends sums of tokens rather than rows; without Triton, what `xla` does."""
    if importlib.util.find_spec("triton") is None:
        return False
    from jax_ep.megakernels import low_latency

    _, tile = low_latency.combine_tile(Schedule(), case.layout, case.layout.num_tokens, case.x.shape[1], case.x.dtype)
    return bool(tile.sends_sums)


def word(mesh: jax.sharding.Mesh, case: Case) -> Variant:
    """Return the smallest all-to-all: a word from each rank to each."""
    from jax_ep.megakernels.exchange import all_gather_i32  # imports Triton
    from jax_ep.megakernels.launch import group_on

    def step(words: Array) -> Array:
        return all_gather_i32(words[0], group_on(AXIS, frozenset()))

    return Variant(step, (case.place(np.zeros((mesh.size * mesh.size, 1), np.int32)),), 0.0)


def check(inputs: Inputs) -> None:
    """Check that a round trip with weights that sum to one returns the tokens."""
    case, weights, _ = inputs
    step = round_trip(case, "triton", False, None, own_rows=True)
    back = jax.jit(case.shard_map(step, 4))(case.x, case.ids, weights, weights)
    error = float(jnp.max(jnp.abs(back.astype(jnp.float32) - case.x.astype(jnp.float32))))
    if not error < 0.05:
        raise RuntimeError(f"the round trip of {case.layout} is wrong by {error}")
