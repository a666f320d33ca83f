"""The expert layer whose first product stores activated rows, where an implementation has such a product.

Where a gradient is wanted, the layer keeps hidden rows instead, which activated ones do not give back.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import jax
from jax.custom_derivatives import CustomVJPPrimal

from jax_ep.core.facts import Part
from jax_ep.core.layout import Bias
from jax_ep.ops import exchange_gemm, registry
from jax_ep.ops.plan import LayerPlan
from jax_ep.types import Array, Experts, Handle

Layer = Callable[..., Array]
type _Pull = Callable[[Array], tuple[tuple[object, ...]]]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def run(
    plan: LayerPlan,
    activated: Part,
    unfused: Layer,
    experts: Experts,
    x: Array,
    weights: Array,
    handle: Handle,
    parts: tuple[Array, Array, Array | None, Array | None],
) -> Array:
    """`[T, H]` tokens, `[T, K]` weights and the matrices and biases of experts to sums `[T, H]`.

    The first product is `activated`. `unfused(plan, ...)` is the same without it.
    """
    w_gate_up, w_down, _, b_down = parts
    rows, row_weights = exchange_gemm.dispatch_apart(plan.first, x, weights, handle)
    product = registry.get("gemm_activation", activated.implementation).gemm_activation
    rows = product(experts, rows, w_gate_up, handle.group_sizes, cast(Array, row_weights))
    bias = None if b_down is None else Bias(b_down, row_weights)
    return exchange_gemm.multiply_and_combine(plan.second, rows, w_down, handle, bias)


def _forward(
    plan: LayerPlan, activated: Part, unfused: Layer, experts: Experts, *arguments: object
) -> tuple[Array, _Pull]:
    """Keeps what `unfused` does, for those arguments alone whose gradient somebody wants."""
    trained = jax.tree.map(lambda a: a.value if a.perturbed else None, arguments, is_leaf=_is_argument)

    def of(trained: object) -> Array:
        whole = jax.tree.map(lambda a, t: a.value if t is None else t, arguments, trained, is_leaf=_is_argument)
        return unfused(plan, experts, *whole)

    return jax.vjp(of, trained)


def _is_argument(node: object) -> bool:
    return isinstance(node, CustomVJPPrimal)


def _backward(
    plan: LayerPlan, activated: Part, unfused: Layer, experts: Experts, pull: _Pull, cotangent: Array
) -> tuple[object, ...]:
    return pull(cotangent)[0]


run.defvjp(_forward, _backward, symbolic_zeros=True)
