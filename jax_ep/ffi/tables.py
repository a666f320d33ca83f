"""Tables of raw addresses, one per device, that a program fetches while it runs."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial

import jax
import numpy as np
from jax import lax

from jax_ep.ffi import library
from jax_ep.ffi.batching import same_for_all


def register_table(table_id: int, device: jax.Device, values: Sequence[int], num_bytes: int = 0) -> None:
    """Makes `values` the table `table_id` of `device`; an earlier one of the same length is replaced in place.

    On a GPU the values go to a small allocation of device memory, once, here.

    Args:
      table_id: a small number that is the same in every run of a program: it becomes part of what is compiled.
      device: one of this process.
      values: addresses, and what else programs look up.
      num_bytes: how much of the memory behind them programs may use; one that was compiled for more is refused.

    Raises:
      ValueError: no values, or another number of them than before.
      RuntimeError: a program has run on `device` that uses more than `num_bytes`.
    """
    platform, ordinal = library.device_key(device)
    array = (ctypes.c_int64 * len(values))(*(int(value) for value in values))
    code = library.load().jax_ep_register_table(platform, table_id, ordinal, array, len(values), num_bytes)
    library.raise_for(code)


def used_bytes(table_id: int, device: jax.Device) -> int:
    """The most `num_bytes` of a program that has run on `device` with this table; of any process's making."""
    platform, ordinal = library.device_key(device)
    return int(library.load().jax_ep_table_used(platform, table_id, ordinal))


def hide_table(table_id: int) -> None:
    """Programs no longer find the table, on any device, and fail; those that have it already run on."""
    library.raise_for(library.load().jax_ep_hide_table(table_id))


def unregister_table(table_id: int) -> None:
    """Hides the table, and makes replayed CUDA graphs read nulls; no program that has it may still be running."""
    library.raise_for(library.load().jax_ep_unregister_table(table_id))


def pointer_table(
    table_id: int,
    num_entries: int,
    *,
    num_bytes: int = 0,
    varying: tuple[str, ...] | None = None,
    token: jax.Array | None = None,
) -> jax.Array:
    """The table `table_id` of the device that executes this: int64 `[num_entries]`, also without 64-bit mode.

    Without 64-bit mode hand it to a kernel as it is: `jax.numpy` would warn, and compute in 32 bits.

    A per-shard function: inside `jax.shard_map` the result differs from device to device, and so is marked as varying
    over all manual mesh axes, or over `varying` where the caller's results do not depend on which table it was. It has
    no effect, so XLA may move or drop the call freely. It shares calls with the same `token`, any array, whose values
    are not read: calls without one it leaves as they are. Under `jax.vmap` there is one table for all elements.
    Running it fails as `check_status` does where the device has no such table, one of another length, or one for less
    memory than `num_bytes`, which is what the program uses of it: it may have been compiled elsewhere.
    """
    if num_entries < 1:
        raise ValueError(f"pointer_table: num_entries must be at least 1, got {num_entries}.")
    library.load()
    shape = jax.ShapeDtypeStruct((num_entries,), np.int64)
    attributes = {"table_id": np.int64(table_id), "num_bytes": np.int64(num_bytes)}
    fetch = partial(jax.ffi.ffi_call(library.POINTER_TABLE, shape), **attributes)
    result = fetch() if token is None else same_for_all(fetch, lax.stop_gradient(token))
    axes = tuple(jax.sharding.get_abstract_mesh().manual_axes) if varying is None else varying
    return lax.pcast(result, axes, to="varying") if axes else result
