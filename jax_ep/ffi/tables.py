"""Tables of raw addresses, one per device, that a program fetches while it runs."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import jax
import numpy as np
from jax import lax

from jax_ep.ffi import library


def register_table(table_id: int, device: jax.Device, values: Sequence[int]) -> None:
    """Makes `values` the table `table_id` of `device`; an earlier one of the same length is replaced in place.

    On a GPU the values go to a small allocation of device memory, once, here.
    """
    platform, ordinal = library.device_key(device)
    array = (ctypes.c_int64 * len(values))(*(int(value) for value in values))
    library.raise_for(library.load().jax_ep_register_table(platform, table_id, ordinal, array, len(values)))


def unregister_table(table_id: int) -> None:
    """Removes the table from every device: programs that still ask for it fail, replayed CUDA graphs read nulls."""
    library.raise_for(library.load().jax_ep_unregister_table(table_id))


def pointer_table(
    table_id: int, num_entries: int, *, varying: tuple[str, ...] | None = None, token: jax.Array | None = None
) -> jax.Array:
    """The table `table_id` of the device that executes this: int64 `[num_entries]`, also without 64-bit mode.

    Without 64-bit mode hand it to a kernel as it is: `jax.numpy` would warn, and compute in 32 bits.

    A per-shard function: inside `jax.shard_map` the result differs from device to device, and so is marked as varying
    over all manual mesh axes, or over `varying` where the caller's results do not depend on which table it was. It has
    no effect, so XLA may move or drop the call freely. It shares calls with the same `token`, any array, whose values
    are not read: calls without one it leaves as they are.
    Running it fails as `check_status` does where the device has no such table, or one of another length.
    """
    if num_entries < 1:
        raise ValueError(f"pointer_table: num_entries must be at least 1, got {num_entries}.")
    library.load()
    result = jax.ffi.ffi_call(
        library.POINTER_TABLE, jax.ShapeDtypeStruct((num_entries,), np.int64), vmap_method="broadcast_all"
    )(*(() if token is None else (lax.stop_gradient(token),)), table_id=np.int64(table_id))
    axes = tuple(jax.sharding.get_abstract_mesh().manual_axes) if varying is None else varying
    return lax.pcast(result, axes, to="varying") if axes else result
