"""Routers and their auxiliary losses, as the published models define them.

Pure JAX: these need no mesh axis, and run on any platform.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_ep.core import check, check_router
from jax_ep.core.autodiff import without_gradient
from jax_ep.core.check import operation
from jax_ep.core.dtypes import accumulation_dtype, contract
from jax_ep.core.layout import count_assignments
from jax_ep.core.mesh_axes import axis_tuple, on_automatic_axes, spec_of
from jax_ep.core.moe_metrics import MoEMetrics
from jax_ep.core.router import SMALLEST_SUM, Router
from jax_ep.types import Array, AxisName, Routing

__all__ = [
    "MoEMetrics",
    "identity_experts",
    "load_balancing_loss",
    "router_z_loss",
    "sparsemixer_router",
    "topk_router",
    "update_router_bias",
]

_ONE_RENORMALIZED = (
    "topk_router: renormalize=True with one expert per token makes every weight equal to scale, so the router gets no"
    " gradient from the output; pass Router(renormalize=False), or apply jax.lax.stop_gradient to topk_weights to train"
    " it by its losses alone."
)
_ONE_SOFTMAX = (
    "topk_router: the softmax over one expert is always 1, so the router gets no gradient from the output; pass"
    " Router('sigmoid', renormalize=False), or apply jax.lax.stop_gradient to topk_weights."
)
_ONE_NEAR = (
    "sparsemixer_router: jitter_eps below the precision of the logits makes every weight 1, so the router gets no"
    " gradient from the output; pass a larger one, such as 0.01, or apply jax.lax.stop_gradient to topk_weights to"
    " train by the losses alone."
)


@operation
def topk_router(
    logits: Array,
    k: int,
    *,
    router: Router | None = None,
    bias: Array | None = None,
    token_mask: Array | None = None,
    topk_idx: Array | None = None,
) -> Routing:
    """Choose k experts for every token.

    Args:
      logits: `[T, E]` floating; scores are computed in float32.
      k: experts per token, `1 <= k <= E`.
      router: how experts are chosen, see `Router`, which lists published models; None: `Router()`.
      bias: `[E]` floating, added to the scores for selection only; weights never contain it and it gets no gradient.
        Experts whose bias is minus infinity are never chosen: a token for which fewer than k are left has id -1 and
        weight 0 in the other places. A Router with `selection_bias=True` requires it.
      token_mask: `[T]` bool, False for tokens without experts, such as padding: their ids are -1, their weights and
        scores 0, and no gradient reaches their logits, whatever these hold. None: every token has experts.
      topk_idx: `[T, k]` int32, the experts that an earlier pass chose, -1 for none. Only the weights and scores then
        come from these logits. Reinforcement learning replays the routing of its rollouts so. None: choose.

    Returns:
      `Routing(topk_idx [T, k] int32, topk_weights [T, k] float32, scores [T, E] float32)`. Among equal scores the lower
      expert id wins. Without `bias` and groups, logits that differ are never equal, even where their scores round to
      the same number.

    Raises:
      ValueError: sizes that do not fit together, or a missing bias.
      TypeError: logits that are not floating, or a mask that is not bool; a gradient of weights that are constant.

    Example:
      >>> import jax.numpy as jnp, jax_ep
      >>> routing = jax_ep.topk_router(jnp.array([[0.0, 2.0, 1.0, -1.0]]), 2)
      >>> routing.topk_idx.tolist()
      [[1, 2]]

    Source: Mixtral (arXiv:2401.04088), DeepSeek-V2 (arXiv:2405.04434), DeepSeek-V3 (arXiv:2412.19437). Replay of a
    routing: R3 (arXiv:2510.11370).
    """
    router = check.value_of("topk_router", "router", router, Router, "jax_ep.Router") or Router()
    check_router.topk(logits, k, router, bias, token_mask, topk_idx)
    specs = _routing_specs(logits)
    if router.score == "sparsemixer":
        jitter_eps = jnp.asarray(_JITTER_EPS, accumulation_dtype(logits.dtype))
        return on_automatic_axes(_sparsemixer, specs, logits, jitter_eps, None, token_mask)
    choose = partial(_choose, k=k, router=router)
    scale = jnp.asarray(router.scale, accumulation_dtype(logits.dtype))
    routing: Routing = on_automatic_axes(choose, specs, logits, bias, scale, token_mask, topk_idx)
    if k == 1 and router.renormalize:
        return routing._replace(topk_weights=without_gradient(_ONE_RENORMALIZED, routing.topk_weights))
    if logits.shape[1] == 1 and router.score == "softmax":
        return routing._replace(topk_weights=without_gradient(_ONE_SOFTMAX, routing.topk_weights))
    return routing


def _routing_specs(logits: Array) -> Routing:
    """Return the specs of a routing on explicit mesh axes: tokens and experts are split as those of the logits."""
    tokens, experts = spec_of(logits)
    return Routing(P(tokens, None), P(tokens, None), P(tokens, experts))  # type: ignore[arg-type]


@partial(jax.jit, static_argnames=("k", "router"))
def _choose(
    logits: Array,
    bias: Array | None,
    scale: Array,
    token_mask: Array | None,
    topk_idx: Array | None,
    *,
    k: int,
    router: Router,
) -> Routing:
    """Route as `topk_router` does; jitted, as all below, so that eager callers get the bits of compiled ones."""
    # Mask first: the gradient of a softmax of NaN is NaN, even times zero.
    logits = _zero_masked(logits.astype(scale.dtype), token_mask)
    scores = jax.nn.softmax(logits, axis=-1) if router.score == "softmax" else jax.nn.sigmoid(logits)
    if topk_idx is None:
        best, topk_idx = lax.top_k(_selection(logits, scores, bias, router), k)
        if bias is not None:  # It may leave fewer than k experts.
            topk_idx = jnp.where(best == -jnp.inf, -1, topk_idx)
    topk_idx = topk_idx.astype(jnp.int32)
    is_expert = (topk_idx >= 0) & (topk_idx < scores.shape[1])
    weights = jnp.take_along_axis(scores, jnp.where(is_expert, topk_idx, 0), axis=-1)
    weights = jnp.where(is_expert, weights, 0)
    if router.renormalize:
        weights = weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), SMALLEST_SUM)
    return _masked(Routing(topk_idx, weights * scale, scores), token_mask)


def _selection(logits: Array, scores: Array, bias: Array | None, router: Router) -> Array:
    """Return `[T, E]` values in whose order experts are chosen."""
    selection = lax.stop_gradient(scores)
    if bias is None and router.num_groups == 1:
        # Logits have the order of their scores, and differ where these round to 1 or 0. For `top_k`, -0.0 is below 0.0.
        return lax.stop_gradient(jnp.where(logits == 0, 0, logits))
    if bias is not None:
        selection = selection + lax.stop_gradient(bias).astype(scores.dtype)[None, :]
    if router.num_groups > 1:
        selection = _keep_best_groups(selection, router.num_groups, router.topk_groups, router.group_score)
    return selection


def _zero_masked(rows: Array, token_mask: Array | None) -> Array:
    """Set `[T, E]` rows of masked tokens to zero, so that neither values nor gradients depend on what they hold."""
    return rows if token_mask is None else jnp.where(token_mask[:, None], rows, 0)


def _masked(routing: Routing, token_mask: Array | None) -> Routing:
    """Take the experts, weights and scores of masked tokens away."""
    if token_mask is None:
        return routing
    topk_idx = jnp.where(token_mask[:, None], routing.topk_idx, -1)
    return Routing(topk_idx, *(_zero_masked(rows, token_mask) for rows in routing[1:]))


def _keep_best_groups(selection: Array, num_groups: int, topk_groups: int, group_score: str) -> Array:
    """Set the scores of all experts outside the best groups to minus infinity."""
    num_tokens, num_experts = selection.shape
    grouped = selection.reshape(num_tokens, num_groups, num_experts // num_groups)
    best = lax.top_k(grouped, min(2 if group_score == "top2_sum" else 1, grouped.shape[-1]))[0]
    if best.shape[-1] > 1:  # A group with one expert that can be chosen comes before a group without any.
        best = jnp.where(best == -jnp.inf, jnp.finfo(best.dtype).min, best)
    chosen = lax.top_k(jnp.sum(best, axis=-1), topk_groups)[1]
    keep = jnp.zeros((num_tokens, num_groups), bool).at[jnp.arange(num_tokens)[:, None], chosen].set(True)
    return jnp.where(keep[:, :, None], grouped, -jnp.inf).reshape(num_tokens, num_experts)


_JITTER_EPS = 0.01


@operation
def sparsemixer_router(logits: Array, *, jitter_eps: float = _JITTER_EPS, key: Array | None = None) -> Routing:
    """Choose two experts for every token, as Phi-3.5-MoE does.

    There are two rounds; the second one excludes the winner of the first. In a round, only experts near the best one
    stay: those whose logit l satisfies `(best - l) / max(|l|, best) <= 2 * jitter_eps`. The weight is the softmax over
    those that stay, so the two weights of a token do not sum to 1: without near rivals both are 1.

    Without a `key`, as in evaluation, the best expert of each round wins; `topk_router` with `Router("sparsemixer")`
    does the same. With a key, as in training, the expert is drawn from the softmax. The weight of an expert that is not
    the best is then divided by 3 in three of four draws. The gradient leaves that division out, so that Heun's
    third-order method estimates the gradient of the expectation over the draws.

    Experts whose logit is minus infinity are never chosen: a round without others gives id -1 and weight 0.

    Args:
      logits: `[T, E]` floating with `E >= 2`; computed in float32.
      jitter_eps: half of the relative distance that an expert may have from the best (`router_jitter_noise`). With 0,
        or less than the precision of the logits, every weight is 1, so differentiating it is an error.
      key: `[]` key of `jax.random.key`, to draw experts for training; None: choose the best ones.

    Returns:
      `Routing(topk_idx [T, 2] int32, topk_weights [T, 2] float32, scores [T, E] float32)`, the experts in the order of
      the rounds; `scores` are the softmax over all experts, for `load_balancing_loss`. Among equal logits, without a
      key, the lower expert id wins.

    Raises:
      ValueError: logits that are not a matrix of two experts or more, or a negative `jitter_eps`.
      TypeError: logits that are not floating, a `jitter_eps` that is not a number, or a `key` that is not a key.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_ep.routing import sparsemixer_router
      >>> routing = sparsemixer_router(jnp.array([[0.0, 2.0, 1.0, -1.0], [3.0, 0.0, 3.0, 1.0]]))
      >>> routing.topk_idx.tolist(), routing.topk_weights.tolist()
      ([[1, 2], [0, 2]], [[1.0, 1.0], [0.5, 1.0]])

    Source: SparseMixer-v2 in GRIN (arXiv:2409.12136). Hugging Face's Phi-3.5-MoE multiplies by 0.3333 for 1/3.
    """
    check_router.sparsemixer(logits, jitter_eps, key)
    eps = jnp.asarray(jitter_eps, accumulation_dtype(logits.dtype))
    routing: Routing = on_automatic_axes(_sparsemixer, _routing_specs(logits), logits, eps, key, None)
    if isinstance(jitter_eps, jax.Array) or jitter_eps > jnp.finfo(eps.dtype).eps / 2:
        return routing
    return routing._replace(topk_weights=without_gradient(_ONE_NEAR, routing.topk_weights))


@jax.jit
def _sparsemixer(logits: Array, jitter_eps: Array, key: Array | None, token_mask: Array | None) -> Routing:
    logits = _zero_masked(logits.astype(jitter_eps.dtype), token_mask)
    first_key, second_key = (None, None) if key is None else jax.random.split(key)
    first, first_weights = _sparsemixer_round(logits, jnp.ones(logits.shape, bool), jitter_eps, first_key)
    others = ~jax.nn.one_hot(first[:, 0], logits.shape[1], dtype=bool)
    second, second_weights = _sparsemixer_round(logits, others, jitter_eps, second_key)
    topk_idx = jnp.concatenate([first, second], axis=-1)
    weights = jnp.concatenate([first_weights, second_weights], axis=-1)
    return _masked(Routing(topk_idx, weights, jax.nn.softmax(logits, axis=-1)), token_mask)


def _sparsemixer_round(logits: Array, free: Array, jitter_eps: Array, key: Array | None) -> tuple[Array, Array]:
    """Return one expert `[T, 1]` of the `free [T, E]` ones, and its weight `[T, 1]`; -1 and 0 if none has a logit."""
    known = jnp.where(free, lax.stop_gradient(logits), -jnp.inf)
    best = jnp.max(known, axis=-1, keepdims=True)
    none = best == -jnp.inf
    best_idx = jnp.where(none, -1, jnp.argmax(known, axis=-1, keepdims=True).astype(jnp.int32))
    # This form keeps NaN, which then reaches the weights.
    far = best - known > 2 * jitter_eps * jnp.maximum(jnp.abs(known), best)
    # A softmax over no expert is NaN, and so is its gradient, even times zero.
    near = jnp.where(free & ~far, jnp.where(none, 0.0, logits), -jnp.inf)
    gates = jnp.where(none, 0.0, jax.nn.softmax(near, axis=-1))
    if key is None:
        return best_idx, jnp.take_along_axis(gates, best_idx, axis=-1)
    draw_key, step_key = jax.random.split(key)
    drawn = jax.random.categorical(draw_key, lax.stop_gradient(near), axis=-1)[:, None].astype(jnp.int32)
    chosen = jnp.where(none, -1, drawn)
    weights = jnp.take_along_axis(gates, chosen, axis=-1)
    whole = (chosen == best_idx) | jax.random.bernoulli(step_key, 0.25, chosen.shape)
    return chosen, weights - lax.stop_gradient(jnp.where(whole, 0.0, weights * (2 / 3)))


@operation
def identity_experts(routing: Routing, num_experts: int) -> tuple[Routing, Array]:
    """Remove identity experts, which return their token unchanged and have ids from `num_experts` on, from a routing.

    LongCat-Flash has such zero-computation experts, so that its router spends less on easy tokens. They need no
    all-to-all: the layer adds `weight[:, None] * x` to the output of the other experts.

    Args:
      routing: `[T, K]` ids and weights of a router over all E experts.
      num_experts: how many of the E experts compute; these have the lower ids.

    Returns:
      `(routing, weight [T] float32)`: the routing with id -1 and weight 0 in place of each identity expert, and with
      the scores of all E experts; and the sum of the weights of identity experts, which has a gradient.

    Raises:
      ValueError: `num_experts` that is not positive, or more than E.
      TypeError: `routing` that is not a `Routing`, or `num_experts` that is not an int.

    Example:
      >>> import jax.numpy as jnp, jax_ep
      >>> from jax_ep.routing import identity_experts
      >>> router = jax_ep.Router("sigmoid", renormalize=False, num_identity_experts=1)
      >>> routing = jax_ep.topk_router(jnp.array([[-9.0, 0.0, -9.0, 0.0]]), 2, router=router)
      >>> routing, weight = identity_experts(routing, 3)
      >>> routing.topk_idx.tolist(), routing.topk_weights.tolist(), weight.tolist()
      ([[1, -1]], [[0.5, 0.0]], [0.5])

    Source: LongCat-Flash (arXiv:2509.01322).
    """
    num_experts = check_router.identity_experts(routing, num_experts)
    specs = [P(*spec_of(part)) for part in routing]
    split = partial(_split_identity_experts, num_experts)
    return on_automatic_axes(split, (Routing(*specs), P(specs[1][0])), routing)  # type: ignore[arg-type]


def _split_identity_experts(num_experts: int, routing: Routing) -> tuple[Routing, Array]:
    is_identity = routing.topk_idx >= num_experts
    weight = jnp.sum(jnp.where(is_identity, routing.topk_weights, 0), axis=-1)
    topk_idx = jnp.where(is_identity, -1, routing.topk_idx)
    return Routing(topk_idx, jnp.where(is_identity, 0, routing.topk_weights), routing.scores), weight


@operation
def load_balancing_loss(
    scores: Array, topk_idx: Array, *, token_mask: Array | None = None, axis_name: AxisName | None = None
) -> Array:
    """Auxiliary loss that is 1 for a uniform load and up to E if one expert gets every token.

    It is `E * sum_e f_e * P_e`: `f_e` is the share of all assignments that expert e gets, without a gradient, and `P_e`
    is its mean normalized score. DeepSeek-V3 has the same loss; that of Mixtral in Hugging Face is K times larger.

    Args:
      scores: `[T, E]` non-negative router scores, as `topk_router` returns them; normalized here per token.
      topk_idx: `[T, K]` int32; `f_e` ignores ids outside `[0, E)`, such as -1. The tokens of such ids still count in
        `P_e`: if -1 marks padding, pass a `token_mask`.
      token_mask: `[T]` bool, False for tokens to ignore, such as padding (`attention_mask` of Hugging Face); None: all
        tokens count.
      axis_name: mesh axes whose ranks hold the other tokens of the batch; None: the loss of these tokens alone.

    Returns:
      `[]` float32 loss, the same on every rank of `axis_name`; 0 if no token counts.

    Raises:
      ValueError: shapes that do not match, or an `axis_name` that is not bound.
      TypeError: ids that are not integers, or a mask that is not bool.

    Example:
      >>> import jax.numpy as jnp, jax_ep
      >>> float(jax_ep.load_balancing_loss(jnp.full((4, 2), 0.5), jnp.array([[0], [1], [0], [1]])))
      1.0
      >>> scores, topk_idx = jnp.array([[0.5, 0.5], [0.5, 0.5], [1.0, 0.0]]), jnp.array([[0], [1], [0]])
      >>> float(jax_ep.load_balancing_loss(scores, topk_idx, token_mask=jnp.array([True, True, False])))
      1.0

    Source: Switch Transformers (arXiv:2101.03961, equation 4), DeepSeek-V3 (arXiv:2412.19437, equation 17).
    """
    check_router.balancing_loss(scores, topk_idx, token_mask, axis_name)
    return on_automatic_axes(partial(_balancing_loss, axis_name=_axes(axis_name)), P(), scores, topk_idx, token_mask)


@partial(jax.jit, static_argnames="axis_name")
def _balancing_loss(
    scores: Array, topk_idx: Array, token_mask: Array | None, *, axis_name: tuple[str, ...] | None
) -> Array:
    num_experts = scores.shape[-1]
    scores = _zero_masked(scores.astype(accumulation_dtype(scores.dtype)), token_mask)
    normalized = scores / jnp.maximum(jnp.sum(scores, axis=-1, keepdims=True), SMALLEST_SUM)
    if topk_idx.dtype.itemsize < 4:  # It may not hold num_experts.
        topk_idx = topk_idx.astype(jnp.int32)
    ids = topk_idx if token_mask is None else jnp.where(token_mask[:, None], topk_idx, -1)
    slots = jnp.where((ids >= 0) & (ids < num_experts), ids, num_experts).reshape(-1)
    counts = jnp.zeros((num_experts,), jnp.int32).at[slots].add(1, mode="drop")
    if axis_name is not None:
        counts = lax.psum(counts, axis_name)
    share = counts.astype(scores.dtype) / jnp.maximum(jnp.sum(counts), 1).astype(scores.dtype)
    return num_experts * jnp.sum(share * _mean_over_tokens(normalized, token_mask, axis_name))


@operation
def router_z_loss(logits: Array, *, token_mask: Array | None = None, axis_name: AxisName | None = None) -> Array:
    """Mean squared log-partition of the router, which keeps its logits small.

    Args:
      logits: `[T, E]` floating.
      token_mask: `[T]` bool, False for tokens to ignore, such as padding; None: all tokens count.
      axis_name: mesh axes whose ranks hold the other tokens of the batch; None: the loss of these tokens alone.

    Returns:
      `[]` float32, `mean(logsumexp(logits, axis=-1) ** 2)` over the tokens that count; 0 if none does.

    Raises:
      ValueError: logits that are not a matrix, a mask of another length, or an `axis_name` that is not bound.
      TypeError: logits that are not floating, or a mask that is not bool.

    Example:
      >>> import jax.numpy as jnp, jax_ep
      >>> round(float(jax_ep.router_z_loss(jnp.zeros((3, 1)))), 6)
      0.0

    Source: ST-MoE (arXiv:2202.08906, equation 5).
    """
    check_router.z_loss(logits, token_mask, axis_name)
    return on_automatic_axes(partial(_z_loss, axis_name=_axes(axis_name)), P(), logits, token_mask)


@partial(jax.jit, static_argnames="axis_name")
def _z_loss(logits: Array, token_mask: Array | None, *, axis_name: tuple[str, ...] | None) -> Array:
    logits = _zero_masked(logits.astype(accumulation_dtype(logits.dtype)), token_mask)
    squares = jnp.square(jax.nn.logsumexp(logits, axis=-1))
    return _mean_over_tokens(
        squares if token_mask is None else jnp.where(token_mask, squares, 0), token_mask, axis_name
    )


@operation
def update_router_bias(bias: Array, load: Array, *, rate: float = 1e-3) -> Array:
    """Move a selection bias by one step: overloaded experts lose `rate`, underloaded ones gain it.

    Args:
      bias: `[..., E]` float32 or float64, one row per layer when the layers are stacked.
      load: `[..., E]`, `MoEMetrics.load` of the same layers.
      rate: size of one step, 0 or more.

    Returns:
      `[..., E]` bias of the next training step.

    Raises:
      ValueError: load and bias of different shapes, or a negative `rate`.
      TypeError: arguments that are not arrays, or a bias of another dtype, which would round small steps away.

    Example:
      >>> import jax.numpy as jnp, jax_ep
      >>> jax_ep.update_router_bias(jnp.zeros(3), jnp.array([6, 2, 1]), rate=0.5).tolist()
      [-0.5, 0.5, 0.5]

    Source: auxiliary-loss-free load balancing (arXiv:2408.15664), as in DeepSeek-V3 (arXiv:2412.19437, section 2.1.2).
    """
    bias, load = check_router.bias_step(bias, load, rate)
    return on_automatic_axes(_move_bias, P(*spec_of(bias)), bias, load, jnp.asarray(rate, bias.dtype))


def _move_bias(bias: Array, load: Array, rate: Array) -> Array:
    load = load.astype(bias.dtype)
    # A mean rounds, so that loads equal to it would move.
    return bias + rate * jnp.sign(load.sum(axis=-1, keepdims=True) - load.shape[-1] * load)


def _axes(axis_name: AxisName | None) -> tuple[str, ...] | None:
    return None if axis_name is None else axis_tuple(axis_name)


def _mean_over_tokens(values: Array, token_mask: Array | None, axis_name: tuple[str, ...] | None) -> Array:
    """Mean of `[T, ...]` over the tokens that count on all ranks of `axis_name`; rows of other tokens are zero."""
    total = jnp.sum(values, axis=0)
    count: Any = values.shape[0]
    if token_mask is not None:
        count = jnp.sum(token_mask, dtype=jnp.int32)
    elif isinstance(count, int):
        count = float(count)  # int32 may not hold it
    if axis_name is not None:
        # Ranks may have different numbers of tokens that count, so this is not the mean of their means.
        total, count = (lax.psum(value, axis_name) for value in (total, count))
    return total / jnp.maximum(count, 1).astype(values.dtype)


class RouterWeights(NamedTuple):
    """Parameters in float32: `kernel [H, E]` and `bias [E]` of the logits, `selection [E]` bias; biases may be None."""

    kernel: Array
    bias: Array | None
    selection: Array | None

    def logits(self, tokens: Array, token_mask: Array | None) -> Array:
        """Return float32 logits `[N, E]` of tokens `[N, H]`; those of masked tokens are as of zeros."""
        tokens = _zero_masked(tokens, token_mask)  # they may be NaN, which would reach gradients
        logits = contract(tokens.astype(jnp.float32), self.kernel, (1, 0))
        return logits if self.bias is None else logits + self.bias[None]


class Routed(NamedTuple):
    """Routing of a layer's tokens, and its statistics over all ranks."""

    chosen: Array  # `[N, K]` ids; -1 for masked tokens
    topk_idx: Array  # the same, with -1 for identity experts
    topk_weights: Array  # `[N, K]`
    identity_weight: Array | None  # `[N]` by which identity experts scale their token, or None
    load: Array  # `[E]` int32 assignments, identity experts included
    load_balancing_loss: Array  # `[]`
    router_z_loss: Array  # `[]`, 0 if the router is a callable, whose logits are unknown

    def with_identity(self, y: Array, tokens: Array) -> Array:
        """Add the output of the identity experts."""
        weight = self.identity_weight
        if weight is None:
            return y
        passed = jnp.any(self.chosen != self.topk_idx, axis=-1, keepdims=True)  # Others, as of padding, may be NaN.
        tokens = jnp.where(passed, tokens, 0)
        return y + (weight[:, None] * tokens.astype(weight.dtype)).astype(y.dtype)

    def metrics(self, topk_idx: Array, dropped: Array, work: dict[str, Array]) -> MoEMetrics:
        shared = {name: getattr(self, name) for name in ("load", "load_balancing_loss", "router_z_loss")}
        return MoEMetrics(topk_idx=topk_idx, dropped=dropped, **shared, **work)


