"""Low-latency exchanges in two launches: one starts and sends at once, the other finishes, and waits for what was sent.

Between the two a device runs something else, and no program of it waits. Several exchanges may be under way at a time,
so there are lanes: in each of them one exchange at a time, in two halves as in low_latency_buffers.py, in an area of
their own. A start takes a free lane, and its finish frees it; where none is free it takes the one whose exchange began
first, whose finish is then void. The control words of this area count, for each device,

    EPOCHS                    starts so far          EPOCHS + (1 + LANES + l) * D   when the exchange in lane l was
    EPOCHS + (1 + l) * D      those in lane l                                       started, 0 after its finish

Both devices of a pair take part in all of these launches, in one order, so they choose the same lanes. What starts an
exchange hands its lane, and its number c there, to what finishes it. When all programs of a start have sent what they
had to, the last one greets all ranks. So a greeting of c says that the start of c has ended there, and a finish needs
no other flags. Two rules hold in each lane:

    (1) A start of c writes to a rank only after it has the greeting of c - 1 of that rank.
    (2) A finish of c reads nothing where c + 1 has been started here before it: it fails and says so.

Nothing is overwritten before it was read, whatever the progress of peers. Let P write into half `c & 1` of a lane of
mine. By (1) it has my greeting of c - 1, so that start has ended here. The finish of c - 2 had ended before it, or by
(2) comes too late and reads nothing, or never comes. This is true of data and of the greeting of c - 2 alike. P's wait
in its start of c is for a word in the other half at P, which I write next in my start of c + 1; by (1) that has P's
greeting of c, and so begins to write when no program of P's start waits any more.

Nothing waits for a finish. A start waits for an earlier start, a finish for the start that it belongs to, each an
earlier launch than the one that waits, and all ranks launch in one order: so launches end, with one resident program of
each, and a program whose finish was removed, or never ran, holds up and harms nobody. Where a lane was free, its start
finds the greeting that it asks for, because the finish of c - 1 has waited for it.

All of this is about one pair of devices and its own counts, so groups may overlap. Counts may wrap: words are compared
for equality. The first start in a lane looks at a word that is zero, as is c - 1, since nobody writes it before it has
that start's greeting.
"""

import triton
import triton.language as tl

from .failures import STATE_OVERTAKEN, report, report_timeout
from .low_latency_buffers import buffers_in, greet, part_of
from .programs import count_stored
from .protocol import await_greetings, first_missing
from .table import DONE, EPOCHS, EXITED, FAILED, TICKET, TIMEOUT_NS
from .trace import EARLIER, WAIT_EVENT, stamp, trace_exchange, trace_members_of

LANES = tl.constexpr(4)
FREE = tl.constexpr(0x7FFFFFFF)  # older than any exchange


@triton.jit
def members(launch, HEAP: tl.constexpr):
    """`[RANKS]` ranks of the group and their devices; lanes past W repeat rank 0."""
    ranks = tl.arange(0, triton.next_power_of_2(HEAP.W))
    ranks = tl.where(ranks < HEAP.W, ranks, 0)
    return ranks, tl.load(launch.group_ptr + ranks)


@triton.jit
def uses_of(launch, lanes, devices, HEAP: tl.constexpr):
    """Pointers to how many exchanges with `devices` were started in lanes."""
    return launch.control + EPOCHS + (1 + lanes) * HEAP.D + devices


@triton.jit
def begins_of(launch, lanes, devices, HEAP: tl.constexpr):
    """Pointers to when the exchanges in them were started, 0 in free ones."""
    return uses_of(launch, LANES + lanes, devices, HEAP)


@triton.jit
def next_slots(launch, HEAP: tl.constexpr):
    """The buffers of an exchange that starts, by rank, and their lanes."""
    _, devices = members(launch, HEAP)
    choices = tl.arange(0, LANES)[None, :]
    begins = tl.load(begins_of(launch, choices, devices[:, None], HEAP))
    now = start_time(launch, devices, HEAP)
    ages = tl.where(begins == 0, FREE, now[:, None] - begins)
    lanes = tl.min(tl.where(ages == tl.max(ages, axis=1)[:, None], choices, LANES), axis=1)
    uses = tl.load(uses_of(launch, lanes, devices, HEAP)) + 1
    return buffers_in(launch, uses, 2 * lanes + (uses & 1), HEAP), lanes


@triton.jit
def start_time(launch, devices, HEAP: tl.constexpr):
    """What a lane keeps of an exchange that starts now with `devices`: never 0."""
    return 2 * tl.load(launch.control + EPOCHS + devices) + 1


