"""Protocol between ranks and programs: task queue, epochs, ready handshakes, block flags and bounded waits.

Memory. Every device has a heap of the same layout, and a table with the addresses of all heaps. failures.py names the
words of both. At byte `flags_offset` of a heap lie `[2, num_devices, max_blocks]` int32 flags: `[e & 1, d, b]` holds
epoch `e` once device d has completed block b here. `num_devices` covers all devices, so any subset can form a group.

Epochs. The epoch of a pair of devices is the number of launches in which both take part; both count it. A peer can be
one launch ahead, so flags and handshakes have two slots, by parity. Epochs are 32 bits wide and wrap around; they are
compared for equality only.

Sequence of a launch, on every rank:
1. `signal_ready` stores this launch's epoch and identity at every peer: earlier launches no longer use this heap.
2. `await_ready` or `await_all_ready` reads a peer's handshake. Nothing is stored at a peer before that.
3. `publish` sets a block's flag at the receiver after the block's data (release). `await_block` polls it (acquire).
4. `end_launch`: the last program resets the queue and increments the epochs.

Why it cannot deadlock. Programs take tasks in order of their number, and a task waits only for tasks with smaller
numbers, here or on a peer. So a launch ends with any number of resident programs, even one per device. Every wait has
a timeout. After a failure `not_failed` is 0: nothing waits and nothing is sent any more. Each function that waits
takes `not_failed` and the number of the task, which the failure report names, and returns the new `not_failed`.

The identity in a handshake is `launch_id`: the operation in the lowest 8 bits, a hash of kernel and sizes above them.
Ranks that launch different kernels therefore exchange nothing: each wait ends in a failure that says so. Two calls of
one kernel with equal sizes have the same identity.

A failed launch, and every launch after a failure, fills its results with 0xFF bytes (`poison`): NaN in float types, -1
in integer types. The status record holds the reason.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .failures import (
    DEVICE,
    DONE,
    EPOCHS,
    EXITED,
    FAILED,
    QUEUE,
    STARTED,
    STATE_WRONG_MESH,
    TICKET,
    TIMEOUT_NS,
    give_up,
    report,
    report_handshake,
    report_timeout,
)
from .gemm_structs import Pointer, Value
from .indices import indices
from .trace import (
    ANNOUNCE_EVENT,
    PUBLISH_EVENT,
    READY,
    WAIT_EVENT,
    stamp,
    trace,
    trace_exchange,
    trace_members,
    trace_wait,
)


class Launch(NamedTuple):
    """A running launch, as one of its programs sees it."""

    group_ptr: Pointer  # as in `Peers`
    table_ptr: Pointer  # as in `Peers`
    control: Value  # control words of this device
    rank: Value  # this rank
    device: Value  # this device's number in the heap


class Peer(NamedTuple):
    """A rank of the EP group."""

    rank: Value
    device: Value  # its device's number in the heap


@triton.jit
def control_words(table_ptr, device):
    """Return a pointer to the control words of `device`."""
    return tl.load(table_ptr + device).to(tl.pointer_type(tl.int32))


@triton.jit
def data_of(launch, device, dtype: tl.constexpr, HEAP: tl.constexpr, OFFSET: tl.constexpr = 0):
    """Return a pointer to byte OFFSET, a multiple of 16, of the data area of `device`, as elements of `dtype`."""
    address = tl.load(launch.table_ptr + device) + (HEAP.data_offset + OFFSET)
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit
def peer_of(launch, rank):
    """Look up the device of a rank."""
    return Peer(rank, tl.load(launch.group_ptr + rank))


@triton.jit
def open_launch(peers, HEAP: tl.constexpr):
    """Open a launch; every kernel that uses the heap begins with this.

    A group may come from the mesh given to `init` while the program runs on another mesh. Then the group has another
    device at this rank, and the launch fails: it sends no data to its peers.

    Returns:
      The launch, and `not_failed`: 0 if this launch or an earlier one has failed, else 1.
    """
    rank = tl.load(peers.group_ptr + HEAP.num_ranks)
    device = tl.load(peers.table_ptr + HEAP.num_devices + DEVICE).to(tl.int32)
    member = tl.load(peers.group_ptr + rank)
    control = control_words(peers.table_ptr, device)
    launch = Launch(peers.group_ptr, peers.table_ptr, control, rank, device)
    # One atomic load for all threads: with separate loads, warps could disagree while another program fails.
    not_failed = 1 - tl.atomic_load(control + FAILED, sem="relaxed", scope="gpu")
    # Fail if the group belongs to another mesh.
    if member != device:
        not_failed = 0
        tl.atomic_store(control + FAILED, 1, sem="relaxed", scope="gpu")
        report(launch, STATE_WRONG_MESH, -1, member, device, -1, 0, HEAP)
    return launch, not_failed


@triton.jit
def next_task(launch):
    """Take the next task number of this launch."""
    return tl.atomic_add(launch.control + TICKET, 1, sem="relaxed", scope="gpu")


@triton.jit
def next_epoch(launch, device):
    """Return the epoch of this launch for `device`, a scalar or a tensor of devices."""
    return tl.load(launch.control + EPOCHS + device) + 1


@triton.jit
def ready_word(epoch, HEAP: tl.constexpr):
    """Pack the handshake of a launch into int64: `launch_id << 32 | epoch`."""
    return (epoch.to(tl.int64) & 0xFFFFFFFF) | (HEAP.launch_id << 32)


@triton.jit
def ready_words(control, device, epoch, HEAP: tl.constexpr):
    """Return pointers to the handshakes of `device`, one or several, in the heap that `control` belongs to."""
    words = (control + EPOCHS + 2 * HEAP.num_devices).to(tl.pointer_type(tl.int64), bitcast=True)
    return words + (epoch & 1) * HEAP.num_devices + device


@triton.jit
def signal_ready(launch, HEAP: tl.constexpr):
    """Signal all peers that this rank has finished its earlier launches, so they may write to its heap."""
    began = stamp(HEAP)
    # Start with the next rank, so that ranks do not all signal rank 0 first.
    for step in range(1, HEAP.num_ranks):
        peer = tl.load(launch.group_ptr + (launch.rank + step) % HEAP.num_ranks)
        epoch = next_epoch(launch, peer)
        own = ready_words(control_words(launch.table_ptr, peer), launch.device, epoch, HEAP)
        tl.atomic_store(own, ready_word(epoch, HEAP), sem="release", scope="sys")
    trace(launch, ANNOUNCE_EVENT, began, 0, HEAP)


@triton.jit
def await_ready(launch, peer, not_failed, task, HEAP: tl.constexpr):
    """Wait until `peer` has begun this launch."""
    began = stamp(HEAP)
    if not_failed != 0:
        epoch = next_epoch(launch, peer.device)
        word = ready_words(launch.control, peer.device, epoch, HEAP)
        timeout_ns = tl.load(launch.table_ptr + HEAP.num_devices + TIMEOUT_NS)
        expected = ready_word(epoch, HEAP)
        # Acquire: the peer's earlier reads of its heap come before what this program stores there.
        if tl.atomic_poll(word, expected, sem="acquire", scope="sys", timeout_ns=timeout_ns) == 0:
            not_failed = 0
            tl.atomic_store(launch.control + FAILED, 1, sem="relaxed", scope="gpu")
            seen = tl.atomic_load(word, sem="relaxed", scope="sys")
            report_handshake(launch, peer.rank, epoch, seen, task, HEAP)
    # All threads store at the peer only after this barrier.
    tl.debug_barrier()
    trace_exchange(launch, WAIT_EVENT, began, task, peer.device, READY, HEAP)
    return not_failed


@triton.jit
def await_all_ready(launch, not_failed, task, HEAP: tl.constexpr):
    """Wait until every peer has begun this launch, polling all at once."""
    NUM_RANKS: tl.constexpr = HEAP.num_ranks
    if NUM_RANKS > 1:
        lanes = indices(triton.next_power_of_2(NUM_RANKS))
        # Lanes without a peer repeat the next rank.
        ranks = tl.where((lanes < NUM_RANKS) & (lanes != launch.rank), lanes, (launch.rank + 1) % NUM_RANKS)
        peers = tl.load(launch.group_ptr + ranks)
        epochs = next_epoch(launch, peers)
        words = ready_words(launch.control, peers, epochs, HEAP)
        not_failed = await_ready_words(launch, words, epochs, ranks, not_failed, task, HEAP)
    return not_failed


@triton.jit
def first_missing(arrived):
    """Mark the first lane whose wait has expired, as a mask `[lanes]`."""
    lanes = indices(arrived.shape[0])
    return lanes == tl.min(tl.where(arrived == 0, lanes, arrived.shape[0]), axis=0)


@triton.jit
def await_ready_words(launch, words, epochs, ranks, not_failed, task, HEAP: tl.constexpr):
    """Wait for the handshakes of all `ranks`, at `words`, and report the first one that is missing."""
    began = stamp(HEAP)
    if not_failed != 0:
        timeout_ns = tl.load(launch.table_ptr + HEAP.num_devices + TIMEOUT_NS)
        expected = ready_word(epochs, HEAP)
        arrived = tl.atomic_poll(words, expected, sem="acquire", scope="sys", timeout_ns=timeout_ns)
        arrived = arrived.to(tl.int32)
        if tl.min(arrived, axis=0) == 0:
            not_failed = 0
            tl.atomic_store(launch.control + FAILED, 1, sem="relaxed", scope="gpu")
            late = first_missing(arrived)
            word = tl.sum(tl.where(late, words.to(tl.int64), 0), axis=0).to(tl.pointer_type(tl.int64))
            seen = tl.atomic_load(word, sem="relaxed", scope="sys")
            epoch, peer_rank = tl.sum(tl.where(late, epochs, 0), axis=0), tl.sum(tl.where(late, ranks, 0), axis=0)
            report_handshake(launch, peer_rank, epoch, seen, task, HEAP)
    # All threads store at the peers only after this barrier.
    tl.debug_barrier()
    trace_wait(launch, began, task, ranks, READY, HEAP)
    return not_failed


@triton.jit
def flag_index(device, epoch, block, HEAP: tl.constexpr):
    """Return the index of the flag of `block` of `device`, counted in control words."""
    return HEAP.flags_offset // 4 + ((epoch & 1) * HEAP.num_devices + device) * HEAP.max_blocks + block


@triton.jit
def publish(launch, peer, block, task, HEAP: tl.constexpr):
    """Signal `peer` that this device's `block` is complete in its heap."""
    began = stamp(HEAP)
    epoch = next_epoch(launch, peer.device)
    flag = control_words(launch.table_ptr, peer.device) + flag_index(launch.device, epoch, block, HEAP)
    # The release of one thread covers the stores of the others only after a barrier.
    tl.debug_barrier()
    tl.atomic_store(flag, epoch, sem="release", scope="sys")
    trace_exchange(launch, PUBLISH_EVENT, began, task, peer.device, block, HEAP)


