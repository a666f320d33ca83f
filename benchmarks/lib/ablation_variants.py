"""What ablations.py times: the kernels as they are, and each without one of the three decisions behind them."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jax_ep.megakernels import exchange_gemm
from jax_ep.megakernels.kernels.structs_gemm import OrderedSends
from jax_ep.megakernels.launch import group_of, launch
from jax_ep.megakernels.send_order import order_sends
from jax_ep.ops import registry
from jax_ep.types import Handle, Schedule
from lib.exchange_chains import OPTIONS, local, stack
from lib.inputs import on_ranks
from lib.layer_chains import Case, Variant
from lib.layer_variants import fresh_handle

DISPATCH, COMBINE, FUSED = "dispatch", "combine", "dispatch + GEMM 1, one launch"
NO_SAVING, NO_SORTING, NO_INTERLEAVING = "no token saving", "no token sorting", "no block order"
EVERYTHING = (DISPATCH, COMBINE, FUSED)


def without(what: str, decision: str) -> str:
    """The name of a variant."""
    return f"{what}, {decision}"


def variants(case: Case, chosen: tuple[str, ...] = EVERYTHING) -> dict[str, Variant]:
    """All of these operations, and each without a decision; the results are the same, or nearly."""
    handle, apart = _plan(case, case.inputs[2]), _plan_apart(case)
    copies = _shard_map(case, lambda x: jnp.repeat(x, case.layout.top_k, axis=0))(case.inputs[0])
    found: dict[str, Variant] = {}
    if DISPATCH in chosen:
        found |= _dispatches(case, handle, apart, copies)
    if COMBINE in chosen:
        found |= _combines(case, handle, apart)
    if FUSED in chosen:
        found |= _fused(case, handle, apart, copies)
    return found


def _shard_map(case: Case, body: Any) -> Any:
    return jax.jit(case.shard_map(body))


def _plan(case: Case, ids: Array, **sizes: int) -> Handle:
    plan, layout = registry.get("exchange", "triton").plan, dataclasses.replace(case.layout, **sizes)
    return _shard_map(case, lambda ids: stack(plan(OPTIONS, ids, layout)))(ids)


def _plan_apart(case: Case) -> Handle:
    """Each pair of token and expert as a token of its own, with one expert; the rows are the same."""
    layout = case.layout
    ids = _shard_map(case, lambda ids: ids.reshape(-1, 1))(case.inputs[2])
    return _plan(case, ids, num_tokens=layout.num_tokens * layout.top_k, top_k=1)


def _dispatches(case: Case, handle: Handle, apart: Handle, copies: Array) -> dict[str, Variant]:
    run = registry.get("exchange", "triton")

    def step(_: Any, fixed: Any, zero: Array) -> Array:
        return run.dispatch_tokens(OPTIONS, fixed[1], None, fresh_handle(fixed[0], zero))[0]

    return {
        DISPATCH: Variant(step, (), (handle, case.inputs[0])),
        without(DISPATCH, NO_SAVING): Variant(step, (), (apart, copies), same_as=DISPATCH),
    }


def _combines(case: Case, handle: Handle, apart: Handle) -> dict[str, Variant]:
    run, rows = registry.get("exchange", "triton"), on_ranks(case.mesh, (case.layout.capacity, case.model.hidden), 6)

    def step(_: Any, fixed: Any, zero: Array) -> Array:
        return run.combine_tokens(OPTIONS, fixed[1], None, fresh_handle(fixed[0], zero))[0]

    def added(_: Any, fixed: Any, zero: Array) -> Array:
        each = step(_, fixed, zero).reshape(-1, case.layout.top_k, case.model.hidden)
        return jnp.sum(each, axis=1, dtype=jnp.float32).astype(each.dtype)

    return {
        COMBINE: Variant(step, (), (handle, rows)),
        without(COMBINE, NO_SAVING): Variant(added, (), (apart, rows), same_as=COMBINE),
    }


def _fused(case: Case, handle: Handle, apart: Handle, copies: Array) -> dict[str, Variant]:
    """Orders are made before, for all alike: what they take is not what the decisions are about."""
    x, w = case.inputs[0], case.weights[0]

    def step(interleaved: bool, _: Any, fixed: Any, zero: Array) -> Array:
        handle, order, x, w = fixed
        return _launch(fresh_handle(handle, zero), OrderedSends(*order), x, w, interleaved)

    def order(make: Any, handle: Handle) -> tuple[Array, ...]:
        return _shard_map(case, lambda h: tuple(make(local(h))))(handle)

    sorted_sends = order(order_sends, handle)
    flops = 4.0 * case.layout.num_tokens * case.layout.top_k * case.model.hidden * case.model.intermediate
    others = {
        NO_SAVING: (True, (apart, order(order_sends, apart), copies, w)),
        NO_SORTING: (True, (handle, order(unsorted_sends, handle), x, w)),
        NO_INTERLEAVING: (False, (handle, sorted_sends, x, w)),
    }
    return {
        FUSED: Variant(partial(step, True), (), (handle, sorted_sends, x, w), flops),
        **{
            without(FUSED, decision): Variant(partial(step, interleaved), (), fixed, flops, FUSED)
            for decision, (interleaved, fixed) in others.items()
        },
    }


def _launch(handle: Handle, order: OrderedSends, x: Array, w: Array, interleaved: bool) -> Array:
    arguments = exchange_gemm._dispatch_arguments(Schedule(), x, None, w, handle, order, False, None)
    operands, results, config, constants = arguments
    sizes = dataclasses.replace(constants["S"], INTERLEAVED=interleaved)
    kernel = exchange_gemm._DISPATCH_GEMM
    return launch(kernel, operands, results, config, constants | {"S": sizes}, group=group_of(handle))[0]


def unsorted_sends(handle: Handle) -> OrderedSends:
    """Tokens in their own order: an expert needs what was sent up to the last token of it and of those before it."""
    layout, rank = handle.layout, group_of(handle)[-1]
    num_ranks, num_local = layout.num_ranks, layout.num_local_experts
    own = lax.dynamic_index_in_dim(handle.ids, rank, keepdims=False)  # [T, K]
    goes = jnp.stack([(own // num_local == r).any(axis=1) for r in range(num_ranks)])
    order = jnp.argsort(~goes, axis=1, stable=True).astype(jnp.int32)
    arriving = handle.ids - rank * num_local  # [W, T, K]
    here = (arriving >= 0) & (arriving < num_local)
    position = jnp.cumsum(here.any(axis=2), axis=1, dtype=jnp.int32)  # [W, T], from 1
    source = lax.broadcasted_iota(jnp.int32, here.shape, 0)
    last = jnp.zeros((num_ranks, num_local), jnp.int32)
    last = last.at[source, jnp.where(here, arriving, num_local)].max(
        jnp.broadcast_to(position[..., None], here.shape), mode="drop"
    )
    return OrderedSends(order, jnp.sum(goes, axis=1, dtype=jnp.int32), lax.cummax(last, axis=1))
