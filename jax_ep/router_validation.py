"""Argument checks of the router and its losses, with the messages of validation.py."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep import validation as check
from jax_ep.mesh_axes import axis_size
from jax_ep.types import AxisName


def router_arguments(
    logits: Any, k: Any, score: str, bias: Any, num_groups: Any, topk_groups: Any, group_score: str, scale: Any
) -> None:
    """Arguments of `topk_router`."""
    function = "topk_router"
    num_experts = check.matrix(function, "logits", logits).shape[1]
    for name, value in (("k", k), ("num_groups", num_groups), ("topk_groups", topk_groups)):
        check.positive(function, name, value)
    if score not in ("softmax", "sigmoid"):
        raise ValueError(f"{function}: score={score!r}, expected 'softmax' or 'sigmoid'; pass one of them.")
    if group_score not in ("top2_sum", "max"):
        raise ValueError(f"{function}: group_score={group_score!r}, expected 'top2_sum' or 'max'; pass one of them.")
    if not isinstance(scale, int | float | np.number | jax.Array | np.ndarray) or np.ndim(scale) != 0:
        shape = f" of shape {np.shape(scale)}" if hasattr(scale, "shape") else ""
        raise TypeError(f"{function}: scale is a {type(scale).__name__}{shape}, expected a number; pass a float.")
    if num_experts % num_groups:
        raise ValueError(
            f"{function}: {num_experts} experts do not divide into num_groups={num_groups}; change either."
        )
    if topk_groups > num_groups:
        raise ValueError(f"{function}: topk_groups={topk_groups} exceeds num_groups={num_groups}; lower topk_groups.")
    selectable = num_experts // num_groups * topk_groups if num_groups > 1 else num_experts
    if k > selectable:
        raise ValueError(
            f"{function}: k={k} exceeds the {selectable} experts that can be chosen; lower k or raise topk_groups."
        )
    if bias is not None:
        bias = check.floating(function, "bias", check.array(function, "bias", bias, 1, "[E]"))
        check.size(function, "the length of bias", bias.shape[0], num_experts, "pass one value per expert")


def loss_arguments(scores: Any, topk_idx: Any, token_mask: Any, axis_name: AxisName | None) -> None:
    """Arguments of `load_balancing_loss`."""
    function = "load_balancing_loss"
    scores = check.matrix(function, "scores", scores)
    topk_idx = check.array(function, "topk_idx", topk_idx, 2, "[T, K]")
    if not jnp.issubdtype(topk_idx.dtype, jnp.integer):
        raise TypeError(f"{function}: topk_idx has dtype {topk_idx.dtype}, expected int32; use .astype(jnp.int32).")
    remedy = "pass the ids of the same tokens"
    check.size(function, "the number of rows of topk_idx", topk_idx.shape[0], scores.shape[0], remedy)
    _other_tokens(function, scores.shape[0], token_mask, axis_name)


def z_loss_arguments(logits: Any, token_mask: Any, axis_name: AxisName | None) -> None:
    """Arguments of `router_z_loss`."""
    function = "router_z_loss"
    num_tokens = check.matrix(function, "logits", logits).shape[0]
    _other_tokens(function, num_tokens, token_mask, axis_name)


def _other_tokens(function: str, num_tokens: int, token_mask: Any, axis_name: AxisName | None) -> None:
    """Which tokens count, here and on other ranks."""
    if token_mask is not None:
        check_token_mask(function, token_mask, (num_tokens,), "[T]")
    if axis_name is not None:
        axis_size(axis_name, function=function, of_vmap=True)


def check_token_mask(function: str, token_mask: Any, shape: tuple[int, ...], meaning: str) -> None:
    """One bool for each token."""
    token_mask = check.array(function, "token_mask", token_mask, len(shape), meaning)
    if token_mask.dtype != jnp.bool_:
        raise TypeError(
            f"{function}: token_mask has dtype {token_mask.dtype}, expected bool, True for tokens that count; pass"
            " attention_mask != 0."
        )
    if token_mask.shape != shape:
        raise ValueError(
            f"{function}: token_mask has shape {token_mask.shape}, expected {shape}, {meaning}; pass a bool per token."
        )
