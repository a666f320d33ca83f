"""Where tokens go in a low-latency dispatch: the rows of an expert, by source rank, then token.

Both ways to find a row count the tokens before that name the same expert, in the ids that all ranks have sent: for
all rows of an expert at once, or for all rows of a token. A token that names an expert twice has one row there.
"""

import triton
import triton.language as tl

from .regions import part_of, pick_each
from .table import DONE


@triton.jit
def ids_of(
    index, incoming, W: tl.constexpr, T: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, IDS_AT: tl.constexpr
):
    """`[N, BLOCK_K]` ids of tokens `index [N]`, source rank * T + token, -1 past the last one; and which exist."""
    region = pick_each(incoming, tl.minimum(index // T, W - 1))
    k = tl.arange(0, BLOCK_K)[None, :]
    exist = (index < W * T)[:, None] & (k < K)
    ids_ptr = part_of(region, IDS_AT, tl.int32)[:, None] + (index % T * K)[:, None] + k
    return tl.load(ids_ptr, mask=exist, other=-1), exist


@triton.jit
def place_expert(
    expert,
    incoming,
    launch,
    sizes_ptr,
    token_ptr,
    start_ptr,
    count_ptr,
    slot_row_ptr,
    W: tl.constexpr,
    T: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    L: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LANES: tl.constexpr,
    CHUNK: tl.constexpr,
    IDS_AT: tl.constexpr,
    COUNT_DONE: tl.constexpr,
):
    """Gives the tokens that name a local expert its rows, in order; also marks a share of the slots without a row.

    With COUNT_DONE this rank is told that it is done.
    """
    first = launch.rank * L
    first_row = expert.to(tl.int64) * (W * M)
    lanes = tl.arange(0, LANES)
    counts = tl.zeros((LANES,), tl.int32)  # by source rank
    size = 0
    for start in range(0, W * T, CHUNK):
        index = start + tl.arange(0, CHUNK)
        source, token = index // T, index % T
        ids, exist = ids_of(index, incoming, W, T, K, BLOCK_K, IDS_AT)
        named = exist & (ids == first + expert)
        is_here = tl.max(named.to(tl.int32), axis=1)
        place = size + tl.cumsum(is_here, axis=0) - is_here
        row = first_row + place
        tl.store(token_ptr + row, token, mask=is_here > 0)
        slots = ((source * M + token) * K)[:, None] + tl.arange(0, BLOCK_K)[None, :]
        nowhere = exist & ((ids < first) | (ids >= first + L)) & (index % L == expert)[:, None]
        tl.store(slot_row_ptr + slots, tl.where(named, row.to(tl.int32)[:, None], -1), mask=named | nowhere)
        size += tl.sum(is_here, axis=0)
        counts += tl.sum(tl.where(source[:, None] == lanes[None, :], is_here[:, None], 0), axis=0)
    tl.store(sizes_ptr + expert, size)
    if COUNT_DONE:
        # All threads' stores come before the count.
        tl.debug_barrier()
        tl.atomic_add(launch.control + DONE, 1, sem="release", scope="gpu")
    tl.store(count_ptr + expert * W + lanes, counts, mask=lanes < W)
    tl.store(start_ptr + expert * W + lanes, tl.cumsum(counts, axis=0) - counts, mask=lanes < W)
    for start in range(0, W * M, CHUNK):
        rows = start + tl.arange(0, CHUNK)
        past = (rows >= size) & (rows < W * M)
        tl.store(token_ptr + first_row + rows, tl.full((CHUNK,), -1, tl.int32), mask=past)


@triton.jit
def count_rows(
    index,
    incoming,
    rank,
    W: tl.constexpr,
    T: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    L: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    IDS_AT: tl.constexpr,
):
    """`[1, BLOCK_K]` rows of one token, -1 where it has none: how many tokens before it name the same expert."""
    own, _ = ids_of(index + tl.arange(0, 1), incoming, W, T, K, BLOCK_K, IDS_AT)
    others = tl.arange(0, CHUNK)
    ids, _ = ids_of(others, incoming, W, T, K, BLOCK_K, IDS_AT)
    same = ids[:, :, None] == tl.reshape(own, (1, 1, BLOCK_K))
    named = tl.max(same.to(tl.int32), axis=1)
    before = tl.sum(tl.where((others < index)[:, None], named, 0), axis=0)[None, :]
    local = own - rank * L
    return tl.where((own >= rank * L) & (own < rank * L + L), local * (W * M) + before, -1)


@triton.jit
def clear_slots(
    first, slot_row_ptr, T: tl.constexpr, M: tl.constexpr, K: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr
):
    """Marks BLOCK slots of tokens that no rank has, T and up, as without a row."""
    if M > T:
        index = first + tl.arange(0, BLOCK)
        width: tl.constexpr = (M - T) * K
        slots = index // width * (M * K) + T * K + index % width
        tl.store(slot_row_ptr + slots, tl.full((BLOCK,), -1, tl.int32), mask=index < W * width)
