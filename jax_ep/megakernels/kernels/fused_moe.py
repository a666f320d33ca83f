"""The expert layer on one device in one launch: both products, the activation between them, the sums.

A slot is a token's choice of an expert, and slots of one expert make blocks of up to BM. Few slots every program sorts
for itself; many have been sorted. There are three kinds of tasks: (1) a tile of columns of a block's hidden rows,
activated and weighted; (2) a tile of a block's rows of the result, or what a part of the hidden columns adds to them,
once all its hidden rows are there; (3) the sums of some tokens' rows, once all are there. Programs take tasks in this
order from one queue, and a task waits only for tasks of earlier kinds, which have been taken before: so no order and no
number of programs can stop, and waits are bounded all the same. What a wait that expires would have read is NaN.

With few tokens the matrices are nearly all that is read, each once, by as many programs as there are tiles. Rows are
read where tokens are, and the hidden and resulting rows lie in the order of slots, so none are moved. Sums are made in
order of k: the same input gives the same bits.

Source: one launch with a queue of tasks and flags between two products, as in Composable Kernel's fused MoE.
"""

import triton
import triton.language as tl

from jax_ep.formats.kernels.prepacked import PIECE
from jax_ep.formats.kernels.quantized import (
    add_fp8_product,
    add_prepacked_product,
    add_product,
    load_packed,
    load_scales,
    scale_columns,
)

from .activation import activate, factor_of, limit_gate
from .quantization import GROUP, quantize, scale_offsets

TIMEOUT_NS = tl.constexpr(10_000_000_000)


@triton.jit
def sort_slots(tensors, scratch, S: tl.constexpr):
    """How many blocks there are; of few slots, stores their order by expert, and where in it each block begins."""
    BLOCK_M: tl.constexpr = S.down.tile.block_m
    if S.presorted:
        num_blocks = tl.load(tensors.num_rows_ptr) // BLOCK_M
    else:
        lanes = tl.arange(0, S.padded_assignments)
        ids = tl.load(tensors.ids_ptr + lanes, mask=lanes < S.num_tokens * S.top_k, other=-1)
        order = tl.sort(tl.where((ids >= 0) & (ids < S.num_experts), ids, S.num_experts) * S.padded_assignments + lanes)
        # All programs store the same, and each reads what itself has stored: behind a barrier, not waiting for another.
        tl.store(scratch.order_ptr + lanes, order)
        tl.debug_barrier()
        experts = order // S.padded_assignments
        before = tl.load(scratch.order_ptr + lanes - 1, mask=lanes > 0, other=-1) // S.padded_assignments
        first = tl.associative_scan(tl.where((lanes > 0) & (experts == before), 0, lanes), 0, largest)
        begins = (experts < S.num_experts) & ((lanes - first) % BLOCK_M == 0)
        block = tl.cumsum(begins.to(tl.int32), axis=0) - 1
        tl.store(scratch.blocks_ptr + block, lanes, mask=begins)
        num_blocks = tl.max(block, axis=0) + 1
        tl.debug_barrier()
    return num_blocks


@triton.jit
def largest(a, b):
    """Of two, as a scan takes it."""
    return tl.maximum(a, b)


@triton.jit
def find_block(block, tensors, scratch, S: tl.constexpr):
    """Expert of a block, its slots `[BM]`, and which of these exist; behind `sort_slots`."""
    BLOCK_M: tl.constexpr = S.down.tile.block_m
    if S.presorted:
        expert = tl.load(tensors.block_expert_ptr + block)
        slots = tl.load(tensors.slots_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M))
        exist = slots >= 0
        slots = tl.maximum(slots, 0)
    else:
        first = tl.load(scratch.blocks_ptr + block)
        places = first + tl.arange(0, BLOCK_M)
        order = tl.load(
            scratch.order_ptr + places, mask=places < S.padded_assignments, other=S.num_experts * S.padded_assignments
        )
        expert = tl.load(scratch.order_ptr + first) // S.padded_assignments
        slots, exist = order % S.padded_assignments, order // S.padded_assignments == expert
    return expert, slots, exist


