"""Variants of exchange.py, and chains of dependent calls.

Every chain is a `lax.scan`, which on GPUs runs without the host. The cost of chaining is a separate variant.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from jax_ep.core.dtypes import FP8
from jax_ep.core.layout import round_up
from jax_ep.ops import registry
from jax_ep.quantization import GROUP_SIZE
from jax_ep.tools.benchmark.chains import zero_chain
from jax_ep.tools.benchmark.inputs import AXIS, Model, routing
from jax_ep.types import Handle, Layout, Options, Schedule

FEW_PROGRAMS = 24
RAGGED, RAGGED_AS_IT_IS = "ragged_all_to_all, best flags", "ragged_all_to_all, default flags"
# On 4 H200s 62 GB/s, without it 8; without the one-shot kernel, NCCL's fallback hung.
_RAGGED_OPTIONS = {"xla_gpu_unsupported_enable_ragged_all_to_all_decomposer": True}

Step = Callable[[Handle, Array, Array], Array]
OPTIONS = Options("benchmark", AXIS)
"""Options of direct calls of implementations, with the default choices."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Tokens of all ranks and their routing, on the mesh.

    Attributes:
      mesh: its only axis is that of the experts.
      layout: static sizes.
      x: `[W * T, H]` tokens.
      ids: `[W * T, K]` expert ids.
      goes_to: `[W, T, W]` whether a token has an expert on a rank; on the host.
    """

    mesh: jax.sharding.Mesh
    layout: Layout
    x: Array
    ids: Array
    goes_to: np.ndarray

    @property
    def remote(self) -> np.ndarray:
        """`[W, W]` number of tokens that each rank sends to each other rank; 0 to itself."""
        counts = self.goes_to.sum(axis=1)
        np.fill_diagonal(counts, 0)
        return counts

    def row_bytes(self, wire: str) -> int:
        """Return the bytes of one token sent as "bf16" or "fp8"."""
        hidden = self.x.shape[1]
        return hidden + 4 * (hidden // GROUP_SIZE) if wire == "fp8" else self.x.dtype.itemsize * hidden

    def shard_map(self, body: Callable[..., Any], num_inputs: int) -> Callable[..., Any]:
        """Map a per-shard function over the stacked inputs."""
        specs = (P("expert"),) * num_inputs
        return jax.shard_map(body, mesh=self.mesh, in_specs=specs, out_specs=P("expert"), check_vma=False)

    def place(self, rows: np.ndarray) -> Array:
        """Place `[W * N, ...]` from the host on the ranks."""
        sharding = jax.NamedSharding(self.mesh, P("expert"))
        return jax.make_array_from_callback(rows.shape, sharding, lambda index: rows[index])


def make_case(mesh: jax.sharding.Mesh, kind: str, tokens: int, dtype: Any, model: Model) -> Case:
    """Make random tokens; the capacity is that of the most loaded rank, rounded up."""
    num_ranks = mesh.devices.size
    ids = routing(kind, num_ranks * tokens, model, np.random.default_rng(0))
    owner = ids // (model.experts // num_ranks)
    rows = np.bincount(owner.reshape(-1), minlength=num_ranks).max()
    goes_to = np.stack([(owner == rank).any(1) for rank in range(num_ranks)], 1)
    layout = Layout(num_ranks, model.experts, tokens, model.top_k, round_up(int(rows), 128), axis=AXIS)
    placed = jax.NamedSharding(mesh, P("expert"))
    make = jax.jit(lambda key: jax.random.normal(key, (num_ranks * tokens, model.hidden), dtype), out_shardings=placed)
    goes_to = goes_to.reshape(num_ranks, tokens, num_ranks)
    return Case(mesh, layout, make(jax.random.key(1)), jax.device_put(ids, placed), goes_to)


class Variant(NamedTuple):
    """A variant: a function of a handle and rows, and what it sends.

    Attributes:
      step: `(handle, rows, zero) -> array`, of one rank; it must depend on the handle or the zero.
      handle: of all ranks.
      rows: of all ranks.
      wire: "bf16" or "fp8" if each token is sent once to every other rank that needs it, "padded" if it is sent to
        all, None if no tokens are sent.
      options: compiler options.
    """

    step: Step
    handle: Handle
    rows: Array
    wire: str | None
    options: dict[str, Any] | None = None


def traffic(case: Case, variant: Variant, peak: float) -> dict[str, float]:
    """Return the bytes that a call sends, and the time of the busiest rank at the peak; {} if it sends no tokens."""
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


def stack(handle: Handle) -> Handle:
    """Add a leading axis of one to the arrays of a handle, for out_specs."""
    return jax.tree.map(lambda leaf: leaf[None], handle)


def local(handle: Handle) -> Handle:
    """Undo `stack`."""
    return jax.tree.map(lambda leaf: leaf[0], handle)


def after(handle: Handle, previous: Array) -> Handle:
    """Return the handle, available only once `previous`, a zero, is."""
    if handle.group is not None:
        return dataclasses.replace(handle, group=handle.group + previous)
    return dataclasses.replace(
        handle,
        row_to_assignment=handle.row_to_assignment + previous,
        assignment_to_row=handle.assignment_to_row + previous,
    )


def local_after(handle: Handle, previous: Array) -> Handle:
    """Return the rank's handle of a stacked one, available only once `previous`, a zero, is."""
    return after(local(handle), previous)


