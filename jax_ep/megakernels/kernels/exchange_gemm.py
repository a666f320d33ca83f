"""Exchange and grouped GEMM in one launch: dispatch + GEMM, GEMM + combine, and combine beside a weight gradient.

No kernel needs more than one resident program: a wait for another rank is never for what a program has yet to begin.

**Dispatch + GEMM**: the first experts are multiplied while the other tokens travel. Of two queues, the first is
communication: announce, then push each block of the send order to every peer, then, where the caller saves the tokens,
copy what has arrived. The first COMM programs to start empty it and then help with the second: the tiles of the
product, in expert order, and the rows that are zero. Tokens are read where they are, in the heap or in the caller's own
array; a tile waits for the prefix of each peer's sends that its expert needs, once per program. Router weights are sent
with their tokens, and stored by the first tile of a row. A program leaves the first queue only when all its tasks are
taken by programs that run; and pushes wait only for the peers' announcements, at least once for each peer.

**GEMM + combine**: each row of the product is stored at its source at once, in slot `[token, k]` of its heap, and added
there. Every program computes its share of the tiles, counts itself, and helps with the sums; the program that counts
last tells all ranks. Values of rows, such as gradients of router weights, go to their slots before the tiles. Sums run
in float32, in the order of k. The launch may make the weight gradient of the same rows, too: both are the backward pass
of dispatch + GEMM. While the last rows of the product travel, and while a program would have no tile left, programs
multiply tiles of the gradient, which need nothing of other ranks. Who had fewer tiles of the product begins with the
tiles of the gradient. Only sums wait for what other ranks compute, and only in programs that see all programs of this
launch begun; the last to begin always does.

**Combine beside a weight gradient**: the rows `y` are products of an earlier launch. The first COMM programs to begin
make their sums, as combine.py does, while all others multiply tiles of the gradient; those of COMM come to them late.
So the link works while the tensor cores do, and only few programs wait for other ranks. Tiles are taken some at a time,
by whoever is free.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .bounded import halves
from .combine import combine_blocks
from .dispatch import copy_tokens
from .exchange_structs import Rows
from .failures import poison
from .grouped_gemm import ALL_TASKS, multiply_rows
from .listed_sums import sum_listed, write_list
from .masks import send_mask
from .programs import all_begun, count_stored
from .protocol import (
    announce,
    await_block_of_all,
    await_blocks,
    await_peers,
    await_ready,
    data_of,
    end_launch,
    next_task,
    open_launch,
    peer_of,
    publish,
)
from .router_weights import clear_weights, push_weights, return_weights, store_row_weights, take_weights
from .table import QUEUE, STARTED
from .tiles import (
    Tile,
    add_bias,
    find_tile,
    load_rhs,
    locate_groups,
    multiply,
    num_turns,
    number_tasks,
    place_after,
    store_tile,
    task_of_turn,
    tasks_until,
    tile_in_grid,
    zero_rows,
)
from .trace import COPY_EVENT, PUSH_EVENT, SUM_EVENT, TILE_EVENT, ZERO_EVENT, stamp, trace, trace_exchange


class TokensByRow(NamedTuple):
    """Where a GEMM tile finds the tokens of its rows."""

    own_ptr: Any  # [num_tokens, hidden] tokens of this rank
    received_ptr: Any  # [num_ranks * num_tokens, hidden] received tokens, in the heap
    row_slot_ptr: Any  # [num_rows] assignment of each row; -1: padding
    rank: Any  # this rank


@triton.jit
def row_tiles(size, BLOCK_M: tl.constexpr):
    """Row tiles of a group of `size` rows."""
    return (size + BLOCK_M - 1) // BLOCK_M


@triton.jit
def count_row_tiles(sizes_ptr, S: tl.constexpr):
    """Row tiles of all groups."""
    groups = tl.arange(0, S.padded_groups)
    return tl.sum(row_tiles(tl.load(sizes_ptr + groups, mask=groups < S.num_groups, other=0), S.tile.block_m), axis=0)


@triton.jit
def find_group(tile, group, first_tile, first_row, sizes_ptr, COLUMN_TILES: tl.constexpr, BLOCK_M: tl.constexpr):
    """From a group at or before that of `tile`, with its first tile and row, to the group of `tile`.

    Tiles come to a program in rising order: it moves on from its last one, mostly by a few groups.
    """
    size = tl.load(sizes_ptr + group)
    tiles = row_tiles(size, BLOCK_M) * COLUMN_TILES
    while tile >= first_tile + tiles:
        group += 1
        first_tile += tiles
        first_row += size
        size = tl.load(sizes_ptr + group)
        tiles = row_tiles(size, BLOCK_M) * COLUMN_TILES
    return group, first_tile, first_row, size


@triton.jit
def multiply_gathered(a_ptrs, b_desc, tile, S: tl.constexpr, BLOCK_M: tl.constexpr):
    """`[BM, BN]` float32: rows at `a_ptrs` (`[BM, BK]`, their first columns) times columns of the group's matrix."""
    BLOCK_K: tl.constexpr = S.tile.block_k
    total = tl.zeros((BLOCK_M, S.tile.block_n), tl.float32)
    for k in range(0, S.K, BLOCK_K):
        if S.K % BLOCK_K == 0:
            a = tl.load(a_ptrs)
        else:
            a = tl.load(a_ptrs, mask=(k + tl.arange(0, BLOCK_K) < S.K)[None, :], other=0.0)
        a_ptrs += BLOCK_K
        total = tl.dot(a, load_rhs(b_desc, tile.group, k, tile.column, S), total)
    return total


