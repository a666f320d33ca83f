"""What a Mixture-of-Experts layer tells about its load, and the balancing that uses it; in pure JAX."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jax_ep.named_scopes import operation
from jax_ep.types import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MoEMetrics:
    """What one call of `MoE` did, over all devices; arrays, so it passes through scan, remat and grad's `aux`.

    Tokens that `token_mask` leaves out count nowhere.

    Attributes:
      load: `[E]` int32, (token, k) assignments of each expert.
      load_balancing_loss: `[]` float32, 1 when every expert is equally loaded; add it to the loss with a weight.
      router_z_loss: `[]` float32, mean squared logsumexp of the router logits.
      dropped: `[]` int32, assignments that did not fit `capacity`.
    """

    load: Array
    load_balancing_loss: Array
    router_z_loss: Array
    dropped: Array

    @property
    def load_share(self) -> Array:
        """`[..., E]` share of the assignments that went to each expert."""
        load = self.load.astype(jnp.float32)
        return load / jnp.maximum(load.sum(axis=-1, keepdims=True), 1.0)


@operation
def update_router_bias(bias: Array, load: Array, *, rate: float = 1e-3) -> Array:
    """DeepSeek-V3's auxiliary-loss-free balancing: overloaded experts lose `rate` of bias, idle ones gain it.

    Args:
      bias: `[..., E]`, one row per layer when the layers are stacked.
      load: `[..., E]`, `MoEMetrics.load` of the same layers.
      rate: size of one step.
    """
    load = load.astype(bias.dtype)
    return bias + rate * jnp.sign(load.mean(axis=-1, keepdims=True) - load)


def count_assignments(topk_idx: Array, num_experts: int) -> Array:
    """`[E]` int32 assignments per expert; comparisons instead of a scatter, which GPUs serialise."""
    hits = topk_idx.reshape(-1, 1) == jnp.arange(num_experts, dtype=topk_idx.dtype)[None]
    return hits.sum(axis=0, dtype=jnp.int32)
