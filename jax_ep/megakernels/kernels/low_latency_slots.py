"""Low-latency exchanges in two launches: one starts and sends at once, the other finishes, and waits for what was sent.

Between the two a device runs something else, and no program of it waits. Two exchanges may be under way at a time: with
buffers of low_latency_buffers.py, of which there are not two, but four per device, in an area of their own.

Two devices count the exchanges that they have started with each other, e. Exchange e lies in slot `e % 4`; what starts
it hands e to what finishes it. When all programs of a start have sent what they had to, the last one greets all ranks.
So a greeting of e says that the start of e has ended there, and a finish needs no other flags. Two rules hold:

    (1) A start writes to a rank only after it has the greeting of exchange e - 2 of that rank.
    (2) A finish of e reads nothing when exchange e + 2 has been started here before it: it fails and says so.

Nothing is overwritten before it was read, whatever the progress of peers. Let P write into slot `e % 4` of mine, for
exchange e + 4. By (1) it has my greeting of e + 2, so that start has ended here. The finish of e had ended before it,
or by (2) comes too late and reads nothing, or never comes. This is true of data and of the greeting of e alike. P's
wait in its start of e + 4 is for a word in slot `(e + 2) % 4` at P, which I write next in my start of e + 6; by (1)
that has P's greeting of e + 4, and so begins to write when no program of P's start waits any more.

Nothing waits for a finish. A start waits for a start before it, a finish for the start that it belongs to, each an
earlier launch than the one that waits, and all ranks launch in one order: so launches end, with one resident program of
each, and a program whose finish was removed, or never ran, holds up and harms nobody. In the order in which
`low_latency_moe` launches, a start finds the greeting that it asks for, because the finish of e - 2 has waited for it.

All of this is about one pair of devices and its own count, so groups may overlap. Counts may wrap: words are compared
for equality, and differences are small. A pair's first two starts have nothing to wait for; the word that they look at
is zero, since nobody writes it before it has a greeting of theirs.
"""

import triton
import triton.language as tl

from .failures import STATE_OVERTAKEN, report, report_timeout
from .low_latency_buffers import buffers_in, greet, pair_epochs, part_of
from .programs import count_stored
from .protocol import await_greetings, first_missing
from .table import DONE, EPOCHS, EXITED, FAILED, TICKET, TIMEOUT_NS
from .trace import EARLIER, WAIT_EVENT, stamp, trace_exchange, trace_members_of

SLOTS = tl.constexpr(4)
UNDER_WAY = tl.constexpr(2)  # exchanges at a time, half of the slots


@triton.jit
def begun_with(launch, devices, HEAP: tl.constexpr):
    """Pointers to how many exchanges there have been with each of `devices`, as far as two."""
    return launch.control + EPOCHS + 2 * HEAP.D + devices


@triton.jit
def members(launch, HEAP: tl.constexpr):
    """`[LANES]` ranks of the group and their devices; lanes past W repeat rank 0."""
    lanes = tl.arange(0, triton.next_power_of_2(HEAP.W))
    ranks = tl.where(lanes < HEAP.W, lanes, 0)
    return ranks, tl.load(launch.group_ptr + ranks)


@triton.jit
def next_slots(launch, HEAP: tl.constexpr):
    """The buffers of an exchange that starts, by rank."""
    _, devices = members(launch, HEAP)
    epochs = tl.load(pair_epochs(launch, devices, HEAP)) + 1
    return buffers_in(launch, epochs, epochs & (SLOTS - 1), HEAP)


@triton.jit
def started_slots(launch, epochs_ptr, HEAP: tl.constexpr):
    """The buffers of an exchange that was started, by rank."""
    ranks, _ = members(launch, HEAP)
    epochs = tl.load(epochs_ptr + ranks)
    return buffers_in(launch, epochs, epochs & (SLOTS - 1), HEAP)


@triton.jit
def await_slots(launch, epochs, alive, task, HEAP: tl.constexpr):
    """Waits until each rank may be written to, rule (1); returns whether the launch is alive."""
    began = stamp(HEAP)
    if alive != 0:
        ranks, devices = members(launch, HEAP)
        has_earlier = tl.load(begun_with(launch, devices, HEAP)) >= UNDER_WAY
        expected = tl.where(has_earlier, epochs - UNDER_WAY, 0)
        before = buffers_in(launch, expected, (epochs - UNDER_WAY) & (SLOTS - 1), HEAP)
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
def refuse_overtaken(launch, epochs, alive, HEAP: tl.constexpr):
    """Fails where later starts have taken the place of exchange `epochs`, rule (2); returns whether it is alive."""
    if alive != 0:
        ranks, devices = members(launch, HEAP)
        started = tl.load(pair_epochs(launch, devices, HEAP))
        too_late = (started - epochs) >= UNDER_WAY
        if tl.max(too_late.to(tl.int32), axis=0) > 0:
            alive = 0
            tl.atomic_store(launch.control + FAILED, 1, sem="relaxed", scope="gpu")
            first = first_missing((too_late == 0).to(tl.int32))
            epoch, peer_rank = tl.sum(tl.where(first, epochs, 0), axis=0), tl.sum(tl.where(first, ranks, 0), axis=0)
            last = tl.sum(tl.where(first, started, 0), axis=0)
            report(launch, STATE_OVERTAKEN, peer_rank, epoch, last, -1, 0, HEAP)
    return alive


@triton.jit
def await_started(launch, buffers, alive, task, HEAP: tl.constexpr, STARTED: tl.constexpr):
    """Waits until each rank has started the exchange, the launch STARTED; returns whether this one is alive."""
    ranks, _ = members(launch, HEAP)
    return await_greetings(launch, part_of(buffers.incoming, 0, tl.int64), buffers.epochs, ranks, alive, task, STARTED)


@triton.jit
def end_start(launch, buffers, epochs_ptr, alive, HEAP: tl.constexpr):
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
        lanes = tl.arange(0, triton.next_power_of_2(HEAP.W))
        _, devices = members(launch, HEAP)
        trace_members_of(launch, buffers.epochs, HEAP)
        begun = begun_with(launch, devices, HEAP)
        inside = lanes < HEAP.W
        tl.store(begun, tl.minimum(tl.load(begun) + 1, UNDER_WAY), mask=inside)
        tl.store(pair_epochs(launch, devices, HEAP), buffers.epochs, mask=inside)
        tl.store(epochs_ptr + lanes, buffers.epochs, mask=inside)
    tl.debug_barrier()
    return has_failed


@triton.jit
def end_finish(launch, epochs, HEAP: tl.constexpr):
    """1 in the program that must poison what the launch returns, else 0."""
    control = launch.control
    has_failed = 0
    tl.debug_barrier()
    if tl.atomic_add(control + EXITED, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        has_failed = tl.atomic_load(control + FAILED, sem="relaxed", scope="gpu")
        tl.store(control + TICKET, 0)
        tl.store(control + EXITED, 0)
        tl.store(control + DONE, 0)
        trace_members_of(launch, epochs, HEAP)
    # Nothing of what other programs have stored may come after what poisons it.
    tl.debug_barrier()
    return has_failed
