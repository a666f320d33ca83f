"""Chains of calls in each of which the first argument, and all ids, are known once the call before has ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from lib.inputs import AXIS
from lib.waiting import zero_after


class Operation(NamedTuple):
    """What is timed: a function of one rank, and its arguments on all ranks.

    Of the first argument, or of its first part, one element is written anew before each call. Arrays of int32 depend on
    it: what needs nothing but ids XLA would make once for all calls.
    """

    step: Callable[..., Any]
    arguments: tuple[Any, ...]


def known_after(touched: Array, other: Array) -> Array:
    """The same array; ids are known once the first element of `touched` is."""
    return other + zero_after(touched) if other.dtype == jnp.int32 else other


def chain(
    mesh: jax.sharding.Mesh, operation: Operation, length: int, *, unroll: int = 1
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """So many calls of an operation, each of which waits for the one before, and the arguments.

    With `unroll` so many of them are one step of the loop, which takes some microseconds by itself.
    """

    def body(*arguments: Any) -> Array:
        leaves, tree = jax.tree.flatten(arguments)

        def once(touched: Array, _: None) -> tuple[Array, None]:
            known = [known_after(touched, leaf) for leaf in leaves[1:]]
            results = operation.step(*jax.tree.unflatten(tree, [touched, *known]))
            # The barrier keeps XLA from computing only the elements that are looked at.
            zero = sum(map(zero_after, lax.optimization_barrier(jax.tree.leaves(results))))
            origin = (0,) * touched.ndim
            first = lax.slice(touched, origin, (1,) * touched.ndim)
            return lax.dynamic_update_slice(touched, first + zero.astype(first.dtype), origin), None

        touched = lax.scan(once, leaves[0], None, length=length, unroll=unroll)[0]
        return touched.reshape(-1)[:1]

    specs = (jax.P(*AXIS),) * len(operation.arguments)
    sharded = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=jax.P(*AXIS), check_vma=False)
    return jax.jit(sharded), operation.arguments
