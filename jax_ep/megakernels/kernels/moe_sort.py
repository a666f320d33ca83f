"""Sort the assignments of one device by expert, each expert padded to whole blocks, in one launch.

Every program counts all assignments by expert, and those before its own share: a few kilobytes, which it reads from the
cache. So no program waits for another, and the launch needs no scratch memory. A program then gives its assignments
their rows, and fills rows without an assignment: the padding of some experts, and a share of what is behind all of
them. Equal ids give equal rows. Floor: launch latency plus reading the ids from the L2 cache.
"""

import triton
import triton.language as tl

from .plan import count_alike_before


@triton.jit
def local_experts(topk_idx_ptr, assignments, num_assignments, S: tl.constexpr):
    """Return the local experts of assignments, and a mask of those that have one."""
    ids = tl.load(topk_idx_ptr + assignments, mask=assignments < num_assignments, other=-1)
    here = (ids >= S.first_expert) & (ids < S.first_expert + S.num_local_experts)
    return tl.where(here, ids - S.first_expert, S.bins), here


@triton.jit
def count_assignments(topk_idx_ptr, first, num_assignments, S: tl.constexpr):
    """Count assignments by expert `[bins]`: all of them, and those before `first`."""
    total = tl.zeros((S.bins,), tl.int32)
    before = tl.zeros((S.bins,), tl.int32)
    for start in range(0, num_assignments, S.count_block):
        assignments = start + tl.arange(0, S.count_block)
        expert, here = local_experts(topk_idx_ptr, assignments, num_assignments, S)
        counts = tl.histogram(expert, S.bins, mask=here)
        total += counts
        # Count blocks before `first` whole, the block around it by a mask.
        if start + S.count_block <= first:
            before += counts
        elif start < first:
            before += tl.histogram(expert, S.bins, mask=here & (assignments < first))
    return total, before


@triton.jit
def fill(target_ptr, first, end, value, LANES: tl.constexpr):
    """Store `value` at positions `[first, end)`."""
    for start in range(first, end, LANES):
        positions = start + tl.arange(0, LANES)
        tl.store(target_ptr + positions, tl.zeros((LANES,), target_ptr.dtype.element_ty) + value, mask=positions < end)


@triton.jit
def fill_rows(assignments_ptr, row_weights_ptr, weights_ptr, first, end, LANES: tl.constexpr):
    """Store rows `[first, end)` without an assignment."""
    fill(assignments_ptr, first, end, -1, LANES)
    if weights_ptr is not None:
        fill(row_weights_ptr, first, end, 0.0, LANES)


@triton.jit
def moe_sort(
    topk_idx_ptr,
    weights_ptr,
    num_tokens_ptr,
    assignments_ptr,
    row_weights_ptr,
    block_expert_ptr,
    sizes_ptr,
    num_rows_ptr,
    S: tl.constexpr,
):
    """Sort ids and weights `[num_assignments]` to the arrays of `SortedTokens`.

    Weights may be None. Unless it is None, `num_tokens` says how many tokens count.
    """
    BINS: tl.constexpr = S.bins
    LANES: tl.constexpr = S.lanes
    num_assignments = S.num_assignments
    if num_tokens_ptr is not None:
        num_assignments = tl.minimum(tl.maximum(tl.load(num_tokens_ptr), 0) * S.top_k, S.num_assignments)
    first = tl.program_id(0) * S.per_program
    total, before = count_assignments(topk_idx_ptr, first, num_assignments, S)
    # Rows of experts, padded to whole blocks, one expert after another.
    padded = (total + S.block_size - 1) // S.block_size * S.block_size
    ends = tl.cumsum(padded, axis=0)
    starts = ends - padded
    num_rows = tl.max(ends, axis=0)
    # The first program stores the sizes.
    if tl.program_id(0) == 0:
        bins = tl.arange(0, BINS)
        tl.store(sizes_ptr + bins, padded, mask=bins < S.num_local_experts)
        tl.store(num_rows_ptr, num_rows)
    bases = starts + before
    # Give this program's assignments their rows.
    for start in range(first, tl.minimum(first + S.per_program, num_assignments), LANES):
        assignments = start + tl.arange(0, LANES)
        expert, here = local_experts(topk_idx_ptr, assignments, num_assignments, S)
        rows = tl.gather(bases, expert & (BINS - 1), 0) + count_alike_before(expert, LANES)
        tl.store(assignments_ptr + rows, assignments, mask=here)
        if weights_ptr is not None:
            tl.store(row_weights_ptr + rows, tl.load(weights_ptr + assignments, mask=here, other=0.0), mask=here)
        bases += tl.histogram(expert, BINS, mask=here)
    # Fill the padding of every num_programs-th expert, and name its blocks.
    for expert in range(tl.program_id(0), S.num_local_experts, tl.num_programs(0)):
        mine = tl.arange(0, BINS) == expert
        start = tl.sum(tl.where(mine, starts, 0), axis=0)
        end = tl.sum(tl.where(mine, ends, 0), axis=0)
        used = start + tl.sum(tl.where(mine, total, 0), axis=0)
        fill_rows(assignments_ptr, row_weights_ptr, weights_ptr, used, end, LANES)
        fill(block_expert_ptr, start // S.block_size, end // S.block_size, expert, LANES)
    # Fill this program's share of the rows behind all experts.
    num_blocks: tl.constexpr = S.num_rows // S.block_size
    rows = tl.cdiv(S.num_rows - num_rows, tl.num_programs(0))
    first = tl.minimum(num_rows + tl.program_id(0) * rows, S.num_rows)
    fill_rows(assignments_ptr, row_weights_ptr, weights_ptr, first, tl.minimum(first + rows, S.num_rows), LANES)
    # The last program marks the blocks behind all experts.
    if tl.program_id(0) == tl.num_programs(0) - 1:
        fill(block_expert_ptr, num_rows // S.block_size, num_blocks, -1, LANES)
