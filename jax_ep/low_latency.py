"""Dispatch and combine for decode-sized batches: one fixed block of rows per expert, FP8 by default.

Symbols: M = max_tokens_per_rank; the others as in api.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_ep import backends, vjp
from jax_ep import validation as check
from jax_ep.mesh_axes import axis_tuple, spread_axes, vary_alike
from jax_ep.named_scopes import operation
from jax_ep.types import Array, AxisName, Layout, LowLatencyDispatched, LowLatencyHandle, Quantized


@operation
def low_latency_dispatch(
    x: Array | Quantized,
    topk_idx: Array,
    *,
    num_experts: int,
    max_tokens_per_rank: int,
    axis_name: AxisName = "expert",
    group_size: int = 128,
    quantize: bool = True,
    num_tokens: Array | int | None = None,
    implementation: str | Sequence[str] | None = None,
) -> LowLatencyDispatched:
    """Sends a small batch of tokens to their experts, quantised to FP8 on the way.

    Rows of an expert are packed at the start of its block, ordered by source rank, then token. A token goes to an
    expert once, however often its ids name it. Inference only when quantised; with `quantize=False` it has a gradient.

    Args:
      x: `[T, H]` tokens with `T <= max_tokens_per_rank`, or a quantised pair `(values [T, H] float8_e4m3fn,
        scales [T, H // group_size] float32)`, which travels as it is.
      topk_idx: `[T, K]` int32 expert ids; -1 is no expert.
      num_experts: E over all ranks.
      max_tokens_per_rank: M, static; sizes the result.
      axis_name: mesh axis, or tuple of axes, over which experts are spread.
      group_size: columns that share an FP8 scale.
      quantize: send FP8 (True) or the dtype of x (False).
      num_tokens: `[]` int32, tokens at and past this index are ignored; None: all T count. May be a device value.
      implementation: see `dispatch`.

    Returns:
      `LowLatencyDispatched(tokens [L, W * M, H], scales [L, W * M, H // group_size] float32 or None, group_sizes [L]
      int32, handle)`; rows past `group_sizes` hold anything, NaN included.

    Raises:
      ValueError: shapes or sizes that do not fit.
      TypeError: unsupported dtypes; also by the gradient of a quantised dispatch.
      NotImplementedError: none of the implementations asked for can serve the call.

    Example:
      >>> import jax.numpy as jnp, jax_ep
      >>> x, idx = jnp.ones((2, 128), jnp.bfloat16), jnp.array([[0, 1], [1, -1]])
      >>> d = jax_ep.low_latency_dispatch(x, idx, num_experts=2, max_tokens_per_rank=4, axis_name=())
      >>> d.tokens.shape, d.group_sizes.tolist()
      ((2, 4, 128), [1, 2])

    Source: the low-latency kernels of DeepEP define this layout.
    """
    function = "low_latency_dispatch"
    x = check.tokens(function, x)
    num_experts, num_ranks = check.experts(function, num_experts, axis_name)
    actual, hidden = (x[0] if isinstance(x, tuple) else x).shape
    max_tokens = checked_max_tokens(function, actual, max_tokens_per_rank)
    topk_idx = check.expert_ids(function, topk_idx, actual, num_experts)
    if isinstance(x, tuple):
        remedy = "pass the group_size that x was quantised with"
        check.size(function, "the number of columns per scale of x", hidden // x[1].shape[1], group_size, remedy)
        dtype = x[0].dtype
    else:
        dtype = jnp.dtype(check.fp8_columns(function, hidden, group_size) if quantize else x.dtype)
    num_tokens = checked_count(function, num_tokens, actual)
    capacity = num_experts * max_tokens
    slots = num_ranks * max_tokens * topk_idx.shape[1]
    sizes = f"max_tokens_per_rank={max_tokens} of {num_ranks} ranks, K={topk_idx.shape[1]} and {num_experts=}"
    check.countable(function, sizes, max(capacity, slots), "lower max_tokens_per_rank, or use dispatch")
    layout = Layout(num_ranks, num_experts, max_tokens, topk_idx.shape[1], capacity, axis=spread_axes(axis_name))
    name = backends.choose(implementation, backends.Request(function, dtype, hidden, "low_latency", layout))
    axis = axis_tuple(axis_name)
    x, topk_idx, num_tokens = vary_alike((x, topk_idx, num_tokens), over=axis)
    route = vjp.LowLatencyRoute(name, axis, layout, group_size if quantize or isinstance(x, tuple) else None)
    return LowLatencyDispatched(*vjp.low_latency_dispatch(route, x, topk_idx, num_tokens))


def checked_max_tokens(function: str, num_tokens: int, max_tokens_per_rank: int) -> int:
    """A maximum that the tokens at hand do not exceed."""
    max_tokens = check.positive(function, "max_tokens_per_rank", max_tokens_per_rank)
    if num_tokens > max_tokens:
        raise ValueError(
            f"{function}: x has {num_tokens} tokens but max_tokens_per_rank={max_tokens}; raise max_tokens_per_rank"
            " or split the batch."
        )
    return max_tokens


def checked_count(function: str, num_tokens: Array | int | None, most: int) -> Array | None:
    """`num_tokens` as an int32 scalar. Any integer is one: more than `most` are as good as that many."""
    if num_tokens is None:
        return None
    value: Any = num_tokens
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        value = np.asarray(min(max(int(value), 0), most), np.int32)
    value = check.array(function, "num_tokens", value, 0, "[], an int32 scalar")
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise TypeError(f"{function}: num_tokens has dtype {value.dtype}, expected int32; use .astype(jnp.int32).")
    if value.dtype.itemsize < 4 or value.dtype == jnp.int32:
        return value.astype(jnp.int32)
    return jnp.clip(value, 0, most).astype(jnp.int32)  # in its own dtype, which has room for `most`


@operation
def low_latency_combine(
    y: Array,
    topk_idx: Array,
    topk_weights: Array,
    handle: LowLatencyHandle,
    *,
    axis_name: AxisName = "expert",
    wire_dtype: DTypeLike | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Array:
    """Sends expert outputs back and sums them with their router weights in float32.

    Args:
      y: `[L, W * M, H]` outputs in the layout of the dispatch; rows past its counts are never read.
      topk_idx: `[T, K]` int32, the ids of the dispatch.
      topk_weights: `[T, K]` float32 router weights.
      handle: `LowLatencyDispatched.handle`.
      axis_name: the axis of the dispatch.
      wire_dtype: `jnp.float8_e4m3fn` rounds what travels, rows or their weighted sums per rank, to FP8 with one scale
        per 128 columns, and has no gradient; None sends both at least as exact as y.
      implementation: see `dispatch`.

    Returns:
      `[T, H]` in the dtype of y: `sum_k weight[t, k] * y[row of expert idx[t, k]]`.

    Raises:
      ValueError: shapes or the axis do not fit the handle.
      TypeError: unsupported dtypes, or something that is no handle.
      NotImplementedError: none of the implementations asked for can serve the call.

    Example:
      >>> import jax.numpy as jnp, jax_ep
      >>> x, idx = jnp.ones((2, 128), jnp.bfloat16), jnp.array([[0, 1], [1, -1]])
      >>> d = jax_ep.low_latency_dispatch(
      ...     x, idx, num_experts=2, max_tokens_per_rank=4, axis_name=(), quantize=False)
      >>> jax_ep.low_latency_combine(d.tokens, idx, jnp.full((2, 2), 0.5), d.handle, axis_name=())[:, 0].tolist()
      [1.0, 0.5]
    """
    function = "low_latency_combine"
    y = check.floating(function, "y", check.array(function, "y", y, 3, "[L, W * M, H]"))
    layout = check.handle(function, handle, LowLatencyHandle, axis_name)
    topk_idx, topk_weights = check_combine(function, "y", y, topk_idx, topk_weights, layout)
    wire_dtype = check.wire(function, wire_dtype, y)
    request = backends.Request(
        function,
        y.dtype,
        y.shape[2],
        "low_latency",
        layout,
        wire_dtype,
        foreign_handle=handle.group is None,
    )
    axis = axis_tuple(axis_name)
    route = vjp.LowLatencyRoute(backends.choose(implementation, request), axis, layout, wire_dtype=wire_dtype)
    return vjp.low_latency_combine(route, *vary_alike((y, topk_weights, handle), over=axis))


def check_combine(
    function: str, name: str, y: Array | jax.ShapeDtypeStruct, topk_idx: Array, topk_weights: Array, layout: Layout
) -> tuple[Array, Array]:
    """Checked ids and weights for a combine of rows `[L, W * M, ...]`, of which the caller knows `y` as `name`."""
    block = layout.num_ranks * layout.num_tokens
    if y.shape[:2] != (layout.num_local_experts, block):
        raise ValueError(
            f"{function}: {name} has shape {y.shape}, expected [{layout.num_local_experts}, {block}, H]; pass rows in"
            " the layout of the dispatch."
        )
    topk_idx = check.expert_ids(function, topk_idx, None, layout.num_experts)
    check.size(function, "top_k of the handle", layout.top_k, topk_idx.shape[1], "pass the topk_idx of the dispatch")
    if topk_idx.shape[0] > layout.num_tokens:
        raise ValueError(
            f"{function}: topk_idx has {topk_idx.shape[0]} tokens, expected at most the {layout.num_tokens} of"
            " the handle; pass the topk_idx of the dispatch."
        )
    return topk_idx, check.router_weights(function, topk_weights, topk_idx.shape, y)