@triton.jit
def publish_to_all(launch, block, task, HEAP: tl.constexpr):
    """Signal every peer that this device's `block` is complete in its heap."""
    began = stamp(HEAP)
    # The release of one thread covers the stores of the others only after a barrier.
    tl.debug_barrier()
    for step in range(1, HEAP.num_ranks):
        peer = tl.load(launch.group_ptr + (launch.rank + step) % HEAP.num_ranks)
        epoch = next_epoch(launch, peer)
        flag = control_words(launch.table_ptr, peer) + flag_index(launch.device, epoch, block, HEAP)
        tl.atomic_store(flag, epoch, sem="release", scope="sys")
    trace_exchange(launch, PUBLISH_EVENT, began, task, -1, block, HEAP)


@triton.jit
def await_block(launch, peer, block, not_failed, task, HEAP: tl.constexpr):
    """Wait until `block` of `peer` is complete in this heap."""
    began = stamp(HEAP)
    epoch = next_epoch(launch, peer.device)
    flag = launch.control + flag_index(peer.device, epoch, block, HEAP)
    not_failed = await_flag(launch, flag, epoch, peer.rank, not_failed, task, HEAP)
    trace_exchange(launch, WAIT_EVENT, began, task, peer.device, block, HEAP)
    return not_failed


