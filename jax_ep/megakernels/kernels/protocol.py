"""How kernels of several ranks meet: the control words of the heap, task queue, epochs, flags and bounded waits.

Every device has a heap of the same layout; a table holds the address of each. Control words (int32):

    0 TICKET   next task of the running launch       64          EPOCHS         [D] launches so far with each device
    1 EXITED   programs of the launch that ended     64 + D      REGION_EPOCHS  [D] the same of regions.py
    2 FAILED   1 after a failure, until reset        64 + 2 * D  READY          [2, D] int64 greetings
    8 QUEUE    next task of a launch's second queue
    9 STARTED  programs of the launch that began
    16 DONE    [16] counters of finished tasks

and from byte `FLAGS` on, `[2, D, MAX_BLOCKS]` epochs: which block of which device has arrived. D counts all devices of
the heap, so that any subset of them can form a group. A pair of devices agrees on its number of launches, its epoch,
because both take part in each. Both use two slots by the parity of the epoch: a peer can be one launch ahead. Epochs
are 32 bits wide and begin again after 2**32 launches; they are only compared for equality.

A rank greets its peers at the beginning of each launch, with the epoch and with what it launches: LAUNCH, the operation
in the lowest 8 bits, and above them a hash of the kernel and its sizes (heap_launch.py). Nothing is sent to a rank
before its greeting has been read. So ranks whose launches of one number differ exchange nothing: each wait for a
greeting ends in a failure that says so. Two calls of one kernel with the same sizes are alike, and not told apart.

A launch that has failed, or that begins after a failure, poisons its results when its last program leaves: all bytes
become 0xFF, which is NaN in every type of floats and -1 in integers. So no number that may be wrong leaves a kernel;
why, the next check of the status record says.

Tasks are taken in order of their number, and wait only for tasks with smaller numbers, here or on a peer. So a launch
ends with any number of resident programs, even one per device.
"""

import triton
import triton.language as tl

from .failures import FAILED, STATE_WRONG_MESH, give_up, refuse_greeting, report

TICKET = tl.constexpr(0)
EXITED = tl.constexpr(1)
QUEUE = tl.constexpr(8)
STARTED = tl.constexpr(9)
DONE = tl.constexpr(16)
EPOCHS = tl.constexpr(64)


@triton.jit
def control_words(table_ptr, device):
    """Pointer to the control words of `device`."""
    return tl.load(table_ptr + device).to(tl.pointer_type(tl.int32))


@triton.jit
def heap_rows(table_ptr, device, dtype: tl.constexpr, DATA: tl.constexpr):
    """Pointer to the data area of `device`, as elements of `dtype`, known to be aligned."""
    address = tl.load(table_ptr + device) + DATA
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit
def open_launch(table_ptr, group_ptr, LAUNCH: tl.constexpr, W: tl.constexpr, D: tl.constexpr):
    """What every launch begins with.

    A group may come from the mesh given to `init`, while the program runs on another. Then this device is not the one
    that the group has at this rank, and the launch fails: nothing is written to a peer but that it has begun.

    Returns:
      Rank, device number, control words, and 1 while no wait has failed on this device, else 0: after a failure nothing
      waits, and nothing is sent.
    """
    rank = tl.load(group_ptr + W)
    me = tl.load(table_ptr + D + 2).to(tl.int32)
    member = tl.load(group_ptr + rank)
    control = control_words(table_ptr, me)
    # By one thread for all: with a load each, warps could disagree while another program fails.
    alive = 1 - tl.atomic_load(control + FAILED, sem="relaxed", scope="gpu")
    if member != me:
        alive = 0
        tl.atomic_store(control + FAILED, 1, sem="relaxed", scope="gpu")
        report(table_ptr, STATE_WRONG_MESH, rank, -1, member, me, -1, 0, LAUNCH, D)
    return rank, me, control, alive


@triton.jit
def next_task(control):
    """Number of the next task of this launch."""
    return tl.atomic_add(control + TICKET, 1, sem="relaxed", scope="gpu")


