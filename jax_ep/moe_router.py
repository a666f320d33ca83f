"""The router of a Mixture-of-Experts layer, from tokens and its kernel to choices and statistics; in pure JAX."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
from jax import lax

from jax_ep.moe_metrics import count_assignments
from jax_ep.routing import load_balancing_loss, router_z_loss, topk_router
from jax_ep.types import Array

# topk_idx, topk_weights, (load, load_balancing_loss, router_z_loss)
Routed = tuple[Array, Array, tuple[Array, Array, Array]]


@dataclasses.dataclass(frozen=True)
class RouterOptions:
    """The keyword arguments of `topk_router`; hashable, as static attributes of a module must be."""

    k: int
    score: Literal["softmax", "sigmoid"]
    renormalize: bool
    num_groups: int
    topk_groups: int
    group_score: Literal["top2_sum", "max"]
    scale: float


def route(
    tokens: Array,
    token_mask: Array | None,
    kernel: Array,
    bias: Array | None,
    *,
    options: RouterOptions,
    axes: tuple[str, ...],
) -> Routed:
    """Expert choice and statistics of tokens.

    Args:
      tokens: `[N, H]` floating.
      token_mask: `[N]` bool, False for tokens that go to no expert and count in no statistic; None: all do.
      kernel: `[H, E]` float32.
      bias: `[E]` float32 for the selection, or None.
      options: of `topk_router`.
      axes: inside `shard_map`, mesh axes over which the statistics are summed.

    Returns:
      `topk_idx [N, K]`, `topk_weights [N, K]`, and `(load [E], load_balancing_loss [], router_z_loss [])`.
    """
    logits = jnp.matmul(tokens.astype(jnp.float32), kernel, precision=lax.Precision.HIGHEST)
    routing = topk_router(logits, bias=bias, **dataclasses.asdict(options))
    topk_idx = routing.topk_idx if token_mask is None else jnp.where(token_mask[:, None], routing.topk_idx, -1)
    load = count_assignments(topk_idx, kernel.shape[1])
    of_tokens: dict[str, Any] = {"token_mask": token_mask, "axis_name": axes or None}
    balance = load_balancing_loss(routing.scores, topk_idx, **of_tokens)
    statistics = (lax.psum(load, axes) if axes else load, balance, router_z_loss(logits, **of_tokens))
    return topk_idx, routing.topk_weights, statistics
