"""How kernels of several ranks meet: task queue, epochs, greetings, flags and bounded waits.

Every device has a heap of the same layout; a table holds the address of each. table.py names the words of both. From
byte FLAGS of a heap on lie `[2, D, MAX_BLOCKS]` epochs: which block of which device has arrived. D counts all devices
of the heap, so that any subset of them can form a group. A pair of devices agrees on its number of launches, its epoch,
because both take part in each. Both use two slots by the parity of the epoch: a peer can be one launch ahead. Epochs
are 32 bits wide and begin again after 2**32 launches; they are only compared for equality.

A rank greets its peers at the beginning of each launch, with the epoch and with what it launches: LAUNCH, the operation
in the lowest 8 bits, and above them a hash of the kernel and its sizes (launch.py). Nothing is sent to a rank
before its greeting has been read. So ranks whose launches of one number differ exchange nothing: each wait for a
greeting ends in a failure that says so. Two calls of one kernel with the same sizes are alike, and not told apart.

A launch that has failed, or that begins after a failure, poisons its results when its last program leaves: all bytes
become 0xFF, which is NaN in every type of floats and -1 in integers. So no number that may be wrong leaves a kernel;
why, the next check of the status record says.

Tasks are taken in order of their number, and wait only for tasks with smaller numbers, here or on a peer. So a launch
ends with any number of resident programs, even one per device.

A kernel knows whether its launch is `alive`: 1 while no wait has failed on this device, else 0. After a failure nothing
waits, and nothing is sent. Each function that waits takes it, with the number of the task that it reports, and returns
it.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .failures import STATE_WRONG_MESH, give_up, refuse_greeting, report
from .table import DEVICE, EPOCHS, EXITED, FAILED, QUEUE, TICKET, TIMEOUT_NS
from .trace import (
    ANNOUNCE_EVENT,
    GREETING,
    PUBLISH_EVENT,
    WAIT_EVENT,
    stamp,
    trace,
    trace_exchange,
    trace_members,
    trace_wait,
)


class Launch(NamedTuple):
    """A running launch, as one of its programs sees it."""

    group_ptr: Any  # as in `Peers`
    table_ptr: Any  # as in `Peers`
    control: Any  # control words of this device
    rank: Any  # this rank
    device: Any  # this device's number in the heap


class Peer(NamedTuple):
    """A rank of the EP group."""

    rank: Any
    device: Any  # its device's number in the heap


@triton.jit
def control_words(table_ptr, device):
    """Pointer to the control words of `device`."""
    return tl.load(table_ptr + device).to(tl.pointer_type(tl.int32))


@triton.jit
def data_of(launch, device, dtype: tl.constexpr, HEAP: tl.constexpr, OFFSET: tl.constexpr = 0):
    """Pointer to byte OFFSET, a multiple of 16, of the data area of `device`, as elements of `dtype`."""
    address = tl.load(launch.table_ptr + device) + (HEAP.data_offset + OFFSET)
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit
def peer_of(launch, rank):
    """A rank and its device."""
    return Peer(rank, tl.load(launch.group_ptr + rank))


@triton.jit
def open_launch(peers, HEAP: tl.constexpr):
    """What every launch begins with.

    A group may come from the mesh given to `init`, while the program runs on another. Then this device is not the one
    that the group has at this rank, and the launch fails: nothing is written to a peer but that it has begun.

    Returns:
      The launch, and whether it is alive.
    """
    rank = tl.load(peers.group_ptr + HEAP.num_ranks)
    device = tl.load(peers.table_ptr + HEAP.num_devices + DEVICE).to(tl.int32)
    member = tl.load(peers.group_ptr + rank)
    control = control_words(peers.table_ptr, device)
    launch = Launch(peers.group_ptr, peers.table_ptr, control, rank, device)
    # By one thread for all: with a load each, warps could disagree while another program fails.
    alive = 1 - tl.atomic_load(control + FAILED, sem="relaxed", scope="gpu")
    if member != device:
        alive = 0
        tl.atomic_store(control + FAILED, 1, sem="relaxed", scope="gpu")
        report(launch, STATE_WRONG_MESH, -1, member, device, -1, 0, HEAP)
    return launch, alive


@triton.jit
def next_task(launch):
    """Number of the next task of this launch."""
    return tl.atomic_add(launch.control + TICKET, 1, sem="relaxed", scope="gpu")


@triton.jit
def next_epoch(launch, device):
    """The number of this launch among those with `device`, one or several."""
    return tl.load(launch.control + EPOCHS + device) + 1


@triton.jit
def greeting(epoch, HEAP: tl.constexpr):
    """What a rank tells a peer when it begins a launch: its epoch, and what it is."""
    return (epoch.to(tl.int64) & 0xFFFFFFFF) | (HEAP.launch_id << 32)


@triton.jit
def greetings_of(control, device, epoch, HEAP: tl.constexpr):
    """Pointers to the greetings of `device`, one or several, in the heap that `control` belongs to."""
    greetings = (control + EPOCHS + 2 * HEAP.num_devices).to(tl.pointer_type(tl.int64), bitcast=True)
    return greetings + (epoch & 1) * HEAP.num_devices + device


@triton.jit
def announce(launch, HEAP: tl.constexpr):
    """Tells all peers that this rank has finished all earlier launches: they may write to its heap."""
    began = stamp(HEAP)
    for step in range(1, HEAP.num_ranks):
        peer = tl.load(launch.group_ptr + (launch.rank + step) % HEAP.num_ranks)
        epoch = next_epoch(launch, peer)
        own = greetings_of(control_words(launch.table_ptr, peer), launch.device, epoch, HEAP)
        tl.atomic_store(own, greeting(epoch, HEAP), sem="release", scope="sys")
    trace(launch, ANNOUNCE_EVENT, began, 0, HEAP)


@triton.jit
def await_ready(launch, peer, alive, task, HEAP: tl.constexpr):
    """Waits until `peer` has begun this launch; returns whether it is still alive."""
    began = stamp(HEAP)
    if alive != 0:
        epoch = next_epoch(launch, peer.device)
        word = greetings_of(launch.control, peer.device, epoch, HEAP)
        timeout_ns = tl.load(launch.table_ptr + HEAP.num_devices + TIMEOUT_NS)
        expected = greeting(epoch, HEAP)
        if tl.atomic_poll(word, expected, sem="acquire", scope="sys", timeout_ns=timeout_ns) == 0:
            alive = 0
            tl.atomic_store(launch.control + FAILED, 1, sem="relaxed", scope="gpu")
            seen = tl.atomic_load(word, sem="relaxed", scope="sys")
            refuse_greeting(launch, peer.rank, epoch, seen, task, HEAP)
    # What the greeting allows is done by all threads, after this barrier.
    tl.debug_barrier()
    trace_exchange(launch, WAIT_EVENT, began, task, peer.device, GREETING, HEAP)
    return alive


@triton.jit
def await_peers(launch, alive, task, HEAP: tl.constexpr):
    """Waits, for all peers at once, until each has begun this launch; returns whether it is still alive."""
    NUM_RANKS: tl.constexpr = HEAP.num_ranks
    if NUM_RANKS > 1:
        lanes = tl.arange(0, triton.next_power_of_2(NUM_RANKS))
        # Lanes of no peer stand for the next rank.
        ranks = tl.where((lanes < NUM_RANKS) & (lanes != launch.rank), lanes, (launch.rank + 1) % NUM_RANKS)
        peers = tl.load(launch.group_ptr + ranks)
        epochs = next_epoch(launch, peers)
        words = greetings_of(launch.control, peers, epochs, HEAP)
        alive = await_greetings(launch, words, epochs, ranks, alive, task, HEAP)
    return alive


@triton.jit
def first_missing(arrived):
    """Which of several lanes is the first whose wait has expired, `[N]`."""
    lanes = tl.arange(0, arrived.shape[0])
    return lanes == tl.min(tl.where(arrived == 0, lanes, arrived.shape[0]), axis=0)


@triton.jit
def await_greetings(launch, words, epochs, ranks, alive, task, HEAP: tl.constexpr):
    """Waits for a greeting each of `ranks`, at `words`, all at once.

    Of those that stay away, the first is reported.
    """
    began = stamp(HEAP)
    if alive != 0:
        timeout_ns = tl.load(launch.table_ptr + HEAP.num_devices + TIMEOUT_NS)
        expected = greeting(epochs, HEAP)
        arrived = tl.atomic_poll(words, expected, sem="acquire", scope="sys", timeout_ns=timeout_ns)
        arrived = arrived.to(tl.int32)
        if tl.min(arrived, axis=0) == 0:
            alive = 0
            tl.atomic_store(launch.control + FAILED, 1, sem="relaxed", scope="gpu")
            late = first_missing(arrived)
            word = tl.sum(tl.where(late, words.to(tl.int64), 0), axis=0).to(tl.pointer_type(tl.int64))
            seen = tl.atomic_load(word, sem="relaxed", scope="sys")
            epoch, peer_rank = tl.sum(tl.where(late, epochs, 0), axis=0), tl.sum(tl.where(late, ranks, 0), axis=0)
            refuse_greeting(launch, peer_rank, epoch, seen, task, HEAP)
    # What the greetings allow is done by all threads, after this barrier.
    tl.debug_barrier()
    trace_wait(launch, began, task, ranks, GREETING, HEAP)
    return alive


@triton.jit
def flag_index(device, epoch, block, HEAP: tl.constexpr):
    """The index of the flag of `block` of `device`, as if flags were control words."""
    return HEAP.flags_offset // 4 + ((epoch & 1) * HEAP.num_devices + device) * HEAP.max_blocks + block


@triton.jit
def publish(launch, peer, block, task, HEAP: tl.constexpr):
    """Tells `peer` that this device's `block` is complete in its heap."""
    began = stamp(HEAP)
    epoch = next_epoch(launch, peer.device)
    flag = control_words(launch.table_ptr, peer.device) + flag_index(launch.device, epoch, block, HEAP)
    # A release by one thread covers the others' stores only after a barrier of the program.
    tl.debug_barrier()
    tl.atomic_store(flag, epoch, sem="release", scope="sys")
    trace_exchange(launch, PUBLISH_EVENT, began, task, peer.device, block, HEAP)


