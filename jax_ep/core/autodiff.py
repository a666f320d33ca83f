"""Rules for JAX: names of residuals, derivatives of linear pairs, functions without one, late lowering."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_ep.types import Array

TOKENS_NAME = "jax_ep.tokens"
"""Name of dispatched tokens in `jax.checkpoint` policies."""
HIDDEN_NAME = "jax_ep.hidden"
"""Name of the first matmul's results in `jax.checkpoint` policies."""
OUTPUT_NAME = "jax_ep.output"
"""Name of the layer's results in `jax.checkpoint` policies."""


def transposes(function: Any, transpose: Any) -> None:
    """Define `transpose` as the backward pass of the linear custom VJP `function(plan, rows, *others, handle)`.

    `transpose` takes the cotangents of the results and the handle, and returns those of the arrays. `plan` has the plan
    of the backward pass as `transposed`.
    """

    def forward(plan: Any, rows: Array, *others: Any) -> tuple[Any, tuple[Array, Any]]:
        return function(plan, rows, *others), (rows[:0], others[-1])  # nothing of the rows, to know their dtype

    def backward(plan: Any, residuals: tuple[Array, Any], cotangents: Any) -> tuple[Any, ...]:
        like, handle = residuals
        rows, *others = cotangents if isinstance(cotangents, tuple) else (cotangents,)
        found = transpose(plan.transposed, rows.astype(like.dtype), *others, handle)
        return *(found if isinstance(found, tuple) else (found,)), None

    function.defvjp(forward, backward)


def saves_operands(function: Any) -> Callable[..., tuple[Any, tuple[Any, ...]]]:
    """Return the forward rule of a custom VJP that saves its operands, which are all but its static arguments."""

    def forward(*arguments: Any) -> tuple[Any, tuple[Any, ...]]:
        operands = (x for i, x in enumerate(arguments) if i not in function.nondiff_argnums)
        return function(*arguments), tuple(operands)

    return forward


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def call_without_gradient(remedy: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return `function(*arguments)`; differentiating it raises a `TypeError`. `function` may lack a derivative."""
    return function(*arguments)


def _call_forward(remedy: str, function: Callable[..., Any], *arguments: Any) -> tuple[Any, None]:
    return call_without_gradient(remedy, function, *arguments), None  # without one under an outer derivative, too


def _refuse(remedy: str, *others: Any) -> Any:
    raise TypeError(remedy)


call_without_gradient.defvjp(_call_forward, _refuse)


def without_gradient[Tree](remedy: str, tree: Tree) -> Tree:
    """Return `tree` unchanged; differentiating it raises a `TypeError` with the message `remedy`."""
    return call_without_gradient(remedy, _same, tree)


def _same[Tree](tree: Tree) -> Tree:
    return tree


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def without_tangent[Tree](remedy: str, tree: Tree) -> Tree:
    """Return `tree` unchanged; a `TypeError` if it is differentiated, also where all that uses it are integers."""
    return tree


without_tangent.defvjp(_refuse, _refuse)


def deferred(name: str, run: Callable[..., Sequence[Array]]) -> Primitive:
    """Return a primitive that lowers to `run(*operands, **params)` on every platform.

    Its parameter `results` holds the `jax.core.ShapedArray`s of the results, typed as replicated. All parameters must
    be hashable. The primitive has no derivative, and `jax.vmap` calls it once per element, in order.
    """
    call = Primitive(name)
    call.multiple_results = True

    @functools.lru_cache(256)
    def jitted(params: tuple[tuple[str, Any], ...]) -> Any:
        return jax.jit(functools.partial(call.bind, **dict(params)))

    call.def_impl(lambda *operands, **params: jitted(tuple(sorted(params.items())))(*operands))
    call.def_abstract_eval(lambda *_, results, **__: list(results))
    batching.primitive_batchers[call] = in_order(call)
    mlir.register_lowering(call, mlir.lower_fun(run, multiple_results=True))
    return call


def in_order(call: Primitive) -> Callable[..., Any]:
    """Return a batching rule that calls a primitive with several results once per batch element, in order."""

    def rule(operands: Sequence[Array], axes: Sequence[int | None], **params: Any) -> tuple[Any, tuple[int, ...]]:
        batched = [jnp.moveaxis(x, axis, 0) for x, axis in zip(operands, axes, strict=True) if axis is not None]

        def element(elements: list[Array]) -> Any:
            rest = iter(elements)
            own = (x if axis is None else next(rest) for x, axis in zip(operands, axes, strict=True))
            return call.bind(*own, **params)

        outputs = lax.map(element, batched)
        return outputs, (0,) * len(outputs)

    return rule


def batched_alike[Tree](tree: Tree, others: Any) -> Tree:
    """Return `tree` unchanged; `jax.vmap` batches all its arrays, or none if it batches none of them and of `others`.

    A custom VJP whose results are not batched alike has no gradient under `jax.vmap`: those that the batch shares would
    count once per element.
    """
    arrays, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, _alike.bind(*arrays, *jax.tree.leaves(others), number=len(arrays)))


def _batch_alike(operands: Sequence[Array], axes: Sequence[int | None], *, number: int) -> tuple[Any, tuple[int, ...]]:
    size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)

    def batched(x: Array, axis: int | None) -> Array:
        return jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)

    return list(map(batched, operands[:number], axes[:number])), (0,) * number


def _alike_derivative(primals: Sequence[Array], tangents: Sequence[Any], *, number: int) -> tuple[Any, Any]:
    return _alike.bind(*primals, number=number), list(tangents[:number])


_alike = Primitive("jax_ep_batched_alike")
_alike.multiple_results = True
_alike.def_impl(lambda *operands, number: list(operands[:number]))
_alike.def_abstract_eval(lambda *types, number: list(types[:number]))
ad.primitive_jvps[_alike] = _alike_derivative
batching.primitive_batchers[_alike] = _batch_alike
mlir.register_lowering(_alike, lambda _, *operands, number: operands[:number])


def shaped(x: Any) -> jax.core.ShapedArray:
    """Return the `results` entry for an array of this shape and dtype."""
    return jax.core.ShapedArray(x.shape, x.dtype)