@triton.jit
def await_slots(launch, buffers, lanes, alive, task, HEAP: tl.constexpr):
    """Waits until each rank may be written to, rule (1); returns whether the launch is alive."""
    began = stamp(HEAP)
    if alive != 0:
        ranks, _ = members(launch, HEAP)
        expected = buffers.epochs - 1
        before = buffers_in(launch, expected, 2 * lanes + (expected & 1), HEAP)
        timeout_ns = tl.load(launch.table_ptr + HEAP.D + TIMEOUT_NS)
        # The low half of a greeting: that exchange may have been another launch than this one.
        words = part_of(before.incoming, 0, tl.int32)
        arrived = tl.atomic_poll(words, expected, sem="acquire", scope="sys", timeout_ns=timeout_ns).to(tl.int32)
        if tl.min(arrived, axis=0) == 0:
            alive = 0
            tl.atomic_store(launch.control + FAILED, 1, sem="relaxed", scope="gpu")
            late = first_missing(arrived)
            seen = tl.sum(tl.where(late, tl.atomic_load(words, sem="relaxed", scope="sys"), 0), axis=0)
            epoch, missing = tl.sum(tl.where(late, expected, 0), axis=0), tl.sum(tl.where(late, ranks, 0), axis=0)
            report_timeout(launch, missing, epoch, seen, task, timeout_ns, HEAP)
    # What is written after the wait is written by all threads, after this barrier.
    tl.debug_barrier()
    trace_exchange(launch, WAIT_EVENT, began, task, -1, EARLIER, HEAP)
    return alive


@triton.jit
def started_slots(launch, exchange_ptr, alive, HEAP: tl.constexpr):
    """The buffers of an exchange that was started, by rank, their lanes, and whether it may be read, rule (2)."""
    ranks, devices = members(launch, HEAP)
    uses = tl.load(exchange_ptr + ranks)
    lanes = tl.load(exchange_ptr + ranks.shape[0] + ranks) & (LANES - 1)  # in range also after a failure
    buffers = buffers_in(launch, uses, 2 * lanes + (uses & 1), HEAP)
    if alive != 0:
        last = tl.load(uses_of(launch, lanes, devices, HEAP))
        is_there = (last == uses).to(tl.int32)
        if tl.min(is_there, axis=0) == 0:
            alive = 0
            tl.atomic_store(launch.control + FAILED, 1, sem="relaxed", scope="gpu")
            first = first_missing(is_there)
            use, peer_rank = tl.sum(tl.where(first, uses, 0), axis=0), tl.sum(tl.where(first, ranks, 0), axis=0)
            report(launch, STATE_OVERTAKEN, peer_rank, use, tl.sum(tl.where(first, last, 0), axis=0), -1, 0, HEAP)
    return buffers, lanes, alive


@triton.jit
def await_started(launch, buffers, alive, task, HEAP: tl.constexpr, STARTED: tl.constexpr):
    """Waits until each rank has started the exchange, the launch STARTED; returns whether this one is alive."""
    ranks, _ = members(launch, HEAP)
    return await_greetings(launch, part_of(buffers.incoming, 0, tl.int64), buffers.epochs, ranks, alive, task, STARTED)


@triton.jit
def end_start(launch, buffers, lanes, exchange_ptr, alive, HEAP: tl.constexpr):
    """Greets all ranks when all programs have sent, and counts the exchange; 1 in the program that must poison."""
    control = launch.control
    if alive != 0:  # who has failed is missing in the count, so that nobody is told of what was not sent
        if count_stored(launch, 0):
            greet(launch, buffers, (tl.full((), 1, tl.int64) << HEAP.W) - 1, 0, HEAP)
    has_failed = 0
    tl.debug_barrier()
    if tl.atomic_add(control + EXITED, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        has_failed = tl.atomic_load(control + FAILED, sem="relaxed", scope="gpu")
        tl.store(control + TICKET, 0)
        tl.store(control + EXITED, 0)
        tl.store(control + DONE, 0)
        index = tl.arange(0, triton.next_power_of_2(HEAP.W))
        _, devices = members(launch, HEAP)
        trace_members_of(launch, buffers.epochs * LANES + lanes, HEAP)
        now = start_time(launch, devices, HEAP)
        inside = index < HEAP.W
        tl.store(launch.control + EPOCHS + devices, now // 2 + 1, mask=inside)
        tl.store(uses_of(launch, lanes, devices, HEAP), buffers.epochs, mask=inside)
        tl.store(begins_of(launch, lanes, devices, HEAP), now, mask=inside)
        tl.store(exchange_ptr + index, buffers.epochs)
        tl.store(exchange_ptr + index.shape[0] + index, lanes)
    tl.debug_barrier()
    return has_failed


@triton.jit
def free(launch, buffers, lanes, HEAP: tl.constexpr):
    """Lets other exchanges have the lanes of one that is finished, if it has them still."""
    index = tl.arange(0, triton.next_power_of_2(HEAP.W))
    _, devices = members(launch, HEAP)
    has_lane = tl.load(uses_of(launch, lanes, devices, HEAP)) == buffers.epochs
    tl.store(
        begins_of(launch, lanes, devices, HEAP), tl.full(index.shape, 0, tl.int32), mask=(index < HEAP.W) & has_lane
    )


@triton.jit
def end_finish(launch, numbers, HEAP: tl.constexpr):
    """1 in the program that must poison what the launch returns, else 0; traces name the launch by `numbers`."""
    control = launch.control
    has_failed = 0
    tl.debug_barrier()
    if tl.atomic_add(control + EXITED, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        has_failed = tl.atomic_load(control + FAILED, sem="relaxed", scope="gpu")
        tl.store(control + TICKET, 0)
        tl.store(control + EXITED, 0)
        tl.store(control + DONE, 0)
        trace_members_of(launch, numbers, HEAP)
    # Nothing of what other programs have stored may come after what poisons it.
    tl.debug_barrier()
    return has_failed