@triton.jit
def publish_to_all(launch, block, task, HEAP: tl.constexpr):
    """Tells every peer that this device's `block` is complete in its heap."""
    began = stamp(HEAP)
    # A release by one thread covers the others' stores only after a barrier of the program.
    tl.debug_barrier()
    for step in range(1, HEAP.num_ranks):
        peer = tl.load(launch.group_ptr + (launch.rank + step) % HEAP.num_ranks)
        epoch = next_epoch(launch, peer)
        flag = control_words(launch.table_ptr, peer) + flag_index(launch.device, epoch, block, HEAP)
        tl.atomic_store(flag, epoch, sem="release", scope="sys")
    trace_exchange(launch, PUBLISH_EVENT, began, task, -1, block, HEAP)


@triton.jit
def await_block(launch, peer, block, alive, task, HEAP: tl.constexpr):
    """Waits until `block` of `peer` is complete in this heap; returns whether the launch is still alive."""
    began = stamp(HEAP)
    epoch = next_epoch(launch, peer.device)
    flag = launch.control + flag_index(peer.device, epoch, block, HEAP)
    alive = await_flag(launch, flag, epoch, peer.rank, alive, task, HEAP)
    trace_exchange(launch, WAIT_EVENT, began, task, peer.device, block, HEAP)
    return alive


