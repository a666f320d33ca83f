"""Per-device tables of raw addresses that a program reads at run time."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial

import jax
import numpy as np
from jax import lax

from jax_ep.ffi import library


def register_table(table_id: int, device: jax.Device, values: Sequence[int], num_bytes: int = 0) -> None:
    """Register `values` as the table `table_id` of `device`, replacing one of the same length in place.

    On a GPU the values are copied to a small allocation of device memory.

    Args:
      table_id: a small number that is the same in every run of a program, because it is compiled in.
      device: a device of this process.
      values: addresses and other values that programs look up.
      num_bytes: usable bytes of the memory behind the addresses; programs compiled for more fail.

    Raises:
      ValueError: there are no values, or their number has changed.
      OverflowError: a number does not fit in 64 bits.
      RuntimeError: a program that uses more than `num_bytes` has run on `device`.
    """
    platform, ordinal = library.device_key(device)
    array = (ctypes.c_int64 * len(values))(*(int(np.int64(value)) for value in values))  # ctypes alone would wrap
    table_id, num_bytes = int(np.int64(table_id)), int(np.int64(num_bytes))
    code = library.load().jax_ep_register_table(platform, table_id, ordinal, array, len(values), num_bytes)
    library.raise_for(code)


def used_bytes(table_id: int, device: jax.Device) -> int:
    """Return the largest `num_bytes` of a program that has run on `device` with this table, from any process."""
    platform, ordinal = library.device_key(device)
    return int(library.load().jax_ep_table_used(platform, table_id, ordinal))


def hide_table(table_id: int) -> None:
    """Hide the table on all devices: programs that look it up fail; running programs that have it continue."""
    library.raise_for(library.load().jax_ep_hide_table(table_id))


def unregister_table(table_id: int) -> None:
    """Hide the table and set device copies to null for replayed CUDA graphs; no program may be using it."""
    library.raise_for(library.load().jax_ep_unregister_table(table_id))


def pointer_table(
    table_id: int,
    num_entries: int,
    *,
    num_bytes: int = 0,
    varying: tuple[str, ...] | None = None,
    token: jax.Array | None = None,
) -> jax.Array:
    """Return the table `table_id` of the executing device, int64 `[num_entries]` even without 64-bit mode.

    Without 64-bit mode pass it to a kernel unchanged: `jax.numpy` would warn and compute in 32 bits.

    A per-shard function: inside `jax.shard_map` the result differs between devices, so it varies over all manual mesh
    axes, or over `varying` if the caller's results do not depend on which table it was. It has no effect, so XLA may
    move or drop the call. Calls with the same `token`, any array whose values are not read, are shared; calls without
    one are not. Under `jax.vmap` there is one table for all elements.

    Running it fails like `check_status` if the device has no such table, one of another length, or one for less memory
    than `num_bytes`, the memory that the program uses; it may have been compiled by another process.
    """
    if num_entries < 1:
        raise ValueError(f"pointer_table: num_entries must be at least 1, got {num_entries}.")
    library.load()
    shape = jax.ShapeDtypeStruct((num_entries,), np.int64)
    attributes = {"table_id": np.int64(table_id), "num_bytes": np.int64(num_bytes)}
    fetch = partial(jax.ffi.ffi_call(library.POINTER_TABLE, shape), **attributes)
    result = fetch() if token is None else library.batch_invariant(fetch, lax.stop_gradient(token))
    axes = tuple(jax.sharding.get_abstract_mesh().manual_axes) if varying is None else varying
    return lax.pcast(result, axes, to="varying") if axes else result
