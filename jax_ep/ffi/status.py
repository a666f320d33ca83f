"""The status record in which a kernel reports a failure to the host, and the check that raises it.

Launches pass these codes to their kernels as constants; the library reads the same layout (`csrc/status.h`, which also
describes how a record is written). The library is loaded when memory is allocated, a message is formatted or a check is
traced.
"""

from __future__ import annotations

import ctypes
import dataclasses
import enum
from functools import partial

import jax
import numpy as np
from jax import lax

from jax_ep.ffi import library


class State(enum.IntEnum):
    """Values of the field `state`: the kind of failure."""

    OK = 0
    TIMEOUT = 1
    ABORTED = 2
    WRITING = 3
    WRONG_MESH = 4
    OTHER_LAUNCH = 5


class Operation(enum.IntEnum):
    """Values of the field `operation`: the call that failed."""

    UNKNOWN = 0
    DISPATCH = 1
    COMBINE = 2
    DISPATCH_GROUPED_GEMM = 3
    GROUPED_GEMM_COMBINE = 4
    LOW_LATENCY_DISPATCH = 5
    LOW_LATENCY_COMBINE = 6
    LOW_LATENCY_GEMM_COMBINE = 7


@dataclasses.dataclass(frozen=True)
class StatusRecord:
    """A copy of a status record; all fields are int32, in memory order."""

    state: int = 0
    operation: int = 0
    rank: int = 0
    peer: int = -1
    expected: int = 0
    seen: int = 0
    task: int = -1
    detail: int = 0


FIELDS: tuple[str, ...] = tuple(field.name for field in dataclasses.fields(StatusRecord))
NUM_BYTES = 4 * len(FIELDS)

_Words = ctypes.c_int32 * len(FIELDS)


def format_status(record: StatusRecord) -> str:
    """Format a record as the error message of `check_status`."""
    words = _Words(*dataclasses.astuple(record))
    format_into = library.load().jax_ep_format_status
    text = ctypes.create_string_buffer(format_into(words, None, 0) + 1)
    format_into(words, text, len(text))
    return text.value.decode()


@dataclasses.dataclass(frozen=True)
class StatusBuffer:
    """Memory of one record, at `host_address` for the host and `device_address` for the device."""

    platform: library.Platform
    device_ordinal: int
    host_address: int
    device_address: int

    def read(self) -> StatusRecord:
        """Read the current record."""
        return StatusRecord(*_Words.from_address(self.host_address))

    def write(self, record: StatusRecord) -> None:
        """Overwrite the record from the host, for example when a context restarts; no kernel may be running."""
        _Words.from_address(self.host_address)[:] = list(dataclasses.astuple(record))

    def clear(self) -> None:
        """Clear a failure."""
        self.write(StatusRecord())

    def register(self, context_id: int) -> None:
        """Register this record for `check_status(..., context_id)` on this device."""
        code = library.load().jax_ep_register_status(
            self.platform, context_id, self.device_ordinal, ctypes.c_void_p(self.host_address)
        )
        library.raise_for(code)

    def free(self) -> None:
        """Free the memory; unregister its context first."""
        host = ctypes.c_void_p(self.host_address)
        library.raise_for(library.load().jax_ep_free_status(self.platform, self.device_ordinal, host))


def alloc_status(platform: library.Platform, device_ordinal: int) -> StatusBuffer:
    """Allocate a cleared record: plain memory for a CPU device, pinned memory mapped into a CUDA device."""
    host, device = ctypes.c_void_p(), ctypes.c_uint64()
    code = library.load().jax_ep_alloc_status(platform, device_ordinal, ctypes.byref(host), ctypes.byref(device))
    library.raise_for(code)
    buffer = StatusBuffer(platform, device_ordinal, int(host.value or 0), int(device.value))
    buffer.clear()
    return buffer


def unregister_status(context_id: int) -> None:
    """Unregister the records of a context on every device; their memory stays until `free`."""
    library.raise_for(library.load().jax_ep_unregister_status(context_id))


def check_status(token: jax.Array, context_id: int, *, wait: bool = False) -> jax.Array:
    """Fail the program if a status record of `context_id` in this process has a failure; else return int32 `[1]` zero.

    `token` is any array that the checked kernel has produced; it orders the check after the kernel, and its values are
    not read. The call has no JAX effect, which would break `jax.checkpoint`, so an unused check is removed: consume it,
    as in `y + check_status(y, context_id).astype(y.dtype)`. The result varies over the mesh axes of `token`. Under
    `jax.vmap` there is one check, after the tokens of all elements.

    The failure is a `JaxRuntimeError` with the formatted record. (On the CPU, later calls of a compiled function raise
    the same text as a `ValueError`, like any immediate failure in JAX's fast path.)

    On a GPU the check runs when its work is enqueued, ahead of the device, so it sees failures of kernels that have
    already ended; the next check sees later ones. `wait=True` waits for the device first, which is exact but stalls. On
    the CPU the check is always exact.

    Each check reads the records of all devices of its process, so that they fail together. But a device that passed its
    last check before another's failure waits for that device in the program's next collective, until XLA's timeout ends
    the process. So check after a program's last collective if possible, and also read the records from the host.
    """
    library.load()
    token = lax.stop_gradient(token)  # The custom call has no derivative, and needs none.
    call = jax.ffi.ffi_call(library.CHECK_STATUS, jax.ShapeDtypeStruct((1,), np.int32))
    result = library.batch_invariant(partial(call, context_id=np.int64(context_id), wait=bool(wait)), token)
    varying = jax.typeof(token).manual_axis_type.varying
    return lax.pcast(result, tuple(sorted(varying)), to="varying") if varying else result
