"""Dispatch and combine: the per-shard functions that move tokens to their experts and back.

Symbols: T tokens per rank, H hidden, K experts per token, E experts, W ranks on the expert axis, L = E / W local
experts, R rows of the expert-major layout.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.typing import DTypeLike

from jax_ep import fused_options, operations
from jax_ep import validation as check
from jax_ep.dtypes import FP8
from jax_ep.named_scopes import operation
from jax_ep.operations import Call
from jax_ep.types import Array, AxisName, Dispatched, DispatchedGemm, Handle, Quantized


@operation
def dispatch(
    x: Array | Quantized,
    topk_idx: Array | None,
    topk_weights: Array | None = None,
    *,
    num_experts: int,
    axis_name: AxisName = "expert",
    capacity: int | None = None,
    alignment: int = 1,
    wire_dtype: DTypeLike | None = None,
    handle: Handle | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Dispatched:
    """Brings every token to the ranks that hold its experts, ordered by expert.

    Rows are ordered by expert, then source rank, token and k. Every `(token, k)` with a valid id has a row; the same
    expert twice in one token gives two. Differentiable in `x` and `topk_weights`: the transpose is `combine` over the
    same handle.

    Args:
      x: `[T, H]` bfloat16, float16, float32 or float64 tokens of this rank, or FP8 tokens as a pair
        `(values [T, H] float8_e4m3fn, scales [T, H // 128] float32)`, which travels bit for bit and has no gradient.
      topk_idx: `[T, K]` int32 expert ids; -1 is no expert. Other ids outside `[0, E)` raise where values are known
        (outside jit), and are treated as -1 and counted in `handle.num_invalid` elsewhere. May be None with `handle`.
      topk_weights: `[T, K]` float32 router weights, or None.
      num_experts: E over all ranks; rank r owns experts `[r * L, (r + 1) * L)`.
      axis_name: mesh axis, or tuple of axes, over which experts are spread; `()` on one device without a mesh.
      capacity: R, static rows on each rank. None: enough for any routing (W * T * K plus alignment padding), so that
        nothing is dropped. Rows past it, in row order, are dropped and counted.
      alignment: every expert starts at a multiple of this many rows; `group_sizes` include that padding.
      wire_dtype: `jnp.float8_e4m3fn` sends tokens quantised per 128 columns, and their cotangents too; None sends them
        as they are.
      handle: layout of an earlier dispatch with the same ids, to be used again.
      implementation: name, names in order of preference, or None for the best that fits.

    Returns:
      `Dispatched(tokens [R, H], weights [R] or None, group_sizes [L] int32, handle, dropped [] int32)`; padding rows
      are zero.

    Raises:
      ValueError: shapes, sizes or axes that do not fit; ids out of range where they are known.
      TypeError: unsupported dtypes or kinds of arguments.
      NotImplementedError: none of the implementations asked for can serve the call.

    Example:
      >>> import jax, jax.numpy as jnp, jax_ep
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.make_mesh((jax.device_count(),), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> def layer(x, idx, weights):  # per shard: [T, H], [T, K], [T, K]
      ...     d = jax_ep.dispatch(x, idx, weights, num_experts=16)
      ...     return jax_ep.combine(d.tokens * d.weights[:, None], d.handle)
      >>> x, idx = jnp.ones((16, 8)), jnp.arange(32, dtype=jnp.int32).reshape(16, 2) % 16
      >>> run = jax.shard_map(layer, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))
      >>> float(jax.jit(run)(x, idx, jnp.full((16, 2), 0.5)).sum())
      128.0

    Source: the expert-major layout is that of MegaBlocks (arXiv:2211.15841).
    """
    call = Call("dispatch", axis_name, wire_dtype, implementation)
    return operations.dispatch(
        call, x, topk_idx, topk_weights, num_experts=num_experts, capacity=capacity, alignment=alignment, handle=handle
    )


@operation
def combine(
    y: Array,
    handle: Handle,
    *,
    axis_name: AxisName = "expert",
    wire_dtype: DTypeLike | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Array:
    """Sends expert outputs back to the ranks of their tokens and sums them there, unweighted.

    Multiply the rows by `Dispatched.weights` first for a weighted sum. Rows of one token on one rank are added in
    order of k in float32, rounded to the wire format, and added at the source in rank order in float32; the result is
    deterministic. Differentiable in `y`: the transpose is `dispatch` over the same handle.

    Args:
      y: `[R, H]` rows in the order of the dispatch; what padding rows hold is never read.
      handle: `Dispatched.handle`.
      axis_name: the axis of the dispatch.
      wire_dtype: `jnp.float8_e4m3fn` quantises what travels per 128 columns; None sends `y.dtype`.
      implementation: see `dispatch`.

    Returns:
      `[T, H]` in the dtype of y; zero for tokens without experts.

    Raises:
      ValueError: y or the axis does not fit the handle.
      TypeError: unsupported dtypes, or something that is no handle.
      NotImplementedError: none of the implementations asked for can serve the call.

    Example:
      >>> import jax.numpy as jnp, jax_ep
      >>> d = jax_ep.dispatch(jnp.ones((2, 4)), jnp.array([[0, 1], [1, -1]]), num_experts=2, axis_name=())
      >>> jax_ep.combine(d.tokens, d.handle, axis_name=())[:, 0].tolist()
      [2.0, 1.0]
    """
    return operations.combine(Call("combine", axis_name, wire_dtype, implementation), y, handle)


@operation
def grouped_gemm(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    *,
    lhs_scales: Array | None = None,
    rhs_scales: Array | None = None,
    preferred_element_type: DTypeLike | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Array:
    """Multiplies consecutive groups of rows by one matrix each: `lax.ragged_dot` that costs what the rows cost.

    Differentiable in `lhs` and `rhs`, to any order. Needs no mesh axis. Sums run in float32 (float64 for float64).

    FP8 operands come with scales, and have no gradient (`moe(forward_dtype=...)` has one). The products of 128 elements
    of a row are scaled by both scales and added in float32.

    Args:
      lhs: `[M, K]` bfloat16, float16, float32, float64 or float8_e4m3fn.
      rhs: `[G, K, N]` of the same dtype. In FP8 `[G, N, K]`, the matrices transposed, so that both operands have K
        last, as FP8 tensor cores need it; `quantize_fp8_weights` makes it of `[G, K, N]`.
      group_sizes: `[G]` int32, rows of each group; rows past their sum belong to none.
      lhs_scales: `[M, K / 128]` float32 of an FP8 lhs, as `quantize_fp8` makes it; else None.
      rhs_scales: `[G, ceil(N / 128), K / 128]` float32 of an FP8 rhs, one per block of 128 by 128; else None.
      preferred_element_type: dtype of the result; None: that of lhs, bfloat16 for FP8.
      implementation: see `dispatch`.

    Returns:
      `[M, N]`; rows past the groups are zero, whatever lhs holds there.

    Raises:
      ValueError: shapes that do not fit; in FP8, K is not a multiple of 128.
      TypeError: unsupported or different dtypes, scales missing or too many; by the gradient of FP8 operands.
      NotImplementedError: none of the implementations asked for can serve the call.

    Example:
      >>> import jax.numpy as jnp, jax_ep
      >>> from jax_ep.quantization import quantize_fp8, quantize_fp8_weights
      >>> rhs = jnp.stack([jnp.eye(2), 3 * jnp.eye(2)])
      >>> jax_ep.grouped_gemm(jnp.ones((3, 2)), rhs, jnp.array([1, 1]))[:, 0].tolist()
      [1.0, 3.0, 0.0]
      >>> rows, scales = quantize_fp8(jnp.ones((3, 128)))
      >>> w, w_scales = quantize_fp8_weights(jnp.ones((2, 128, 4)))
      >>> y = jax_ep.grouped_gemm(rows, w, jnp.array([1, 1]), lhs_scales=scales, rhs_scales=w_scales)
      >>> y.shape, y.dtype.name, y[:, 0].tolist()
      ((3, 4), 'bfloat16', [128.0, 128.0, 0.0])

    Source: the scales are those of DeepSeek-V3 (arXiv:2412.19437, section 3.3).
    """
    call = Call("grouped_gemm", implementation=implementation)
    if FP8 in (getattr(lhs, "dtype", None), getattr(rhs, "dtype", None)) or not (lhs_scales is rhs_scales is None):
        scales = (lhs_scales, rhs_scales)
        return operations.grouped_gemm_fp8(call, lhs, rhs, group_sizes, *scales, preferred_element_type)
    return operations.grouped_gemm(call, lhs, rhs, group_sizes, preferred_element_type=preferred_element_type)


@operation
def dispatch_grouped_gemm(
    x: Array,
    topk_idx: Array | None,
    topk_weights: Array | None,
    w: Array,
    *,
    num_experts: int,
    axis_name: AxisName = "expert",
    capacity: int | None = None,
    alignment: int = 1,
    wire_dtype: DTypeLike | None = None,
    handle: Handle | None = None,
    fuse_weight_gradients: bool | None = None,
    num_communicating_programs: int | None = None,
    mode: str | None = None,
    implementation: str | Sequence[str] | None = None,
) -> DispatchedGemm:
    """`dispatch`, then the rows of each expert times its matrix.

    Args:
      x: `[T, H]` tokens; see `dispatch` for this and all arguments not named here.
      topk_idx: `[T, K]` int32 expert ids.
      topk_weights: `[T, K]` float32 router weights, or None.
      w: `[L, H, N]` matrices of this rank's experts, in the dtype of x.
      num_experts: E.
      axis_name: expert axis.
      capacity: R.
      alignment: rows at whose multiples experts start.
      wire_dtype: FP8 on the wire.
      handle: layout to be used again.
      fuse_weight_gradients: True: in the backward pass, the gradient of w comes from the launch that sends the gradient
        of x, whose other programs multiply meanwhile; it exists in `triton`, for tokens of 16 bits without
        `wire_dtype`. False: from a launch of its own. None: what should be faster.
      num_communicating_programs: of the launch for dispatch and product in `triton`, how many programs, of one per
        multiprocessor, send tokens before they multiply too; fewer leave more to the first products, more send sooner.
        None: 16.
      mode: "fused": one kernel, in which tokens travel while the rows of those that have arrived are multiplied;
        "serial": a kernel for the dispatch and one for the product; None: the one that should be faster for these
        sizes. "fused" exists in `triton`, for tokens of 16 bits without `wire_dtype`. The backward pass of
        `grouped_gemm_combine` has the same choice, for itself.
      implementation: see `dispatch`.

    Returns:
      `DispatchedGemm(hidden [R, N], weights [R] or None, group_sizes [L] int32, handle, dropped [] int32)`.

    Raises:
      ValueError: an unknown mode; `fuse_weight_gradients=True` or `num_communicating_programs` where there is no such
        launch; and as `dispatch` and `grouped_gemm` do.
      TypeError: as `dispatch` and `grouped_gemm` do.
      NotImplementedError: none of the implementations asked for can serve the call, in this mode.

    Example:
      >>> import jax.numpy as jnp, jax_ep
      >>> x, w = jnp.ones((2, 4)), jnp.ones((2, 4, 3))
      >>> out = jax_ep.dispatch_grouped_gemm(x, jnp.array([[0], [1]]), None, w, num_experts=2, axis_name=())
      >>> out.hidden.shape
      (2, 3)
    """
    name = "dispatch_grouped_gemm"
    wanted = fused_options.fuse_weight_gradients(name, fuse_weight_gradients)
    communicating = fused_options.num_communicating_programs(name, num_communicating_programs)
    mode = operations.dispatch_mode(name, "mode", mode, communicating)
    call = Call(name, axis_name, wire_dtype, implementation, None, wanted, communicating, mode)
    x = check.matrix(call.function, "x", x, "[T, H]")
    w = check.expert_weights(call.function, "w", w, (call.num_local_experts(num_experts), x.shape[1]), x.dtype)
    return operations.dispatch_gemm(
        call,
        x,
        topk_idx,
        topk_weights,
        w,
        num_experts=num_experts,
        capacity=capacity,
        alignment=alignment,
        handle=handle,
    )


@operation
def grouped_gemm_combine(
    h: Array,
    w: Array,
    handle: Handle,
    *,
    axis_name: AxisName = "expert",
    wire_dtype: DTypeLike | None = None,
    mode: str | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Array:
    """The rows of each expert times its matrix, then `combine`.

    Where the sums are made is a matter of speed. "serial" rounds as `combine` does after `grouped_gemm`: the
    products to the dtype of h, then the sum of each expert rank, then that of the ranks. "scatter" rounds the products,
    and the sum of all K of them. Each mode gives the same bits on every run.

    Args:
      h: `[R, I]` rows in the order of the dispatch.
      w: `[L, I, H]` matrices of this rank's experts, in the dtype of h.
      handle: `Dispatched.handle`.
      axis_name: the axis of the dispatch.
      wire_dtype: see `combine`.
      mode: "scatter": one kernel, which stores every row at the rank of its token, where the K rows of a token are
        added; "serial": a kernel for the product and one for the combine; None: the one that should be faster for these
        sizes. "scatter" exists in `triton`, for tokens of 16 bits without `wire_dtype`. The gradients are the same in
        both.
      implementation: see `dispatch`.

    Returns:
      `[T, H]` unweighted sums in the dtype of h.

    Raises:
      ValueError: an unknown mode; and as `combine` and `grouped_gemm` do.
      TypeError: as `combine` and `grouped_gemm` do.
      NotImplementedError: none of the implementations asked for can serve the call, in this mode.

    Example:
      >>> import jax.numpy as jnp, jax_ep
      >>> x, w = jnp.ones((2, 4)), jnp.ones((2, 4, 3))
      >>> out = jax_ep.dispatch_grouped_gemm(x, jnp.array([[0], [1]]), None, w, num_experts=2, axis_name=())
      >>> jax_ep.grouped_gemm_combine(out.hidden, jnp.ones((2, 3, 4)), out.handle, axis_name=()).tolist()[0]
      [12.0, 12.0, 12.0, 12.0]
    """
    mode = operations.combine_mode("grouped_gemm_combine", "mode", mode)
    call = Call("grouped_gemm_combine", axis_name, wire_dtype, implementation, mode)
    h = check.matrix(call.function, "h", h, "[R, I]")
    layout = check.handle(call.function, handle, Handle, axis_name)
    remedy = "pass one row per row of the dispatch that made the handle"
    check.size(call.function, "the number of rows of h", h.shape[0], layout.capacity, remedy)
    w = check.expert_weights(call.function, "w", w, (layout.num_local_experts, h.shape[1]), h.dtype)
    return operations.gemm_combine(call, h, w, handle)
