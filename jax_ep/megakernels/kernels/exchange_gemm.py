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

import triton
import triton.language as tl

from .bounded import halves
from .combine import combine_blocks
from .dispatch import copy_tokens
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
from .structs import Rows
from .structs_gemm import Tile, TokensByRow
from .table import QUEUE, STARTED
from .tiles import (
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


@triton.jit
def row_tiles(size, BM: tl.constexpr):
    """Row tiles of a group of `size` rows."""
    return (size + BM - 1) // BM


@triton.jit
def count_row_tiles(sizes_ptr, S: tl.constexpr):
    """Row tiles of all groups."""
    groups = tl.arange(0, S.GROUPS)
    return tl.sum(row_tiles(tl.load(sizes_ptr + groups, mask=groups < S.G, other=0), S.tile.BM), axis=0)


@triton.jit
def find_group(tile, group, first_tile, first_row, sizes_ptr, COLUMN_TILES: tl.constexpr, BM: tl.constexpr):
    """From a group at or before that of `tile`, with its first tile and row, to the group of `tile`.

    Tiles come to a program in rising order: it moves on from its last one, mostly by a few groups.
    """
    size = tl.load(sizes_ptr + group)
    tiles = row_tiles(size, BM) * COLUMN_TILES
    while tile >= first_tile + tiles:
        group += 1
        first_tile += tiles
        first_row += size
        size = tl.load(sizes_ptr + group)
        tiles = row_tiles(size, BM) * COLUMN_TILES
    return group, first_tile, first_row, size


@triton.jit
def multiply_gathered(a_ptrs, b_desc, tile, S: tl.constexpr, BM: tl.constexpr):
    """`[BM, BN]` float32: rows at `a_ptrs` (`[BM, BK]`, their first columns) times columns of the group's matrix."""
    BK: tl.constexpr = S.tile.BK
    total = tl.zeros((BM, S.tile.BN), tl.float32)
    for k in range(0, S.K, BK):
        if S.K % BK == 0:
            a = tl.load(a_ptrs)
        else:
            a = tl.load(a_ptrs, mask=(k + tl.arange(0, BK) < S.K)[None, :], other=0.0)
        a_ptrs += BK
        total = tl.dot(a, load_rhs(b_desc, tile.group, k, tile.column, S), total)
    return total


@triton.jit
def gathered_tile(tokens, b_desc, out_ptr, group, row, size, column, S: tl.constexpr, BM: tl.constexpr):
    """Multiplies `size <= BM` rows of the `TokensByRow` from `row` on with a tile's columns; stores the product."""
    lines = tl.arange(0, BM)
    inside = lines < size
    slot = tl.load(tokens.row_slot_ptr + row + lines, mask=inside, other=-1)
    # Rows without a slot are padding: any token may stand for them, since the product is not used.
    token = tl.where(slot < 0, 0, slot // S.K)
    columns = tl.arange(0, S.product.tile.BK)[None, :]
    own = ((slot < 0) | (token // S.T == tokens.rank))[:, None]
    own_ptrs = tokens.own_ptr + (token % S.T).to(tl.int64)[:, None] * S.product.K + columns
    received_ptrs = tokens.received_ptr + token.to(tl.int64)[:, None] * S.product.K + columns
    a_ptrs = tl.multiple_of(tl.where(own, own_ptrs, received_ptrs), (16, 16))
    tile = Tile(group, row, row + size, column * S.product.tile.BN)
    total = multiply_gathered(a_ptrs, b_desc, tile, S.product, BM)
    total = tl.where((slot >= 0)[:, None], total, 0.0)
    store_tile(out_ptr, total, tile, S.product)


@triton.jit
def push_block(x_ptr, weights_ptr, order, launch, peer, block, num_sends, task, S: tl.constexpr, HEAP: tl.constexpr):
    """Sends a block of what goes to `peer`."""
    began = stamp(HEAP)
    index = block * S.BLOCK_T + tl.arange(0, S.BLOCK_T)
    mask = index < num_sends
    tokens = tl.load(order.order_ptr + peer.rank * S.T + index, mask=mask, other=0)
    values_ptr = data_of(launch, peer.device, x_ptr.dtype.element_ty, HEAP)
    copy_tokens(x_ptr, tokens, launch.rank * S.T + tokens, mask, values_ptr, S.product.K, S.BLOCK_H)
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
    W: tl.constexpr = HEAP.W
    BLOCK_T: tl.constexpr = S.BLOCK_T
    num_blocks: tl.constexpr = (S.T + BLOCK_T - 1) // BLOCK_T
    num_peers: tl.constexpr = W - 1 if W > 1 else 1
    push_end: tl.constexpr = 1 + num_blocks * (W - 1)
    task = next_task(launch)
    while task < push_end + (num_blocks * W if S.SAVES else 0):
        if task == 0:
            announce(launch, HEAP)
        elif task < push_end:
            block = (task - 1) // num_peers
            step = (task - 1) % num_peers
            peer_rank = (launch.rank + 1 + step) % W
            num_sends = tl.load(order.num_sends_ptr + peer_rank)
            peer = peer_of(launch, peer_rank)
            # Once even where nothing goes: no rank may run two launches ahead of another.
            if (block == 0) | (block * BLOCK_T < num_sends):
                alive = await_ready(launch, peer, alive, task, HEAP)
                if (alive != 0) & (block * BLOCK_T < num_sends):
                    push_block(x_ptr, weights_ptr, order, launch, peer, block, num_sends, task, S, HEAP)
        else:
            # Own tokens first: they are here.
            source = peer_of(launch, (launch.rank + (task - push_end) // num_blocks) % W)
            local = (task - push_end) % num_blocks * BLOCK_T + tl.arange(0, BLOCK_T)
            slots = source.rank * S.T + local
            mask = send_mask(ids_ptr, slots * S.K, local < S.T, launch.rank, S.K, S.product.G)
            began = stamp(HEAP)
            if source.rank == launch.rank:
                copy_tokens(x_ptr, local, slots, mask, saved_ptr, S.product.K, S.BLOCK_H)
            else:
                needed = tl.load(order.num_needed_ptr + source.rank * S.product.G + S.product.G - 1)
                end = (needed + BLOCK_T - 1) // BLOCK_T
                alive = await_blocks(launch, source, 0, end, alive, task, HEAP)
                began = stamp(HEAP)
                copy_tokens(received_ptr, slots, slots, mask, saved_ptr, S.product.K, S.BLOCK_H)
            trace_exchange(launch, COPY_EVENT, began, task, source.device, (task - push_end) % num_blocks, HEAP)
        task = next_task(launch)
    return alive


@triton.jit
def await_tokens(launch, order, ready, expert, alive, tile, S: tl.constexpr, HEAP: tl.constexpr):
    """Waits for the tokens of experts behind `ready` up to `expert`; returns whether the launch is still alive."""
    for step in range(1, HEAP.W):
        source = peer_of(launch, (launch.rank + HEAP.W - step) % HEAP.W)
        needed_ptr = order.num_needed_ptr + source.rank * S.product.G
        begin = tl.load(needed_ptr + ready, mask=ready >= 0, other=0) // S.BLOCK_T
        end = (tl.load(needed_ptr + expert) + S.BLOCK_T - 1) // S.BLOCK_T
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
    P: tl.constexpr = S.product
    BM: tl.constexpr = S.product.tile.BM
    BN: tl.constexpr = S.product.tile.BN
    received_ptr = data_of(launch, launch.device, x_ptr.dtype.element_ty, HEAP)
    if tl.atomic_add(launch.control + STARTED, 1, sem="relaxed", scope="gpu") < S.COMM:
        alive = communicate(x_ptr, weights_ptr, received_ptr, handle.ids_ptr, order, saved_ptr, launch, alive, S, HEAP)
    row_slot_ptr, sizes_ptr = handle.row_slot_ptr, handle.sizes_ptr
    tokens = TokensByRow(x_ptr, received_ptr, row_slot_ptr, launch.rank)
    column_tiles: tl.constexpr = (P.N + BN - 1) // BN
    num_tiles = count_row_tiles(sizes_ptr, P) * column_tiles
    lanes = tl.arange(0, P.GROUPS)
    num_rows = tl.sum(tl.load(sizes_ptr + lanes, mask=lanes < P.G, other=0), axis=0)
    num_clears = (P.M - num_rows + BM - 1) // BM
    expert, first_tile, first_row, ready = 0, 0, 0, -1
    tile = tl.atomic_add(launch.control + QUEUE, 1, sem="relaxed", scope="gpu")
    while tile < num_tiles + num_clears:
        if tile < num_tiles:
            expert, first_tile, first_row, size = find_group(
                tile, expert, first_tile, first_row, sizes_ptr, column_tiles, BM
            )
            if expert > ready:
                alive = await_tokens(launch, order, ready, expert, alive, tile, S, HEAP)
                ready = expert
            began = stamp(HEAP)
            row_tile, column = tile_in_grid(tile - first_tile, row_tiles(size, BM), column_tiles, P.tile.GROUP_M)
            rows_left = size - row_tile * BM
            if weights_ptr is not None:
                if column == 0:
                    first = first_row + row_tile * BM
                    store_row_weights(weights_ptr, row_slot_ptr, out_weights_ptr, first, rows_left, launch, S, BM, HEAP)
            # A group ends with a tile of half the height where at most that many rows remain.
            if rows_left > BM // 2:
                gathered_tile(tokens, b_desc, out_ptr, expert, first_row + row_tile * BM, rows_left, column, S, BM)
            else:
                gathered_tile(tokens, b_desc, out_ptr, expert, first_row + row_tile * BM, rows_left, column, S, BM // 2)
            trace(launch, TILE_EVENT, began, tile, HEAP)
        else:
            began = stamp(HEAP)
            zero_rows(out_ptr, num_rows + (tile - num_tiles) * BM, P.M, P.N, BM, BN)
            if weights_ptr is not None:
                clear_weights(out_weights_ptr, row_slot_ptr, num_rows + (tile - num_tiles) * BM, BM, P.M)
            trace(launch, ZERO_EVENT, began, tile, HEAP)
        tile = tl.atomic_add(launch.control + QUEUE, 1, sem="relaxed", scope="gpu")
    if end_launch(launch, HEAP):
        poison(out_ptr, P.M * P.N)
        if S.SAVES:
            poison(saved_ptr, HEAP.W * S.T * P.K)
        if weights_ptr is not None:
            poison(out_weights_ptr, P.M)


@triton.jit
def row_addresses(row_slot_ptr, launch, tile, dtype: tl.constexpr, S: tl.constexpr, HEAP: tl.constexpr):
    """Addresses of the rows of a `Tile` in the heaps of the ranks that their tokens came from, or 0 behind its end."""
    rows = tile.row + tl.arange(0, S.product.tile.BM)
    slot = tl.load(row_slot_ptr + rows, mask=rows < tile.end, other=-1)
    travels = slot >= 0
    source = tl.load(launch.group_ptr + tl.where(travels, slot // (S.T * S.K), 0))
    heap = tl.load(launch.table_ptr + source)
    offset = tl.where(travels, slot % (S.T * S.K), 0).to(tl.int64) * (S.product.N * dtype.primitive_bitwidth // 8)
    return tl.where(travels, heap + HEAP.DATA + offset, 0)


@triton.jit
def store_at_sources(total, addresses, column, dtype: tl.constexpr, S: tl.constexpr):
    """Stores a tile's columns of the rows at these addresses."""
    columns = (column + tl.arange(0, total.shape[1]))[None, :]
    target = tl.multiple_of(addresses.to(tl.pointer_type(dtype))[:, None] + columns, (16, 16))
    tl.store(target, total.to(dtype), mask=(addresses != 0)[:, None] & (columns < S.product.N))


@triton.jit
def store_biased_at_sources(total, bias, tile, addresses, dtype: tl.constexpr, S: tl.constexpr):
    """The same with a `Bias`, one half of the columns after the other: all at once would spill registers."""
    HALF: tl.constexpr = S.product.tile.BN // 2
    left, right = halves(total, S.product.tile.BM, HALF * 2)
    left = add_bias(left, bias, tile, S.product)
    store_at_sources(left, addresses, tile.column, dtype, S)
    right_tile = Tile(tile.group, tile.row, tile.end, tile.column + HALF)
    store_at_sources(add_bias(right, bias, right_tile, S.product), addresses, right_tile.column, dtype, S)


@triton.jit
def clear_dropped(handle, launch, dtype: tl.constexpr, S: tl.constexpr, HEAP: tl.constexpr):
    """This program's share of the zeros at the sources, for slots that should have a row here but found no place."""
    T: tl.constexpr = S.T
    H: tl.constexpr = S.product.N
    L: tl.constexpr = S.product.G
    ROWS: tl.constexpr = S.CLEAR_T
    COLUMNS: tl.constexpr = S.CLEAR_H
    blocks: tl.constexpr = (T + ROWS - 1) // ROWS
    for index in range(tl.program_id(0), HEAP.W * blocks, tl.num_programs(0)):
        source_rank = index // blocks
        tokens = index % blocks * ROWS + tl.arange(0, ROWS)
        base = data_of(launch, tl.load(launch.group_ptr + source_rank), dtype, HEAP)
        for k in range(S.K):
            slots = (source_rank * T + tokens) * S.K + k
            expert = tl.load(handle.ids_ptr + slots, mask=tokens < T, other=-1)
            dropped = (expert >= launch.rank * L) & (expert < launch.rank * L + L)
            dropped = dropped & (tl.load(handle.slot_row_ptr + slots, mask=tokens < T, other=0) < 0)
            if tl.max(dropped.to(tl.int32), axis=0) > 0:
                for h in range(0, H, COLUMNS):
                    columns = h + tl.arange(0, COLUMNS)[None, :]
                    target = tl.multiple_of(base + (tokens * S.K + k).to(tl.int64)[:, None] * H + columns, (16, 16))
                    tl.store(target, tl.zeros((ROWS, COLUMNS), dtype), mask=dropped[:, None] & (columns < H))


@triton.jit
def return_share_of_weights(weights_ptr, handle, launch, S: tl.constexpr, HEAP: tl.constexpr):
    """Sends this program's share of the values of rows to their slots, those that found no place included."""
    blocks: tl.constexpr = (S.T + S.WEIGHT_T - 1) // S.WEIGHT_T
    for index in range(tl.program_id(0), HEAP.W * blocks, tl.num_programs(0)):
        peer = peer_of(launch, index // blocks)
        tokens = index % blocks * S.WEIGHT_T + tl.arange(0, S.WEIGHT_T)
        return_weights(weights_ptr, handle.ids_ptr, handle.slot_row_ptr, tokens, launch, peer, S, S.product.G, HEAP)


@triton.jit
def list_slots(list_ptr, ids_ptr, rank, block, E: tl.constexpr, S: tl.constexpr):
    """Lists the slots of a block of this rank's tokens that have an expert, in order of k; returns how many."""
    tokens = block * S.SUM_T + tl.arange(0, S.SUM_T)
    k = tl.arange(0, S.CHOICES)[None, :]
    slots = tokens[:, None] * S.K + k
    inside = (tokens < S.T)[:, None] & (k < S.K)
    expert = tl.load(ids_ptr + rank * S.T * S.K + slots, mask=inside, other=-1)
    chosen = (expert >= 0) & (expert < E)
    return write_list(list_ptr, slots, chosen, tokens, tokens < S.T, S.sums.LENGTH)


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
    W: tl.constexpr = HEAP.W
    P: tl.constexpr = S.product
    dtype: tl.constexpr = h_desc.dtype
    received_ptr = data_of(launch, launch.device, dtype, HEAP)
    if tl.atomic_add(launch.control + STARTED, 1, sem="relaxed", scope="gpu") == 0:
        announce(launch, HEAP)
    alive = await_peers(launch, alive, 0, HEAP)
    if S.DROPS:  # known when compiling, unlike what follows
        if alive != 0:
            began = stamp(HEAP)
            clear_dropped(handle, launch, dtype, S, HEAP)
            trace(launch, ZERO_EVENT, began, tl.program_id(0), HEAP)
    if weights_ptr is not None:
        if alive != 0:
            began = stamp(HEAP)
            return_share_of_weights(weights_ptr, handle, launch, S, HEAP)
            trace_exchange(launch, PUSH_EVENT, began, tl.program_id(0), -1, 0, HEAP)
    groups = locate_groups(handle.sizes_ptr, P)
    group_ends = number_tasks(groups, P)
    # After a failure nobody may be there to receive: no more stores, whatever the results then are.
    all_tiles = tasks_until(tl.max(group_ends, axis=0))
    num_tiles = all_tiles * alive
    for turn in tl.range(0, num_turns(num_tiles), flatten=True):
        began = stamp(HEAP)
        tile = find_tile(task_of_turn(turn), group_ends, handle.sizes_ptr, P)
        total = multiply(h_desc, b_desc, tile, P)
        # Addresses that live beside the sums would spill registers in the flat loop.
        addresses = row_addresses(handle.row_slot_ptr, launch, tile, dtype, S, HEAP)
        if bias is None:
            store_at_sources(total, addresses, tile.column, dtype, S)
        else:
            store_biased_at_sources(total, bias, tile, addresses, dtype, S)
        trace(launch, TILE_EVENT, began, task_of_turn(turn), HEAP)
    if alive != 0:  # who has failed is missing in the count, so that nobody is told of rows that were not stored
        if count_stored(launch, 0):
            for peer_rank in range(W):
                publish(launch, peer_of(launch, peer_rank), 0, 0, HEAP)
    if gradient is not None:
        # The first tile is the same in all programs, also where some have failed and others not.
        began = stamp(HEAP)
        multiply_rows(factors.lhs, factors.rhs, gradient, groups, place_after(all_tiles), ALL_TASKS, S.gradient)
        trace(launch, TILE_EVENT, began, all_tiles + tl.program_id(0), HEAP)
    if all_begun(launch):
        blocks: tl.constexpr = (S.T + S.SUM_T - 1) // S.SUM_T
        list_ptr = sums.lists_ptr + tl.program_id(0) * 2 * S.sums.LENGTH
        block = next_task(launch)
        if block < blocks:
            alive = await_block_of_all(launch, 0, alive, block, HEAP)
        while block < blocks:
            began = stamp(HEAP)
            count = list_slots(list_ptr, handle.ids_ptr, launch.rank, block, W * P.G, S)
            received = Rows(received_ptr, received_ptr)
            sum_listed(list_ptr, count, received, Rows(sums.out_ptr, sums.out_ptr), tl.float32, P.N, S.sums)
            if weights_ptr is not None:
                tokens = block * S.SUM_T + tl.arange(0, S.SUM_T)
                take_weights(handle.ids_ptr, tokens, out_weights_ptr, launch, S, P.G, HEAP)
            trace(launch, SUM_EVENT, began, block, HEAP)
            block = next_task(launch)
    if end_launch(launch, HEAP):
        poison(sums.out_ptr, S.T * P.N)  # the gradient needs nothing of other ranks
        if weights_ptr is not None:
            poison(out_weights_ptr, S.T * S.K)


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
    BM: tl.constexpr = S.gradient.tile.BM
    BN: tl.constexpr = S.gradient.tile.BN
    tiles: tl.constexpr = GRADIENT.G * ((GRADIENT.K + BM - 1) // BM) * ((GRADIENT.N + BN - 1) // BN)
    most_turns = tl.cdiv(tiles, S.TASKS * programs) * programs
    communicates = tl.atomic_add(launch.control + STARTED, 1, sem="relaxed", scope="gpu") < S.COMM
    if communicates:
        ids_ptr, slot_row_ptr = handle.ids_ptr, handle.slot_row_ptr
        combine_blocks(y_ptr, weights_ptr, ids_ptr, slot_row_ptr, sums, out_weights_ptr, launch, alive, S.combine, HEAP)
    groups = locate_groups(handle.sizes_ptr, GRADIENT)
    turn = tl.atomic_add(launch.control + QUEUE, 1, sem="relaxed", scope="gpu")
    while turn < most_turns:
        # Programs that take neighbouring turns work on neighbouring tiles.
        first = turn // programs * programs * S.TASKS + turn % programs
        began = stamp(HEAP)
        multiply_rows(factors.lhs, factors.rhs, gradient, groups, first, S.TASKS, GRADIENT)
        trace(launch, TILE_EVENT, began, turn, HEAP)
        turn = tl.atomic_add(launch.control + QUEUE, 1, sem="relaxed", scope="gpu")
    if end_launch(launch, HEAP):
        poison(sums.out_ptr, S.combine.T * S.combine.H)  # the gradient needs nothing of other ranks
        if weights_ptr is not None:
            poison(out_weights_ptr, S.combine.T * S.combine.K)
