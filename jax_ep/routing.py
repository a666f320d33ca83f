"""Routers and their auxiliary losses, as the published models define them.

Pure JAX: these need no mesh axis, and run on any platform.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_ep.core import check, check_router
from jax_ep.core.dtypes import accumulation_dtype
from jax_ep.core.mesh_axes import axis_tuple, on_automatic_axes, spec_of
from jax_ep.core.named_scopes import operation
from jax_ep.core.no_gradient import without_gradient
from jax_ep.types import Array, AxisName, Routing, result_type

# DeepSeek-V3 adds 1e-20 to the sum. A lower bound of 1e-18 gives the same float32 weights for every sum above 1e-11,
# and the gradient of the division, which squares it, stays finite for tokens whose scores all underflow.
_SMALLEST_SUM = 1e-18
_ONE_RENORMALIZED = (
    "topk_router: renormalize=True with one expert per token makes every weight equal to scale, so the router gets no"
    " gradient from the output; pass renormalize=False, here or to MoE, or jax.lax.stop_gradient(topk_weights) to train"
    " it by its losses alone."
)
_ONE_NEAR = (
    "sparsemixer_router: jitter_eps=0 makes every weight 1, so the router gets no gradient from the output; pass a"
    " positive jitter_eps, such as 0.01, or jax.lax.stop_gradient(topk_weights) to train it by its losses alone."
)


@operation
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
    token_mask: Array | None = None,
) -> Routing:
    """Chooses k experts for every token.

    How published models say it; the page Models has the rest of their layers:

    - Mixtral, Qwen3-MoE: the defaults. Qwen2-MoE, OLMoE: `renormalize=False`.
    - gpt-oss: the defaults, with logits that contain the router's bias. A softmax over the chosen logits is the softmax
      over all of them, renormalised.
    - DeepSeek-V2: `renormalize=False, num_groups=8, topk_groups=3, group_score="max", scale=16.0`.
    - DeepSeek-V3: `score="sigmoid", bias=..., num_groups=8, topk_groups=4, scale=2.5`. GLM-4.5: without groups.
      MiniMax-M2: without groups and scale.
    - ERNIE-4.5: `bias=...`. LongCat-Flash: `bias=..., renormalize=False, scale=6.0`, then `identity_experts`.
    - Llama 4: `k=1, score="sigmoid", renormalize=False`, and experts whose input is weighted, `weight_on="input"`.
    - Phi-3.5-MoE: `sparsemixer_router`.

    Args:
      logits: `[T, E]` floating; scores are computed in float32.
      k: experts per token, `1 <= k <= E`.
      score: how logits become scores.
      renormalize: divide the chosen scores by their sum, so that they sum to `scale`. With `k=1` every weight is then
        `scale`, so differentiating it is an error: to train such a router, pass False.
      bias: `[E]` floating, added to the scores for selection only (auxiliary-loss-free balancing, arXiv:2408.15664);
        weights never contain it and it receives no gradient.
      num_groups: splits the experts into this many contiguous groups of equal size.
      topk_groups: only experts of the best `topk_groups` groups can be chosen.
      group_score: a group's score: the sum of its two best experts (DeepSeek-V3) or its best one (DeepSeek-V2).
      scale: factor on the weights (`routed_scaling_factor`), finite and not 0.
      token_mask: `[T]` bool, False for tokens that go to no expert, such as padding: their ids are -1, their weights
        and scores 0, and no gradient reaches their logits, whatever these hold. None: every token has experts.

    Returns:
      `Routing(topk_idx [T, k] int32, topk_weights [T, k] float32, scores [T, E] float32)`. Equal scores: the lower
      expert id wins. Without `bias` and groups, logits that differ are never equal, even where their scores round to
      the same number.

    Raises:
      ValueError: sizes that do not fit together, an unknown `score` or `group_score`, or a `scale` of 0.
      TypeError: logits that are not floating, or a mask that is not bool; a gradient of weights that are constant.

    Example:
      >>> import jax.numpy as jnp, jax_ep
      >>> routing = jax_ep.topk_router(jnp.array([[0.0, 2.0, 1.0, -1.0]]), 2)
      >>> routing.topk_idx.tolist()
      [[1, 2]]

    Source: Mixtral (arXiv:2401.04088), DeepSeek-V2 (arXiv:2405.04434), DeepSeek-V3 (arXiv:2412.19437).
    """
    check_router.router(logits, k, score, bias, num_groups, topk_groups, group_score, scale, token_mask)
    choose = partial(
        _choose,
        k=k,
        score=score,
        renormalize=renormalize,
        num_groups=num_groups,
        topk_groups=topk_groups,
        group_score=group_score,
    )
    factor = jnp.asarray(scale, accumulation_dtype(logits.dtype))
    routing: Routing = on_automatic_axes(choose, _routing_specs(logits), logits, bias, factor, token_mask)
    if k > 1 or not renormalize or logits.shape[1] == 1:
        return routing
    return routing._replace(topk_weights=without_gradient(_ONE_RENORMALIZED, routing.topk_weights))


def _routing_specs(logits: Array) -> Routing:
    """Specs of a routing on explicit mesh axes: tokens and experts are split as those of the logits."""
    tokens, experts = spec_of(logits)
    return Routing(P(tokens, None), P(tokens, None), P(tokens, experts))  # type: ignore[arg-type]


@partial(jax.jit, static_argnames=("k", "score", "renormalize", "num_groups", "topk_groups", "group_score"))
def _choose(
    logits: Array,
    bias: Array | None,
    scale: Array,
    token_mask: Array | None,
    *,
    k: int,
    score: str,
    renormalize: bool,
    num_groups: int,
    topk_groups: int,
    group_score: str,
) -> Routing:
    """See `topk_router`; jitted, as all below, so that eager callers get the bits of compiled ones."""
    # Before anything else: the gradient of a softmax of NaN is NaN, even times zero.
    logits = _counting(logits.astype(scale.dtype), token_mask)
    scores = jax.nn.softmax(logits, axis=-1) if score == "softmax" else jax.nn.sigmoid(logits)
    selection = lax.stop_gradient(scores)
    if bias is None and num_groups == 1:
        # Logits have the order of their scores, and differ where these round to 1 or 0. For `top_k`, -0.0 is below 0.0.
        selection = lax.stop_gradient(jnp.where(logits == 0, 0, logits))
    if bias is not None:
        selection = selection + lax.stop_gradient(bias).astype(scores.dtype)[None, :]
    if num_groups > 1:
        selection = _keep_best_groups(selection, num_groups, topk_groups, group_score)
    topk_idx = lax.top_k(selection, k)[1].astype(jnp.int32)
    weights = jnp.take_along_axis(scores, topk_idx, axis=-1)
    check.flag("topk_router", "renormalize", renormalize)
    if renormalize:
        weights = weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), _SMALLEST_SUM)
    if token_mask is not None:
        topk_idx = jnp.where(token_mask[:, None], topk_idx, -1)
    return Routing(topk_idx, _counting(weights * scale, token_mask), _counting(scores, token_mask))


def _keep_best_groups(selection: Array, num_groups: int, topk_groups: int, group_score: str) -> Array:
    """Sets the scores of all experts outside the best groups to minus infinity."""
    num_tokens, num_experts = selection.shape
    grouped = selection.reshape(num_tokens, num_groups, num_experts // num_groups)
    best = lax.top_k(grouped, min(2 if group_score == "top2_sum" else 1, grouped.shape[-1]))[0]
    chosen = lax.top_k(jnp.sum(best, axis=-1), topk_groups)[1]
    keep = jnp.zeros((num_tokens, num_groups), bool).at[jnp.arange(num_tokens)[:, None], chosen].set(True)
    return jnp.where(keep[:, :, None], grouped, -jnp.inf).reshape(num_tokens, num_experts)


@operation
def sparsemixer_router(logits: Array, *, jitter_eps: float = 0.01, key: Array | None = None) -> Routing:
    """Chooses two experts for every token, as Phi-3.5-MoE does.

    Each expert comes from a round of its own, the second without the winner of the first. In a round, only experts
    near the best one stay: those whose logit l has `(best - l) / max(|l|, best) <= 2 * jitter_eps`. The weight is the
    softmax over those that stay, so the two weights of a token do not sum to 1: without near rivals both are 1.

    Without a `key`, as in evaluation, the best expert of each round is chosen. With one, as in training, the expert is
    drawn from the softmax, and the weight of an expert that is not the best is divided by 3, in three of four draws.
    That division is left out of the gradient: Heun's third-order method estimates the gradient of the expectation over
    the draws so.

    Experts whose logit is minus infinity are never chosen: a round that has no others gives id -1 and weight 0.

    Args:
      logits: `[T, E]` floating with `E >= 2`; computed in float32.
      jitter_eps: how far from the best an expert may be, half of the relative distance (`router_jitter_noise`). With 0
        every weight is 1, so differentiating it is an error.
      key: `[]` key of `jax.random.key`, to draw experts for training; None: the best are chosen.

    Returns:
      `Routing(topk_idx [T, 2] int32, topk_weights [T, 2] float32, scores [T, E] float32)`, the experts in the order of
      the rounds; `scores` are the softmax over all experts, for `load_balancing_loss`. Equal logits: without a key the
      lower expert id wins.

    Raises:
      ValueError: logits that are not a matrix of two experts or more, or a negative `jitter_eps`.
      TypeError: logits that are not floating, a `jitter_eps` that is no number, or a `key` that is no key.

    Example:
      >>> import jax.numpy as jnp, jax_ep
      >>> routing = jax_ep.sparsemixer_router(jnp.array([[0.0, 2.0, 1.0, -1.0], [3.0, 0.0, 3.0, 1.0]]))
      >>> routing.topk_idx.tolist(), routing.topk_weights.tolist()
      ([[1, 2], [0, 2]], [[1.0, 1.0], [0.5, 1.0]])

    Source: SparseMixer-v2 in GRIN (arXiv:2409.12136). Hugging Face's Phi-3.5-MoE multiplies by 0.3333 for 1/3.
    """
    check_router.sparsemixer(logits, jitter_eps, key)
    routing: Routing = on_automatic_axes(
        _sparsemixer, _routing_specs(logits), logits, jnp.asarray(jitter_eps, accumulation_dtype(logits.dtype)), key
    )
    if isinstance(jitter_eps, jax.Array) or jitter_eps > 0:
        return routing
    return routing._replace(topk_weights=without_gradient(_ONE_NEAR, routing.topk_weights))


@jax.jit
def _sparsemixer(logits: Array, jitter_eps: Array, key: Array | None) -> Routing:
    logits = logits.astype(jitter_eps.dtype)
    first_key, second_key = (None, None) if key is None else jax.random.split(key)
    first, first_weights = _sparsemixer_round(logits, jnp.ones(logits.shape, bool), jitter_eps, first_key)
    others = ~jax.nn.one_hot(first[:, 0], logits.shape[1], dtype=bool)
    second, second_weights = _sparsemixer_round(logits, others, jitter_eps, second_key)
    topk_idx = jnp.concatenate([first, second], axis=-1)
    return Routing(topk_idx, jnp.concatenate([first_weights, second_weights], axis=-1), jax.nn.softmax(logits, axis=-1))


def _sparsemixer_round(logits: Array, free: Array, jitter_eps: Array, key: Array | None) -> tuple[Array, Array]:
    """One expert `[T, 1]` of those `free [T, E]`, and its weight `[T, 1]`; -1 and 0 where all these are masked."""
    known = jnp.where(free, lax.stop_gradient(logits), -jnp.inf)
    best = jnp.max(known, axis=-1, keepdims=True)
    none = best == -jnp.inf
    best_idx = jnp.where(none, -1, jnp.argmax(known, axis=-1, keepdims=True).astype(jnp.int32))
    # Written so that NaN stays, and makes the weights NaN.
    far = best - known > 2 * jitter_eps * jnp.maximum(jnp.abs(known), best)
    # A softmax over nothing is NaN, and so is its gradient, even times zero.
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
    """Takes the experts that return their token unchanged, from id `num_experts` on, out of a routing.

    LongCat-Flash has such zero-computation experts, so that its router spends less on easy tokens. They need no
    exchange: the layer adds `weight[:, None] * x` to the output of the other experts.

    Args:
      routing: `[T, K]` ids and weights of a router over all E experts.
      num_experts: how many of the E experts compute; these have the lower ids.

    Returns:
      `(routing, weight [T] float32)`: the routing with id -1 and weight 0 in the place of each identity expert, its
      scores still of all E experts; and the sum of the weights that these had, differentiable as they are.

    Raises:
      ValueError: `num_experts` that is not positive, or more than E.
      TypeError: `routing` that is no `Routing`, or `num_experts` that is no int.

    Example:
      >>> import jax.numpy as jnp, jax_ep
      >>> routing = jax_ep.topk_router(jnp.array([[-9.0, 0.0, -9.0, 0.0]]), 2, score="sigmoid", renormalize=False)
      >>> routing, weight = jax_ep.identity_experts(routing, 3)
      >>> routing.topk_idx.tolist(), routing.topk_weights.tolist(), weight.tolist()
      ([[1, -1]], [[0.5, 0.0]], [0.5])

    Source: LongCat-Flash (arXiv:2509.01322).
    """
    check_router.identity_experts(routing, num_experts)
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
    """Auxiliary loss that is 1 when the load is uniform and up to E when one expert gets everything.

    `E * sum_e f_e * P_e` with `f_e` the share of all assignments that went to expert e (no gradient) and `P_e` its
    mean normalised score. The Hugging Face Mixtral loss is K times this one, the DeepSeek-V3 one equals it.

    Args:
      scores: `[T, E]` non-negative router scores, as `topk_router` returns them; normalised here per token.
      topk_idx: `[T, K]` int32; ids outside `[0, E)`, such as -1, count for nothing in `f_e`. Their tokens still count
        in `P_e`, as the router has scored them: where -1 marks padding, pass a `token_mask`.
      token_mask: `[T]` bool, False for tokens that count for nothing, such as padding, as Hugging Face's
        `attention_mask` says it; None: all count.
      axis_name: mesh axes whose ranks hold the other tokens of the batch; None: the loss of these tokens alone.

    Returns:
      `[]` float32 loss, the same on every rank of `axis_name`; 0 where no token counts.

    Raises:
      ValueError: shapes that do not match, or `axis_name` not bound.
      TypeError: ids that are no integers, or a mask that is not bool.

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
    scores = _counting(scores.astype(accumulation_dtype(scores.dtype)), token_mask)
    normalised = scores / jnp.maximum(jnp.sum(scores, axis=-1, keepdims=True), _SMALLEST_SUM)
    ids = topk_idx if token_mask is None else jnp.where(token_mask[:, None], topk_idx, -1)
    slots = jnp.where((ids >= 0) & (ids < num_experts), ids, num_experts).reshape(-1)
    counts = jnp.zeros((num_experts,), jnp.int32).at[slots].add(1, mode="drop")
    if axis_name is not None:
        counts = lax.psum(counts, axis_name)
    share = counts.astype(scores.dtype) / jnp.maximum(jnp.sum(counts), 1).astype(scores.dtype)
    return num_experts * jnp.sum(share * _mean_over_tokens(normalised, token_mask, axis_name))


