"""The low-latency area of the heap: launches that send at once, without asking whether a peer is ready.

The area holds `[2, D]` regions of one size. Of the regions of device d only d writes; each begins with flags (int32),
and what a launch sends lies behind them, as it likes. The table says where the area begins, after the number of this
device, and how large a region is: both may change when the heap is allocated again, with all its words zero.

Two devices count the launches that use the area and in which both take part: their epoch here, at control word
64 + 3 * D + device. A launch sends through half `epoch & 1`, and its flags become `epoch`. Every rank hears from every
other rank of its group before its launch ends. So two halves suffice, and nobody needs to announce itself:

    Let P send something in its launch e + 2 with me. Its launch e + 1 with me has ended, and in it P heard from me.
    So I had begun launch e + 1, and had ended launch e: I no longer read what P sent in e, which lay in the same half,
    and no longer wait for a flag of e, in whose place there is now a flag of e + 2.

This is about one pair of devices, its own regions and its own count. So groups may overlap, launches of different sizes
may follow each other, and launches of other operations in between change nothing: they use neither the area nor this
count, and need not wait for anybody.
"""

import triton
import triton.language as tl

from .failures import FAILED, report_timeout
from .protocol import DONE, EXITED, STARTED, TICKET

REGION_EPOCHS = tl.constexpr(64)  # behind 3 * D other words


@triton.jit
def open_regions(table_ptr, group_ptr, control, me, W: tl.constexpr, D: tl.constexpr, LANES: tl.constexpr):
    """By rank, `[LANES]`: epoch of this launch, and addresses of the region to which to write and of that to read.

    Lanes past W repeat rank 0. All that a launch must look up, at its start: after a wait it would cost more.
    """
    lanes = tl.arange(0, LANES)
    peers = tl.load(group_ptr + tl.where(lanes < W, lanes, 0))
    epochs = tl.load(control + REGION_EPOCHS + 3 * D + peers) + 1
    area, size = tl.load(table_ptr + D + 3), tl.load(table_ptr + D + 4)
    half = (epochs & 1) * D
    outgoing = tl.load(table_ptr + peers) + area + (half + me).to(tl.int64) * size
    incoming = tl.load(table_ptr + me) + area + (half + peers).to(tl.int64) * size
    return epochs, outgoing, incoming


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
def part_of(region, AT: tl.constexpr, dtype: tl.constexpr):
    """Pointer to what lies at byte AT, a multiple of 16, of one region or of several."""
    return tl.multiple_of((region + AT).to(tl.pointer_type(dtype)), 16)


@triton.jit
def in_set(ranks, rank):
    """Whether a set of ranks, as bits, has this one."""
    return (ranks >> rank.to(tl.int64)) & 1 > 0


@triton.jit
def publish_to(outgoing, epochs, ranks, flag, W: tl.constexpr):
    """Sets a flag at each rank of a set: what this program has stored there is complete."""
    lanes = tl.arange(0, epochs.shape[0])
    flags = part_of(outgoing, 0, tl.int32) + flag
    # A release by some threads covers the others' stores only after a barrier of the program.
    tl.debug_barrier()
    tl.atomic_store(flags, epochs, mask=(lanes < W) & in_set(ranks, lanes), sem="release", scope="sys")


@triton.jit
def await_flags(
    table_ptr, control, regions, flags, epochs, ranks, rank, alive, task, OPERATION: tl.constexpr, D: tl.constexpr
):
    """Waits for `flags [N]` in `regions [N]`, those of `ranks [N]`; returns whether the launch is still alive."""
    if alive != 0:
        timeout_ns = tl.load(table_ptr + D + 1)
        places = part_of(regions, 0, tl.int32) + flags
        arrived = tl.atomic_poll(places, epochs, sem="acquire", scope="sys", timeout_ns=timeout_ns)
        if tl.min(arrived.to(tl.int32), axis=0) == 0:
            alive = 0
            tl.atomic_store(control + FAILED, 1, sem="relaxed", scope="gpu")
            missing = tl.max(tl.where(arrived, -1, ranks), axis=0)
            is_missing = (ranks == missing) & (arrived == 0)
            seen = tl.max(tl.where(is_missing, tl.atomic_load(places, sem="relaxed", scope="sys"), -1), axis=0)
            epoch = tl.max(tl.where(is_missing, epochs, -1), axis=0)
            report_timeout(table_ptr, rank, missing, epoch, seen, task, timeout_ns, OPERATION, D)
    # What the flags guard is read by all threads, after this barrier.
    tl.debug_barrier()
    return alive


@triton.jit
def end_region_launch(control, group_ptr, W: tl.constexpr, D: tl.constexpr, LANES: tl.constexpr):
    """The last program to leave resets the queue and counts the launch with every peer."""
    tl.debug_barrier()
    if tl.atomic_add(control + EXITED, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        tl.store(control + TICKET, 0)
        tl.store(control + EXITED, 0)
        tl.store(control + DONE, 0)
        tl.store(control + STARTED, 0)
        lanes = tl.arange(0, LANES)
        peers = tl.load(group_ptr + lanes, mask=lanes < W, other=0)
        epochs = control + REGION_EPOCHS + 3 * D + peers
        tl.store(epochs, tl.load(epochs, mask=lanes < W, other=0) + 1, mask=lanes < W)
