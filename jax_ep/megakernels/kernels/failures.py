"""Failures of a launch: the status record for the host, the end of all waits, and poisoned results.

Also the words of a heap's table and of its control area, which `jax_ep/heap` allocates. The table is int64. It begins
with the heap addresses of all `num_devices` devices; the words below follow them. Each heap begins with int32 control
words.
"""

import triton
import triton.language as tl

from .indices import indices

# Words of the table, from index num_devices on.
STATUS = tl.constexpr(0)  # address of the status record
TIMEOUT_NS = tl.constexpr(1)  # how long a wait may take
DEVICE = tl.constexpr(2)  # number of this device
AREA = tl.constexpr(3)  # offset of the low-latency area in a heap
BUFFER_BYTES = tl.constexpr(4)  # size of a low-latency buffer
TRACE = tl.constexpr(5)  # address of the trace area; 0: nothing is recorded

# Control words of the running launch.
TICKET = tl.constexpr(0)  # next task
EXITED = tl.constexpr(1)  # programs that have ended
FAILED = tl.constexpr(2)  # 1 after a failure, until the heap is reset
QUEUE = tl.constexpr(8)  # next task of the second queue
STARTED = tl.constexpr(9)  # programs that have started
DONE = tl.constexpr(16)  # finished tasks

# Control words that outlive a launch.
#   EPOCHS                    [num_devices] int32: launches with each device
#   EPOCHS + num_devices      [num_devices] int32: launches with each device that use the low-latency area
#   EPOCHS + 2 * num_devices  [2, num_devices] int64: ready handshakes, by parity of the epoch
EPOCHS = tl.constexpr(64)

# States of the status record, as in jax_ep/ffi/csrc/status.h.
STATE_TIMEOUT = tl.constexpr(1)
STATE_WRITING = tl.constexpr(3)
STATE_WRONG_MESH = tl.constexpr(4)
STATE_OTHER_LAUNCH = tl.constexpr(5)

# Elements that `poison` stores at a time.
POISON_BLOCK = tl.constexpr(2048)


@triton.jit
def poison(ptr, NUM: tl.constexpr):
    """Fill `[NUM]` elements of any type with 0xFF bytes: NaN in float types, -1 in integer types."""
    bits: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth
    word: tl.constexpr = tl.int8 if bits == 8 else tl.int16 if bits == 16 else tl.int32 if bits == 32 else tl.int64
    words = ptr.to(tl.pointer_type(word), bitcast=True)
    lanes = indices(POISON_BLOCK).to(tl.int64)
    for block in range((NUM + POISON_BLOCK - 1) // POISON_BLOCK):
        # int64, so that large results do not overflow.
        tl.store(words + lanes, -1, mask=lanes < NUM - tl.cast(block, tl.int64) * POISON_BLOCK)
        words += POISON_BLOCK


@triton.jit
def give_up(launch, flag, epoch, peer_rank, task, timeout_ns, HEAP: tl.constexpr):
    """End all waits on this device after the wait for `flag` has expired, and report it."""
    tl.atomic_store(launch.control + FAILED, 1, sem="relaxed", scope="gpu")
    seen = tl.atomic_load(flag, sem="relaxed", scope="sys")
    report_timeout(launch, peer_rank, epoch, seen, task, timeout_ns, HEAP)


@triton.jit
def report_handshake(launch, peer_rank, epoch, seen, task, HEAP: tl.constexpr):
    """Report an expired wait for a handshake: the peer is late, or it launched a different kernel."""
    LAUNCH: tl.constexpr = HEAP.launch_id
    # Unpack the handshake: launch_id << 32 | epoch.
    seen_epoch, seen_launch = seen.to(tl.int32), (seen >> 32).to(tl.int32)
    is_other = (seen_epoch == epoch) & (seen_launch != LAUNCH)
    # The same epoch with another identity is another kernel; every other value is a late peer.
    state = tl.where(is_other, STATE_OTHER_LAUNCH, STATE_TIMEOUT)
    expected, found = tl.where(is_other, LAUNCH, epoch), tl.where(is_other, seen_launch, seen_epoch)
    timeout_ns = tl.load(launch.table_ptr + HEAP.num_devices + TIMEOUT_NS)
    detail = tl.where(is_other, epoch, (timeout_ns // 1000000).to(tl.int32))
    report(launch, state, peer_rank, expected, found, task, detail, HEAP)


@triton.jit
def report_timeout(launch, peer_rank, epoch, seen, task, timeout_ns, HEAP: tl.constexpr):
    """Report a wait that has expired."""
    detail = (timeout_ns // 1000000).to(tl.int32)
    report(launch, STATE_TIMEOUT, peer_rank, epoch, seen, task, detail, HEAP)


@triton.jit
def report(launch, state, peer_rank, expected, seen, task, detail, HEAP: tl.constexpr):
    """Fill the status record (jax_ep/ffi/csrc/status.h), unless an earlier failure holds it."""
    status = tl.load(launch.table_ptr + HEAP.num_devices + STATUS).to(tl.pointer_type(tl.int32))
    # The first failure wins; the record stays in state WRITING until it is complete.
    if tl.atomic_cas(status, 0, STATE_WRITING, sem="relaxed", scope="sys") == 0:
        tl.store(status + 1, HEAP.launch_id & 0xFF)  # the operation
        tl.store(status + 2, launch.rank)
        tl.store(status + 3, peer_rank)
        tl.store(status + 4, expected)
        tl.store(status + 5, seen)
        tl.store(status + 6, task)
        tl.store(status + 7, detail)
        tl.atomic_store(status, state, sem="release", scope="sys")