@operation
def router_z_loss(logits: Array, *, token_mask: Array | None = None, axis_name: AxisName | None = None) -> Array:
    """Mean squared log-partition of the router, which keeps its logits small.

    Args:
      logits: `[T, E]` floating.
      token_mask: `[T]` bool, False for tokens that count for nothing, such as padding; None: all count.
      axis_name: mesh axes whose ranks hold the other tokens of the batch; None: the loss of these tokens alone.

    Returns:
      `[]` float32, `mean(logsumexp(logits, axis=-1) ** 2)` over the tokens that count; 0 where none does.

    Raises:
      ValueError: logits that are not a matrix, a mask of another length, or `axis_name` not bound.
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
    logits = _counting(logits.astype(accumulation_dtype(logits.dtype)), token_mask)
    squares = jnp.square(jax.nn.logsumexp(logits, axis=-1))
    return _mean_over_tokens(
        squares if token_mask is None else jnp.where(token_mask, squares, 0), token_mask, axis_name
    )


@operation
def update_router_bias(bias: Array, load: Array, *, rate: float = 1e-3) -> Array:
    """DeepSeek-V3's auxiliary-loss-free balancing: overloaded experts lose `rate` of bias, idle ones gain it.

    Args:
      bias: `[..., E]` float32 or float64, one row per layer when the layers are stacked.
      load: `[..., E]`, `MoEMetrics.load` of the same layers.
      rate: size of one step, 0 or more.

    Returns:
      The bias of the next step.

    Raises:
      ValueError: load and bias of different shapes, or a negative `rate`.
      TypeError: arguments that are no arrays, or a bias of another dtype, which would round small steps away.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_ep.routing import update_router_bias
      >>> update_router_bias(jnp.zeros(3), jnp.array([6, 2, 1]), rate=0.5).tolist()
      [-0.5, 0.5, 0.5]

    Source: auxiliary-loss-free load balancing (arXiv:2408.15664), as in DeepSeek-V3 (arXiv:2412.19437, section 2.1.2).
    """
    bias, load = check_router.bias_step(bias, load, rate)
    return on_automatic_axes(_move_bias, P(*spec_of(bias)), bias, load, jnp.asarray(rate, bias.dtype))


def _move_bias(bias: Array, load: Array, rate: Array) -> Array:
    load = load.astype(bias.dtype)
    return bias + rate * jnp.sign(load.mean(axis=-1, keepdims=True) - load)


@dataclasses.dataclass(frozen=True)
class RouterOptions:
    """How a layer routes; hashable, as static attributes of modules must be. The first are keywords of `topk_router`.

    Attributes:
      k, renormalize, num_groups, topk_groups, group_score, scale: see `topk_router`.
      score: likewise, or "sparsemixer", of which only `k=2` is known.
      num_identity_experts: experts behind all others that return their token.
    """

    k: int
    score: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    renormalize: bool = True
    num_groups: int = 1
    topk_groups: int = 1
    group_score: Literal["top2_sum", "max"] = "top2_sum"
    scale: float = 1.0
    num_identity_experts: int = 0


class RouterWeights(NamedTuple):
    """`kernel [H, E]` and `bias [E]` or None of the logits, and `selection [E]` added to scores or None; float32."""

    kernel: Array
    bias: Array | None
    selection: Array | None


class Routed(NamedTuple):
    """What a layer's router decided, and its statistics over all ranks.

    Attributes:
      topk_idx: `[N, K]` ids; -1 for tokens that do not count, and for identity experts.
      topk_weights: `[N, K]`.
      identity_weight: `[N]` by which identity experts scale their token, or None.
      load: `[E]` int32 assignments, identity experts included.
      load_balancing_loss: `[]`.
      router_z_loss: `[]`, 0 where the logits are not known.
    """

    topk_idx: Array
    topk_weights: Array
    identity_weight: Array | None
    load: Array
    load_balancing_loss: Array
    router_z_loss: Array


@result_type
class MoEMetrics(dict[str, Array]):
    """What one call of `jax_ep.flax.MoE` did, over all devices; its arrays are items and attributes.

    A pytree that passes scan, remat and grad's `aux`, and a dict, which `nnx.tabulate` needs. Tokens that `token_mask`
    leaves out count nowhere.

    Attributes:
      load: `[E]` int32, (token, k) assignments of each expert, identity experts behind the others.
      load_balancing_loss: `[]` float32, 1 when every expert is equally loaded; add it to the loss with a weight.
      router_z_loss: `[]` float32, mean squared logsumexp of the router logits; 0 with a `router_fn`, which has none.
      dropped: `[]` int32, assignments that did not fit `capacity`.
    """

    load: Array
    load_balancing_loss: Array
    router_z_loss: Array
    dropped: Array

    def __getattr__(self, name: str) -> Array:
        """An array by its name."""
        if name in self:
            return self[name]
        raise AttributeError(f"MoEMetrics has no attribute {name!r}, only {[*self]} and load_share")

    def tree_flatten_with_keys(self) -> tuple[tuple[Any, ...], tuple[str, ...]]:
        """The arrays with their names, and the names."""
        return tuple((jax.tree_util.GetAttrKey(name), array) for name, array in self.items()), tuple(self)

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], arrays: tuple[Any, ...]) -> MoEMetrics:
        """The metrics of these arrays, whatever JAX puts in their place."""
        return cls(zip(names, arrays, strict=True))

    @property
    def load_share(self) -> Array:
        """`[..., E]` share of the assignments that went to each expert."""
        load = self.load.astype(jnp.float32)
        return load / jnp.maximum(load.sum(axis=-1, keepdims=True), 1.0)


def route(
    tokens: Array,
    token_mask: Array | None,
    router: RouterWeights | Routing,
    *,
    options: RouterOptions,
    axes: tuple[str, ...],
) -> Routed:
    """Expert choice and statistics of a layer's tokens.

    Args:
      tokens: `[N, H]` floating.
      token_mask: `[N]` bool, False for tokens that go to no expert and count in no statistic; None: all do.
      router: its weights, or what another one decided.
      options: how it decides.
      axes: inside `shard_map`, mesh axes over which the statistics are summed.
    """
    if token_mask is not None:
        tokens = jnp.where(token_mask[:, None], tokens, 0)  # which may be NaN, and must not spoil gradients
    logits = None
    if isinstance(router, Routing):
        topk_idx, topk_weights, scores = router
    else:
        logits = jnp.matmul(tokens.astype(jnp.float32), router.kernel, precision=lax.Precision.HIGHEST)
        if router.bias is not None:
            logits = logits + router.bias[None]
        topk_idx, topk_weights, scores = _decide(logits, router.selection, options)
    if token_mask is not None:
        topk_idx = jnp.where(token_mask[:, None], topk_idx, -1)
    num_experts = scores.shape[1]
    load = count_assignments(topk_idx, num_experts)
    of_tokens: dict[str, Any] = {"token_mask": token_mask, "axis_name": axes or None}
    balance = load_balancing_loss(scores, topk_idx, **of_tokens)
    z_loss = jnp.zeros((), jnp.float32) if logits is None else router_z_loss(logits, **of_tokens)
    weight = None
    if options.num_identity_experts:
        routing = Routing(topk_idx, topk_weights, scores)
        (topk_idx, topk_weights, _), weight = identity_experts(routing, num_experts - options.num_identity_experts)
    return Routed(topk_idx, topk_weights, weight, lax.psum(load, axes) if axes else load, balance, z_loss)


def _decide(logits: Array, selection: Array | None, options: RouterOptions) -> Routing:
    if options.score == "sparsemixer":
        return sparsemixer_router(logits)
    return topk_router(
        logits,
        options.k,
        score=options.score,
        renormalize=options.renormalize,
        bias=selection,
        num_groups=options.num_groups,
        topk_groups=options.topk_groups,
        group_score=options.group_score,
        scale=options.scale,
    )


def count_assignments(topk_idx: Array, num_experts: int) -> Array:
    """`[E]` int32 assignments per expert; comparisons instead of a scatter, which GPUs serialise."""
    hits = topk_idx.reshape(-1, 1) == jnp.arange(num_experts, dtype=topk_idx.dtype)[None]
    return hits.sum(axis=0, dtype=jnp.int32)


def count_dropped(
    topk_idx: Array,
    *,
    axes: tuple[str, ...],
    batch_axes: tuple[str, ...],
    capacity: int,
    num_experts: int,
    num_ranks: int,
) -> Array:
    """`[]` int32 assignments past `capacity` over all shards; the ranks of a batch shard take its tokens only."""
    load = lax.psum(count_assignments(topk_idx, num_experts), axes)
    rows = load.reshape(num_ranks, -1).sum(axis=1)
    return lax.psum(jnp.maximum(rows - capacity, 0).sum(dtype=jnp.int32), batch_axes)


def _axes(axis_name: AxisName | None) -> tuple[str, ...] | None:
    return None if axis_name is None else axis_tuple(axis_name)


def _counting(rows: Array, token_mask: Array | None) -> Array:
    """`[T, E]` with zeros for tokens that do not count, whatever they hold: neither values nor gradients see them."""
    return rows if token_mask is None else jnp.where(token_mask[:, None], rows, 0)


def _mean_over_tokens(values: Array, token_mask: Array | None, axis_name: tuple[str, ...] | None) -> Array:
    """`[T, ...]`, zero for tokens that do not count, to the mean over those that do, on all ranks of `axis_name`."""
    total = jnp.sum(values, axis=0)
    count = values.shape[0] if token_mask is None else jnp.sum(token_mask, dtype=jnp.int32)
    if axis_name is not None:
        # Ranks may have different numbers of tokens that count, so the mean of their means would be another one.
        total, count = (lax.psum(value, axis_name) for value in (total, count))
    return total / jnp.maximum(count, 1).astype(values.dtype)