@triton.jit
def load_rows(x_ptr, rows, exist, k, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr):
    """`[BM, BK]` of rows of `[., WIDTH]`, zero behind them."""
    columns = k + tl.arange(0, BLOCK_K)[None, :]
    source = x_ptr + rows.to(tl.int64)[:, None] * WIDTH + columns
    return tl.load(source, mask=exist[:, None] & (columns < WIDTH), other=0.0)


@triton.jit
def load_step(x_ptr, rows, exist, k, WIDTH: tl.constexpr, S: tl.constexpr):
    """`[BM, BK]` of rows of `[., WIDTH]`, of a step; with prepacked weights, each piece of it."""
    if S.prepacked:
        first = load_rows(x_ptr, rows, exist, k, WIDTH, PIECE)
        second = load_rows(x_ptr, rows, exist, k + PIECE, WIDTH, PIECE)
        if S.tile.block_k == 2 * PIECE:
            step = first, second
        else:
            third = load_rows(x_ptr, rows, exist, k + 2 * PIECE, WIDTH, PIECE)
            fourth = load_rows(x_ptr, rows, exist, k + 3 * PIECE, WIDTH, PIECE)
            step = first, second, third, fourth  # type: ignore[assignment]
    else:
        step = load_rows(x_ptr, rows, exist, k, WIDTH, S.tile.block_k)
    return step