def chain(case: Case, variant: Variant, n: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a jitted function of n dependent steps, and its arguments."""

    arrays = variant.rows, variant.handle

    def step(zero: Array, rows: Array, handle: Handle) -> Array:
        return variant.step(local_after(handle, zero), rows, zero)

    return jax.jit(zero_chain(case.mesh, step, arrays, n), compiler_options=variant.options), arrays


def variants(case: Case, *, baselines: bool) -> dict[str, Variant]:
    """Return all variants of one case, by name; `baselines` includes the implementation `xla`."""
    found: dict[str, Variant] = {}
    for name in ("triton", "xla") if baselines else ("triton",):
        handle, y = _handle_and_rows(case, name)
        found |= _exchanges(case, name, handle, y)
        if name == "triton":
            found |= _of_triton(case, handle, y)
    handle = found["triton combine"].handle
    found["all_to_all, padded"] = Variant(_all_to_all(case), handle, case.x, "padded")
    found["chain alone"] = Variant(lambda h, x, zero: x[0, 0] + h.group[0].astype(x.dtype), handle, case.x, None)
    return found


def ragged_variants(case: Case) -> dict[str, Variant]:
    """Return XLA's collective for the tokens of a dispatch, with its best and with its default flags."""
    best = _ragged_all_to_all(case, _handle_and_rows(case, "triton")[0])
    return {RAGGED: best, RAGGED_AS_IT_IS: best._replace(options=None)}


def _handle_and_rows(case: Case, name: str) -> tuple[Handle, Array]:
    run = registry.get("exchange", name)
    handle = jax.jit(case.shard_map(lambda ids: stack(run.plan(OPTIONS, ids, case.layout)), 1))(case.ids)
    dispatch = case.shard_map(lambda x, h: run.dispatch_tokens(OPTIONS, x, None, local(h))[0], 2)
    return handle, jax.jit(dispatch)(case.x, handle)


def _exchanges(case: Case, name: str, handle: Handle, y: Array) -> dict[str, Variant]:
    """Return the variants that every implementation has."""
    run, wire = registry.get("exchange", name), "bf16" if name == "triton" else "padded"

    def planned(h: Handle, ids: Array, zero: Array) -> Array:
        leaves = lax.optimization_barrier(jax.tree.leaves(run.plan(OPTIONS, ids + zero, case.layout)))
        return sum(leaf.reshape(-1)[0].astype(jnp.float32) for leaf in leaves)

    return {
        f"{name} dispatch to rows": Variant(
            lambda h, x, zero: run.dispatch_tokens(OPTIONS, x, None, h)[0], handle, case.x, wire
        ),
        f"{name} combine": Variant(lambda h, y, zero: run.combine_tokens(OPTIONS, y, None, h)[0], handle, y, wire),
        f"{name} plan": Variant(planned, handle, case.ids, None),
    }


def _of_triton(case: Case, handle: Handle, y: Array) -> dict[str, Variant]:
    """Return the variants of the kernels: FP8 on the wire, few programs, a dispatch with its plan."""
    run: Any = registry.get("exchange", "triton")
    num_tokens = case.layout.num_tokens
    in_fp8 = dataclasses.replace(OPTIONS, wire_dtype=FP8)
    schedule = Schedule(num_communicating_programs=FEW_PROGRAMS, num_combining_programs=FEW_PROGRAMS)
    by_few = dataclasses.replace(OPTIONS, schedule=schedule)

    def planned_too(options: Options, h: Handle, x: Array, zero: Array) -> Array:
        first = h.group[-1] * num_tokens  # every handle has the ids of all ranks, so no second input is needed
        ids = lax.dynamic_slice_in_dim(h.topk_idx.reshape(-1, case.layout.top_k), first, num_tokens)
        return run.dispatch_tokens(options, x, None, run.plan(options, ids + zero, case.layout))[0]

    def to_rows(options: Options, h: Handle, x: Array, zero: Array) -> Array:
        return run.dispatch_tokens(options, x, None, h)[0]

    def sums(options: Options, h: Handle, y: Array, zero: Array) -> Array:
        return run.combine_tokens(options, y, None, h)[0]

    return {
        "triton plan and dispatch to rows": Variant(partial(planned_too, OPTIONS), handle, case.x, "bf16"),
        "triton plan and dispatch to rows, FP8 wire": Variant(partial(planned_too, in_fp8), handle, case.x, "fp8"),
        "triton dispatch to rows, FP8 wire": Variant(partial(to_rows, in_fp8), handle, case.x, "fp8"),
        "triton combine, FP8 wire": Variant(partial(sums, in_fp8), handle, y, "fp8"),
        f"triton dispatch to rows, {FEW_PROGRAMS} programs": Variant(partial(to_rows, by_few), handle, case.x, "bf16"),
        f"triton combine, {FEW_PROGRAMS} programs": Variant(partial(sums, by_few), handle, y, "bf16"),
    }


def _all_to_all(case: Case) -> Step:
    """Return NCCL's all-to-all with fixed capacity, here of all tokens for every rank."""
    num_ranks = case.layout.num_ranks

    def step(h: Handle, x: Array, zero: Array) -> Array:
        blocks = jnp.broadcast_to(x[None] * (1 + zero).astype(x.dtype), (num_ranks, *x.shape))
        return lax.all_to_all(blocks, AXIS, 0, 0)

    return step


def _ragged_all_to_all(case: Case, handle: Handle) -> Variant:
    """Return the ragged all-to-all of a dispatch's tokens, gathered by destination, including the rank's own."""
    counts = case.goes_to.sum(axis=1)  # [W, W]: source, destination
    num_rows = int(max(counts.sum(axis=0).max(), counts.sum(axis=1).max()))
    orders = np.zeros((len(counts), num_rows), np.int32)
    for rank, wanted in enumerate(case.goes_to):
        order = np.nonzero(wanted.T)[1]  # by destination, then token
        orders[rank, : len(order)] = order
    starts = np.cumsum(counts, axis=1) - counts
    places = np.cumsum(counts, axis=0) - counts  # first row of each source on each destination
    sizes = np.stack([starts, counts, places, counts.T], axis=1).astype(np.int32)
    rows = (case.x, case.place(orders.reshape(-1)), case.place(sizes.reshape(-1, len(counts))))

    def step(h: Handle, rows: Any, zero: Array) -> Array:
        x, order, (first, send, place, receive) = rows
        out = jnp.zeros((num_rows, x.shape[1]), x.dtype)
        return lax.ragged_all_to_all(x[order], out, first + zero, send, place, receive, axis_name=AXIS)

    return Variant(step, handle, rows, "bf16", _RAGGED_OPTIONS)
