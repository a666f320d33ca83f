"""`MoEMetrics`: statistics of one call of the Flax layer."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep.core import check
from jax_ep.types import Array, result_type


@result_type
class MoEMetrics(dict[str, Array]):
    """Statistics of one call of `jax_ep.flax.MoE` over all devices; its arrays are items and attributes.

    It is a pytree that passes scan, remat and grad's `aux`, and a dict, which `nnx.tabulate` needs. Masked tokens count
    in none of them.

    Attributes:
      load: `[E]` int32, (token, k) assignments of each expert, identity experts behind the others.
      load_balancing_loss: `[]` float32, 1 if every expert is equally loaded; add it to the loss with a weight.
      router_z_loss: `[]` float32, mean squared logsumexp of the router logits; 0 if the router is a callable.
      dropped: `[]` int32, assignments that did not fit `capacity`.
      topk_idx: `[..., K]` int32, the experts of each token of x, -1 for none; the layer takes them back as `topk_idx=`.
      rows_before, rows_after: `[ranks]` int32, rows that each rank would compute without `balance`, and computes with
        it. This item and the next two are there only if several ranks share the experts and `balance` is set.
      copies: `[ranks]` int32, copies of experts that each rank fetched.
      passes: `[ranks]` int32, passes of the layer, the same on all ranks that share experts.
    """

    load: Array
    load_balancing_loss: Array
    router_z_loss: Array
    dropped: Array
    topk_idx: Array
    rows_before: Array
    rows_after: Array
    copies: Array
    passes: Array

    def __getattr__(self, name: str) -> Array:
        if name in self:
            return self[name]
        raise AttributeError(f"MoEMetrics has no attribute {name!r}, only {[*self]} and load_share")

    def __setattr__(self, name: str, value: Array) -> None:
        self[name] = value

    def tree_flatten_with_keys(self) -> tuple[tuple[Any, ...], tuple[str, ...]]:
        return tuple((jax.tree_util.GetAttrKey(name), array) for name, array in self.items()), tuple(self)

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], arrays: tuple[Any, ...]) -> MoEMetrics:
        """Make metrics of these leaves, which JAX may have replaced."""
        return cls(zip(names, arrays, strict=True))

    @property
    def load_share(self) -> Array:
        """`[..., E]` share of the assignments that went to each expert."""
        load = jnp.asarray(self["load"], jnp.float32)
        return load / jnp.maximum(load.sum(axis=-1, keepdims=True), 1.0)

    def summary(
        self, num_ranks: int | None = None, *, num_identity_experts: int = 0, num_stored_experts: int | None = None
    ) -> dict[str, Array]:
        """Return scalars to log, `[...]` float32 each, one for each layer if layers are stacked.

        Args:
          num_ranks: ranks that share the experts, for `rank_load`; None: without it.
          num_identity_experts: that of the `Router`; no rank has these experts.
          num_stored_experts: that of the layer, where its ranks do not divide the experts; None: no expert was added.

        Returns:
          `load`: load of the busiest expert over the mean; 1 is balanced, E is all tokens to one expert.
          `rank_load`: the same of the busiest rank.
          `entropy`: of the load, over that of a uniform one; 1 is balanced, 0 is all tokens to one expert.
          `dead_experts`: experts without a token.
          `dropped_share`: share of the assignments that did not fit `capacity`.
          `load_balancing_loss`, `router_z_loss`: as above.
          With balance: `rank_load_before` and `rank_load_after` of the busiest rank, `copies` of all ranks, and
          `passes`.

        Raises:
          ValueError: the experts that the ranks store are not a multiple of `num_ranks`.
          TypeError: a number that is not an int.

        Example:
          >>> import jax.numpy as jnp
          >>> from jax_ep.routing import MoEMetrics
          >>> zero = jnp.zeros(())
          >>> load = jnp.array([6, 2, 0, 0])
          >>> found = MoEMetrics(load=load, dropped=zero, load_balancing_loss=zero, router_z_loss=zero)
          >>> float(found.summary(num_ranks=2)["rank_load"])
          2.0
        """
        function = "MoEMetrics.summary"
        num_identity_experts = check.integer(function, "num_identity_experts", num_identity_experts, least=0)
        share, total = self.load_share, jnp.maximum(self.load.sum(axis=-1), 1).astype(jnp.float32)
        entropy = -jnp.sum(jnp.where(share > 0, share * jnp.log(jnp.where(share > 0, share, 1)), 0), axis=-1)
        num_experts = share.shape[-1]
        found = {
            "load": num_experts * share.max(axis=-1),
            "entropy": entropy / max(math.log(num_experts), 1e-30),
            "dead_experts": jnp.sum(self.load == 0, axis=-1, dtype=jnp.float32),
            "dropped_share": self.dropped.astype(jnp.float32) / total,
            "load_balancing_loss": self.load_balancing_loss,
            "router_z_loss": self.router_z_loss,
        }
        if num_ranks is not None:
            num_ranks = check.integer(function, "num_ranks", num_ranks)
            others = max(0, num_experts - num_identity_experts)
            given = num_stored_experts
            stored = others if given is None else check.integer(function, "num_stored_experts", given)
            if not others or stored < others or stored % num_ranks:
                raise ValueError(
                    f"{function}: {num_ranks=} of {num_experts} experts with {num_identity_experts=} and"
                    f" {num_stored_experts=}, expected ranks that store equally many of the others; pass the ranks of"
                    " the expert axis, and num_stored_experts=moe.num_stored_experts if they do not divide the experts."
                )
            placed = jnp.pad(share[..., :others], [*[(0, 0)] * (share.ndim - 1), (0, stored - others)])
            rows = placed.reshape(*share.shape[:-1], num_ranks, -1).sum(axis=-1)
            found["rank_load"] = _over_mean(rows)
        if "passes" in self:
            for when in ("before", "after"):
                found[f"rank_load_{when}"] = _over_mean(self[f"rows_{when}"].astype(jnp.float32))
            found["copies"] = self.copies.sum(axis=-1).astype(jnp.float32)
            found["passes"] = self.passes.max(axis=-1).astype(jnp.float32)
        return found


def _over_mean(rows: Array) -> Array:
    """Return the largest of `[..., ranks]` float32 over their mean, 0 if all are 0."""
    return rows.max(axis=-1) / jnp.maximum(rows.mean(axis=-1), 1e-30)
