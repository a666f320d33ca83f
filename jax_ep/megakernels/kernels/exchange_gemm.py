"""All-to-all fused with grouped GEMMs: dispatch + GEMM, and GEMM + combine.

Every kernel finishes with one resident program per rank: a program waits only for work that a running program, here or
on another rank, has already taken.

**Dispatch + GEMM** (`dispatch_gemm`). Two queues. The communication queue, in order:

    task 0     signal the peers that this rank is ready
    send       wait for a peer's handshake, copy a block of the send order to its heap, and set the block's flag
    copy       if tokens are saved: wait for a source's blocks and copy them to the result

The first `comm_programs` programs to start run it to its end, then join the others at the tile queue: tiles of the
grouped GEMM in expert order, then blocks of padding rows. A tile reads tokens where they are, in the heap or in the
caller's array. Before the first tile of an expert, a program waits for the prefix of each source's sends that the
expert needs. So the first experts are computed while the tokens of later ones travel. Every rank plays both parts:

    rank A, as receiver                                  rank B, as sender
    signal_ready         ------- handshake ------->      await_ready
    await_tokens(e = 0)  <---- block 0, flag 0 -----     push_block(0)
    tiles of expert 0    <---- block 1, flag 1 -----     push_block(1)
    await_tokens(e = 1), tiles of expert 1, ...          tiles, as rank A

Router weights travel with tokens; the first column tile of a row stores them. No deadlock: sends wait only for
handshakes (task 0), and a program begins with tiles only after `comm_programs` others have begun with the communication
queue, which they run to its end. Floor: the larger of link time and GEMM time.

**GEMM + combine** (`gemm_combine`). Each tile's epilogue stores its rows directly at their sources, at assignment
`[token, k]` of the heap. Every program computes a fixed share of the tiles and counts itself; the last one to count
signals all ranks. Then programs add the rows of this rank's tokens, in float32 and in order of k. No deadlock: the
first program of a rank signals before it waits for handshakes. Only sums wait for what other ranks compute, and only in
programs that see that all programs of this launch have started; the last one to start always does. Floor: the larger
of link time and GEMM time.

    rank A, as expert rank                               rank B, as source of tokens
    await_all_ready      <------ handshake ---------     signal_ready
    tile, epilogue       ------- rows of B -------->     assignments [token, k] of B's heap
    last tile, publish   ------- one flag --------->     await_block_of_all, then sum_listed
"""

from typing import NamedTuple

import triton
import triton.language as tl

from . import protocol, tiles
from .exchange_structs import Rows
from .failures import QUEUE, STARTED, poison
from .gemm_structs import Pointer, Value
from .indices import indices
from .listed_sums import sum_listed, write_list
from .router_weights import clear_weights, push_weights, return_weights, store_row_weights, take_weights
from .token_rows import copy_tokens, send_mask
from .trace import COPY_EVENT, PUSH_EVENT, SUM_EVENT, TILE_EVENT, ZERO_EVENT, stamp, trace, trace_exchange


class TokensByRow(NamedTuple):
    """Pointers through which a GEMM tile finds the tokens of its rows."""

    own_ptr: Pointer  # [num_tokens, hidden] tokens of this rank
    received_ptr: Pointer  # [num_ranks * num_tokens, hidden] received tokens, in the heap
    row_to_assignment_ptr: Pointer  # [num_rows] assignment of each row; -1: padding
    rank: Value  # this rank


@triton.jit
def row_tiles(size, BLOCK_M: tl.constexpr):
    """Return the number of row tiles of a group of `size` rows."""
    return (size + BLOCK_M - 1) // BLOCK_M


@triton.jit
def count_row_tiles(sizes_ptr, S: tl.constexpr):
    """Return the number of row tiles of all groups."""
    groups = tl.arange(0, S.padded_groups)
    return tl.sum(row_tiles(tl.load(sizes_ptr + groups, mask=groups < S.num_groups, other=0), S.tile.block_m), axis=0)


@triton.jit
def find_group(tile, group, first_tile, first_row, sizes_ptr, COLUMN_TILES: tl.constexpr, BLOCK_M: tl.constexpr):
    """Advance from a group at or before that of `tile`, with its first tile and row, to the group of `tile`.

    A program gets tiles in ascending order, so it searches from its previous group, usually by a few groups.
    """
    size = tl.load(sizes_ptr + group)
    group_tiles = row_tiles(size, BLOCK_M) * COLUMN_TILES
    while tile >= first_tile + group_tiles:
        group += 1
        first_tile += group_tiles
        first_row += size
        size = tl.load(sizes_ptr + group)
        group_tiles = row_tiles(size, BLOCK_M) * COLUMN_TILES
    return group, first_tile, first_row, size


