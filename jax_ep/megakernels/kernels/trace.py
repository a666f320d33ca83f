"""Traces: when each task of a launch began and ended, and on which multiprocessor.

Compiled out unless `Heap.traced`. Each program writes its events to its own region of the device's trace area
(trace_structs.py). One thread writes for all: the clock is that of the first thread, so work of other warps up to their
next barrier is not visible. A kernel compiled with traces may run while nothing records: the table then has no area.
"""

import triton
import triton.language as tl

from .failures import TRACE
from .indices import indices
from .token_rows import goes_to
from .trace_structs import AREA_LAUNCHES, AREA_LOST, AREA_PROGRAMS, AREA_ROOM, KINDS, NUM_HEADER, NUM_WORDS
from .trace_structs import OWN as OWN_BLOCK
from .trace_structs import READY as READY_BLOCK

MEMBER_EVENT = tl.constexpr(KINDS.index("member"))
ANNOUNCE_EVENT = tl.constexpr(KINDS.index("announce"))
COUNT_EVENT = tl.constexpr(KINDS.index("count"))
PLACE_EVENT = tl.constexpr(KINDS.index("place"))
PUSH_EVENT = tl.constexpr(KINDS.index("push"))
PUBLISH_EVENT = tl.constexpr(KINDS.index("publish"))
WAIT_EVENT = tl.constexpr(KINDS.index("wait"))
COPY_EVENT = tl.constexpr(KINDS.index("copy"))
TILE_EVENT = tl.constexpr(KINDS.index("tile"))
SUM_EVENT = tl.constexpr(KINDS.index("sum"))
ZERO_EVENT = tl.constexpr(KINDS.index("zero"))

READY = tl.constexpr(READY_BLOCK)
OWN = tl.constexpr(OWN_BLOCK)

HEADER = tl.constexpr(NUM_HEADER)
WORDS = tl.constexpr(NUM_WORDS)
LAUNCHES = tl.constexpr(AREA_LAUNCHES)
ROOM = tl.constexpr(AREA_ROOM)
PROGRAMS = tl.constexpr(AREA_PROGRAMS)
LOST = tl.constexpr(AREA_LOST)


@triton.jit
def stamp(HEAP: tl.constexpr):
    """Return the device's clock in ns, or 0 if nothing is traced."""
    now = tl.cast(0, tl.int64)
    if HEAP.traced:
        now = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l,~{memory}", [], tl.int64, False, 1)
    return now


@triton.jit
def trace(launch, KIND: tl.constexpr, began, task, HEAP: tl.constexpr):
    """Record what this program did from `began` until now, for a task without a peer."""
    trace_exchange(launch, KIND, began, task, -1, 0, HEAP)


@triton.jit
def trace_exchange(launch, KIND: tl.constexpr, began, task, peer, block, HEAP: tl.constexpr):
    """Record a task for a block that goes to, or is awaited from, device `peer`; -1 stands for several devices."""
    if HEAP.traced:
        write_event(launch, KIND, began, stamp(HEAP), task, peer, block, 0, HEAP)


@triton.jit
def trace_set(launch, KIND: tl.constexpr, began, task, ranks, block, HEAP: tl.constexpr):
    """Record a task for a set of ranks, given as bits; the event names the peer if there is only one."""
    if HEAP.traced:
        lanes = indices(triton.next_power_of_2(HEAP.num_ranks))
        # Name the only rank of the set, or -1.
        chosen = (lanes < HEAP.num_ranks) & goes_to(ranks, lanes)
        device = tl.load(launch.group_ptr + tl.max(tl.where(chosen, lanes, 0), axis=0))
        peer = tl.where(tl.sum(chosen.to(tl.int32), axis=0) == 1, device, -1)
        write_event(launch, KIND, began, stamp(HEAP), task, peer, block, 0, HEAP)


@triton.jit
def trace_wait(launch, began, task, ranks, block, HEAP: tl.constexpr):
    """Record a wait for `block` of each of several ranks."""
    if HEAP.traced:
        # Name the rank if all entries are equal, else -1.
        rank = tl.max(ranks, axis=0)
        device = tl.load(launch.group_ptr + rank)
        peer = tl.where(tl.min(ranks, axis=0) == rank, device, -1)
        write_event(launch, WAIT_EVENT, began, stamp(HEAP), task, peer, block, 0, HEAP)


@triton.jit
def trace_members(launch, EPOCHS_AT: tl.constexpr, HEAP: tl.constexpr):
    """Record the members of this launch; the last program calls it at the end.

    The epochs are those at control low_word EPOCHS_AT, which do not count this launch yet.
    """
    if HEAP.traced:
        lanes = indices(triton.next_power_of_2(HEAP.num_ranks))
        devices = tl.load(launch.group_ptr + tl.where(lanes < HEAP.num_ranks, lanes, 0))
        epochs = tl.load(launch.control + EPOCHS_AT + devices) + 1
        now = stamp(HEAP)
        # One event per member, so that the traces of several devices can be matched.
        for rank in range(HEAP.num_ranks):
            device = tl.load(launch.group_ptr + rank)
            epoch = tl.sum(tl.where(lanes == rank, epochs, 0), axis=0)
            task = rank | (HEAP.num_ranks << 16)
            write_event(launch, MEMBER_EVENT, now, now, task, device, tl.num_programs(0), epoch, HEAP)
        # Count the traced launches.
        area = tl.load(launch.table_ptr + HEAP.num_devices + TRACE).to(tl.pointer_type(tl.int64))
        recording = tl.load(launch.table_ptr + HEAP.num_devices + TRACE) != 0
        number = tl.load(area + LAUNCHES, mask=recording, other=0)
        tl.store(area + LAUNCHES, number + 1, mask=recording)


@triton.jit
def write_event(launch, KIND: tl.constexpr, began, ended, task, peer, block, epoch, HEAP: tl.constexpr):
    """Write an event to this program's region, or only count it if the region is full."""
    address = tl.load(launch.table_ptr + HEAP.num_devices + TRACE)
    area = address.to(tl.pointer_type(tl.int64))
    recording = address != 0
    program = tl.program_id(0)
    room = tl.load(area + ROOM, mask=recording, other=0)
    # Programs beyond the regions of the area only count lost events.
    has_region = recording & (program < tl.load(area + PROGRAMS, mask=recording, other=0))
    tl.atomic_add(area + LOST, 1, mask=recording & (has_region == 0), sem="relaxed", scope="gpu")
    region = area + HEADER + program.to(tl.int64) * (HEADER + WORDS * room)
    # Append: only this program writes to its region.
    index = tl.load(region, mask=has_region, other=0)
    number = tl.load(area + LAUNCHES, mask=recording, other=0)
    tl.store(region, index + 1, mask=has_region)
    fits = has_region & (index < room)
    sm = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], tl.int32, False, 1)
    event = region + HEADER + WORDS * index
    # Pack the event as trace_structs.py describes it.
    what = low_word(task, 0) | (KIND << 32) | (sm.to(tl.int64) << 40) | (low_word(peer + 1, 52))
    tl.store(event, began, mask=fits)
    tl.store(event + 1, ended, mask=fits)
    tl.store(event + 2, what, mask=fits)
    tl.store(event + 3, low_word(block, 0) | low_word(epoch, 32), mask=fits)
    tl.store(event + 4, HEAP.launch_id | (number << 32), mask=fits)


@triton.jit
def low_word(value, SHIFT: tl.constexpr):
    """Return the low 32 bits of a number, shifted to their place in an int64 word."""
    return (tl.cast(value, tl.int64) & 0xFFFFFFFF) << SHIFT