@triton.jit
def await_block_of_all(launch, block, not_failed, task, HEAP: tl.constexpr):
    """Wait until `block` of every rank is complete in this heap, polling all at once."""
    began = stamp(HEAP)
    lanes = indices(triton.next_power_of_2(HEAP.num_ranks))
    # Lanes without a rank repeat this one.
    ranks = tl.where(lanes < HEAP.num_ranks, lanes, launch.rank)
    devices = tl.load(launch.group_ptr + ranks)
    epochs = next_epoch(launch, devices)
    flags = launch.control + flag_index(devices, epochs, block, HEAP)
    not_failed = await_flags_at(launch, flags, epochs, ranks, not_failed, task, HEAP)
    trace_exchange(launch, WAIT_EVENT, began, task, -1, block, HEAP)
    return not_failed


@triton.jit
def await_blocks(launch, peer, first, end, not_failed, task, HEAP: tl.constexpr):
    """Wait until blocks `[first, end)` of `peer` are complete in this heap, polling 64 at a time."""
    began = stamp(HEAP)
    epoch = next_epoch(launch, peer.device)
    flags = launch.control + flag_index(peer.device, epoch, 0, HEAP)
    timeout_ns = tl.load(launch.table_ptr + HEAP.num_devices + TIMEOUT_NS)
    lanes = indices(64)
    for start in range(first, end, 64):
        if not_failed != 0:
            # Lanes past the end repeat the first block.
            block = tl.where(start + lanes < end, start + lanes, start)
            expected = lanes * 0 + epoch
            arrived = tl.atomic_poll(flags + block, expected, sem="acquire", scope="sys", timeout_ns=timeout_ns)
            if tl.min(arrived.to(tl.int32), axis=0) == 0:
                not_failed = 0
                give_up(launch, flags + end - 1, epoch, peer.rank, task, timeout_ns, HEAP)
    # All threads read what the flags guard only after this barrier.
    tl.debug_barrier()
    trace_exchange(launch, WAIT_EVENT, began, task, peer.device, end - 1, HEAP)
    return not_failed


