"""The expert layer whose first product stores activated rows, where an implementation has such a product.

Where a gradient is wanted, the layer keeps hidden rows instead, which activated ones do not give back.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.custom_derivatives import CustomVJPPrimal

from jax_ep.core.bias import Bias
from jax_ep.ops import activation_gemm_combine, exchange_gemm, registry
from jax_ep.types import Array, Experts, Handle, Options

Layer = Callable[..., Array]


def choose(
    options: Options, experts: Experts, x: Array, w: Array, b_gate_up: Array | None, handle: Handle
) -> str | None:
    """Whose product of dispatched tokens and `w [L, H, 2I]` should store activated rows; None: it should not."""
    if b_gate_up is not None:
        return None
    name = exchange_gemm.product_apart(options, x, w, handle)
    if name not in registry.available("gemm_activation"):
        return None
    return name if registry.requirements(name).activates(experts, w.shape[1]) else None


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3, 4))
def run(
    options: Options,
    name: str,
    unfused: Layer,
    back: Options,
    experts: Experts,
    x: Array,
    weights: Array,
    handle: Handle,
    parts: Any,
) -> Array:
    """`[T, H]` tokens, `[T, K]` weights and the matrices and biases of experts to sums `[T, H]`.

    The first product is that of the implementation `name`. `unfused(options, back, ...)` is the same; `back` are the
    options of the second product and the way back.
    """
    w_gate_up, w_down, _, b_down = parts
    rows, row_weights = exchange_gemm.dispatch_apart(options, x, weights, w_gate_up, handle)
    product = registry.get("gemm_activation", name).gemm_activation
    activated = product(experts, rows, w_gate_up, handle.group_sizes, row_weights)
    bias = None if b_down is None else Bias(b_down, row_weights)
    return activation_gemm_combine.multiply_and_combine(back, activated, w_down, handle, bias)


def _forward(
    options: Options, name: str, unfused: Layer, back: Options, experts: Experts, *arguments: Any
) -> tuple[Array, Any]:
    """Keeps what `unfused` does, for those arguments alone whose gradient somebody wants."""
    trained = jax.tree.map(lambda a: a.value if a.perturbed else None, arguments, is_leaf=_is_argument)

    def of(trained: Any) -> Array:
        whole = jax.tree.map(lambda a, t: a.value if t is None else t, arguments, trained, is_leaf=_is_argument)
        return unfused(options, back, experts, *whole)

    return jax.vjp(of, trained)


def _is_argument(node: Any) -> bool:
    return isinstance(node, CustomVJPPrimal)


def _backward(
    options: Options, name: str, unfused: Layer, back: Options, experts: Experts, pull: Any, cotangent: Any
) -> tuple[Any, ...]:
    return pull(cotangent)[0]


run.defvjp(_forward, _backward, symbolic_zeros=True)
