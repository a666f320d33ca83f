"""Routers and their auxiliary losses, as Mixtral, Qwen3-MoE, DeepSeek-V2 and DeepSeek-V3 define them.

Pure JAX: these need no mesh axis, and run on any platform.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep import router_validation
from jax_ep import validation as check
from jax_ep.dtypes import accumulation_dtype
from jax_ep.types import Array, AxisName, Routing

# DeepSeek-V3 adds 1e-20 to the sum. A lower bound of 1e-18 gives the same float32 weights for every sum above 1e-11,
# and the gradient of the division, which squares it, stays finite for tokens whose scores all underflow.
_SMALLEST_SUM = 1e-18


def topk_router(
    logits: Array,
    k: int,
    *,
    score: Literal["softmax", "sigmoid"] = "softmax",
    renormalize: bool = True,
    bias: Array | None = None,
    num_groups: int = 1,
    topk_groups: int = 1,
    group_score: Literal["top2_sum", "max"] = "top2_sum",
    scale: float = 1.0,
) -> Routing:
    """Chooses k experts for every token.

    Mixtral and Qwen3-MoE: the defaults. DeepSeek-V2: `score="softmax", renormalize=False, num_groups, topk_groups,
    group_score="max", scale=16.0`. DeepSeek-V3: `score="sigmoid", bias=..., num_groups=8, topk_groups=4, scale=2.5`.

    Args:
      logits: `[T, E]` floating; scores are computed in float32.
      k: experts per token, `1 <= k <= E`.
      score: how logits become scores.
      renormalize: divide the chosen scores by their sum, so that they sum to `scale`.
      bias: `[E]` floating, added to the scores for selection only (auxiliary-loss-free balancing, arXiv:2408.15664);
        weights never contain it and it receives no gradient.
      num_groups: splits the experts into this many contiguous groups of equal size.
      topk_groups: only experts of the best `topk_groups` groups can be chosen.
      group_score: a group's score: the sum of its two best experts (DeepSeek-V3) or its best one (DeepSeek-V2).
      scale: factor on the weights (`routed_scaling_factor`).

    Returns:
      `Routing(topk_idx [T, k] int32, topk_weights [T, k] float32, scores [T, E] float32)`. Equal scores: the lower
      expert id wins.

    Raises:
      ValueError: sizes that do not fit together, or an unknown `score` or `group_score`.
      TypeError: logits that are not floating.

    Example:
      >>> import jax.numpy as jnp, jax_ep
      >>> routing = jax_ep.topk_router(jnp.array([[0.0, 2.0, 1.0, -1.0]]), 2)
      >>> routing.topk_idx.tolist()
      [[1, 2]]

    Source: Mixtral (arXiv:2401.04088), DeepSeek-V2 (arXiv:2405.04434), DeepSeek-V3 (arXiv:2412.19437).
    """
    router_validation.router_arguments(logits, k, score, bias, num_groups, topk_groups, group_score, scale)
    logits = logits.astype(accumulation_dtype(logits.dtype))
    scores = jax.nn.softmax(logits, axis=-1) if score == "softmax" else jax.nn.sigmoid(logits)
    selection = lax.stop_gradient(scores)
    if bias is not None:
        selection = selection + lax.stop_gradient(bias).astype(scores.dtype)[None, :]
    if num_groups > 1:
        selection = _keep_best_groups(selection, num_groups, topk_groups, group_score)
    topk_idx = lax.top_k(selection, k)[1].astype(jnp.int32)
    weights = jnp.take_along_axis(scores, topk_idx, axis=-1)
    if renormalize:
        weights = weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), _SMALLEST_SUM)
    return Routing(topk_idx, weights * scale, scores)


def _keep_best_groups(selection: Array, num_groups: int, topk_groups: int, group_score: str) -> Array:
    """Sets the scores of all experts outside the best groups to minus infinity."""
    num_tokens, num_experts = selection.shape
    grouped = selection.reshape(num_tokens, num_groups, num_experts // num_groups)
    best = lax.top_k(grouped, min(2 if group_score == "top2_sum" else 1, grouped.shape[-1]))[0]
    chosen = lax.top_k(jnp.sum(best, axis=-1), topk_groups)[1]
    keep = jnp.zeros((num_tokens, num_groups), bool).at[jnp.arange(num_tokens)[:, None], chosen].set(True)
    return jnp.where(keep[:, :, None], grouped, -jnp.inf).reshape(num_tokens, num_experts)


def load_balancing_loss(scores: Array, topk_idx: Array, *, axis_name: AxisName | None = None) -> Array:
    """Auxiliary loss that is 1 when the load is uniform and up to E when one expert gets everything.

    `E * sum_e f_e * P_e` with `f_e` the share of all assignments that went to expert e (no gradient) and `P_e` its
    mean normalised score. The Hugging Face Mixtral loss is K times this one, the DeepSeek-V3 one equals it.

    Args:
      scores: `[T, E]` non-negative router scores, as `topk_router` returns them; normalised here per token.
      topk_idx: `[T, K]` int32; ids outside `[0, E)`, such as the -1 of padding, count for nothing in `f_e`.
      axis_name: mesh axes whose ranks hold the other tokens of the batch; None: the loss of these tokens alone.

    Returns:
      `[]` float32 loss, the same on every rank of `axis_name`.

    Raises:
      ValueError: shapes that do not match, or `axis_name` not bound.

    Example:
      >>> import jax.numpy as jnp, jax_ep
      >>> float(jax_ep.load_balancing_loss(jnp.full((4, 2), 0.5), jnp.array([[0], [1], [0], [1]])))
      1.0

    Source: Switch Transformers (arXiv:2101.03961, equation 4), DeepSeek-V3 (arXiv:2412.19437, equation 17).
    """
    router_validation.loss_arguments(scores, topk_idx, axis_name)
    num_experts = scores.shape[-1]
    scores = scores.astype(accumulation_dtype(scores.dtype))
    normalised = scores / jnp.maximum(jnp.sum(scores, axis=-1, keepdims=True), _SMALLEST_SUM)
    ids = topk_idx.reshape(-1)
    slots = jnp.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    counts = jnp.zeros((num_experts,), scores.dtype).at[slots].add(jnp.ones((), scores.dtype), mode="drop")
    # No tokens: no loss.
    mean_score = jnp.sum(normalised, axis=0) / max(scores.shape[0], 1)
    if axis_name is not None:
        counts = lax.psum(counts, axis_name)
        mean_score = lax.pmean(mean_score, axis_name)
    share = counts / jnp.maximum(jnp.sum(counts), 1)
    return num_experts * jnp.sum(lax.stop_gradient(share) * mean_score)


def router_z_loss(logits: Array) -> Array:
    """Mean squared log-partition of the router, which keeps its logits small.

    Args:
      logits: `[T, E]` floating.

    Returns:
      `[]` float32, `mean(logsumexp(logits, axis=-1) ** 2)`.

    Raises:
      ValueError: logits that are not a matrix.
      TypeError: logits that are not floating.

    Example:
      >>> import jax.numpy as jnp, jax_ep
      >>> round(float(jax_ep.router_z_loss(jnp.zeros((3, 1)))), 6)
      0.0

    Source: ST-MoE (arXiv:2202.08906, equation 5).
    """
    check.matrix("router_z_loss", "logits", logits)
    logits = logits.astype(accumulation_dtype(logits.dtype))
    return jnp.sum(jnp.square(jax.nn.logsumexp(logits, axis=-1))) / max(logits.shape[0], 1)