@triton.jit
def multiply_gathered(a_ptrs, b_desc, tile, S: tl.constexpr, BLOCK_M: tl.constexpr):
    """Multiply rows at `a_ptrs` with a tile's columns of the group's weights, to float32 `[BLOCK_M, block_n]`.

    `a_ptrs [BLOCK_M, block_k]` point to the first columns of the rows.
    """
    BLOCK_K: tl.constexpr = S.tile.block_k
    b_desc, group = tiles.locate_weights(b_desc, tile.group, S.home_groups)
    total = tl.zeros((BLOCK_M, S.tile.block_n), tl.float32)
    for k in range(0, S.K, BLOCK_K):
        # Mask the last step only if K needs it.
        if S.K % BLOCK_K == 0:
            a = tl.load(a_ptrs)
        else:
            a = tl.load(a_ptrs, mask=(k + tl.arange(0, BLOCK_K) < S.K)[None, :], other=0.0)
        a_ptrs += BLOCK_K
        total = tl.dot(a, tiles.load_rhs(b_desc, group, k, tile.column, S), total)
    return total


@triton.jit
def gathered_tile(tokens, b_desc, out_ptr, group, row, size, column, S: tl.constexpr, BLOCK_M: tl.constexpr):
    """Compute one tile from rows of `TokensByRow`: at most BLOCK_M of `size` rows from `row` on; store the result."""
    row_offsets = tl.arange(0, BLOCK_M)
    inside = row_offsets < size
    assignment = tl.load(tokens.row_to_assignment_ptr + row + row_offsets, mask=inside, other=-1)
    # Padding rows read any token, since their result is replaced by zero.
    token = tl.where(assignment < 0, 0, assignment // S.top_k)
    columns = tl.arange(0, S.gemm.tile.block_k)[None, :]
    own = ((assignment < 0) | (token // S.num_tokens == tokens.rank))[:, None]
    # Own tokens are in the caller's array, the others in the heap.
    own_ptrs = tokens.own_ptr + (token % S.num_tokens).to(tl.int64)[:, None] * S.gemm.K + columns
    received_ptrs = tokens.received_ptr + token.to(tl.int64)[:, None] * S.gemm.K + columns
    a_ptrs = tl.multiple_of(tl.where(own, own_ptrs, received_ptrs), (16, 16))
    tile = tiles.Tile(group, row, row + size, column * S.gemm.tile.block_n)
    total = multiply_gathered(a_ptrs, b_desc, tile, S.gemm, BLOCK_M)
    # Padding rows are zero.
    total = tl.where((assignment >= 0)[:, None], total, 0.0)
    tiles.store_tile(out_ptr, total, tile, S.gemm)


@triton.jit
def push_block(x_ptr, weights_ptr, order, launch, peer, block, num_sends, task, S: tl.constexpr, HEAP: tl.constexpr):
    """Send a block of the tokens that go to `peer`."""
    began = stamp(HEAP)
    index = block * S.block_tokens + indices(S.block_tokens)
    mask = index < num_sends
    # The send order lists the tokens of each destination.
    tokens = tl.load(order.order_ptr + peer.rank * S.num_tokens + index, mask=mask, other=0)
    values_ptr = protocol.data_of(launch, peer.device, x_ptr.dtype.element_ty, HEAP)
    copy_tokens(x_ptr, tokens, launch.rank * S.num_tokens + tokens, mask, values_ptr, S.gemm.K, S.block_hidden)
    if weights_ptr is not None:
        push_weights(weights_ptr, tokens, mask, launch, peer, S, HEAP)
    trace_exchange(launch, PUSH_EVENT, began, task, peer.device, block, HEAP)
    protocol.publish(launch, peer, block, task, HEAP)


@triton.jit
def communicate(
    x_ptr,
    weights_ptr,
    received_ptr,
    topk_idx_ptr,
    order,
    saved_ptr,
    launch,
    not_failed,
    S: tl.constexpr,
    HEAP: tl.constexpr,
):
    """Run the communication queue of `dispatch_gemm` until no task is left."""
    NUM_RANKS: tl.constexpr = HEAP.num_ranks
    BLOCK_TOKENS: tl.constexpr = S.block_tokens
    num_blocks: tl.constexpr = (S.num_tokens + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    num_peers: tl.constexpr = NUM_RANKS - 1 if NUM_RANKS > 1 else 1
    push_end: tl.constexpr = 1 + num_blocks * (NUM_RANKS - 1)
    task = protocol.next_task(launch)
    while task < push_end + (num_blocks * NUM_RANKS if S.saves_tokens else 0):
        if task == 0:
            protocol.signal_ready(launch, HEAP)
        elif task < push_end:
            # Send: blocks are interleaved over the peers.
            block = (task - 1) // num_peers
            step = (task - 1) % num_peers
            peer_rank = (launch.rank + 1 + step) % NUM_RANKS
            num_sends = tl.load(order.num_sends_ptr + peer_rank)
            peer = protocol.peer_of(launch, peer_rank)
            # At block 0 wait for the peer even if nothing is sent: no rank may run two launches ahead of another.
            if (block == 0) | (block * BLOCK_TOKENS < num_sends):
                not_failed = protocol.await_ready(launch, peer, not_failed, task, HEAP)
                if (not_failed != 0) & (block * BLOCK_TOKENS < num_sends):
                    push_block(x_ptr, weights_ptr, order, launch, peer, block, num_sends, task, S, HEAP)
        else:
            # Copy a block of tokens to save; own tokens come first, since they need no wait.
            source = protocol.peer_of(launch, (launch.rank + (task - push_end) // num_blocks) % NUM_RANKS)
            local = (task - push_end) % num_blocks * BLOCK_TOKENS + indices(BLOCK_TOKENS)
            slots = source.rank * S.num_tokens + local
            mask = send_mask(
                topk_idx_ptr, slots * S.top_k, local < S.num_tokens, launch.rank, S.top_k, S.gemm.num_groups
            )
            began = stamp(HEAP)
            if source.rank == launch.rank:
                copy_tokens(x_ptr, local, slots, mask, saved_ptr, S.gemm.K, S.block_hidden)
            else:
                # The last expert needs all tokens that the source sends here.
                needed = tl.load(order.num_needed_ptr + source.rank * S.gemm.num_groups + S.gemm.num_groups - 1)
                end = (needed + BLOCK_TOKENS - 1) // BLOCK_TOKENS
                not_failed = protocol.await_blocks(launch, source, 0, end, not_failed, task, HEAP)
                began = stamp(HEAP)
                copy_tokens(received_ptr, slots, slots, mask, saved_ptr, S.gemm.K, S.block_hidden)
            trace_exchange(launch, COPY_EVENT, began, task, source.device, (task - push_end) % num_blocks, HEAP)
        task = protocol.next_task(launch)
    return not_failed


@triton.jit
def await_tokens(launch, order, ready, expert, not_failed, tile, S: tl.constexpr, HEAP: tl.constexpr):
    """Wait for the tokens of the experts after `ready` up to `expert`, from every source."""
    for step in range(1, HEAP.num_ranks):
        source = protocol.peer_of(launch, (launch.rank + HEAP.num_ranks - step) % HEAP.num_ranks)
        needed_ptr = order.num_needed_ptr + source.rank * S.gemm.num_groups
        # Blocks before this one were awaited for the previous expert.
        begin = tl.load(needed_ptr + ready, mask=ready >= 0, other=0) // S.block_tokens
        end = (tl.load(needed_ptr + expert) + S.block_tokens - 1) // S.block_tokens
        not_failed = protocol.await_blocks(launch, source, begin, end, not_failed, tile, HEAP)
    return not_failed


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
    """Multiply dispatched tokens with their experts' weights.

    `x [num_tokens, hidden]` and weights `[num_local_experts, hidden, N]` (`[., N, hidden]` if transposed) give `out
    [num_rows, N]`. If `S.saves_tokens`, tokens with an expert here are copied to `saved [num_ranks * num_tokens,
    hidden]`. Unless both are None, `weights [num_tokens, top_k]` go to `out_weights [num_rows]`, zero in padding rows.
    """
    launch, not_failed = protocol.open_launch(peers, HEAP)
    GEMM: tl.constexpr = S.gemm
    BLOCK_M: tl.constexpr = S.gemm.tile.block_m
    BLOCK_N: tl.constexpr = S.gemm.tile.block_n
    received_ptr = protocol.data_of(launch, launch.device, x_ptr.dtype.element_ty, HEAP)
    # The first programs to start communicate until that queue is empty.
    if tl.atomic_add(launch.control + STARTED, 1, sem="relaxed", scope="gpu") < S.comm_programs:
        not_failed = communicate(
            x_ptr, weights_ptr, received_ptr, handle.topk_idx_ptr, order, saved_ptr, launch, not_failed, S, HEAP
        )
    row_to_assignment_ptr, sizes_ptr = handle.row_to_assignment_ptr, handle.sizes_ptr
    tokens = TokensByRow(x_ptr, received_ptr, row_to_assignment_ptr, launch.rank)
    # The tile queue: tiles of all experts, then blocks of padding rows behind them.
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
            # First tile of an expert in this program: wait for the tokens that it needs.
            if expert > ready:
                not_failed = await_tokens(launch, order, ready, expert, not_failed, tile, S, HEAP)
                ready = expert
            began = stamp(HEAP)
            # Locate the tile among those of its expert.
            row_tile, column = tiles.tile_in_grid(
                tile - first_tile, row_tiles(size, BLOCK_M), column_tiles, GEMM.tile.group_m
            )
            rows_left = size - row_tile * BLOCK_M
            # The first column tile stores the router weights of its rows.
            if weights_ptr is not None:
                if column == 0:
                    first = first_row + row_tile * BLOCK_M
                    store_row_weights(
                        weights_ptr, row_to_assignment_ptr, out_weights_ptr, first, rows_left, launch, S, BLOCK_M, HEAP
                    )
            # Use a tile of half the height if the remaining rows fit.
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
            # Zero a block of rows behind all experts.
            tiles.zero_rows(out_ptr, num_rows + (tile - num_tiles) * BLOCK_M, GEMM.M, GEMM.N, BLOCK_M, BLOCK_N)
            if weights_ptr is not None:
                clear_weights(
                    out_weights_ptr, row_to_assignment_ptr, num_rows + (tile - num_tiles) * BLOCK_M, BLOCK_M, GEMM.M
                )
            trace(launch, ZERO_EVENT, began, tile, HEAP)
        tile = tl.atomic_add(launch.control + QUEUE, 1, sem="relaxed", scope="gpu")
    # After a failure no result may look valid.
    if protocol.end_launch(launch, HEAP):
        poison(out_ptr, GEMM.M * GEMM.N)
        if S.saves_tokens:
            poison(saved_ptr, HEAP.num_ranks * S.num_tokens * GEMM.K)
        if weights_ptr is not None:
            poison(out_weights_ptr, GEMM.M)


@triton.jit
def row_addresses(row_to_assignment_ptr, launch, tile, dtype: tl.constexpr, S: tl.constexpr, HEAP: tl.constexpr):
    """Return the addresses of a tile's rows in the heaps of their tokens' sources; 0 for padding and past the end."""
    rows = tile.row + tl.arange(0, S.gemm.tile.block_m)
    assignment = tl.load(row_to_assignment_ptr + rows, mask=rows < tile.end, other=-1)
    travels = assignment >= 0
    # The source rank is the leading part of the assignment.
    source = tl.load(launch.group_ptr + tl.where(travels, assignment // (S.num_tokens * S.top_k), 0))
    heap = tl.load(launch.table_ptr + source)
    # The source numbers the assignments of its tokens from 0.
    row_bytes: tl.constexpr = S.gemm.N * dtype.primitive_bitwidth // 8
    offset = tl.where(travels, assignment % (S.num_tokens * S.top_k), 0).to(tl.int64) * row_bytes
    return tl.where(travels, heap + HEAP.data_offset + offset, 0)


@triton.jit
def store_at_sources(total, addresses, column, dtype: tl.constexpr, S: tl.constexpr):
    """Store a tile's columns of the rows at these addresses."""
    columns = (column + tl.arange(0, total.shape[1]))[None, :]
    target = tl.multiple_of(addresses.to(tl.pointer_type(dtype))[:, None] + columns, (16, 16))
    tl.store(target, total.to(dtype), mask=(addresses != 0)[:, None] & (columns < S.gemm.N))


@triton.jit
def store_biased_at_sources(total, bias, tile, addresses, dtype: tl.constexpr, S: tl.constexpr):
    """Add a `Bias` and store a tile at its sources in two halves of the columns: at once they would spill registers."""
    HALF: tl.constexpr = S.gemm.tile.block_n // 2
    left, right = tiles.split_columns(total, S.gemm.tile.block_m, HALF * 2)
    left = tiles.add_bias(left, bias, tile, S.gemm)
    store_at_sources(left, addresses, tile.column, dtype, S)
    right_tile = tiles.Tile(tile.group, tile.row, tile.end, tile.column + HALF)
    store_at_sources(tiles.add_bias(right, bias, right_tile, S.gemm), addresses, right_tile.column, dtype, S)


@triton.jit
def clear_dropped(handle, launch, dtype: tl.constexpr, S: tl.constexpr, HEAP: tl.constexpr):
    """Zero this program's share of the dropped assignments, at their sources."""
    NUM_TOKENS: tl.constexpr = S.num_tokens
    HIDDEN: tl.constexpr = S.gemm.N
    LOCAL_EXPERTS: tl.constexpr = S.gemm.num_groups
    ROWS: tl.constexpr = S.clear_tokens
    COLUMNS: tl.constexpr = S.clear_hidden
    blocks: tl.constexpr = (NUM_TOKENS + ROWS - 1) // ROWS
    for index in range(tl.program_id(0), HEAP.num_ranks * blocks, tl.num_programs(0)):
        source_rank = index // blocks
        tokens = index % blocks * ROWS + tl.arange(0, ROWS)
        base = protocol.data_of(launch, tl.load(launch.group_ptr + source_rank), dtype, HEAP)
        for k in range(S.top_k):
            assignments = (source_rank * NUM_TOKENS + tokens) * S.top_k + k
            expert = tl.load(handle.topk_idx_ptr + assignments, mask=tokens < NUM_TOKENS, other=-1)
            # Dropped: the expert is here, but the assignment has no row.
            first_expert = launch.rank * LOCAL_EXPERTS
            dropped = (expert >= first_expert) & (expert < first_expert + LOCAL_EXPERTS)
            dropped = dropped & (
                tl.load(handle.assignment_to_row_ptr + assignments, mask=tokens < NUM_TOKENS, other=0) < 0
            )
            if tl.max(dropped.to(tl.int32), axis=0) > 0:
                for h in range(0, HIDDEN, COLUMNS):
                    columns = h + tl.arange(0, COLUMNS)[None, :]
                    rows = (tokens * S.top_k + k).to(tl.int64)
                    target = tl.multiple_of(base + rows[:, None] * HIDDEN + columns, (16, 16))
                    tl.store(target, tl.zeros((ROWS, COLUMNS), dtype), mask=dropped[:, None] & (columns < HIDDEN))


@triton.jit
def return_share_of_weights(weights_ptr, handle, launch, S: tl.constexpr, HEAP: tl.constexpr):
    """Send this program's share of row values to their assignments, dropped ones included."""
    blocks: tl.constexpr = (S.num_tokens + S.weight_tokens - 1) // S.weight_tokens
    for index in range(tl.program_id(0), HEAP.num_ranks * blocks, tl.num_programs(0)):
        peer = protocol.peer_of(launch, index // blocks)
        tokens = index % blocks * S.weight_tokens + tl.arange(0, S.weight_tokens)
        return_weights(
            weights_ptr,
            handle.topk_idx_ptr,
            handle.assignment_to_row_ptr,
            tokens,
            launch,
            peer,
            S,
            S.gemm.num_groups,
            HEAP,
        )


@triton.jit
def list_assignments(list_ptr, topk_idx_ptr, rank, block, NUM_EXPERTS: tl.constexpr, S: tl.constexpr):
    """List the assignments of a block of this rank's tokens that have an expert, in order of k; return how many."""
    tokens = block * S.sum_tokens + tl.arange(0, S.sum_tokens)
    k = tl.arange(0, S.padded_top_k)[None, :]
    assignments = tokens[:, None] * S.top_k + k
    inside = (tokens < S.num_tokens)[:, None] & (k < S.top_k)
    expert = tl.load(topk_idx_ptr + rank * S.num_tokens * S.top_k + assignments, mask=inside, other=-1)
    chosen = (expert >= 0) & (expert < NUM_EXPERTS)
    return write_list(list_ptr, assignments, chosen, tokens, tokens < S.num_tokens, S.sums.list_length)


@triton.jit
def gemm_combine(
    h_desc,
    weights_ptr,
    b_desc,
    handle,
    bias,
    peers,
    sums,
    out_weights_ptr,
    S: tl.constexpr,
    HEAP: tl.constexpr,
):
    """Multiply rows `h [num_rows, K]` with their experts' weights and combine the results at their sources.

    Weights are `[num_local_experts, K, hidden]` (`[., hidden, K]` if transposed). Unless it is None, a `Bias` is added
    before rows are rounded and sent. Unless both are None, values `weights [num_rows]` go to `out_weights [num_tokens,
    top_k]`, zero where an assignment has no row.
    """
    launch, not_failed = protocol.open_launch(peers, HEAP)
    NUM_RANKS: tl.constexpr = HEAP.num_ranks
    GEMM: tl.constexpr = S.gemm
    dtype: tl.constexpr = h_desc.dtype
    received_ptr = protocol.data_of(launch, launch.device, dtype, HEAP)
    # The first program signals; every program waits before it stores at a peer.
    if tl.atomic_add(launch.control + STARTED, 1, sem="relaxed", scope="gpu") == 0:
        protocol.signal_ready(launch, HEAP)
    not_failed = protocol.await_all_ready(launch, not_failed, 0, HEAP)
    # Assignments without a row need a value at their source.
    if S.may_drop:
        if not_failed != 0:
            began = stamp(HEAP)
            clear_dropped(handle, launch, dtype, S, HEAP)
            trace(launch, ZERO_EVENT, began, tl.program_id(0), HEAP)
    # Row values, such as gradients of router weights, go to their assignments.
    if weights_ptr is not None:
        if not_failed != 0:
            began = stamp(HEAP)
            return_share_of_weights(weights_ptr, handle, launch, S, HEAP)
            trace_exchange(launch, PUSH_EVENT, began, tl.program_id(0), -1, 0, HEAP)
    groups = tiles.locate_groups(handle.sizes_ptr, GEMM)
    group_ends = tiles.number_tasks(groups, GEMM)
    # After a failure compute no tiles: a peer may no longer exist.
    num_tiles = tiles.tasks_until(tl.max(group_ends, axis=0)) * not_failed
    # GEMM: the loops over tiles and K are one, so the loads of a tile begin before the previous tile is stored.
    for i in tl.range(0, tiles.num_own_tasks(num_tiles), flatten=True):
        began = stamp(HEAP)
        tile = tiles.find_tile(tiles.own_task(i), group_ends, handle.sizes_ptr, GEMM)
        total = tiles.multiply(h_desc, b_desc, tile, GEMM)
        # Look addresses up after the GEMM: kept across it, they would spill registers.
        addresses = row_addresses(handle.row_to_assignment_ptr, launch, tile, dtype, S, HEAP)
        if bias is None:
            store_at_sources(total, addresses, tile.column, dtype, S)
        else:
            store_biased_at_sources(total, bias, tile, addresses, dtype, S)
        trace(launch, TILE_EVENT, began, tiles.own_task(i), HEAP)
    # The last program to finish signals all ranks. A failed program does not count, so that no rank takes missing rows
    # for stored ones.
    if not_failed != 0:
        if protocol.count_stored(launch):
            for peer_rank in range(NUM_RANKS):
                protocol.publish(launch, protocol.peer_of(launch, peer_rank), 0, 0, HEAP)
    if protocol.all_programs_started(launch):
        # Sum the rows of this rank's tokens; the first block waits for all ranks.
        blocks: tl.constexpr = (S.num_tokens + S.sum_tokens - 1) // S.sum_tokens
        list_ptr = sums.lists_ptr + tl.program_id(0) * 2 * S.sums.list_length
        block = protocol.next_task(launch)
        if block < blocks:
            not_failed = protocol.await_block_of_all(launch, 0, not_failed, block, HEAP)
        while block < blocks:
            began = stamp(HEAP)
            count = list_assignments(list_ptr, handle.topk_idx_ptr, launch.rank, block, NUM_RANKS * GEMM.num_groups, S)
            received = Rows(received_ptr, received_ptr)
            sum_listed(list_ptr, count, received, Rows(sums.out_ptr, sums.out_ptr), tl.float32, GEMM.N, S.sums)
            if weights_ptr is not None:
                tokens = block * S.sum_tokens + tl.arange(0, S.sum_tokens)
                take_weights(handle.topk_idx_ptr, tokens, out_weights_ptr, launch, S, GEMM.num_groups, HEAP)
            trace(launch, SUM_EVENT, began, block, HEAP)
            block = protocol.next_task(launch)
    if protocol.end_launch(launch, HEAP):
        poison(sums.out_ptr, S.num_tokens * GEMM.N)
        if weights_ptr is not None:
            poison(out_weights_ptr, S.num_tokens * S.top_k)