@triton.jit
def await_block_of_all(launch, block, alive, task, HEAP: tl.constexpr):
    """Waits, for all ranks at once, until `block` of each is complete in this heap; returns whether it is alive."""
    began = stamp(HEAP)
    lanes = tl.arange(0, triton.next_power_of_2(HEAP.num_ranks))
    ranks = tl.where(lanes < HEAP.num_ranks, lanes, launch.rank)
    devices = tl.load(launch.group_ptr + ranks)
    epochs = next_epoch(launch, devices)
    alive = await_flags_at(launch, flag_index(devices, epochs, block, HEAP), epochs, ranks, alive, task, HEAP)
    trace_exchange(launch, WAIT_EVENT, began, task, -1, block, HEAP)
    return alive


@triton.jit
def await_blocks(launch, peer, first, end, alive, task, HEAP: tl.constexpr):
    """Waits until blocks `[first, end)` of `peer` are complete in this heap; returns whether the launch is alive."""
    began = stamp(HEAP)
    epoch = next_epoch(launch, peer.device)
    flags = launch.control + flag_index(peer.device, epoch, 0, HEAP)
    timeout_ns = tl.load(launch.table_ptr + HEAP.num_devices + TIMEOUT_NS)
    lanes = tl.arange(0, 64)
    for start in range(first, end, 64):
        if alive != 0:
            block = tl.where(start + lanes < end, start + lanes, start)
            expected = tl.zeros((64,), tl.int32) + epoch
            arrived = tl.atomic_poll(flags + block, expected, sem="acquire", scope="sys", timeout_ns=timeout_ns)
            if tl.min(arrived.to(tl.int32), axis=0) == 0:
                alive = 0
                give_up(launch, flags + end - 1, epoch, peer.rank, task, timeout_ns, HEAP)
    # What the flags guard is read by all threads, after this barrier.
    tl.debug_barrier()
    trace_exchange(launch, WAIT_EVENT, began, task, peer.device, end - 1, HEAP)
    return alive


