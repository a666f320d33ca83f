"""Chains of dependent calls: each call needs a number from the previous one, so XLA cannot merge or reorder them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jax_ep.tools.benchmark.inputs import AXIS

type Program = tuple[Any, tuple[Any, ...]]
"""A jitted function, and its arguments."""


def zero_after(result: Array) -> Array:
    """Return an int32 zero that the device knows only once it has the first element of `result`."""
    return (result.reshape(-1)[0].astype(jnp.float32) == 12345.678).astype(jnp.int32)  # never true


def _touch(x: Array, zero: Array) -> Array:
    """Return `x`, available only once the zero is; in place if nothing else needs it."""
    origin = (0,) * x.ndim
    return lax.dynamic_update_slice(x, lax.slice(x, origin, (1,) * x.ndim) + zero.astype(x.dtype), origin)


def chain(
    mesh: jax.sharding.Mesh,
    step: Callable[..., Any],
    arrays: tuple[Any, ...],
    length: int,
    *,
    touched: int = 0,
    unroll: int = 1,
    options: dict[str, Any] | None = None,
) -> Program:
    """Return a program that makes `length` dependent calls in a loop, which on GPUs runs without the host.

    Args:
      mesh: its only axis is that of the experts.
      step: `step(zero, *arrays)`, of one rank. Its results must need the zero, or a touched array.
      arrays: of all ranks, split along their first axis. They are arguments, because XLA would fold constants.
      length: number of calls.
      touched: how many of the first arrays get one element rewritten before each call, in place.
      unroll: calls per step of the loop, which takes some microseconds itself.
      options: of the compiler.
    """

    def body(*local: Any) -> Array:
        def once(carry: Any, _: None) -> tuple[Any, None]:
            # The barriers keep XLA from moving work out of the loop, and from computing only what is read.
            (zero, own), fixed = lax.optimization_barrier((carry, local[touched:]))
            results = lax.optimization_barrier(jax.tree.leaves(step(zero, *own, *fixed)))
            zero = sum(map(zero_after, results), jnp.int32(0))
            return (zero, jax.tree.map(lambda x: _touch(x, zero), own)), None

        start = jnp.zeros((), jnp.int32), local[:touched]
        return lax.scan(once, start, None, length=length, unroll=unroll)[0][0][None]

    return jax.jit(on_each_rank(mesh, body), compiler_options=options), arrays


def calls(
    mesh: jax.sharding.Mesh, function: Callable[..., Any], arrays: tuple[Any, ...], length: int, *, unroll: int = 1
) -> Program:
    """Return a `chain` of calls of a function of `arrays`; its other int32 arrays change with the first one.

    Otherwise XLA would compute once for all calls what needs only ids.
    """

    def step(zero: Array, first: Any, *others: Any) -> Any:
        return function(first, *jax.tree.map(lambda x: x + zero if x.dtype == jnp.int32 else x, others))

    return chain(mesh, step, arrays, length, touched=1, unroll=unroll)


def passed_on(mesh: jax.sharding.Mesh, step: Callable[..., Any], arrays: tuple[Any, ...], length: int) -> Program:
    """Return a program of `length` calls of `step(first, *others)`, each result being the next call's first array.

    Nothing else runs, not even a loop, so it suits calls of a few microseconds.
    """
    step = jax.jit(step)  # traced once

    def body(first: Array, *others: Any) -> Array:
        for _ in range(length):
            first = step(first, *others)
        return first.reshape(-1)[:1]

    return jax.jit(on_each_rank(mesh, body)), arrays


def on_each_rank(mesh: jax.sharding.Mesh, body: Callable[..., Any]) -> Callable[..., Any]:
    """Map a function of one rank over arrays that are split along their first axis."""
    return jax.shard_map(body, mesh=mesh, in_specs=jax.P(*AXIS), out_specs=jax.P(*AXIS), check_vma=False)
