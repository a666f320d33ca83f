"""The expert layer on one device in one launch, where an implementation has it.

Where a gradient is wanted, the layer runs in several launches, which keep what the gradient needs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.typing import DTypeLike

from jax_ep.core import check
from jax_ep.core.expert_matrices import QuantizedExperts
from jax_ep.ops import quantized_gemm, registry
from jax_ep.types import Array, Experts, Options

Layer = Callable[..., Array]
Matrices = tuple[Array, Array] | tuple[QuantizedExperts, QuantizedExperts]


def is_wanted(
    options: Options, experts: Experts, x: Array, topk_idx: Array, matrices: Matrices, kept: dict[str, Any]
) -> bool:
    """Whether a layer is one launch: as the schedule says, or where one should be faster than several.

    `matrices` are those of both products, and `kept` the keywords of `moe` that such a launch has no use for.

    Raises:
      ValueError: the schedule wants it, and there is none.
      TypeError: ids that are no array, of which there are so many.
      NotImplementedError: likewise, with none of the implementations asked for.
    """
    schedule = options.schedule
    if schedule.single_launch is None:
        modes = schedule.dispatch_mode, schedule.combine_mode, schedule.fuse_weight_gradients
        name = registry.first_choice(options, "fused_moe", x.dtype)
        if modes != (None, None, None) or name is None:
            return False
        reason = _reason_against(options, name, experts, x, topk_idx, matrices, kept)
        return reason is None and registry.get("fused_moe", name).is_fastest(topk_idx.size, *matrices)
    if not schedule.single_launch:
        return False
    name = registry.choose(options, "fused_moe", x.dtype)
    reason = _reason_against(options, name, experts, x, topk_idx, matrices, kept)
    if reason is not None:
        raise ValueError(f"{options.function}: single_launch=True, but {reason}; leave it None in the schedule.")
    return True


def _reason_against(
    options: Options, name: str, experts: Experts, x: Array, topk_idx: Array, matrices: Matrices, kept: dict[str, Any]
) -> str | None:
    if options.axis:
        return f"experts are spread over {options.axis}, and one launch serves one device"
    given = [name for name, value in kept.items() if value is not None]
    if given:
        return f"there is no such launch with {', '.join(given)}"
    slots = check.array(options.function, "topk_idx", topk_idx, 2, "[T, K]").size
    if registry.get("fused_moe", name).fuses(experts, slots, x.dtype, *matrices):
        return None
    shapes = " and ".join(str(tuple(w.shape)) for w in matrices)
    return (
        f"{name!r} has no such launch for {slots} slots of {x.dtype} tokens with matrices {shapes} and"
        f" {experts}: it takes tokens of 16 bits, sizes that are multiples of 8, or of 16 or 32 where matrices have"
        " 8 or 4 bits, scales of 16 to 128 elements in int4, no tokens in int8, and no function of the caller's"
    )


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def run(
    options: Options,
    experts: Experts,
    out_dtype: DTypeLike,
    unfused: Layer,
    topk_idx: Array,
    x: Array,
    topk_weights: Array,
    matrices: Matrices,
    biases: tuple[Array | None, Array | None],
) -> Array:
    """`moe` of checked arguments on one device; `unfused(topk_idx, x, topk_weights, matrices, biases)` is the same."""
    name = registry.choose(options, "fused_moe", x.dtype)
    launch = registry.get("fused_moe", name).fused_moe
    return launch(experts, x, topk_idx, topk_weights, *matrices, biases, out_dtype=out_dtype)


def _forward(
    options: Options, experts: Experts, out_dtype: DTypeLike, unfused: Layer, topk_idx: Array, *operands: Any
) -> tuple[Array, Any]:
    quantized_gemm.refuse_gradient(options, operands[2])
    return jax.vjp(partial(unfused, topk_idx), *operands)


def _backward(
    options: Options, experts: Experts, out_dtype: DTypeLike, unfused: Layer, pull: Any, cotangent: Array
) -> tuple[Any, ...]:
    return None, *pull(cotangent)


run.defvjp(_forward, _backward)
