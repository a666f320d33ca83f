"""The status record through which a kernel tells the host that it gave up, and the check that raises for it.

Launches pass these codes to their kernels as constants; the library reads the same layout (`csrc/status.h`, which also
holds the protocol of writing a record). The library is loaded only where memory is allocated, a message is formatted or
a check is traced.
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
from jax_ep.ffi.batching import same_for_all


class State(enum.IntEnum):
    """Field `state`: what went wrong."""

    OK = 0
    TIMEOUT = 1
    ABORTED = 2
    WRITING = 3
    WRONG_MESH = 4
    OTHER_LAUNCH = 5


class Operation(enum.IntEnum):
    """Field `operation`: in which call."""

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
    """One reading of a record; every field is an int32, in memory in this order."""

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
    """`record` in words, as `check_status` puts it into its error."""
    words = _Words(*dataclasses.astuple(record))
    format_into = library.load().jax_ep_format_status
    text = ctypes.create_string_buffer(format_into(words, None, 0) + 1)
    format_into(words, text, len(text))
    return text.value.decode()


@dataclasses.dataclass(frozen=True)
class StatusBuffer:
    """Memory of one record that the host sees at `host_address` and the device at `device_address`."""

    platform: library.Platform
    device_ordinal: int
    host_address: int
    device_address: int

    def read(self) -> StatusRecord:
        """The record as it stands now."""
        return StatusRecord(*_Words.from_address(self.host_address))

    def write(self, record: StatusRecord) -> None:
        """Overwrites the record from the host, as when a context starts again; no kernel may run meanwhile."""
        _Words.from_address(self.host_address)[:] = list(dataclasses.astuple(record))

    def clear(self) -> None:
        """Forgets a failure."""
        self.write(StatusRecord())

    def register(self, context_id: int) -> None:
        """Lets `check_status(..., context_id)` on this device read this record."""
        code = library.load().jax_ep_register_status(
            self.platform, context_id, self.device_ordinal, ctypes.c_void_p(self.host_address)
        )
        library.raise_for(code)

    def free(self) -> None:
        """Gives the memory back; its context must have been unregistered."""
        host = ctypes.c_void_p(self.host_address)
        library.raise_for(library.load().jax_ep_free_status(self.platform, self.device_ordinal, host))


def alloc_status(platform: library.Platform, device_ordinal: int) -> StatusBuffer:
    """A cleared record: plain memory for a CPU device, pinned memory mapped into a CUDA device."""
    host, device = ctypes.c_void_p(), ctypes.c_uint64()
    code = library.load().jax_ep_alloc_status(platform, device_ordinal, ctypes.byref(host), ctypes.byref(device))
    library.raise_for(code)
    buffer = StatusBuffer(platform, device_ordinal, int(host.value or 0), int(device.value))
    buffer.clear()
    return buffer


def unregister_status(context_id: int) -> None:
    """Removes the records of a context from every device; their memory stays until `free`."""
    library.raise_for(library.load().jax_ep_unregister_status(context_id))


def check_status(token: jax.Array, context_id: int, *, wait: bool = False) -> jax.Array:
    """int32 `[1]` zero, or a failed program where a status record of `context_id` in this process tells of a failure.

    `token` is any array that the kernel to be checked has produced: it orders the check after it, and its values are
    not read. The call has no JAX effect (one would break `jax.checkpoint`), so a check whose result nobody uses is
    removed: consume it, as in `y + check_status(y, context_id).astype(y.dtype)`. The result varies over the mesh axes
    over which `token` does. Under `jax.vmap` there is one check, after the tokens of all elements.

    The failure is a `JaxRuntimeError` with all that the record tells. (On the CPU, later calls of a compiled function
    raise the same text as a `ValueError`: so does JAX's fast path with whatever fails at once.)

    On a GPU the check runs when its work is enqueued, ahead of the device, and so sees failures of kernels that have
    already ended; one that ends later is seen by the next check. `wait=True` waits for the device first: exact, at
    the price of a stall. On the CPU the check is always exact.

    The devices of one process fail together as far as a check can bring that about: each looks at the records of
    all. But one that has passed its last check before another's failure waits for it in the next collective of the
    program, until XLA's own timeout ends the process. So check after a program's last collective where that is
    possible, and look at the records from the host as well.
    """
    library.load()
    token = lax.stop_gradient(token)  # the custom call has no derivative, and needs none
    call = jax.ffi.ffi_call(library.CHECK_STATUS, jax.ShapeDtypeStruct((1,), np.int32))
    result = same_for_all(partial(call, context_id=np.int64(context_id), wait=bool(wait)), token)
    varying = jax.typeof(token).manual_axis_type.varying
    return lax.pcast(result, tuple(sorted(varying)), to="varying") if varying else result