@triton.jit
def await_flag(launch, flag, epoch, peer_rank, not_failed, task, HEAP: tl.constexpr):
    """Wait until `flag` holds `epoch`; after a failure return at once."""
    if not_failed != 0:
        timeout_ns = tl.load(launch.table_ptr + HEAP.num_devices + TIMEOUT_NS)
        arrived = tl.atomic_poll(flag, epoch, sem="acquire", scope="sys", timeout_ns=timeout_ns)
        if arrived == 0:
            not_failed = 0
            give_up(launch, flag, epoch, peer_rank, task, timeout_ns, HEAP)
    # All threads read what the flag guards only after this barrier.
    tl.debug_barrier()
    return not_failed


@triton.jit
def await_flags_at(launch, flags, epochs, ranks, not_failed, task, HEAP: tl.constexpr):
    """Wait for one flag of each of `ranks`, polling all at once, and report the first one that is missing."""
    if not_failed != 0:
        timeout_ns = tl.load(launch.table_ptr + HEAP.num_devices + TIMEOUT_NS)
        arrived = tl.atomic_poll(flags, epochs, sem="acquire", scope="sys", timeout_ns=timeout_ns).to(tl.int32)
        if tl.min(arrived, axis=0) == 0:
            not_failed = 0
            tl.atomic_store(launch.control + FAILED, 1, sem="relaxed", scope="gpu")
            late = first_missing(arrived)
            seen = tl.sum(tl.where(late, tl.atomic_load(flags, sem="relaxed", scope="sys"), 0), axis=0)
            epoch, peer_rank = tl.sum(tl.where(late, epochs, 0), axis=0), tl.sum(tl.where(late, ranks, 0), axis=0)
            report_timeout(launch, peer_rank, epoch, seen, task, timeout_ns, HEAP)
    # All threads read what the flags guard only after this barrier.
    tl.debug_barrier()
    return not_failed


@triton.jit
def count_task(counter_ptr):
    """Count a task whose results other tasks wait for."""
    # The release of one thread covers the stores of the others only after a barrier.
    tl.debug_barrier()
    tl.atomic_add(counter_ptr, 1, sem="release", scope="gpu")


@triton.jit
def count_stored(launch):
    """Count this program among those that have stored their share; return whether it is the last one."""
    # Stores of all threads come before the count; those of all programs come before what the last count allows.
    tl.debug_barrier()
    return tl.atomic_add(launch.control + DONE, 1, sem="acq_rel", scope="sys") == tl.num_programs(0) - 1


@triton.jit
def all_programs_started(launch):
    """Return whether all programs of this launch have started; the last one to start always sees it.

    Only then may a program wait for other ranks or programs outside of the task order: it cannot keep a program that it
    waits for from becoming resident.
    """
    return tl.atomic_add(launch.control + STARTED, 0, sem="relaxed", scope="gpu") == tl.num_programs(0)


@triton.jit
def end_launch(launch, HEAP: tl.constexpr):
    """End a launch: the last program to leave resets the queue and counts the launch with every peer.

    Returns:
      1 in that program if the launch has failed: it must then `poison` the results. 0 in all others.
    """
    return end_counted_launch(launch, EPOCHS, HEAP)


@triton.jit
def end_counted_launch(launch, EPOCHS_AT: tl.constexpr, HEAP: tl.constexpr):
    """`end_launch` of a launch whose counts, by device, are the control words from EPOCHS_AT on."""
    control = launch.control
    has_failed = 0
    tl.debug_barrier()
    # acq_rel: the last program sees the stores of all others.
    if tl.atomic_add(control + EXITED, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        has_failed = tl.atomic_load(control + FAILED, sem="relaxed", scope="gpu")
        # Reset the queues and counters for the next launch.
        tl.store(control + TICKET, 0)
        tl.store(control + EXITED, 0)
        tl.store(control + QUEUE + indices(32), 0)
        trace_members(launch, EPOCHS_AT, HEAP)
        # Count this launch with every member of the group.
        lanes = indices(triton.next_power_of_2(HEAP.num_ranks))
        inside = lanes < HEAP.num_ranks
        epochs = control + EPOCHS_AT + tl.load(launch.group_ptr + lanes, mask=inside, other=0)
        tl.store(epochs, tl.load(epochs, mask=inside, other=0) + 1, mask=inside)
    # Stores of other programs must not land after the poison.
    tl.debug_barrier()
    return has_failed