@triton.jit
def greeting(epoch, LAUNCH: tl.constexpr):
    """What a rank tells a peer when it begins a launch: its epoch, and what it is."""
    return (epoch.to(tl.int64) & 0xFFFFFFFF) | (LAUNCH << 32)


@triton.jit
def ready_words(control, device, epoch, D: tl.constexpr):
    """Pointers to the greetings of `device`, one or several, in the heap that `control` belongs to."""
    words = (control + EPOCHS + 2 * D).to(tl.pointer_type(tl.int64), bitcast=True)
    return words + (epoch & 1) * D + device


@triton.jit
def announce(table_ptr, group_ptr, control, me, rank, LAUNCH: tl.constexpr, W: tl.constexpr, D: tl.constexpr):
    """Tells all peers that this rank has finished all earlier launches: they may write to its heap."""
    for step in range(1, W):
        peer = tl.load(group_ptr + (rank + step) % W)
        epoch = tl.load(control + EPOCHS + peer) + 1
        ready = ready_words(control_words(table_ptr, peer), me, epoch, D)
        tl.atomic_store(ready, greeting(epoch, LAUNCH), sem="release", scope="sys")


@triton.jit
def await_ready(table_ptr, control, rank, peer_rank, peer, alive, task, LAUNCH: tl.constexpr, D: tl.constexpr):
    """Waits until `peer` has begun this launch; returns whether the launch is still alive."""
    if alive != 0:
        epoch = tl.load(control + EPOCHS + peer) + 1
        ready = ready_words(control, peer, epoch, D)
        timeout_ns = tl.load(table_ptr + D + 1)
        if tl.atomic_poll(ready, greeting(epoch, LAUNCH), sem="acquire", scope="sys", timeout_ns=timeout_ns) == 0:
            alive = 0
            tl.atomic_store(control + FAILED, 1, sem="relaxed", scope="gpu")
            seen = tl.atomic_load(ready, sem="relaxed", scope="sys")
            refuse_greeting(table_ptr, rank, peer_rank, epoch, seen, task, LAUNCH, D)
    # What the greeting allows is done by all threads, after this barrier.
    tl.debug_barrier()
    return alive


@triton.jit
def await_peers(
    table_ptr, group_ptr, control, rank, alive, task, LAUNCH: tl.constexpr, W: tl.constexpr, D: tl.constexpr
):
    """Waits, for all peers at once, until each has begun this launch; returns whether the launch is still alive."""
    if W > 1:
        lanes = tl.arange(0, triton.next_power_of_2(W))
        # Lanes of no peer stand for the next rank.
        ranks = tl.where((lanes < W) & (lanes != rank), lanes, (rank + 1) % W)
        peers = tl.load(group_ptr + ranks)
        epochs = tl.load(control + EPOCHS + peers) + 1
        ready = ready_words(control, peers, epochs, D)
        alive = await_greetings(table_ptr, ready, epochs, ranks, control, rank, alive, task, LAUNCH, D)
    return alive


@triton.jit
def first_missing(arrived):
    """Which of several lanes is the first whose wait has expired, `[N]`."""
    lanes = tl.arange(0, arrived.shape[0])
    return lanes == tl.min(tl.where(arrived == 0, lanes, arrived.shape[0]), axis=0)


@triton.jit
def await_greetings(table_ptr, words, epochs, ranks, control, rank, alive, task, LAUNCH: tl.constexpr, D: tl.constexpr):
    """Waits for a greeting each of `ranks`, at `words`, all at once.

    Of those that stay away, the first is reported.
    """
    if alive != 0:
        timeout_ns = tl.load(table_ptr + D + 1)
        arrived = tl.atomic_poll(words, greeting(epochs, LAUNCH), sem="acquire", scope="sys", timeout_ns=timeout_ns)
        arrived = arrived.to(tl.int32)
        if tl.min(arrived, axis=0) == 0:
            alive = 0
            tl.atomic_store(control + FAILED, 1, sem="relaxed", scope="gpu")
            late = first_missing(arrived)
            word = tl.sum(tl.where(late, words.to(tl.int64), 0), axis=0).to(tl.pointer_type(tl.int64))
            seen = tl.atomic_load(word, sem="relaxed", scope="sys")
            epoch, peer_rank = tl.sum(tl.where(late, epochs, 0), axis=0), tl.sum(tl.where(late, ranks, 0), axis=0)
            refuse_greeting(table_ptr, rank, peer_rank, epoch, seen, task, LAUNCH, D)
    # What the greetings allow is done by all threads, after this barrier.
    tl.debug_barrier()
    return alive


