"""Dispatch and combine for decode-sized batches: one fixed block of rows per expert, FP8 by default.

They are for inference and have no gradient. Symbols: M = max_tokens_per_rank; the others as in exchange.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_ep import context
from jax_ep.core import check
from jax_ep.core.autodiff import call_without_gradient
from jax_ep.core.check import operation
from jax_ep.core.facts import LowLatencyFacts
from jax_ep.core.mesh_axes import spread_axes, takes_global_arrays, vary_alike
from jax_ep.ops import plan_serving, registry
from jax_ep.ops.plan_serving import PartPlan
from jax_ep.types import Array, AxisName, Layout, LowLatencyDispatched, LowLatencyHandle, Options, Schedule, Tokens


@operation
@takes_global_arrays()
def low_latency_dispatch(
    x: Tokens,
    topk_idx: Array,
    *,
    num_experts: int,
    max_tokens_per_rank: int,
    axis_name: AxisName = "expert",
    group_size: int = 128,
    quantize: bool = True,
    num_tokens: Array | int | None = None,
    schedule: Schedule | None = None,
    implementation: str | Sequence[str] | None = None,
) -> LowLatencyDispatched:
    """Send a small batch of tokens to their experts, quantized to FP8 on the wire.

    Rows of an expert are packed at the start of its block, ordered by source rank, then token. A token goes to an
    expert once, even if its ids name it twice. It is for inference and has no gradient.

    Args:
      x: `[T, H]` tokens with `T <= max_tokens_per_rank`, or a quantized pair `(values [T, H] float8_e4m3fn,
        scales [T, H // group_size] float32)`, which is sent unchanged.
      topk_idx: `[T, K]` int32 expert ids; -1 is no expert.
      num_experts: E over all ranks.
      max_tokens_per_rank: M, static; determines the size of the result.
      axis_name: mesh axis, or tuple of axes, over which experts are spread.
      group_size: columns that share an FP8 scale; `masked_grouped_gemm` takes 128 and its multiples.
      quantize: send FP8 (True) or the dtype of x (False).
      num_tokens: `[]` int32, tokens at and past this index are ignored; None: all T count. May be a device value.
      schedule: see `dispatch`.
      implementation: see `dispatch`.

    Returns:
      `LowLatencyDispatched(tokens [L, W * M, H], scales [L, W * M, H // group_size] float32 or None, group_sizes [L]
      int32, handle)`; rows past `group_sizes` hold anything, NaN included.

    Raises:
      ValueError: shapes or sizes that do not fit.
      TypeError: unsupported dtypes; the result is differentiated.
      NotImplementedError: no requested implementation supports the call.

    Example:
      >>> import jax.numpy as jnp, jax_ep
      >>> x, idx = jnp.ones((2, 128), jnp.bfloat16), jnp.array([[0, 1], [1, -1]])
      >>> d = jax_ep.low_latency_dispatch(x, idx, num_experts=2, max_tokens_per_rank=4, axis_name=())
      >>> d.tokens.shape, d.group_sizes.tolist()
      ((2, 4, 128), [1, 2])

    Source: the low-latency kernels of DeepEP define this layout.
    """
    function = "low_latency_dispatch"
    check.flag(function, "quantize", quantize)
    group_size = check.integer(function, "group_size", group_size)
    x = check.tokens(function, x)
    num_experts, _ = check.experts(function, num_experts, axis_name)
    actual, hidden = (x[0] if isinstance(x, tuple) else x).shape
    check.known_rows(function, "x", "in a low-latency dispatch", actual)
    max_tokens = checked_max_tokens(function, actual, max_tokens_per_rank)
    topk_idx = check.expert_ids(function, topk_idx, actual, num_experts, all_count=num_tokens is None)
    if isinstance(x, tuple):
        remedy = "pass the group_size that x was quantized with"
        check.size(function, "the number of columns per scale of x", hidden // x[1].shape[1], group_size, remedy)
        dtype = x[0].dtype
    else:
        dtype = jnp.dtype(check.fp8_columns(function, hidden, group_size) if quantize else x.dtype)
    if num_tokens is not None:
        num_tokens = check.token_count(function, num_tokens, actual)
    options = registry.options(function, axis_name, implementation, schedule, has_wire=False)
    layout = checked_layout(options, num_experts, max_tokens, topk_idx.shape[1])
    x, topk_idx, num_tokens = vary_alike((x, topk_idx, num_tokens), over=options.axis)
    columns = group_size if quantize or isinstance(x, tuple) else None
    plan = plan_serving.one_part(options, LowLatencyFacts(dtype, hidden, layout))
    return LowLatencyDispatched(*dispatch_tokens(plan, layout, columns, x, topk_idx, num_tokens))


@operation
@takes_global_arrays()
def low_latency_combine(
    y: Array,
    topk_idx: Array,
    topk_weights: Array,
    handle: LowLatencyHandle,
    *,
    axis_name: AxisName = "expert",
    preferred_element_type: DTypeLike | None = None,
    schedule: Schedule | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Array:
    """Send expert outputs back and sum them with their router weights in float32.

    It is for inference and has no gradient.

    Args:
      y: `[L, W * M, H]` outputs in the layout of the dispatch; rows past its counts are never read.
      topk_idx: `[T, K]` int32, the ids of the dispatch.
      topk_weights: `[T, K]` float32 router weights.
      handle: `LowLatencyDispatched.handle`.
      axis_name: the axis of the dispatch.
      preferred_element_type: dtype of the result, see `combine`; None: that of y.
      schedule: see `dispatch`.
      implementation: see `dispatch`.

    Returns:
      `[T, H]`: `sum_k weight[t, k] * y[row of expert idx[t, k]]`.

    Raises:
      ValueError: shapes or the axis do not fit the handle.
      TypeError: unsupported dtypes, `handle` is not a handle, or the result is differentiated.
      NotImplementedError: no requested implementation supports the call.

    Example:
      >>> import jax.numpy as jnp, jax_ep
      >>> x, idx = jnp.ones((2, 128), jnp.bfloat16), jnp.array([[0, 1], [1, -1]])
      >>> d = jax_ep.low_latency_dispatch(
      ...     x, idx, num_experts=2, max_tokens_per_rank=4, axis_name=(), quantize=False)
      >>> jax_ep.low_latency_combine(d.tokens, idx, jnp.full((2, 2), 0.5), d.handle, axis_name=())[:, 0].tolist()
      [1.0, 0.5]
    """
    function = "low_latency_combine"
    y = check.floating(function, "y", y, "[L, W * M, H >= 1]")
    layout = check.handle(function, handle, LowLatencyHandle, axis_name)
    topk_idx, topk_weights = check_combine(function, "y", y, topk_idx, topk_weights, layout)
    options = registry.options(function, axis_name, implementation, schedule)
    sum_dtype = check.result_dtype(function, preferred_element_type, y.dtype)
    wire_dtype = check.wire(function, options.wire_dtype, y.dtype, y.shape[2])
    options = dataclasses.replace(options, wire_dtype=wire_dtype, sum_dtype=sum_dtype)
    context.compare(function, layout, wire_dtype, y)
    plan = plan_serving.one_part(options, LowLatencyFacts(y.dtype, y.shape[2], layout, handle.group is None))
    return combine_tokens(plan, *vary_alike((y, topk_weights, handle), over=options.axis))


def checked_layout(options: Options, num_experts: int, max_tokens: int, top_k: int) -> Layout:
    """Return the static sizes of a dispatch; check that int32 can number its rows."""
    num_experts, num_ranks = check.experts(options.function, num_experts, options.axis)
    capacity, slots = num_experts * max_tokens, num_ranks * max_tokens * top_k
    sizes = f"max_tokens_per_rank={max_tokens} of {num_ranks} ranks, K={top_k} and {num_experts=}"
    check.int32_rows(options.function, sizes, max(capacity, slots), "lower max_tokens_per_rank, or use dispatch")
    return Layout(num_ranks, num_experts, max_tokens, top_k, capacity, axis=spread_axes(options.axis))


def checked_max_tokens(function: str, num_tokens: int, max_tokens_per_rank: int) -> int:
    """Check that there are at most `max_tokens_per_rank` tokens."""
    max_tokens = check.integer(function, "max_tokens_per_rank", max_tokens_per_rank)
    if num_tokens > max_tokens:
        raise ValueError(
            f"{function}: x has {num_tokens} tokens, expected at most max_tokens_per_rank={max_tokens}; raise"
            " max_tokens_per_rank or split the batch."
        )
    return max_tokens


def check_combine(
    function: str, name: str, y: Array | jax.ShapeDtypeStruct, topk_idx: Array, topk_weights: Array, layout: Layout
) -> tuple[Array, Array]:
    """Check the ids and weights of a combine of rows `y [L, W * M, ...]`, which errors call `name`."""
    block = layout.num_ranks * layout.num_tokens
    if y.shape[:2] != (layout.num_local_experts, block):
        raise ValueError(
            f"{function}: {name} has shape {y.shape}, expected [{layout.num_local_experts}, {block}, H]; pass rows in"
            " the layout of the dispatch."
        )
    # The handle knows which tokens count: ids of others may be anything.
    topk_idx = check.expert_ids(function, topk_idx, None, layout.num_experts, all_count=False)
    check.size(function, "top_k of the handle", layout.top_k, topk_idx.shape[1], "pass the topk_idx of the dispatch")
    if topk_idx.shape[0] > layout.num_tokens:
        raise ValueError(
            f"{function}: topk_idx has {topk_idx.shape[0]} tokens, expected at most the {layout.num_tokens} of"
            " the handle; pass the topk_idx of the dispatch."
        )
    return topk_idx, check.router_weights(function, topk_weights, topk_idx.shape, y.dtype)


def dispatch_tokens(
    plan: PartPlan, layout: Layout, group_size: int | None, x: Tokens, topk_idx: Array, num_tokens: Array | None
) -> tuple[Array, Array | None, Array, LowLatencyHandle]:
    """Return tokens, scales, group sizes and handle of a dispatch.

    `group_size` are the columns per FP8 scale; None: x travels as it is.
    """
    values = x[0] if isinstance(x, tuple) else x
    padded = jax.ShapeDtypeStruct((layout.num_tokens, values.shape[1]), values.dtype)  # ranks may have fewer tokens
    context.compare(plan.options.function, f"{layout}, {group_size=}", plan.options.wire_dtype, padded)
    run = registry.LOW_LATENCY.by(plan.part.implementation).low_latency_dispatch
    send = partial(run, plan.options, layout=layout, group_size=group_size)
    return call_without_gradient(_remedy(plan), send, x, topk_idx, num_tokens)


def combine_tokens(plan: PartPlan, y: Array, topk_weights: Array, handle: LowLatencyHandle) -> Array:
    """Return the weighted sums of a combine."""
    run = partial(registry.LOW_LATENCY.by(plan.part.implementation).low_latency_combine, plan.options)
    return call_without_gradient(_remedy(plan), run, y, topk_weights, handle)


def _remedy(plan: PartPlan) -> str:
    return f"{plan.options.function} has no gradient: train with moe, or with dispatch and combine."
