"""Part of a heap from byte BASE on: a flag per source, then from byte 64 on a row per source."""

import triton
import triton.language as tl


@triton.jit
def pointer(heaps_ptr, worker, OFFSET: tl.constexpr, dtype: tl.constexpr):
    addresses = heaps_ptr.to(tl.pointer_type(tl.int64))
    return (tl.load(addresses + worker) + OFFSET).to(tl.pointer_type(dtype))


@triton.jit
def all_to_all(rank_ptr, epoch_ptr, heaps_ptr, x_ptr, y_ptr, W: tl.constexpr, H: tl.constexpr, BASE: tl.constexpr):
    """y[source] = what source has in x[this rank]: push tasks first, then tasks that wait for a peer each."""
    rank = tl.load(rank_ptr)
    epoch = tl.load(epoch_ptr)
    columns = tl.arange(0, H)
    for task in range(tl.program_id(0), 2 * W, tl.num_programs(0)):
        peer = (rank + task) % W
        if task < W:
            row = tl.load(x_ptr + peer * H + columns)
            tl.store(pointer(heaps_ptr, peer, BASE + 64, tl.float32) + rank * H + columns, row)
            tl.debug_barrier()
            tl.atomic_store(pointer(heaps_ptr, peer, BASE, tl.int32) + rank, epoch, sem="release", scope="sys")
        else:
            flag = pointer(heaps_ptr, rank, BASE, tl.int32) + peer
            tl.atomic_poll(flag, epoch, sem="acquire", scope="sys", timeout_ns=1_000_000_000_000)
            tl.debug_barrier()
            row = tl.load(pointer(heaps_ptr, rank, BASE + 64, tl.float32) + peer * H + columns)
            tl.store(y_ptr + peer * H + columns, row)


@triton.jit
def wait(rank_ptr, heaps_ptr, seen_ptr, W: tl.constexpr, TIMEOUT_NS: tl.constexpr):
    """seen[i] = whether flag i of this rank becomes 1 in time; on a scalar pointer each, then on all at once."""
    flags = pointer(heaps_ptr, tl.load(rank_ptr), 0, tl.int32)
    index = tl.arange(0, W)
    alone = tl.atomic_poll(flags, 1, sem="acquire", scope="sys", timeout_ns=TIMEOUT_NS)
    seen = tl.atomic_poll(flags + index, tl.full((W,), 1, tl.int32), sem="acquire", scope="sys", timeout_ns=TIMEOUT_NS)
    tl.store(seen_ptr, alone.to(tl.int32))
    tl.store(seen_ptr + 1 + index, seen.to(tl.int32))