@triton.jit
def gathered_tile(tokens, b_desc, out_ptr, group, row, size, column, S: tl.constexpr, BLOCK_M: tl.constexpr):
    """Multiplies `size <= BM` rows of the `TokensByRow` from `row` on with a tile's columns; stores the product."""
    lines = tl.arange(0, BLOCK_M)
    inside = lines < size
    slot = tl.load(tokens.row_slot_ptr + row + lines, mask=inside, other=-1)
    # Rows without a slot are padding: any token may stand for them, since the product is not used.
    token = tl.where(slot < 0, 0, slot // S.top_k)
    columns = tl.arange(0, S.gemm.tile.block_k)[None, :]
    own = ((slot < 0) | (token // S.num_tokens == tokens.rank))[:, None]
    own_ptrs = tokens.own_ptr + (token % S.num_tokens).to(tl.int64)[:, None] * S.gemm.K + columns
    received_ptrs = tokens.received_ptr + token.to(tl.int64)[:, None] * S.gemm.K + columns
    a_ptrs = tl.multiple_of(tl.where(own, own_ptrs, received_ptrs), (16, 16))
    tile = Tile(group, row, row + size, column * S.gemm.tile.block_n)
    total = multiply_gathered(a_ptrs, b_desc, tile, S.gemm, BLOCK_M)
    total = tl.where((slot >= 0)[:, None], total, 0.0)
    store_tile(out_ptr, total, tile, S.gemm)


@triton.jit
def push_block(x_ptr, weights_ptr, order, launch, peer, block, num_sends, task, S: tl.constexpr, HEAP: tl.constexpr):
    """Sends a block of what goes to `peer`."""
    began = stamp(HEAP)
    index = block * S.block_tokens + tl.arange(0, S.block_tokens)
    mask = index < num_sends
    tokens = tl.load(order.order_ptr + peer.rank * S.num_tokens + index, mask=mask, other=0)
    values_ptr = data_of(launch, peer.device, x_ptr.dtype.element_ty, HEAP)
    copy_tokens(x_ptr, tokens, launch.rank * S.num_tokens + tokens, mask, values_ptr, S.gemm.K, S.block_hidden)
    if weights_ptr is not None:
        push_weights(weights_ptr, tokens, mask, launch, peer, S, HEAP)
    trace_exchange(launch, PUSH_EVENT, began, task, peer.device, block, HEAP)
    publish(launch, peer, block, task, HEAP)


@triton.jit
def communicate(
    x_ptr,
    weights_ptr,
    received_ptr,
    ids_ptr,
    order,
    saved_ptr,
    launch,
    alive,
    S: tl.constexpr,
    HEAP: tl.constexpr,
):
    """Tasks of the first queue of `dispatch_gemm` until none is left; returns whether the launch is still alive."""
    NUM_RANKS: tl.constexpr = HEAP.num_ranks
    BLOCK_TOKENS: tl.constexpr = S.block_tokens
    num_blocks: tl.constexpr = (S.num_tokens + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    num_peers: tl.constexpr = NUM_RANKS - 1 if NUM_RANKS > 1 else 1
    push_end: tl.constexpr = 1 + num_blocks * (NUM_RANKS - 1)
    task = next_task(launch)
    while task < push_end + (num_blocks * NUM_RANKS if S.saves_tokens else 0):
        if task == 0:
            announce(launch, HEAP)
        elif task < push_end:
            block = (task - 1) // num_peers
            step = (task - 1) % num_peers
            peer_rank = (launch.rank + 1 + step) % NUM_RANKS
            num_sends = tl.load(order.num_sends_ptr + peer_rank)
            peer = peer_of(launch, peer_rank)
            # Once even where nothing goes: no rank may run two launches ahead of another.
            if (block == 0) | (block * BLOCK_TOKENS < num_sends):
                alive = await_ready(launch, peer, alive, task, HEAP)
                if (alive != 0) & (block * BLOCK_TOKENS < num_sends):
                    push_block(x_ptr, weights_ptr, order, launch, peer, block, num_sends, task, S, HEAP)
        else:
            # Own tokens first: they are here.
            source = peer_of(launch, (launch.rank + (task - push_end) // num_blocks) % NUM_RANKS)
            local = (task - push_end) % num_blocks * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
            slots = source.rank * S.num_tokens + local
            mask = send_mask(ids_ptr, slots * S.top_k, local < S.num_tokens, launch.rank, S.top_k, S.gemm.num_groups)
            began = stamp(HEAP)
            if source.rank == launch.rank:
                copy_tokens(x_ptr, local, slots, mask, saved_ptr, S.gemm.K, S.block_hidden)
            else:
                needed = tl.load(order.num_needed_ptr + source.rank * S.gemm.num_groups + S.gemm.num_groups - 1)
                end = (needed + BLOCK_TOKENS - 1) // BLOCK_TOKENS
                alive = await_blocks(launch, source, 0, end, alive, task, HEAP)
                began = stamp(HEAP)
                copy_tokens(received_ptr, slots, slots, mask, saved_ptr, S.gemm.K, S.block_hidden)
            trace_exchange(launch, COPY_EVENT, began, task, source.device, (task - push_end) % num_blocks, HEAP)
        task = next_task(launch)
    return alive


@triton.jit
def await_tokens(launch, order, ready, expert, alive, tile, S: tl.constexpr, HEAP: tl.constexpr):
    """Waits for the tokens of experts behind `ready` up to `expert`; returns whether the launch is still alive."""
    for step in range(1, HEAP.num_ranks):
        source = peer_of(launch, (launch.rank + HEAP.num_ranks - step) % HEAP.num_ranks)
        needed_ptr = order.num_needed_ptr + source.rank * S.gemm.num_groups
        begin = tl.load(needed_ptr + ready, mask=ready >= 0, other=0) // S.block_tokens
        end = (tl.load(needed_ptr + expert) + S.block_tokens - 1) // S.block_tokens
        alive = await_blocks(launch, source, begin, end, alive, tile, HEAP)
    return alive


@triton.jit
def dispatch_gemm(
    x_ptr,
    weights_ptr,
    b_desc,
    handle,
    order,
    peers,
    out_ptr,
    saved_ptr,
    out_weights_ptr,
    S: tl.constexpr,
    HEAP: tl.constexpr,
):
    """`x [T, H]` and matrices `[L, H, N]` (`[L, N, H]` if TRANSPOSED) to `out [R, N]`.

    With SAVES, tokens with an expert here are copied to `saved [W * T, H]`. Unless both are None, `weights [T, K]` go
    to `out_weights [R]`, zero in padding rows.
    """
    launch, alive = open_launch(peers, HEAP)
    GEMM: tl.constexpr = S.gemm
    BLOCK_M: tl.constexpr = S.gemm.tile.block_m
    BLOCK_N: tl.constexpr = S.gemm.tile.block_n
    received_ptr = data_of(launch, launch.device, x_ptr.dtype.element_ty, HEAP)
    if tl.atomic_add(launch.control + STARTED, 1, sem="relaxed", scope="gpu") < S.comm_programs:
        alive = communicate(x_ptr, weights_ptr, received_ptr, handle.ids_ptr, order, saved_ptr, launch, alive, S, HEAP)
    row_slot_ptr, sizes_ptr = handle.row_slot_ptr, handle.sizes_ptr
    tokens = TokensByRow(x_ptr, received_ptr, row_slot_ptr, launch.rank)
    column_tiles: tl.constexpr = (GEMM.N + BLOCK_N - 1) // BLOCK_N
    num_tiles = count_row_tiles(sizes_ptr, GEMM) * column_tiles
    lanes = tl.arange(0, GEMM.padded_groups)
    num_rows = tl.sum(tl.load(sizes_ptr + lanes, mask=lanes < GEMM.num_groups, other=0), axis=0)
    num_clears = (GEMM.M - num_rows + BLOCK_M - 1) // BLOCK_M
    expert, first_tile, first_row, ready = 0, 0, 0, -1
    tile = tl.atomic_add(launch.control + QUEUE, 1, sem="relaxed", scope="gpu")
    while tile < num_tiles + num_clears:
        if tile < num_tiles:
            expert, first_tile, first_row, size = find_group(
                tile, expert, first_tile, first_row, sizes_ptr, column_tiles, BLOCK_M
            )
            if expert > ready:
                alive = await_tokens(launch, order, ready, expert, alive, tile, S, HEAP)
                ready = expert
            began = stamp(HEAP)
            row_tile, column = tile_in_grid(
                tile - first_tile, row_tiles(size, BLOCK_M), column_tiles, GEMM.tile.group_m
            )
            rows_left = size - row_tile * BLOCK_M
            if weights_ptr is not None:
                if column == 0:
                    first = first_row + row_tile * BLOCK_M
                    store_row_weights(
                        weights_ptr, row_slot_ptr, out_weights_ptr, first, rows_left, launch, S, BLOCK_M, HEAP
                    )
            # A group ends with a tile of half the height where at most that many rows remain.
            if rows_left > BLOCK_M // 2:
                gathered_tile(
                    tokens, b_desc, out_ptr, expert, first_row + row_tile * BLOCK_M, rows_left, column, S, BLOCK_M
                )
            else:
                gathered_tile(
                    tokens, b_desc, out_ptr, expert, first_row + row_tile * BLOCK_M, rows_left, column, S, BLOCK_M // 2
                )
            trace(launch, TILE_EVENT, began, tile, HEAP)
        else:
            began = stamp(HEAP)
            zero_rows(out_ptr, num_rows + (tile - num_tiles) * BLOCK_M, GEMM.M, GEMM.N, BLOCK_M, BLOCK_N)
            if weights_ptr is not None:
                clear_weights(out_weights_ptr, row_slot_ptr, num_rows + (tile - num_tiles) * BLOCK_M, BLOCK_M, GEMM.M)
            trace(launch, ZERO_EVENT, began, tile, HEAP)
        tile = tl.atomic_add(launch.control + QUEUE, 1, sem="relaxed", scope="gpu")
    if end_launch(launch, HEAP):
        poison(out_ptr, GEMM.M * GEMM.N)
        if S.saves_tokens:
            poison(saved_ptr, HEAP.num_ranks * S.num_tokens * GEMM.K)
        if weights_ptr is not None:
            poison(out_weights_ptr, GEMM.M)


@triton.jit
def row_addresses(row_slot_ptr, launch, tile, dtype: tl.constexpr, S: tl.constexpr, HEAP: tl.constexpr):
    """Addresses of the rows of a `Tile` in the heaps of the ranks that their tokens came from, or 0 behind its end."""
    rows = tile.row + tl.arange(0, S.gemm.tile.block_m)
    slot = tl.load(row_slot_ptr + rows, mask=rows < tile.end, other=-1)
    travels = slot >= 0
    source = tl.load(launch.group_ptr + tl.where(travels, slot // (S.num_tokens * S.top_k), 0))
    heap = tl.load(launch.table_ptr + source)
    offset = tl.where(travels, slot % (S.num_tokens * S.top_k), 0).to(tl.int64) * (
        S.gemm.N * dtype.primitive_bitwidth // 8
    )
    return tl.where(travels, heap + HEAP.data_offset + offset, 0)


@triton.jit
def store_at_sources(total, addresses, column, dtype: tl.constexpr, S: tl.constexpr):
    """Stores a tile's columns of the rows at these addresses."""
    columns = (column + tl.arange(0, total.shape[1]))[None, :]
    target = tl.multiple_of(addresses.to(tl.pointer_type(dtype))[:, None] + columns, (16, 16))
    tl.store(target, total.to(dtype), mask=(addresses != 0)[:, None] & (columns < S.gemm.N))


@triton.jit
def store_biased_at_sources(total, bias, tile, addresses, dtype: tl.constexpr, S: tl.constexpr):
    """The same with a `Bias`, one half of the columns after the other: all at once would spill registers."""
    HALF: tl.constexpr = S.gemm.tile.block_n // 2
    left, right = halves(total, S.gemm.tile.block_m, HALF * 2)
    left = add_bias(left, bias, tile, S.gemm)
    store_at_sources(left, addresses, tile.column, dtype, S)
    right_tile = Tile(tile.group, tile.row, tile.end, tile.column + HALF)
    store_at_sources(add_bias(right, bias, right_tile, S.gemm), addresses, right_tile.column, dtype, S)


@triton.jit
def clear_dropped(handle, launch, dtype: tl.constexpr, S: tl.constexpr, HEAP: tl.constexpr):
    """This program's share of the zeros at the sources, for slots that should have a row here but found no place."""
    NUM_TOKENS: tl.constexpr = S.num_tokens
    HIDDEN: tl.constexpr = S.gemm.N
    LOCAL_EXPERTS: tl.constexpr = S.gemm.num_groups
    ROWS: tl.constexpr = S.clear_tokens
    COLUMNS: tl.constexpr = S.clear_hidden
    blocks: tl.constexpr = (NUM_TOKENS + ROWS - 1) // ROWS
    for index in range(tl.program_id(0), HEAP.num_ranks * blocks, tl.num_programs(0)):
        source_rank = index // blocks
        tokens = index % blocks * ROWS + tl.arange(0, ROWS)
        base = data_of(launch, tl.load(launch.group_ptr + source_rank), dtype, HEAP)
        for k in range(S.top_k):
            slots = (source_rank * NUM_TOKENS + tokens) * S.top_k + k
            expert = tl.load(handle.ids_ptr + slots, mask=tokens < NUM_TOKENS, other=-1)
            dropped = (expert >= launch.rank * LOCAL_EXPERTS) & (expert < launch.rank * LOCAL_EXPERTS + LOCAL_EXPERTS)
            dropped = dropped & (tl.load(handle.slot_row_ptr + slots, mask=tokens < NUM_TOKENS, other=0) < 0)
            if tl.max(dropped.to(tl.int32), axis=0) > 0:
                for h in range(0, HIDDEN, COLUMNS):
                    columns = h + tl.arange(0, COLUMNS)[None, :]
                    target = tl.multiple_of(
                        base + (tokens * S.top_k + k).to(tl.int64)[:, None] * HIDDEN + columns, (16, 16)
                    )
                    tl.store(target, tl.zeros((ROWS, COLUMNS), dtype), mask=dropped[:, None] & (columns < HIDDEN))


@triton.jit
def return_share_of_weights(weights_ptr, handle, launch, S: tl.constexpr, HEAP: tl.constexpr):
    """Sends this program's share of the values of rows to their slots, those that found no place included."""
    blocks: tl.constexpr = (S.num_tokens + S.weight_tokens - 1) // S.weight_tokens
    for index in range(tl.program_id(0), HEAP.num_ranks * blocks, tl.num_programs(0)):
        peer = peer_of(launch, index // blocks)
        tokens = index % blocks * S.weight_tokens + tl.arange(0, S.weight_tokens)
        return_weights(
            weights_ptr, handle.ids_ptr, handle.slot_row_ptr, tokens, launch, peer, S, S.gemm.num_groups, HEAP
        )


@triton.jit
def list_slots(list_ptr, ids_ptr, rank, block, NUM_EXPERTS: tl.constexpr, S: tl.constexpr):
    """Lists the slots of a block of this rank's tokens that have an expert, in order of k; returns how many."""
    tokens = block * S.sum_tokens + tl.arange(0, S.sum_tokens)
    k = tl.arange(0, S.padded_top_k)[None, :]
    slots = tokens[:, None] * S.top_k + k
    inside = (tokens < S.num_tokens)[:, None] & (k < S.top_k)
    expert = tl.load(ids_ptr + rank * S.num_tokens * S.top_k + slots, mask=inside, other=-1)
    chosen = (expert >= 0) & (expert < NUM_EXPERTS)
    return write_list(list_ptr, slots, chosen, tokens, tokens < S.num_tokens, S.sums.list_length)


@triton.jit
def gemm_combine(
    h_desc,
    weights_ptr,
    b_desc,
    handle,
    bias,
    factors,
    peers,
    sums,
    out_weights_ptr,
    gradient,
    S: tl.constexpr,
    HEAP: tl.constexpr,
):
    """`h [R, F]` and matrices `[L, F, H]` (`[L, H, F]` if TRANSPOSED) to `Sums`.

    Unless it is None, a `Bias` is added to the rows before they are rounded and travel. Unless both are None,
    `weights [R]` go to the slots `out_weights [T, K]` of their rows, zero where there is none.

    Unless `gradient` is None, also `factors`, which are `h` and the tokens `[R, H]` by row (or these and `h` if
    TRANSPOSED), to `gradient`: `lhs[rows].T @ rhs[rows]` of each expert, in the shape of the matrices, through a
    descriptor of blocks `[1, BM, BN / PARTS]`.
    """
    launch, alive = open_launch(peers, HEAP)
    NUM_RANKS: tl.constexpr = HEAP.num_ranks
    GEMM: tl.constexpr = S.gemm
    dtype: tl.constexpr = h_desc.dtype
    received_ptr = data_of(launch, launch.device, dtype, HEAP)
    if tl.atomic_add(launch.control + STARTED, 1, sem="relaxed", scope="gpu") == 0:
        announce(launch, HEAP)
    alive = await_peers(launch, alive, 0, HEAP)
    if S.may_drop:  # known when compiling, unlike what follows
        if alive != 0:
            began = stamp(HEAP)
            clear_dropped(handle, launch, dtype, S, HEAP)
            trace(launch, ZERO_EVENT, began, tl.program_id(0), HEAP)
    if weights_ptr is not None:
        if alive != 0:
            began = stamp(HEAP)
            return_share_of_weights(weights_ptr, handle, launch, S, HEAP)
            trace_exchange(launch, PUSH_EVENT, began, tl.program_id(0), -1, 0, HEAP)
    groups = locate_groups(handle.sizes_ptr, GEMM)
    group_ends = number_tasks(groups, GEMM)
    # After a failure nobody may be there to receive: no more stores, whatever the results then are.
    all_tiles = tasks_until(tl.max(group_ends, axis=0))
    num_tiles = all_tiles * alive
    for turn in tl.range(0, num_turns(num_tiles), flatten=True):
        began = stamp(HEAP)
        tile = find_tile(task_of_turn(turn), group_ends, handle.sizes_ptr, GEMM)
        total = multiply(h_desc, b_desc, tile, GEMM)
        # Addresses that live beside the sums would spill registers in the flat loop.
        addresses = row_addresses(handle.row_slot_ptr, launch, tile, dtype, S, HEAP)
        if bias is None:
            store_at_sources(total, addresses, tile.column, dtype, S)
        else:
            store_biased_at_sources(total, bias, tile, addresses, dtype, S)
        trace(launch, TILE_EVENT, began, task_of_turn(turn), HEAP)
    if alive != 0:  # who has failed is missing in the count, so that nobody is told of rows that were not stored
        if count_stored(launch, 0):
            for peer_rank in range(NUM_RANKS):
                publish(launch, peer_of(launch, peer_rank), 0, 0, HEAP)
    if gradient is not None:
        # The first tile is the same in all programs, also where some have failed and others not.
        began = stamp(HEAP)
        multiply_rows(factors.lhs, factors.rhs, gradient, groups, place_after(all_tiles), ALL_TASKS, S.gradient)
        trace(launch, TILE_EVENT, began, all_tiles + tl.program_id(0), HEAP)
    if all_begun(launch):
        blocks: tl.constexpr = (S.num_tokens + S.sum_tokens - 1) // S.sum_tokens
        list_ptr = sums.lists_ptr + tl.program_id(0) * 2 * S.sums.list_length
        block = next_task(launch)
        if block < blocks:
            alive = await_block_of_all(launch, 0, alive, block, HEAP)
        while block < blocks:
            began = stamp(HEAP)
            count = list_slots(list_ptr, handle.ids_ptr, launch.rank, block, NUM_RANKS * GEMM.num_groups, S)
            received = Rows(received_ptr, received_ptr)
            sum_listed(list_ptr, count, received, Rows(sums.out_ptr, sums.out_ptr), tl.float32, GEMM.N, S.sums)
            if weights_ptr is not None:
                tokens = block * S.sum_tokens + tl.arange(0, S.sum_tokens)
                take_weights(handle.ids_ptr, tokens, out_weights_ptr, launch, S, GEMM.num_groups, HEAP)
            trace(launch, SUM_EVENT, began, block, HEAP)
            block = next_task(launch)
    if end_launch(launch, HEAP):
        poison(sums.out_ptr, S.num_tokens * GEMM.N)  # the gradient needs nothing of other ranks
        if weights_ptr is not None:
            poison(out_weights_ptr, S.num_tokens * S.top_k)


@triton.jit
def combine_with_weight_gradient(
    y_ptr,
    weights_ptr,
    handle,
    factors,
    peers,
    sums,
    out_weights_ptr,
    gradient,
    S: tl.constexpr,
    HEAP: tl.constexpr,
):
    """`y [R, H]` and `weights` to where `combine` has them; and `factors` to `gradient`, as `gemm_combine` has it."""
    launch, alive = open_launch(peers, HEAP)
    programs = tl.num_programs(0)
    GRADIENT: tl.constexpr = S.gradient
    BLOCK_M: tl.constexpr = S.gradient.tile.block_m
    BLOCK_N: tl.constexpr = S.gradient.tile.block_n
    tiles: tl.constexpr = (
        GRADIENT.num_groups * ((GRADIENT.K + BLOCK_M - 1) // BLOCK_M) * ((GRADIENT.N + BLOCK_N - 1) // BLOCK_N)
    )
    most_turns = tl.cdiv(tiles, S.tiles_per_task * programs) * programs
    communicates = tl.atomic_add(launch.control + STARTED, 1, sem="relaxed", scope="gpu") < S.comm_programs
    if communicates:
        ids_ptr, slot_row_ptr = handle.ids_ptr, handle.slot_row_ptr
        combine_blocks(y_ptr, weights_ptr, ids_ptr, slot_row_ptr, sums, out_weights_ptr, launch, alive, S.combine, HEAP)
    groups = locate_groups(handle.sizes_ptr, GRADIENT)
    turn = tl.atomic_add(launch.control + QUEUE, 1, sem="relaxed", scope="gpu")
    while turn < most_turns:
        # Programs that take neighbouring turns work on neighbouring tiles.
        first = turn // programs * programs * S.tiles_per_task + turn % programs
        began = stamp(HEAP)
        multiply_rows(factors.lhs, factors.rhs, gradient, groups, first, S.tiles_per_task, GRADIENT)
        trace(launch, TILE_EVENT, began, turn, HEAP)
        turn = tl.atomic_add(launch.control + QUEUE, 1, sem="relaxed", scope="gpu")
    if end_launch(launch, HEAP):
        poison(sums.out_ptr, S.combine.num_tokens * S.combine.hidden)  # the gradient needs nothing of other ranks
        if weights_ptr is not None:
            poison(out_weights_ptr, S.combine.num_tokens * S.combine.top_k)
