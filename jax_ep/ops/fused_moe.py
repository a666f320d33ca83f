"""The whole expert layer on one device."""

from __future__ import annotations

from collections.abc import Sequence

from jax.typing import DTypeLike

from jax_ep.core import check
from jax_ep.core.check import operation
from jax_ep.core.expert_matrices import LoraWeights, QArray, QuantizedWeights, base_of
from jax_ep.formats.qarrays import own_weights
from jax_ep.ops.moe import moe
from jax_ep.types import Array, Biases, Experts, Schedule


@operation
def fused_moe(
    x: Array,
    topk_idx: Array,
    topk_weights: Array,
    w_gate_up: Array | QuantizedWeights | QArray | LoraWeights,
    w_down: Array | QuantizedWeights | QArray | LoraWeights,
    *,
    experts: Experts | None = None,
    biases: Biases | None = None,
    recipe: str | None = None,
    preferred_element_type: DTypeLike | None = None,
    schedule: Schedule | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Array:
    """Run the expert layer on one device: `moe` without a mesh axis.

    Args:
      x: `[T, H]` tokens.
      topk_idx: `[T, K]` int32 expert ids; -1 is no expert.
      topk_weights: `[T, K]` router weights.
      w_gate_up: `[E, H, 2 * I]`, or `[E, H, I]` for experts without a gate; or `QuantizedWeights` or `LoraWeights`, see
        `moe`.
      w_down: `[E, I, H]`, or `QuantizedWeights` or `LoraWeights`.
      experts: see `moe`.
      biases: `(b_gate_up [E, 2 * I], b_down [E, H])`, see `moe`.
      recipe: see `moe`.
      preferred_element_type: see `moe`.
      schedule: see `moe`.
      implementation: see `dispatch`.

    Returns:
      `[T, H]`.

    Raises:
      ValueError, TypeError, NotImplementedError: as `moe` does.

    Example:
      >>> import jax.numpy as jnp, jax_ep
      >>> x, idx, weights = jnp.ones((2, 4)), jnp.array([[0], [1]]), jnp.ones((2, 1))
      >>> jax_ep.fused_moe(x, idx, weights, jnp.ones((2, 4, 6)), jnp.ones((2, 3, 4))).shape
      (2, 4)
    """
    w_gate_up = own_weights("fused_moe", "w_gate_up", w_gate_up)
    name, values = "w_gate_up", base_of(w_gate_up)
    if isinstance(values, QuantizedWeights):
        name, values = "w_gate_up.values", values.values
    num_experts = check.array("fused_moe", name, values, "[E, ...]").shape[0]
    return moe(
        x,
        topk_idx,
        topk_weights,
        w_gate_up,
        w_down,
        num_experts=num_experts,
        experts=experts,
        biases=biases,
        axis_name=(),
        recipe=recipe,
        preferred_element_type=preferred_element_type,
        schedule=schedule,
        implementation=implementation,
    )
