"""Frozen values of layers and checkpoints: how a router chooses experts, and the experts that every token passes."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, NamedTuple

from jax_ep.core import check
from jax_ep.types import Array
from jax_ep.values import shown

# DeepSeek-V3 adds 1e-20 to the sum. A lower bound of 1e-18 gives the same float32 weights for every sum above 1e-11,
# and the gradient of the division, which squares it, stays finite for tokens whose scores all underflow.
SMALLEST_SUM = 1e-18
"""By which the scores of a token are divided at least, to renormalize them."""

_SCORES = ("softmax", "sigmoid", "sparsemixer")
_GROUP_SCORES = ("top2_sum", "max")
_SPARSEMIXER_TOP_K = 2


@dataclasses.dataclass(frozen=True)
class Router:
    """How a router chooses experts. Frozen and hashable; values are checked at construction.

    Routers of published models; the page Models lists the rest of their layers:

    - Mixtral, Qwen3-MoE, gpt-oss: `Router()`. Qwen2-MoE, OLMoE: `Router(renormalize=False)`.
    - DeepSeek-V2: `Router(renormalize=False, num_groups=8, topk_groups=3, group_score="max", scale=16.0)`.
    - DeepSeek-V3: `Router("sigmoid", num_groups=8, topk_groups=4, scale=2.5, selection_bias=True)`. GLM-4.5: without
      groups. MiniMax-M2: without groups and scale.
    - ERNIE-4.5: `Router(selection_bias=True)`.
    - LongCat-Flash: `Router(renormalize=False, scale=6.0, selection_bias=True, num_identity_experts=256)`.
    - Llama 4: `Router("sigmoid", renormalize=False)` with one expert per token and `Experts(weight_on="input")`.
    - Phi-3.5-MoE: `Router("sparsemixer")`.

    Attributes:
      score: "softmax" or "sigmoid" of the logits, or "sparsemixer", see `jax_ep.routing.sparsemixer_router`, which
        chooses two experts and supports neither groups, nor a scale, nor a selection bias.
      renormalize: divide the chosen scores by their sum, so that the weights of a token sum to `scale`. "sparsemixer"
        has no such choice. With one expert per token every weight is then `scale`, so differentiating it is an error:
        pass False to train such a router.
      num_groups: number of contiguous groups of equal size that the experts form.
      topk_groups: number of groups per token from which experts are chosen.
      group_score: the score of a group: the sum of its two best experts (DeepSeek-V3), or its best one (DeepSeek-V2).
      scale: factor on the weights (`routed_scaling_factor`), finite and not 0.
      logit_bias: the logits have a bias, as in gpt-oss. `jax_ep.flax.MoE` makes it a parameter; the logits that
        `topk_router` takes contain it already.
      selection_bias: experts are chosen by score plus bias (auxiliary-loss-free balancing, arXiv:2408.15664).
        `jax_ep.flax.MoE` keeps it as a `RouterBias`; `topk_router` takes it as `bias=`.
      num_identity_experts: experts behind all others that return their token, as in LongCat-Flash. `jax_ep.flax.MoE`
        computes them; after `topk_router` see `jax_ep.routing.identity_experts`.

    Raises:
      ValueError: an unknown score, more chosen groups than groups, a `group_score` without groups, a scale of 0, or an
        option that "sparsemixer" lacks.
      TypeError: a value of another type.

    Example:
      >>> import jax_ep
      >>> deepseek_v3 = jax_ep.Router("sigmoid", num_groups=8, topk_groups=4, scale=2.5, selection_bias=True)
      >>> deepseek_v3.renormalize
      True

    Source: Mixtral (arXiv:2401.04088), DeepSeek-V2 (arXiv:2405.04434), DeepSeek-V3 (arXiv:2412.19437).
    """

    score: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    _: dataclasses.KW_ONLY
    renormalize: bool = True
    num_groups: int = 1
    topk_groups: int = 1
    group_score: Literal["top2_sum", "max"] = "top2_sum"
    scale: float = 1.0
    logit_bias: bool = False
    selection_bias: bool = False
    num_identity_experts: int = 0

    def __post_init__(self) -> None:
        check.choice("Router", "score", self.score, _SCORES)
        check.choice("Router", "group_score", self.group_score, _GROUP_SCORES)
        for name in ("renormalize", "logit_bias", "selection_bias"):
            object.__setattr__(self, name, check.flag("Router", name, getattr(self, name)))
        for name, least in (("num_groups", 1), ("topk_groups", 1), ("num_identity_experts", 0)):
            object.__setattr__(self, name, check.integer("Router", name, getattr(self, name), least=least))
        self._check_scale()
        if self.topk_groups > self.num_groups:
            raise ValueError(
                f"Router: topk_groups={self.topk_groups} exceeds num_groups={self.num_groups}, expected at most that;"
                " lower topk_groups."
            )
        if self.group_score == "max" and self.num_groups == 1:
            raise ValueError(
                "Router: group_score='max' with num_groups=1, expected several groups to score; set num_groups, or"
                " leave group_score out."
            )
        useless = {name: getattr(self, name) for name in ("renormalize", "selection_bias", "scale", "num_groups")}
        if self.score == "sparsemixer" and tuple(useless.values()) != (True, False, 1, 1):
            given = ", ".join(f"{name}={value}" for name, value in useless.items())
            raise ValueError(
                f"Router: {given} with score='sparsemixer', expected the defaults, since SparseMixer has no other"
                " weights, no bias, no scale and no groups; leave them out."
            )

    def _check_scale(self) -> None:
        value = self.scale
        remedy = "pass a float, and multiply topk_weights by an array yourself"
        object.__setattr__(self, "scale", check.number("Router", "scale", value, remedy=remedy))
        if self.scale == 0 or not math.isfinite(self.scale):
            raise ValueError(
                f"Router: scale={shown(value)}, expected a finite float32 other than 0, since it scales all router"
                " weights and their gradients; pass 1.0 for no factor."
            )

    def check_sizes(self, function: str, name: str, top_k: int, num_logits: int) -> None:
        """Check that `top_k` experts can be chosen; errors call it `name`."""
        check.multiple(
            function, "the number of experts", num_logits, self.num_groups, "num_groups of the Router", "change either"
        )
        if self.num_identity_experts >= num_logits:
            raise ValueError(
                f"{function}: {num_logits} experts with num_identity_experts={self.num_identity_experts} of the Router,"
                " expected fewer, since the others compute; lower it."
            )
        if self.score == "sparsemixer" and (top_k != _SPARSEMIXER_TOP_K or num_logits < _SPARSEMIXER_TOP_K):
            raise ValueError(
                f"{function}: {name}={top_k} of {num_logits} experts with Router('sparsemixer'), expected 2 of at least"
                f" 2; pass {name}=2, or another Router."
            )
        selectable = num_logits // self.num_groups * self.topk_groups
        if top_k > selectable:
            remedy = f"lower {name}" if self.num_groups == 1 else f"lower {name} or raise topk_groups"
            raise ValueError(
                f"{function}: {name}={top_k} exceeds the {selectable} experts that can be chosen, expected at most that"
                f" many; {remedy}."
            )


class RouterInputs(NamedTuple):
    """Inputs of a router, see `topk_router`."""

    logits: Array  # `[T, E]`
    bias: Array | None  # `[E]`
    token_mask: Array | None  # `[T]` bool


@dataclasses.dataclass(frozen=True)
class SharedExperts:
    """Experts that every token passes, computed as one dense MLP with the activation of the routed experts.

    Attributes:
      num: how many there are; their intermediate sizes add up.
      intermediate_size: I of one shared expert, if it differs from that of a routed expert, as in Qwen2-MoE; None: the
        same I.
      gate: scale their output by `sigmoid(x @ shared_gate [H, 1])`, as in Qwen2-MoE.

    Raises:
      ValueError: a number below 1.
      TypeError: a value of another type.

    Example:
      >>> from jax_ep.flax import SharedExperts
      >>> SharedExperts(2).gate
      False

    Source: DeepSeekMoE (arXiv:2401.06066).
    """

    num: int = 1
    _: dataclasses.KW_ONLY
    intermediate_size: int | None = None
    gate: bool = False

    def __post_init__(self) -> None:
        remedy = "pass a positive one, or shared_experts=None for a layer without shared experts"
        object.__setattr__(self, "num", check.integer("SharedExperts", "num", self.num, remedy=remedy))
        if self.intermediate_size is not None:
            size = check.integer("SharedExperts", "intermediate_size", self.intermediate_size)
            object.__setattr__(self, "intermediate_size", size)
        object.__setattr__(self, "gate", check.flag("SharedExperts", "gate", self.gate))
