"""Low-latency buffers: launches that send at once, without asking whether a peer is ready.

Their area of the heap holds `[2, D]` buffers of one size. Of the buffers of device d only d writes; each begins with
d's greeting (int64, see protocol.py) and flags (int32, flag i >= 1 at byte 4 + 4 * i), and what a launch sends lies
behind them, as it likes. The table says where the area begins, after the number of this device, and how large a buffer
is: both may change when the heap is allocated again, with all its words zero.

Two devices count the launches that use the area and in which both take part: their epoch here, at control word
EPOCHS + D + device. A launch sends through half `epoch & 1`, and its flags become `epoch`. Every rank waits for the
greeting of every other rank of its group before its launch ends, and so learns whether all have launched the same. So
two halves suffice, and nobody needs to announce itself:

    Let P send something in its launch e + 2 with me. Its launch e + 1 with me has ended, and in it P heard from me.
    So I had begun launch e + 1, and had ended launch e: I no longer read what P sent in e, which lay in the same half,
    and no longer wait for a flag of e, in whose place there is now a flag of e + 2.

This is about one pair of devices, its own buffers and its own count. So groups may overlap, launches of different sizes
may follow each other, and launches of other operations in between change nothing: they use neither the area nor this
count, and need not wait for anybody.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .failures import report_timeout
from .masks import goes_to
from .protocol import await_greetings, first_missing, greeting
from .table import AREA, BUFFER_BYTES, DONE, EPOCHS, EXITED, FAILED, STARTED, TICKET, TIMEOUT_NS
from .trace import ANNOUNCE_EVENT, PUBLISH_EVENT, stamp, trace_members, trace_set, trace_wait


class LowLatencyBuffers(NamedTuple):
    """The buffers of a launch, as `[padded_ranks]` tensors by rank."""

    epochs: Any  # number of this launch among those with the rank
    outgoing: Any  # address of the buffer to write to
    incoming: Any  # address of the buffer to read


@triton.jit
def pair_epochs(launch, devices, HEAP: tl.constexpr):
    """Pointers to the numbers of launches so far with each of `devices`."""
    return launch.control + EPOCHS + HEAP.num_devices + devices


@triton.jit
def open_buffers(launch, HEAP: tl.constexpr):
    """The buffers of this launch, by rank; lanes past W repeat rank 0.

    All that a launch must look up, at its start: after a wait it would cost more.
    """
    NUM_DEVICES: tl.constexpr = HEAP.num_devices
    lanes = tl.arange(0, triton.next_power_of_2(HEAP.num_ranks))
    peers = tl.load(launch.group_ptr + tl.where(lanes < HEAP.num_ranks, lanes, 0))
    epochs = tl.load(pair_epochs(launch, peers, HEAP)) + 1
    halves = epochs & 1
    area, size = tl.load(launch.table_ptr + NUM_DEVICES + AREA), tl.load(launch.table_ptr + NUM_DEVICES + BUFFER_BYTES)
    outgoing = tl.load(launch.table_ptr + peers) + area + (halves * NUM_DEVICES + launch.device).to(tl.int64) * size
    incoming = tl.load(launch.table_ptr + launch.device) + area + (halves * NUM_DEVICES + peers).to(tl.int64) * size
    return LowLatencyBuffers(epochs, outgoing, incoming)


@triton.jit
def pick(values, rank):
    """The entry of `values [LANES]` for a rank."""
    lanes = tl.arange(0, values.shape[0])
    return tl.sum(tl.where(lanes == rank, values, 0), axis=0)


@triton.jit
def pick_each(values, ranks):
    """The entries `[N]` of `values [LANES]` for `ranks [N]`."""
    lanes = tl.arange(0, values.shape[0])[None, :]
    return tl.sum(tl.where(ranks[:, None] == lanes, values[None, :], 0), axis=1)


@triton.jit
def part_of(buffer, AT: tl.constexpr, dtype: tl.constexpr):
    """Pointer to what lies at byte AT, a multiple of 16, of one buffer or of several."""
    return tl.multiple_of((buffer + AT).to(tl.pointer_type(dtype)), 16)


@triton.jit
def greet(launch, buffers, ranks, task, HEAP: tl.constexpr):
    """Greets each rank of a set; what this program has stored there is complete."""
    began = stamp(HEAP)
    lanes = tl.arange(0, buffers.epochs.shape[0])
    words = part_of(buffers.outgoing, 0, tl.int64)
    # A release by some threads covers the others' stores only after a barrier of the program.
    tl.debug_barrier()
    mask = (lanes < HEAP.num_ranks) & goes_to(ranks, lanes)
    tl.atomic_store(words, greeting(buffers.epochs, HEAP), mask=mask, sem="release", scope="sys")
    trace_set(launch, ANNOUNCE_EVENT, began, task, ranks, 0, HEAP)


@triton.jit
def await_greeting_of_each(launch, incoming, epochs, ranks, alive, task, HEAP: tl.constexpr):
    """Waits for the greetings in buffers `incoming [N]`, those of `ranks [N]`; returns whether it is still alive."""
    return await_greetings(launch, part_of(incoming, 0, tl.int64), epochs, ranks, alive, task, HEAP)


@triton.jit
def publish_to(launch, buffers, ranks, flag, task, HEAP: tl.constexpr):
    """Sets flag `flag >= 1` at each rank of a set: what this program has stored there is complete."""
    began = stamp(HEAP)
    lanes = tl.arange(0, buffers.epochs.shape[0])
    flags = part_of(buffers.outgoing, 0, tl.int32) + 1 + flag
    # A release by some threads covers the others' stores only after a barrier of the program.
    tl.debug_barrier()
    mask = (lanes < HEAP.num_ranks) & goes_to(ranks, lanes)
    tl.atomic_store(flags, buffers.epochs, mask=mask, sem="release", scope="sys")
    trace_set(launch, PUBLISH_EVENT, began, task, ranks, flag, HEAP)


@triton.jit
def await_flags(launch, incoming, flags, epochs, ranks, alive, task, HEAP: tl.constexpr):
    """Waits for `flags [N]` in buffers `incoming [N]`, those of `ranks [N]`; returns whether the launch is alive."""
    began = stamp(HEAP)
    if alive != 0:
        timeout_ns = tl.load(launch.table_ptr + HEAP.num_devices + TIMEOUT_NS)
        words = part_of(incoming, 0, tl.int32) + 1 + flags
        arrived = tl.atomic_poll(words, epochs, sem="acquire", scope="sys", timeout_ns=timeout_ns)
        arrived = arrived.to(tl.int32)
        if tl.min(arrived, axis=0) == 0:
            alive = 0
            tl.atomic_store(launch.control + FAILED, 1, sem="relaxed", scope="gpu")
            late = first_missing(arrived)
            seen = tl.sum(tl.where(late, tl.atomic_load(words, sem="relaxed", scope="sys"), 0), axis=0)
            epoch, missing = tl.sum(tl.where(late, epochs, 0), axis=0), tl.sum(tl.where(late, ranks, 0), axis=0)
            report_timeout(launch, missing, epoch, seen, task, timeout_ns, HEAP)
    # What the flags guard is read by all threads, after this barrier.
    tl.debug_barrier()
    trace_wait(launch, began, task, ranks, tl.max(flags, axis=0), HEAP)
    return alive


@triton.jit
def end_low_latency_launch(launch, HEAP: tl.constexpr):
    """As `end_launch` of protocol.py: 1 in the program that must poison what the launch returns, else 0."""
    control = launch.control
    has_failed = 0
    tl.debug_barrier()
    if tl.atomic_add(control + EXITED, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        has_failed = tl.atomic_load(control + FAILED, sem="relaxed", scope="gpu")
        tl.store(control + TICKET, 0)
        tl.store(control + EXITED, 0)
        tl.store(control + DONE, 0)
        tl.store(control + STARTED, 0)
        lanes = tl.arange(0, triton.next_power_of_2(HEAP.num_ranks))
        inside = lanes < HEAP.num_ranks
        peers = tl.load(launch.group_ptr + lanes, mask=inside, other=0)
        epochs = pair_epochs(launch, peers, HEAP)
        trace_members(launch, EPOCHS + HEAP.num_devices, HEAP)
        tl.store(epochs, tl.load(epochs, mask=inside, other=0) + 1, mask=inside)
    # Nothing of what other programs have stored may come after what poisons it.
    tl.debug_barrier()
    return has_failed
