"""XLA custom calls of a small compiled library, which is loaded on first use.

`launch_kernel` runs compiled kernels, `pointer_table` gives every device its own table of raw addresses, and
`check_status` turns a failure that a kernel recorded into an exception. A missing or stale library is a `LibraryError`
that says how to build it.
"""

from jax_ep.ffi.kernels import by_address, by_descriptor, launch_kernel
from jax_ep.ffi.library import LibraryError, Platform, device_key, load
from jax_ep.ffi.status import (
    Operation,
    State,
    StatusBuffer,
    StatusRecord,
    alloc_status,
    check_status,
    format_status,
    unregister_status,
)
from jax_ep.ffi.tables import hide_table, pointer_table, register_table, unregister_table, used_bytes

__all__ = [
    "LibraryError",
    "Operation",
    "Platform",
    "State",
    "StatusBuffer",
    "StatusRecord",
    "alloc_status",
    "by_address",
    "by_descriptor",
    "check_status",
    "device_key",
    "format_status",
    "hide_table",
    "launch_kernel",
    "load",
    "pointer_table",
    "register_table",
    "unregister_status",
    "unregister_table",
    "used_bytes",
]
