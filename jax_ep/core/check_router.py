"""Argument checks of routers, their losses and the update of the selection bias."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep.core import check
from jax_ep.core.mesh_axes import axis_size
from jax_ep.core.router import Router
from jax_ep.types import Array, AxisName, Routing
from jax_ep.values import in_float32, shown, type_name


def topk(logits: Any, k: Any, router: Router, bias: Any, token_mask: Any, topk_idx: Any) -> None:
    """Check the arguments of `topk_router`."""
    function = "topk_router"
    num_tokens, num_experts = check.floating(function, "logits", logits, "[T, E]").shape
    router.check_sizes(function, "k", check.integer(function, "k", k), num_experts)
    if bias is not None:
        remedy = "pass one value per expert"
        bias = check.floating(function, "bias", bias, "[E]", remedy=remedy, E=num_experts)
    if bias is not None and router.score == "sparsemixer":
        raise ValueError(f"{function}: bias with Router('sparsemixer'), expected none; leave bias out.")
    if bias is None and router.selection_bias:
        raise ValueError(
            f"{function}: bias=None with selection_bias=True of the Router, expected an array [{num_experts}]; pass"
            " bias=, or a Router without selection_bias."
        )
    other_tokens(function, num_tokens, token_mask, None)
    if topk_idx is None:
        return
    if router.score == "sparsemixer":
        raise ValueError(f"{function}: topk_idx with Router('sparsemixer'), expected none; leave topk_idx out.")
    ids = check.expert_ids(function, topk_idx, num_tokens, num_experts)
    check.size(function, "K of topk_idx", ids.shape[1], int(k), "pass the ids of a pass with the same k")


def number(function: str, name: str, value: Any) -> None:
    """Check that `value` is a number, which may be traced."""
    check.not_deleted(function, name, value)
    is_array = isinstance(value, jax.Array | np.ndarray | np.generic)
    is_real = _is_real(value.dtype) if is_array else isinstance(value, int | float) and not isinstance(value, bool)
    if not is_real or np.ndim(value) != 0:
        shape = f" of shape {np.shape(value)}" if hasattr(value, "shape") else ""
        raise TypeError(f"{function}: {name} is {type_name(value)}{shape}, expected a number; pass a float.")
    if isinstance(value, int) and math.isinf(in_float32(value)):
        raise ValueError(f"{function}: {name}={shown(value)}, expected a number in float32; pass a float.")


def _is_real(dtype: np.dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.floating)


def sparsemixer(logits: Any, jitter_eps: Any, key: Any) -> None:
    """Check the arguments of `sparsemixer_router`."""
    function = "sparsemixer_router"
    num_experts = check.floating(function, "logits", logits, "[T, E]").shape[1]
    if num_experts < 2:
        raise ValueError(f"{function}: logits are of {num_experts} experts, expected at least 2; pass [T, E] logits.")
    number(function, "jitter_eps", jitter_eps)
    if not isinstance(jitter_eps, jax.Array) and not jitter_eps >= 0:
        raise ValueError(f"{function}: jitter_eps={shown(jitter_eps)}, expected at least 0; pass 0.01, for example.")
    if key is not None:
        check.random_key(function, "key", key)


def identity_experts(routing: Any, num_experts: Any) -> int:
    """Check the arguments of `identity_experts`; return `num_experts` as an int."""
    function = "identity_experts"
    check.instance(function, "routing", routing, Routing, "a Routing", remedy="pass what topk_router returns")
    num_experts = check.integer(function, "num_experts", num_experts)
    num_tokens, routed = check.floating(function, "scores of routing", routing.scores, "[T, E]").shape
    ids = check.expert_ids(function, routing.topk_idx, num_tokens, routed)
    check.router_weights(function, routing.topk_weights, ids.shape, routing.scores.dtype)
    if num_experts > routed:
        raise ValueError(
            f"{function}: num_experts={num_experts} exceeds the {routed} experts of the routing; pass the number of"
            " experts that compute."
        )
    return num_experts


def balancing_loss(scores: Any, topk_idx: Any, token_mask: Any, axis_name: AxisName | None) -> None:
    """Check the arguments of `load_balancing_loss`."""
    function = "load_balancing_loss"
    scores = _of_experts(function, "scores", scores)
    remedy = "pass the ids of the same tokens"
    topk_idx = check.array(function, "topk_idx", topk_idx, "[T, K]", remedy=remedy, T=scores.shape[0])
    if not jnp.issubdtype(topk_idx.dtype, jnp.integer):
        raise TypeError(f"{function}: topk_idx has dtype {topk_idx.dtype}, expected int32; use .astype(jnp.int32).")
    other_tokens(function, scores.shape[0], token_mask, axis_name)


def z_loss(logits: Any, token_mask: Any, axis_name: AxisName | None) -> None:
    """Check the arguments of `router_z_loss`."""
    function = "router_z_loss"
    logits = _of_experts(function, "logits", logits)
    other_tokens(function, logits.shape[0], token_mask, axis_name)


def _of_experts(function: str, name: str, value: Any) -> Array:
    return check.floating(function, name, value, "[T, E >= 1]", remedy="pass one column per expert")


def other_tokens(function: str, num_tokens: int, token_mask: Any, axis_name: AxisName | None) -> None:
    """Check the arguments that say which tokens count, here and on other ranks."""
    if token_mask is not None:
        check.token_mask(function, token_mask, (num_tokens,))
    if axis_name is not None:
        axis_size(axis_name, function=function, of_vmap=True)


def bias_step(bias: Any, load: Any, rate: Any) -> tuple[Array, Array]:
    """Return the checked arrays of `update_router_bias`: integers and 16-bit biases would lose a step of 1e-3."""
    function = "update_router_bias"
    bias, load = (check.array(function, name, x, "[..., E]") for name, x in (("bias", bias), ("load", load)))
    if bias.dtype not in (jnp.float32, jnp.float64):
        raise TypeError(
            f"{function}: bias has dtype {bias.dtype}, expected float32 or float64, since others round small steps"
            " away; cast it with astype."
        )
    if bias.shape != load.shape:
        raise ValueError(
            f"{function}: load has shape {load.shape}, expected that of bias, {bias.shape}; pass the load of the same"
            " layers."
        )
    if not _is_real(load.dtype):
        raise TypeError(f"{function}: load has dtype {load.dtype}, expected int32 or float32; pass MoEMetrics.load.")
    number(function, "rate", rate)
    if not isinstance(rate, jax.Array) and not 0 <= in_float32(rate) < math.inf:
        raise ValueError(f"{function}: rate={shown(rate)}, expected a finite number from 0 on; pass 1e-3, for example.")
    return bias, load


def router_or_callable(
    router: Router | Callable[[Array], Routing] | None,
) -> tuple[Router, Callable[[Array], Routing] | None]:
    """Split `router` into the Router of the layer, and the callable that replaces it or None."""
    if router is None or isinstance(router, Router):
        return router or Router(), None
    if not callable(router):
        raise TypeError(
            f"MoE: router is {type_name(router)}, expected a jax_ep.Router, or a callable of tokens that returns a"
            " jax_ep.types.Routing; pass jax_ep.Router(...)."
        )
    return Router(), router
