"""Custom VJPs of the fused operations: dispatch + grouped GEMM and grouped GEMM + combine.

They are each other's transpose with the transposed matrices, so the backward pass of each is the other kernel. The
gradient of the matrices multiplies rows with the tokens that the forward kernel has kept. An implementation may have
one launch for the whole backward pass of the first. All are closed under differentiation, so gradients of any order
exist.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values

from jax_ep import backends
from jax_ep.mesh_axes import vary_alike
from jax_ep.types import TOKENS_NAME, Array, Handle, Layout


class FusedConfig(NamedTuple):
    """How a fused operation runs: static, hashable.

    Attributes:
      implementation: registered name.
      axis: mesh axes of the exchange.
      transpose_rhs: contract with the last axis of the matrices.
      keep: the dispatched tokens that are returned, for `token_products`, and that this gets: "tokens", `[W * T, H]` by
        source rank and token; "rows", `[R, H]`; None, neither.
      mode: how every GEMM + combine runs, those of derivatives included; None: what should be fastest.
      fuse_weight_gradients: whether the gradient of the matrices shares a launch with what travels in the backward pass
        of dispatch + GEMM; None: what should be fastest.
      num_communicating: programs of dispatch + GEMM that send tokens before they multiply; None: what was fastest.
      dispatch_mode: how every dispatch + GEMM runs, those of derivatives included; None: what should be faster.
    """

    implementation: str
    axis: tuple[str, ...]
    transpose_rhs: bool = False
    keep: str | None = None
    mode: str | None = None
    fuse_weight_gradients: bool | None = None
    num_communicating: int | None = None
    dispatch_mode: str | None = None

    def kept_as(self, layout: Layout) -> str:
        """What is kept for the backward pass: `keep` where it says so, else what takes less memory."""
        return self.keep or ("rows" if layout.capacity <= layout.num_ranks * layout.num_tokens else "tokens")


class Scattered(NamedTuple):
    """`hidden [R, N]`, `kept` as `FusedConfig.keep` says, `row_weights [R]` or None."""

    hidden: Array
    kept: Array | None
    row_weights: Array | None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def scatter_gemm(config: FusedConfig, x: Array, weights: Array | None, w: Array, handle: Handle) -> Scattered:
    """`[T, H]` tokens to rows, times `w [L, H, N]`; and `[T, K]` weights to `[R]`. Transpose of `gather_gemm`."""
    run = backends.get(config.implementation)
    hidden, kept = run.dispatch_gemm(
        x,
        w,
        handle,
        transpose_rhs=config.transpose_rhs,
        keep=config.keep,
        num_communicating=config.num_communicating,
        mode=config.dispatch_mode,
    )
    if weights is None:
        return Scattered(hidden, kept, None)
    return Scattered(hidden, kept, run.send_weights(weights, handle, config.axis, after=hidden))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def gather_gemm(
    config: FusedConfig, h: Array, row_weights: Array | None, w: Array, handle: Handle
) -> tuple[Array, Array | None]:
    """`[R, F]` rows times `w [L, F, H]` to sums `[T, H]`; and `[R]` to `[T, K]`. Transpose of `scatter_gemm`."""
    run = backends.get(config.implementation)
    sums = run.gemm_combine(h, w, handle, transpose_rhs=config.transpose_rhs, mode=config.mode)
    if row_weights is None:
        return sums, None
    return sums, run.return_weights(row_weights, handle, config.axis, after=sums)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def token_products(config: FusedConfig, x: Array, kept: Array, rows: Array, handle: Handle) -> Array:
    """Per local expert, dispatched tokens times rows: `[L, H, N]`, or `[L, N, H]` with `transpose_rhs`.

    `kept` holds what became of the tokens `x` on the way; gradients go to `x`.
    """
    run = backends.get(config.implementation)
    return run.token_products(kept, rows, handle, transpose=config.transpose_rhs, kept_as=config.kept_as(handle.layout))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def gather_gemm_products(
    config: FusedConfig, h: Array, row_weights: Array | None, x: Array, kept: Array, w: Array, handle: Handle
) -> tuple[Array, Array | None, Array]:
    """`gather_gemm`, and `token_products` of the same rows in the shape of `w`, which share a launch."""
    run = backends.get(config.implementation)
    turn, form = config.transpose_rhs, config.kept_as(handle.layout)
    sums, products = run.gemm_combine_products(h, w, kept, handle, transpose_rhs=turn, mode=config.mode, kept_as=form)
    if row_weights is None:
        return sums, None, products
    return sums, run.return_weights(row_weights, handle, config.axis, after=sums), products


def _turned(config: FusedConfig, *, keep: str | None = None) -> FusedConfig:
    return config._replace(transpose_rhs=not config.transpose_rhs, keep=keep)


def _scatter_gemm_forward(config: FusedConfig, *arguments: Any) -> Any:
    """Keeps no tokens for matrices of which nobody wants the gradient."""
    trains = arguments[2].perturbed
    x, weights, w, handle = custom_vjp_primal_tree_values(arguments)
    keep = config.kept_as(handle.layout) if trains else config.keep
    found = scatter_gemm(config._replace(keep=keep), x, weights, w, handle)
    kept = None if found.kept is None else checkpoint_name(found.kept, TOKENS_NAME)
    return found._replace(kept=kept if config.keep else None), (x, kept if trains else None, w, handle)


def _scatter_gemm_backward(config: FusedConfig, residuals: Any, cotangents: Scattered) -> Any:
    x, kept, w, handle = residuals
    d_hidden, d_row_weights = cotangents.hidden, cotangents.row_weights
    if isinstance(d_hidden, SymbolicZero):
        d_hidden = vary_alike((jnp.zeros(d_hidden.shape, d_hidden.dtype), x))[0]
    if isinstance(d_row_weights, SymbolicZero):
        d_row_weights = None
    back, sizes = _turned(config, keep=config.kept_as(handle.layout)), (d_hidden.shape[1], x.shape[1])
    if kept is None:
        return *gather_gemm(back, d_hidden, d_row_weights, w, handle), None, None
    run, wanted = backends.get(config.implementation), config.fuse_weight_gradients
    if run.fuses_products(handle.layout, x.dtype, *sizes, mode=config.mode, wanted=wanted):
        return *gather_gemm_products(back, d_hidden, d_row_weights, x, kept, w, handle), None
    d_x, d_weights = gather_gemm(back, d_hidden, d_row_weights, w, handle)
    return d_x, d_weights, token_products(config, x, kept, d_hidden, handle), None


def _gather_gemm_forward(config: FusedConfig, h: Array, row_weights: Array | None, w: Array, handle: Handle) -> Any:
    return gather_gemm(config, h, row_weights, w, handle), (h, w, handle)


def _gather_gemm_backward(config: FusedConfig, residuals: Any, cotangents: tuple[Array, Array | None]) -> Any:
    h, w, handle = residuals
    d_sums, d_slots = cotangents
    # The tokens are needed at once, as rows, and not kept.
    turned = _turned(config, keep="rows")
    back = scatter_gemm(turned, d_sums, d_slots, w, handle)
    d_w = token_products(turned, d_sums, back.kept, h, handle)
    return back.hidden, back.row_weights, d_w, None


def _token_products_forward(config: FusedConfig, x: Array, kept: Array, rows: Array, handle: Handle) -> Any:
    return token_products(config, x, kept, rows, handle), (x, kept, rows, handle)


def _token_products_backward(config: FusedConfig, residuals: Any, cotangent: Array) -> Any:
    x, kept, rows, handle = residuals
    d_x, _ = gather_gemm(_turned(config), rows, None, cotangent, handle)
    d_rows = scatter_gemm(config._replace(keep=None), x, None, cotangent, handle).hidden
    return d_x, jnp.zeros_like(kept), d_rows, None


def _gather_gemm_products_forward(config: FusedConfig, h: Array, row_weights: Array | None, *others: Any) -> Any:
    return gather_gemm_products(config, h, row_weights, *others), (h, *others)


def _gather_gemm_products_backward(
    config: FusedConfig, residuals: Any, cotangents: tuple[Array, Array | None, Array]
) -> Any:
    """The sum of the backward passes of both parts."""
    h, x, kept, w, handle = residuals
    d_sums, d_slots, d_products = cotangents
    d_h, d_row_weights, d_w, _ = _gather_gemm_backward(config, (h, w, handle), (d_sums, d_slots))
    turned = _turned(config, keep=config.keep)
    d_x, d_kept, d_rows, _ = _token_products_backward(turned, (x, kept, h, handle), d_products)
    return d_h + d_rows, d_row_weights, d_x, d_kept, d_w, None


scatter_gemm.defvjp(_scatter_gemm_forward, _scatter_gemm_backward, symbolic_zeros=True)
gather_gemm.defvjp(_gather_gemm_forward, _gather_gemm_backward)
token_products.defvjp(_token_products_forward, _token_products_backward)
gather_gemm_products.defvjp(_gather_gemm_products_forward, _gather_gemm_products_backward)