def route(
    tokens: Array,
    token_mask: Array | None,
    replayed: Array | None,
    router: RouterWeights | Routing,
    *,
    options: Router,
    top_k: int,
    axes: tuple[str, ...],
) -> Routed:
    """Choose experts for a layer's tokens, and compute the statistics.

    Args:
      tokens: `[N, H]` floating.
      token_mask: `[N]` bool, False for tokens without experts, which count in no statistic; None: all tokens count.
      replayed: `[N, K]` ids of an earlier pass, or None.
      router: weights of the layer's router, or the routing that a callable has returned.
      options: how the layer's router chooses.
      top_k: experts per token.
      axes: inside `shard_map`, mesh axes over which the statistics are summed.
    """
    logits = None
    if isinstance(router, Routing):
        topk_idx, topk_weights, scores = router
    else:
        logits = router.logits(tokens, token_mask)
        topk_idx, topk_weights, scores = topk_router(
            logits, top_k, router=options, bias=router.selection, topk_idx=replayed
        )
    if token_mask is not None:
        topk_idx = jnp.where(token_mask[:, None], topk_idx, -1)
    num_experts, chosen = scores.shape[1], topk_idx
    load = count_assignments(topk_idx, num_experts)
    of_tokens: dict[str, Any] = {"token_mask": token_mask, "axis_name": axes or None}
    balance = load_balancing_loss(scores, topk_idx, **of_tokens)
    z_loss = jnp.zeros((), jnp.float32) if logits is None else router_z_loss(logits, **of_tokens)
    weight = None
    if options.num_identity_experts:
        routing = Routing(topk_idx, topk_weights, scores)
        (topk_idx, topk_weights, _), weight = identity_experts(routing, num_experts - options.num_identity_experts)
    return Routed(chosen, topk_idx, topk_weights, weight, lax.psum(load, axes) if axes else load, balance, z_loss)


def count_dropped(
    topk_idx: Array,
    *,
    axes: tuple[str, ...],
    batch_axes: tuple[str, ...],
    capacity: int,
    num_experts: int,
    num_ranks: int,
) -> Array:
    """Count assignments past `capacity`, `[]` int32, over all shards; each batch shard has its own ranks."""
    load = lax.psum(count_assignments(topk_idx, num_experts), axes)
    rows = load.reshape(num_ranks, -1).sum(axis=1)
    return lax.psum(jnp.maximum(rows - capacity, 0).sum(dtype=jnp.int32), batch_axes)