@triton.jit
def await_flag(launch, flag, epoch, peer_rank, alive, task, HEAP: tl.constexpr):
    """Waits for `epoch`, at most as long as the table allows. After a failure nothing waits any more."""
    if alive != 0:
        timeout_ns = tl.load(launch.table_ptr + HEAP.num_devices + TIMEOUT_NS)
        arrived = tl.atomic_poll(flag, epoch, sem="acquire", scope="sys", timeout_ns=timeout_ns)
        if arrived == 0:
            alive = 0
            give_up(launch, flag, epoch, peer_rank, task, timeout_ns, HEAP)
    # What the flag guards is read by all threads, after this barrier.
    tl.debug_barrier()
    return alive


@triton.jit
def await_flags_at(launch, indices, epochs, ranks, alive, task, HEAP: tl.constexpr):
    """Waits for one flag each of `ranks`, all at once.

    Of those that stay away, the first is reported.
    """
    if alive != 0:
        timeout_ns = tl.load(launch.table_ptr + HEAP.num_devices + TIMEOUT_NS)
        flags = launch.control + indices
        arrived = tl.atomic_poll(flags, epochs, sem="acquire", scope="sys", timeout_ns=timeout_ns).to(tl.int32)
        if tl.min(arrived, axis=0) == 0:
            alive = 0
            late = first_missing(arrived)
            epoch, peer_rank = tl.sum(tl.where(late, epochs, 0), axis=0), tl.sum(tl.where(late, ranks, 0), axis=0)
            flag = launch.control + tl.sum(tl.where(late, indices, 0), axis=0)
            give_up(launch, flag, epoch, peer_rank, task, timeout_ns, HEAP)
    # What the flags guard is read by all threads, after this barrier.
    tl.debug_barrier()
    return alive


@triton.jit
def end_launch(launch, HEAP: tl.constexpr):
    """The last program to leave resets the queue and counts the launch with every peer.

    Returns:
      1 in that program if the launch has failed: it must then `poison` what the launch returns; else 0.
    """
    control = launch.control
    has_failed = 0
    tl.debug_barrier()
    if tl.atomic_add(control + EXITED, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        has_failed = tl.atomic_load(control + FAILED, sem="relaxed", scope="gpu")
        tl.store(control + TICKET, 0)
        tl.store(control + EXITED, 0)
        tl.store(control + QUEUE + tl.arange(0, 32), tl.zeros((32,), tl.int32))
        trace_members(launch, EPOCHS, HEAP)
        for peer_rank in range(HEAP.num_ranks):
            peer = tl.load(launch.group_ptr + peer_rank)
            tl.store(control + EPOCHS + peer, tl.load(control + EPOCHS + peer) + 1)
    # Nothing of what other programs have stored may come after what poisons it.
    tl.debug_barrier()
    return has_failed
