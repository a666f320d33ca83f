"""Exchange of 32-bit values between ranks: ids and router weights."""

from __future__ import annotations

import jax

from jax_ep import context, ffi
from jax_ep.kernel import Kernel
from jax_ep.megakernels import tuning
from jax_ep.megakernels.heap_launch import launch_on_heap
from jax_ep.megakernels.kernels.structs import SmallExchange
from jax_ep.types import Array

_EXCHANGE = Kernel("small_exchange", "exchange_i32")


def all_gather_i32(x: Array, group: Array, after: Array | None = None) -> Array:
    """`[N]` 32-bit values of each rank to all ranks: `[W, N]` by source rank."""
    return _exchange_i32(x, group, after, to_each=False)


def all_to_all_i32(x: Array, group: Array, after: Array | None = None) -> Array:
    """`[W, N]` 32-bit values, a row to each rank: `[W, N]` by source rank."""
    return _exchange_i32(x, group, after, to_each=True)


def _exchange_i32(x: Array, group: Array, after: Array | None, *, to_each: bool) -> Array:
    num_ranks, num_values = group.shape[0] - 1, x.shape[-1]
    config, block = tuning.small_exchange(num_ranks, num_values)
    context.reserve("dispatch", num_ranks * num_values * 4)
    constants = {"S": SmallExchange(num_values, to_each, block), "OPERATION": int(ffi.Operation.DISPATCH)}
    result = jax.ShapeDtypeStruct((num_ranks, num_values), x.dtype)
    return launch_on_heap(_EXCHANGE, (x,), group, (result,), config, constants, after)[0]
