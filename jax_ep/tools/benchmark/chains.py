"""Chains of dependent calls: each call needs a number from the previous one, so XLA cannot merge or reorder them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jax_ep.tools.benchmark.inputs import AXIS


def zero_after(result: Array) -> Array:
    """Return an int32 zero that the device knows only once it has the first element of `result`."""
    return (result.reshape(-1)[0].astype(jnp.float32) == 12345.678).astype(jnp.int32)  # never true


def after(array: Array, result: Array) -> Array:
    """Return `array`, available only once all of `result` is."""
    return array + zero_after(lax.optimization_barrier(result)).astype(array.dtype)


class Operation(NamedTuple):
    """An operation to time: a function of one rank, and its arguments on all ranks.

    Before each call, one element of the first argument, or of its first leaf, is rewritten. Arrays of int32 depend on
    it: otherwise XLA would compute once for all calls what needs only ids.
    """

    step: Callable[..., Any]
    arguments: tuple[Any, ...]


def chain(
    mesh: jax.sharding.Mesh, operation: Operation, length: int, *, unroll: int = 1
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a function that makes `length` dependent calls, and its arguments.

    One step of the loop, which takes some microseconds itself, makes `unroll` calls.
    """

    def body(*arguments: Any) -> Array:
        leaves, tree = jax.tree.flatten(arguments)

        def once(touched: Array, _: None) -> tuple[Array, None]:
            zero = zero_after(touched)
            known = [leaf + zero if leaf.dtype == jnp.int32 else leaf for leaf in leaves[1:]]
            results = operation.step(*jax.tree.unflatten(tree, [touched, *known]))
            # The barrier keeps XLA from computing only the elements that are read.
            zero = sum(map(zero_after, lax.optimization_barrier(jax.tree.leaves(results))), jnp.int32(0))
            return touch(touched, zero), None

        touched = lax.scan(once, leaves[0], None, length=length, unroll=unroll)[0]
        return touched.reshape(-1)[:1]

    specs = (jax.P(*AXIS),) * len(operation.arguments)
    sharded = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=jax.P(*AXIS), check_vma=False)
    return jax.jit(sharded), operation.arguments


def touch(x: Array, zero: Array) -> Array:
    """Return `x`, available only once the zero is; in place if nothing else needs it."""
    origin = (0,) * x.ndim
    return lax.dynamic_update_slice(x, lax.slice(x, origin, (1,) * x.ndim) + zero.astype(x.dtype), origin)


def zero_chain(
    mesh: jax.sharding.Mesh, step: Callable[..., Any], arrays: tuple[Any, ...], length: int
) -> Callable[..., Array]:
    """Return a function of arrays of all ranks that makes `length` dependent calls of `step(zero, *arrays)`.

    `step` is a function of one rank, and its result must need the zero. The barriers keep XLA from moving work out of
    the loop, and from computing only the element that is read.
    """

    def body(*local: Any) -> Array:
        def once(zero: Array, _: None) -> tuple[Array, None]:
            zero, inputs = lax.optimization_barrier((zero, local))
            results = lax.optimization_barrier(jax.tree.leaves(step(zero, *inputs)))
            return zero_after(results[0]), None

        return lax.scan(once, jnp.zeros((), jnp.int32), None, length=length)[0][None]

    specs = (jax.P(*AXIS),) * len(arrays)
    return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=jax.P(*AXIS), check_vma=False)
