"""Low-latency buffers: launches that send at once, without waiting for the receiver's ready handshake.

Layout. The area of a heap holds `[2, num_devices]` buffers of one size. Only device d writes to the buffers of d. Each
begins with d's handshake (int64, protocol.py) and flags (int32; flag i >= 1 at byte 4 + 4 * i); the launch's data
follows. The table says where the area begins and how large a buffer is. Both may change when the heap is reallocated,
which zeroes all words.

Epochs. A pair of devices counts the launches that use the area and in which both take part, at control word
`EPOCHS + num_devices + device`. A launch sends through half `epoch & 1` and sets flags to `epoch`.

Why two halves suffice. Every rank waits for the handshakes of all ranks of its group before its launch ends. Let P send
in its launch e + 2 with this rank. P's launch e + 1 has ended, and in it P read this rank's handshake of e + 1. So this
rank had begun launch e + 1 and ended launch e: it no longer reads what P sent in e, in the same half, and no longer
waits for flags of e, which e + 2 overwrites.

The argument concerns one pair of devices, its buffers and its count. So groups may overlap, and launches of different
sizes may alternate. Other operations use neither the area nor the count, so they need no handshake here.

The handshakes also compare launch identities: ranks that launched different kernels fail instead of hanging.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .failures import AREA, BUFFER_BYTES, EPOCHS
from .gemm_structs import Value
from .protocol import await_flags_at, await_ready_words, end_counted_launch, ready_word
from .token_rows import goes_to
from .trace import ANNOUNCE_EVENT, PUBLISH_EVENT, stamp, trace_set, trace_wait


class LowLatencyBuffers(NamedTuple):
    """The buffers of a launch, as `[padded_ranks]` tensors by rank."""

    epochs: Value  # number of this launch among those with the rank
    outgoing: Value  # address of the buffer to write to
    incoming: Value  # address of the buffer to read


@triton.jit
def pair_epochs(launch, devices, HEAP: tl.constexpr):
    """Return pointers to the launch counts with each of `devices`."""
    return launch.control + EPOCHS + HEAP.num_devices + devices


@triton.jit
def open_buffers(launch, HEAP: tl.constexpr):
    """Look up the buffers of this launch by rank; lanes past num_ranks repeat rank 0.

    All lookups happen at the start of a launch: after a wait they would add latency.
    """
    NUM_DEVICES: tl.constexpr = HEAP.num_devices
    lanes = tl.arange(0, triton.next_power_of_2(HEAP.num_ranks))
    peers = tl.load(launch.group_ptr + tl.where(lanes < HEAP.num_ranks, lanes, 0))
    epochs = tl.load(pair_epochs(launch, peers, HEAP)) + 1
    # Two halves, by parity of the epoch.
    halves = epochs & 1
    area, size = tl.load(launch.table_ptr + NUM_DEVICES + AREA), tl.load(launch.table_ptr + NUM_DEVICES + BUFFER_BYTES)
    outgoing = tl.load(launch.table_ptr + peers) + area + (halves * NUM_DEVICES + launch.device).to(tl.int64) * size
    incoming = tl.load(launch.table_ptr + launch.device) + area + (halves * NUM_DEVICES + peers).to(tl.int64) * size
    return LowLatencyBuffers(epochs, outgoing, incoming)


@triton.jit
def pick(values, rank):
    """Return the entry of `values [lanes]` for a rank."""
    lanes = tl.arange(0, values.shape[0])
    return tl.sum(tl.where(lanes == rank, values, 0), axis=0)


@triton.jit
def pick_each(values, ranks):
    """Return the entries of `values [lanes]` for `ranks [N]`."""
    lanes = tl.arange(0, values.shape[0])[None, :]
    return tl.sum(tl.where(ranks[:, None] == lanes, values[None, :], 0), axis=1)


@triton.jit
def part_of(buffer, AT: tl.constexpr, dtype: tl.constexpr):
    """Return a pointer to byte AT, a multiple of 16, of one buffer or of several."""
    return tl.multiple_of((buffer + AT).to(tl.pointer_type(dtype)), 16)


@triton.jit
def signal_ready_to(launch, buffers, ranks, task, HEAP: tl.constexpr):
    """Signal each rank of a set that this launch has begun and that this program's stores there are complete."""
    began = stamp(HEAP)
    lanes = tl.arange(0, buffers.epochs.shape[0])
    words = part_of(buffers.outgoing, 0, tl.int64)
    # The release of some threads covers the stores of the others only after a barrier.
    tl.debug_barrier()
    mask = (lanes < HEAP.num_ranks) & goes_to(ranks, lanes)
    tl.atomic_store(words, ready_word(buffers.epochs, HEAP), mask=mask, sem="release", scope="sys")
    trace_set(launch, ANNOUNCE_EVENT, began, task, ranks, 0, HEAP)


@triton.jit
def await_ready_of(launch, incoming, epochs, ranks, not_failed, task, HEAP: tl.constexpr):
    """Wait for the handshakes in buffers `incoming [N]` of `ranks [N]`."""
    return await_ready_words(launch, part_of(incoming, 0, tl.int64), epochs, ranks, not_failed, task, HEAP)


@triton.jit
def publish_to(launch, buffers, ranks, flag, task, HEAP: tl.constexpr):
    """Set flag `flag >= 1` at each rank of a set: this program's stores there are complete."""
    began = stamp(HEAP)
    lanes = tl.arange(0, buffers.epochs.shape[0])
    flags = part_of(buffers.outgoing, 0, tl.int32) + 1 + flag
    # The release of some threads covers the stores of the others only after a barrier.
    tl.debug_barrier()
    mask = (lanes < HEAP.num_ranks) & goes_to(ranks, lanes)
    tl.atomic_store(flags, buffers.epochs, mask=mask, sem="release", scope="sys")
    trace_set(launch, PUBLISH_EVENT, began, task, ranks, flag, HEAP)


@triton.jit
def await_flags(launch, incoming, flags, epochs, ranks, not_failed, task, HEAP: tl.constexpr):
    """Wait for `flags [N]` in buffers `incoming [N]` of `ranks [N]`."""
    began = stamp(HEAP)
    words = part_of(incoming, 0, tl.int32) + 1 + flags
    not_failed = await_flags_at(launch, words, epochs, ranks, not_failed, task, HEAP)
    trace_wait(launch, began, task, ranks, tl.max(flags, axis=0), HEAP)
    return not_failed


@triton.jit
def end_low_latency_launch(launch, HEAP: tl.constexpr):
    """End a launch that uses the buffers; returns like `end_launch` of protocol.py."""
    return end_counted_launch(launch, EPOCHS + HEAP.num_devices, HEAP)