@triton.jit
def block_word(device, epoch, block, FLAGS: tl.constexpr, D: tl.constexpr, MAX_BLOCKS: tl.constexpr):
    """Which of the heap's control words is the flag of `block` of `device`."""
    return FLAGS // 4 + ((epoch & 1) * D + device) * MAX_BLOCKS + block


@triton.jit
def block_flag(control, device, epoch, block, FLAGS: tl.constexpr, D: tl.constexpr, MAX_BLOCKS: tl.constexpr):
    """Flag of `block` of `device` in the heap that `control` belongs to."""
    return control + block_word(device, epoch, block, FLAGS, D, MAX_BLOCKS)


@triton.jit
def publish(table_ptr, control, me, peer, block, FLAGS: tl.constexpr, D: tl.constexpr, MAX_BLOCKS: tl.constexpr):
    """Tells `peer` that this device's `block` is complete in its heap."""
    epoch = tl.load(control + EPOCHS + peer) + 1
    flag = block_flag(control_words(table_ptr, peer), me, epoch, block, FLAGS, D, MAX_BLOCKS)
    # A release by one thread covers the others' stores only after a barrier of the program.
    tl.debug_barrier()
    tl.atomic_store(flag, epoch, sem="release", scope="sys")


@triton.jit
def publish_to_all(
    table_ptr,
    group_ptr,
    control,
    me,
    rank,
    block,
    FLAGS: tl.constexpr,
    W: tl.constexpr,
    D: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
):
    """Tells every peer that this device's `block` is complete in its heap."""
    # A release by one thread covers the others' stores only after a barrier of the program.
    tl.debug_barrier()
    for step in range(1, W):
        peer = tl.load(group_ptr + (rank + step) % W)
        epoch = tl.load(control + EPOCHS + peer) + 1
        flag = block_flag(control_words(table_ptr, peer), me, epoch, block, FLAGS, D, MAX_BLOCKS)
        tl.atomic_store(flag, epoch, sem="release", scope="sys")


@triton.jit
def await_block(
    table_ptr,
    control,
    rank,
    peer_rank,
    peer,
    block,
    alive,
    task,
    LAUNCH: tl.constexpr,
    FLAGS: tl.constexpr,
    D: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
):
    """Waits until `block` of `peer` is complete in this heap; returns whether the launch is still alive."""
    epoch = tl.load(control + EPOCHS + peer) + 1
    flag = block_flag(control, peer, epoch, block, FLAGS, D, MAX_BLOCKS)
    return await_flag(table_ptr, flag, epoch, control, rank, peer_rank, alive, task, LAUNCH, D)


@triton.jit
def await_block_of_all(
    table_ptr,
    group_ptr,
    control,
    rank,
    block,
    alive,
    task,
    LAUNCH: tl.constexpr,
    FLAGS: tl.constexpr,
    W: tl.constexpr,
    D: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
):
    """Waits, for all ranks at once, until `block` of each is complete in this heap; returns whether it is alive."""
    lanes = tl.arange(0, triton.next_power_of_2(W))
    ranks = tl.where(lanes < W, lanes, rank)
    devices = tl.load(group_ptr + ranks)
    epochs = tl.load(control + EPOCHS + devices) + 1
    words = block_word(devices, epochs, block, FLAGS, D, MAX_BLOCKS)
    return await_words(table_ptr, words, epochs, ranks, control, rank, alive, task, LAUNCH, D)