@triton.jit
def load_row_scales(scales_ptr, rows, exist, k, S: tl.constexpr):
    """`[BM]` scales of rows of `[., K / 128]` at a step, of those in FP8; else anything."""
    scales = exist
    if S.fp8_rows:
        scales = tl.load(scales_ptr + rows.to(tl.int64) * (S.K // GROUP) + k // GROUP, mask=exist, other=0.0)
    return scales


@triton.jit
def add_step(total, rows, row_scales, matrix, scales, scales_ptr, expert, column, k, S: tl.constexpr):
    """`total` and the product of rows of `load_step` with the block of an expert's matrix at (k, column)."""
    if S.decoder == "":
        block = tl.reshape(matrix.load([expert, k, column]), (S.tile.block_k, S.tile.block_n))
        total = tl.dot(rows, block, total)
    elif S.prepacked:
        total = add_prepacked_product(total, rows, matrix, scales_ptr, expert, column, k, S)
    else:
        packed = load_packed(matrix, expert, column, k, S)
        if S.fp8_rows:
            total = add_fp8_product(total, rows, row_scales, packed, scales, scales_ptr, expert, column, k, S)
        else:
            total = add_product(total, rows, packed, scales, scales_ptr, expert, column, k, S)
    return total


@triton.jit
def no_sums(S: tl.constexpr):
    """float32 zeros `[BM, BN]`, or with SWAP turned."""
    BLOCK_M: tl.constexpr = S.tile.block_m
    BLOCK_N: tl.constexpr = S.tile.block_n
    return tl.zeros((BLOCK_N, BLOCK_M) if S.tile.swap_ab else (BLOCK_M, BLOCK_N), tl.float32)


@triton.jit
def whole_sums(total, scales_ptr, expert, column, rows_dtype: tl.constexpr, S: tl.constexpr):
    """`[BM, BN]`, of rows of a dtype, with the scales of columns where they have some."""
    return scale_columns(tl.trans(total) if S.tile.swap_ab else total, scales_ptr, expert, column, rows_dtype, S)


@triton.jit
def multiply_hidden(tensors, scales_ptr, tokens, exist, expert, column, KIND: tl.constexpr, S: tl.constexpr):
    """float32 `[BM, BN]` gates and what they multiply, of columns of I from `column` on; twice the same without.

    Where gates and what they multiply lie in two halves, these are two products, or of prepacked weights one of both.
    """
    GEMM: tl.constexpr = S.gate_up
    BLOCK_M: tl.constexpr = GEMM.tile.block_m
    BLOCK_K: tl.constexpr = GEMM.tile.block_k
    TWICE: tl.constexpr = KIND.gated and not KIND.interleaved and not GEMM.split_halves
    dtype: tl.constexpr = tensors.x_ptr.dtype.element_ty
    if KIND.interleaved:
        column *= 2
    first, second = no_sums(GEMM), no_sums(GEMM)
    ahead = load_scales(scales_ptr, expert, column, 0, GEMM)
    ahead_second = load_scales(scales_ptr, expert, S.intermediate_size + column, 0, GEMM)
    for k in range(0, S.hidden, BLOCK_K):
        rows = load_step(tensors.x_ptr, tokens, exist, k, S.hidden, GEMM)
        row_scales = load_row_scales(tensors.x_scales_ptr, tokens, exist, k, GEMM)
        scales, ahead = ahead, load_scales(scales_ptr, expert, column, k + BLOCK_K, GEMM)
        first = add_step(first, rows, row_scales, tensors.gate_up, scales, scales_ptr, expert, column, k, GEMM)
        if TWICE:
            up = S.intermediate_size + column
            scales, ahead_second = ahead_second, load_scales(scales_ptr, expert, up, k + BLOCK_K, GEMM)
            second = add_step(second, rows, row_scales, tensors.gate_up, scales, scales_ptr, expert, up, k, GEMM)
    first = whole_sums(first, scales_ptr, expert, column, dtype, GEMM)
    if KIND.interleaved:
        gate, up = tl.split(tl.reshape(first, (BLOCK_M, S.block_intermediate, 2)))
    elif GEMM.split_halves:
        gate, up = tl.split(tl.permute(tl.reshape(first, (BLOCK_M, 2, S.block_intermediate)), (0, 2, 1)))
    else:
        gate, up = first, first
        if TWICE:
            up = whole_sums(second, scales_ptr, expert, S.intermediate_size + column, dtype, GEMM)
    return gate, up


@triton.jit
def load_bias(bias_ptr, expert, column, KIND: tl.constexpr, S: tl.constexpr):
    """`[1, BN]` biases of gates and of what they multiply."""
    columns = column + tl.arange(0, S.block_intermediate)
    inside = columns < S.intermediate_size
    width: tl.constexpr = 2 * S.intermediate_size if KIND.gated else S.intermediate_size
    stride: tl.constexpr = 2 if KIND.interleaved else 1
    source = bias_ptr + expert.to(tl.int64) * width + stride * columns
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = gate
    if KIND.gated:
        up = tl.load(source + (1 if KIND.interleaved else S.intermediate_size), mask=inside, other=0.0).to(tl.float32)
    return gate[None, :], up[None, :]


@triton.jit
def make_hidden(
    tensors, scales_ptr, bias_ptr, scratch, expert, slots, exist, column, KIND: tl.constexpr, S: tl.constexpr
):
    """Task (1): a tile of the activated and weighted hidden rows of a block."""
    gate, up = multiply_hidden(tensors, scales_ptr, slots // S.top_k, exist, expert, column, KIND, S)
    weights = tl.load(tensors.weights_ptr + slots, mask=exist, other=0.0)[:, None]
    if KIND.weights_on_input:
        gate, up = gate * weights, up * weights
    if bias_ptr is not None:
        gate_bias, up_bias = load_bias(bias_ptr, expert, column, KIND, S)
        gate, up = gate + gate_bias, up + up_bias
    values = activate(limit_gate(gate, KIND), KIND)
    if KIND.gated:
        values *= factor_of(up, KIND)
    if not KIND.weights_on_input:
        values *= weights
    if S.down.fp8_rows:
        values, scales = quantize(values, S.down.tile.block_m, S.block_intermediate)
        offsets, inside = scale_offsets(slots, column, S.intermediate_size, S.block_intermediate)
        tl.store(scratch.hidden_scales_ptr + offsets, scales, mask=exist[:, None] & inside)
    columns = column + tl.arange(0, S.block_intermediate)[None, :]
    target = scratch.hidden_ptr + slots.to(tl.int64)[:, None] * S.intermediate_size + columns
    tl.store(
        target, values.to(scratch.hidden_ptr.dtype.element_ty), mask=exist[:, None] & (columns < S.intermediate_size)
    )


@triton.jit
def multiply_part(tensors, scales_ptr, scratch, slots, exist, expert, column, part, S: tl.constexpr):
    """float32 `[BM, BN]`: what a part of the hidden columns adds to rows of the result."""
    GEMM: tl.constexpr = S.down
    BLOCK_K: tl.constexpr = GEMM.tile.block_k
    DEPTH: tl.constexpr = (GEMM.K + GEMM.k_splits * BLOCK_K - 1) // (GEMM.k_splits * BLOCK_K) * BLOCK_K
    start = part * DEPTH
    total = no_sums(GEMM)
    ahead = load_scales(scales_ptr, expert, column, start, GEMM)
    for k in range(start, tl.minimum(start + DEPTH, GEMM.K), BLOCK_K):
        rows = load_step(scratch.hidden_ptr, slots, exist, k, GEMM.K, GEMM)
        row_scales = load_row_scales(scratch.hidden_scales_ptr, slots, exist, k, GEMM)
        scales, ahead = ahead, load_scales(scales_ptr, expert, column, k + BLOCK_K, GEMM)
        total = add_step(total, rows, row_scales, tensors.down, scales, scales_ptr, expert, column, k, GEMM)
    return whole_sums(total, scales_ptr, expert, column, scratch.hidden_ptr.dtype.element_ty, GEMM)


@triton.jit
def finish_rows(
    total, tensors, bias_ptr, rows_ptr, expert, slots, exist, column, part, KIND: tl.constexpr, S: tl.constexpr
):
    """Stores a tile of a block's rows, or a part of them; the first one has the bias."""
    columns = column + tl.arange(0, S.down.tile.block_n)
    if bias_ptr is not None:
        source = bias_ptr + expert.to(tl.int64) * S.hidden + columns
        bias = tl.load(source, mask=(columns < S.hidden) & (part == 0), other=0.0).to(tl.float32)[None, :]
        if KIND.weights_on_input:
            total += bias
        else:
            total += tl.load(tensors.weights_ptr + slots, mask=exist, other=0.0)[:, None] * bias
    target = rows_ptr + (slots.to(tl.int64) * S.down.k_splits + part)[:, None] * S.hidden + columns[None, :]
    tl.store(target, total.to(rows_ptr.dtype.element_ty), mask=exist[:, None] & (columns < S.hidden)[None, :])


@triton.jit
def add_rows(ids_ptr, rows_ptr, out_ptr, first, column, arrived, S: tl.constexpr):
    """Task (3): the sums of a block of tokens, in order of k and of the parts."""
    K: tl.constexpr = S.top_k
    K_SPLITS: tl.constexpr = S.down.k_splits
    SUM_TOKENS: tl.constexpr = S.sum_tokens
    SUM_HIDDEN: tl.constexpr = S.sum_hidden
    tokens = first + tl.arange(0, SUM_TOKENS)
    columns = column + tl.arange(0, SUM_HIDDEN)
    inside = (tokens < S.num_tokens)[:, None] & (columns < S.hidden)[None, :]
    total = tl.zeros((SUM_TOKENS, SUM_HIDDEN), tl.float32)
    for k in tl.static_range(K):
        slots = tokens * K + k
        expert = tl.load(ids_ptr + slots, mask=tokens < S.num_tokens, other=-1)
        exists = ((expert >= 0) & (expert < S.num_experts))[:, None] & inside
        for part in tl.static_range(K_SPLITS):
            source = rows_ptr + (slots.to(tl.int64) * K_SPLITS + part)[:, None] * S.hidden + columns[None, :]
            total += tl.load(source, mask=exists, other=0.0).to(tl.float32)
    total = tl.where(arrived, total, float("nan"))
    target = out_ptr + tokens.to(tl.int64)[:, None] * S.hidden + columns[None, :]
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def count_up(counter_ptr):
    """Tells others that what this program has stored for a task is there."""
    # A release by one thread covers the others' stores only after a barrier of the program.
    tl.debug_barrier()
    tl.atomic_add(counter_ptr, 1, sem="release", scope="gpu")


@triton.jit
def await_count(counter_ptr, count):
    """Waits until so many tasks have been counted; returns whether they have."""
    arrived = tl.atomic_poll(counter_ptr, count, sem="acquire", scope="gpu", timeout_ns=TIMEOUT_NS)
    # What they have stored is read by all threads, after this barrier.
    tl.debug_barrier()
    return arrived


@triton.jit
def fused_moe(
    tensors,
    gate_up_scales_ptr,
    down_scales_ptr,
    gate_up_bias_ptr,
    down_bias_ptr,
    counters_ptr,
    scratch,
    out_ptr,
    written_counters_ptr,
    KIND: tl.constexpr,
    S: tl.constexpr,
):
    """Tokens `[T, H]` to `out [T, H]`.

    `counters` are zero: the queue, the tiles of rows of the result that are there, the tiles of hidden rows of each of
    MOST_BLOCKS blocks that are. They are written in place, which `written_counters` is there to say.
    """
    BLOCK_N: tl.constexpr = S.down.tile.block_n
    num_blocks = sort_slots(tensors, scratch, S)
    hidden_tiles: tl.constexpr = (S.intermediate_size + S.block_intermediate - 1) // S.block_intermediate
    row_tiles: tl.constexpr = (S.hidden + BLOCK_N - 1) // BLOCK_N
    row_tasks: tl.constexpr = row_tiles * S.down.k_splits
    sum_tiles: tl.constexpr = (S.hidden + S.sum_hidden - 1) // S.sum_hidden
    sum_tasks: tl.constexpr = (S.num_tokens + S.sum_tokens - 1) // S.sum_tokens * sum_tiles
    done_ptr = counters_ptr + 1
    hidden_counts_ptr = counters_ptr + 2
    first_rows = num_blocks * hidden_tiles
    first_sums = first_rows + num_blocks * row_tasks
    # Not taken ahead: it would wait for this program when others have none. What it waits for has been taken before.
    task = tl.atomic_add(counters_ptr, 1, sem="relaxed", scope="gpu")
    while task < first_sums + sum_tasks:
        if task < first_rows:
            block, tile = task // hidden_tiles, task % hidden_tiles
            expert, slots, exist = find_block(block, tensors, scratch, S)
            column = tile * S.block_intermediate
            make_hidden(tensors, gate_up_scales_ptr, gate_up_bias_ptr, scratch, expert, slots, exist, column, KIND, S)
            count_up(hidden_counts_ptr + block)
        elif task < first_sums:
            block, inside = (task - first_rows) // row_tasks, (task - first_rows) % row_tasks
            part, column = inside // row_tiles, inside % row_tiles * BLOCK_N
            expert, slots, exist = find_block(block, tensors, scratch, S)
            arrived = await_count(hidden_counts_ptr + block, hidden_tiles)
            total = multiply_part(tensors, down_scales_ptr, scratch, slots, exist, expert, column, part, S)
            total = tl.where(arrived, total, float("nan"))
            finish_rows(total, tensors, down_bias_ptr, scratch.rows_ptr, expert, slots, exist, column, part, KIND, S)
            count_up(done_ptr)
        else:
            token, column = (
                (task - first_sums) // sum_tiles * S.sum_tokens,
                (task - first_sums) % sum_tiles * S.sum_hidden,
            )
            arrived = await_count(done_ptr, num_blocks * row_tasks)
            add_rows(tensors.ids_ptr, scratch.rows_ptr, out_ptr, token, column, arrived, S)
        task = tl.atomic_add(counters_ptr, 1, sem="relaxed", scope="gpu")