@triton.jit
def await_blocks(
    table_ptr,
    control,
    rank,
    peer_rank,
    peer,
    first,
    end,
    alive,
    task,
    LAUNCH: tl.constexpr,
    FLAGS: tl.constexpr,
    D: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
):
    """Waits until blocks `[first, end)` of `peer` are complete in this heap; returns whether the launch is alive."""
    epoch = tl.load(control + EPOCHS + peer) + 1
    flags = block_flag(control, peer, epoch, 0, FLAGS, D, MAX_BLOCKS)
    timeout_ns = tl.load(table_ptr + D + 1)
    lanes = tl.arange(0, 64)
    for start in range(first, end, 64):
        if alive != 0:
            block = tl.where(start + lanes < end, start + lanes, start)
            expected = tl.zeros((64,), tl.int32) + epoch
            arrived = tl.atomic_poll(flags + block, expected, sem="acquire", scope="sys", timeout_ns=timeout_ns)
            if tl.min(arrived.to(tl.int32), axis=0) == 0:
                alive = 0
                give_up(table_ptr, flags + end - 1, epoch, control, rank, peer_rank, task, timeout_ns, LAUNCH, D)
    # What the flags guard is read by all threads, after this barrier.
    tl.debug_barrier()
    return alive


@triton.jit
def await_flag(table_ptr, flag, epoch, control, rank, peer_rank, alive, task, LAUNCH: tl.constexpr, D: tl.constexpr):
    """Waits for `epoch`, at most as long as the table allows. After a failure nothing waits any more."""
    if alive != 0:
        timeout_ns = tl.load(table_ptr + D + 1)
        arrived = tl.atomic_poll(flag, epoch, sem="acquire", scope="sys", timeout_ns=timeout_ns)
        if arrived == 0:
            alive = 0
            give_up(table_ptr, flag, epoch, control, rank, peer_rank, task, timeout_ns, LAUNCH, D)
    # What the flag guards is read by all threads, after this barrier.
    tl.debug_barrier()
    return alive


@triton.jit
def await_words(
    table_ptr,
    words,
    epochs,
    ranks,
    control,
    rank,
    alive,
    task,
    LAUNCH: tl.constexpr,
    D: tl.constexpr,
):
    """Waits for one control word each of `ranks`, all at once.

    Of those that stay away, the first is reported.
    """
    if alive != 0:
        timeout_ns = tl.load(table_ptr + D + 1)
        arrived = tl.atomic_poll(control + words, epochs, sem="acquire", scope="sys", timeout_ns=timeout_ns).to(
            tl.int32
        )
        if tl.min(arrived, axis=0) == 0:
            alive = 0
            late = first_missing(arrived)
            epoch, peer_rank = tl.sum(tl.where(late, epochs, 0), axis=0), tl.sum(tl.where(late, ranks, 0), axis=0)
            flag = control + tl.sum(tl.where(late, words, 0), axis=0)
            give_up(table_ptr, flag, epoch, control, rank, peer_rank, task, timeout_ns, LAUNCH, D)
    # What the flags guard is read by all threads, after this barrier.
    tl.debug_barrier()
    return alive


@triton.jit
def end_launch(control, group_ptr, W: tl.constexpr):
    """The last program to leave resets the queue and counts the launch with every peer.

    Returns:
      1 in that program if the launch has failed: it must then `poison` what the launch returns; else 0.
    """
    has_failed = 0
    tl.debug_barrier()
    if tl.atomic_add(control + EXITED, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        has_failed = tl.atomic_load(control + FAILED, sem="relaxed", scope="gpu")
        tl.store(control + TICKET, 0)
        tl.store(control + EXITED, 0)
        tl.store(control + QUEUE + tl.arange(0, 32), tl.zeros((32,), tl.int32))
        for peer_rank in range(W):
            peer = tl.load(group_ptr + peer_rank)
            tl.store(control + EPOCHS + peer, tl.load(control + EPOCHS + peer) + 1)
    # Nothing of what other programs have stored may come after what poisons it.
    tl.debug_barrier()
    return has_failed
