"""The expert layer of one device in one launch: both GEMMs, the activation between them, and the sums over top_k.

Assignments of one expert form blocks of up to block_m. Few assignments are sorted by every program itself; many come
sorted (moe_sort.py). Roles: programs are equal and take tasks from one queue, in phases:

    (0) route    the experts of a token, if they are not given (route.py)
    (1) hidden   a tile of columns of a block's hidden rows, activated and weighted
    (2) rows     once all hidden tiles of a block are done: a tile of its rows, or the part of them from one split of K
    (3) sums     once all rows are done: the sums over k of some tokens

Waits. (1) polls a counter of routed tokens, (2) a counter per block, (3) one counter of all row tasks. It cannot
deadlock: a task waits only for tasks of earlier phases, which have smaller numbers and have been taken, so any order
and number of resident programs finishes. Waits have a timeout all the same; values whose wait expired are NaN.

Floor: with few tokens nearly all memory traffic is the weights, each read once by as many programs as there are tiles.
Rows are read where tokens are, and intermediate rows stay in the order of assignments, so nothing is permuted. Sums run
in order of k and of the splits: the same input gives the same bits.

Source: one launch with a task queue and flags between two GEMMs, as in Composable Kernel's fused MoE.
"""

import triton
import triton.language as tl

from jax_ep.formats.kernels import quantized
from jax_ep.formats.kernels.prepacked import PIECE

from .activation import activate_halves
from .fused_moe_structs import LayerTensors
from .protocol import count_task
from .quantization import GROUP, quantize, scale_offsets
from .route import choose_experts

TIMEOUT_NS = tl.constexpr(10_000_000_000)  # of a wait within the launch


@triton.jit
def sort_assignments(tensors, scratch, S: tl.constexpr):
    """Sort few assignments by expert and store where each block begins; return the number of blocks."""
    BLOCK_M: tl.constexpr = S.down.tile.block_m
    if S.presorted:
        num_blocks = tl.load(tensors.num_rows_ptr) // BLOCK_M
    else:
        lanes = tl.arange(0, S.padded_assignments)
        ids = tl.load(tensors.topk_idx_ptr + lanes, mask=lanes < S.num_tokens * S.top_k, other=-1)
        # Keys order by (expert, assignment); invalid ids come last.
        order = tl.sort(tl.where((ids >= 0) & (ids < S.num_experts), ids, S.num_experts) * S.padded_assignments + lanes)
        # All programs store the same values, and each reads only after its own stores: a barrier suffices.
        tl.store(scratch.order_ptr + lanes, order)
        tl.debug_barrier()
        experts = order // S.padded_assignments
        before = tl.load(scratch.order_ptr + lanes - 1, mask=lanes > 0, other=-1) // S.padded_assignments
        # Position of each expert's first assignment, by a running maximum.
        first = tl.associative_scan(tl.where((lanes > 0) & (experts == before), 0, lanes), 0, largest)
        # A block begins at every block_m-th assignment of an expert.
        begins = (experts < S.num_experts) & ((lanes - first) % BLOCK_M == 0)
        block = tl.cumsum(begins.to(tl.int32), axis=0) - 1
        tl.store(scratch.blocks_ptr + block, lanes, mask=begins)
        num_blocks = tl.max(block, axis=0) + 1
        tl.debug_barrier()
    return num_blocks


@triton.jit
def largest(a, b):
    """Return the larger of two, the combine function of a scan."""
    return tl.maximum(a, b)


@triton.jit
def find_block(block, tensors, scratch, S: tl.constexpr):
    """Return a block's expert, its assignments `[block_m]` and their mask; call `sort_assignments` first."""
    BLOCK_M: tl.constexpr = S.down.tile.block_m
    if S.presorted:
        # Presorted: padding rows have no assignment.
        expert = tl.load(tensors.block_expert_ptr + block)
        assignments = tl.load(tensors.assignments_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M))
        exist = assignments >= 0
        assignments = tl.maximum(assignments, 0)
    else:
        # Sorted here: a block ends where the next expert begins.
        first = tl.load(scratch.blocks_ptr + block)
        positions = first + tl.arange(0, BLOCK_M)
        past_end: tl.constexpr = S.num_experts * S.padded_assignments
        order = tl.load(scratch.order_ptr + positions, mask=positions < S.padded_assignments, other=past_end)
        expert = tl.load(scratch.order_ptr + first) // S.padded_assignments
        assignments, exist = order % S.padded_assignments, order // S.padded_assignments == expert
    return expert, assignments, exist


@triton.jit
def load_rows(x_ptr, rows, exist, k, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load columns `[k, k + BLOCK_K)` of rows of `[., WIDTH]`; zero outside."""
    columns = k + tl.arange(0, BLOCK_K)[None, :]
    source = x_ptr + rows.to(tl.int64)[:, None] * WIDTH + columns
    return tl.load(source, mask=exist[:, None] & (columns < WIDTH), other=0.0)


@triton.jit
def load_step(x_ptr, rows, exist, k, WIDTH: tl.constexpr, S: tl.constexpr):
    """Load the rows of one step of K; for prepacked weights, as a tuple of pieces."""
    if S.prepacked:
        first = load_rows(x_ptr, rows, exist, k, WIDTH, PIECE)
        second = load_rows(x_ptr, rows, exist, k + PIECE, WIDTH, PIECE)
        if S.tile.block_k == 2 * PIECE:
            step = first, second
        else:
            third = load_rows(x_ptr, rows, exist, k + 2 * PIECE, WIDTH, PIECE)
            interleaved_rows = load_rows(x_ptr, rows, exist, k + 3 * PIECE, WIDTH, PIECE)
            step = first, second, third, interleaved_rows  # type: ignore[assignment]
    else:
        step = load_rows(x_ptr, rows, exist, k, WIDTH, S.tile.block_k)
    return step


@triton.jit
def load_row_scales(scales_ptr, rows, exist, k, S: tl.constexpr):
    """Load the scales of FP8 rows of `[., K / 128]` at a step; return anything for other rows."""
    scales = exist
    if S.fp8_rows:
        scales = tl.load(scales_ptr + rows.to(tl.int64) * (S.K // GROUP) + k // GROUP, mask=exist, other=0.0)
    return scales


@triton.jit
def add_step(total, rows, row_scales, matrix, scales, scales_ptr, expert, column, k, S: tl.constexpr):
    """Add the product of rows of `load_step` and the expert's weights at (k, column) to `total`."""
    # Weights in the tokens' dtype need no decoding.
    if S.decoder == "":
        block = tl.reshape(matrix.load([expert, k, column]), (S.tile.block_k, S.tile.block_n))
        total = tl.dot(rows, block, total)
    elif S.prepacked:
        total = quantized.add_prepacked_product(total, rows, matrix, scales_ptr, expert, column, k, S)
    else:
        packed = quantized.load_packed(matrix, expert, column, k, S)
        if S.fp8_rows:
            total = quantized.add_fp8_product(total, rows, row_scales, packed, scales, scales_ptr, expert, column, k, S)
        else:
            total = quantized.add_product(total, rows, packed, scales, scales_ptr, expert, column, k, S)
    return total


@triton.jit
def zero_sums(S: tl.constexpr):
    """Return float32 zeros `[block_m, block_n]`, or `[block_n, block_m]` with swap_ab."""
    BLOCK_M: tl.constexpr = S.tile.block_m
    BLOCK_N: tl.constexpr = S.tile.block_n
    return tl.zeros((BLOCK_N, BLOCK_M) if S.tile.swap_ab else (BLOCK_M, BLOCK_N), tl.float32)


@triton.jit
def finish_sums(total, scales_ptr, expert, column, rows_dtype: tl.constexpr, S: tl.constexpr):
    """Transpose swapped sums to `[block_m, block_n]` and apply the scales that are left."""
    return quantized.scale_columns(
        tl.trans(total) if S.tile.swap_ab else total, scales_ptr, expert, column, rows_dtype, S
    )


@triton.jit
def compute_gate_up(tensors, scales_ptr, tokens, exist, expert, column, KIND: tl.constexpr, S: tl.constexpr):
    """Compute float32 gates and up values of a block, `[block_m, block_intermediate]`; without gates return one twice.

    Gates and up values in separate halves need two GEMMs over the same rows, except for prepacked weights, whose tiles
    hold both halves.
    """
    GEMM: tl.constexpr = S.gate_up
    BLOCK_M: tl.constexpr = GEMM.tile.block_m
    BLOCK_K: tl.constexpr = GEMM.tile.block_k
    TWICE: tl.constexpr = KIND.gated and not KIND.interleaved and not GEMM.split_halves
    dtype: tl.constexpr = tensors.x_ptr.dtype.element_ty
    if KIND.interleaved:
        column *= 2
    first, second = zero_sums(GEMM), zero_sums(GEMM)
    # Scales are loaded one step ahead.
    ahead = quantized.load_scales(scales_ptr, expert, column, 0, GEMM)
    ahead_second = quantized.load_scales(scales_ptr, expert, S.intermediate_size + column, 0, GEMM)
    for k in range(0, S.hidden, BLOCK_K):
        rows = load_step(tensors.x_ptr, tokens, exist, k, S.hidden, GEMM)
        row_scales = load_row_scales(tensors.x_scales_ptr, tokens, exist, k, GEMM)
        scales, ahead = ahead, quantized.load_scales(scales_ptr, expert, column, k + BLOCK_K, GEMM)
        first = add_step(first, rows, row_scales, tensors.gate_up, scales, scales_ptr, expert, column, k, GEMM)
        # Second GEMM over the same rows: the up values.
        if TWICE:
            up = S.intermediate_size + column
            scales, ahead_second = ahead_second, quantized.load_scales(scales_ptr, expert, up, k + BLOCK_K, GEMM)
            second = add_step(second, rows, row_scales, tensors.gate_up, scales, scales_ptr, expert, up, k, GEMM)
    first = finish_sums(first, scales_ptr, expert, column, dtype, GEMM)
    if KIND.interleaved:
        # Split gates and up values.
        gate, up = tl.split(tl.reshape(first, (BLOCK_M, S.block_intermediate, 2)))
    elif GEMM.split_halves:
        gate, up = tl.split(tl.permute(tl.reshape(first, (BLOCK_M, 2, S.block_intermediate)), (0, 2, 1)))
    else:
        gate, up = first, first
        if TWICE:
            up = finish_sums(second, scales_ptr, expert, S.intermediate_size + column, dtype, GEMM)
    return gate, up


@triton.jit
def load_bias(bias_ptr, expert, column, KIND: tl.constexpr, S: tl.constexpr):
    """Load `[1, block_intermediate]` biases of gates and up values."""
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
def compute_hidden_tile(
    tensors, scales_ptr, bias_ptr, scratch, expert, assignments, exist, column, KIND: tl.constexpr, S: tl.constexpr
):
    """Run a task of phase (1): a tile of a block's hidden rows, activated and weighted."""
    gate, up = compute_gate_up(tensors, scales_ptr, assignments // S.top_k, exist, expert, column, KIND, S)
    weights = tl.load(tensors.weights_ptr + assignments, mask=exist, other=0.0)[:, None]
    if KIND.weights_on_input:
        gate, up = gate * weights, up * weights
    if bias_ptr is not None:
        gate_bias, up_bias = load_bias(bias_ptr, expert, column, KIND, S)
        gate, up = gate + gate_bias, up + up_bias
    values = activate_halves(gate, up, KIND)
    if not KIND.weights_on_input:
        values *= weights
    # The second GEMM takes FP8 rows: quantize here.
    if S.down.fp8_rows:
        values, scales = quantize(values, S.down.tile.block_m, S.block_intermediate)
        offsets, inside = scale_offsets(assignments, column, S.intermediate_size, S.block_intermediate)
        tl.store(scratch.hidden_scales_ptr + offsets, scales, mask=exist[:, None] & inside)
    columns = column + tl.arange(0, S.block_intermediate)[None, :]
    target = scratch.hidden_ptr + assignments.to(tl.int64)[:, None] * S.intermediate_size + columns
    tl.store(
        target, values.to(scratch.hidden_ptr.dtype.element_ty), mask=exist[:, None] & (columns < S.intermediate_size)
    )


@triton.jit
def compute_down(tensors, scales_ptr, scratch, assignments, exist, expert, column, part, S: tl.constexpr):
    """Compute what one split of K adds to a tile of a block's rows, in float32 `[block_m, block_n]`."""
    GEMM: tl.constexpr = S.down
    BLOCK_K: tl.constexpr = GEMM.tile.block_k
    # K of a split, in whole steps.
    SPLIT_K: tl.constexpr = (GEMM.K + GEMM.k_splits * BLOCK_K - 1) // (GEMM.k_splits * BLOCK_K) * BLOCK_K
    start = part * SPLIT_K
    total = zero_sums(GEMM)
    ahead = quantized.load_scales(scales_ptr, expert, column, start, GEMM)
    for k in range(start, tl.minimum(start + SPLIT_K, GEMM.K), BLOCK_K):
        rows = load_step(scratch.hidden_ptr, assignments, exist, k, GEMM.K, GEMM)
        row_scales = load_row_scales(scratch.hidden_scales_ptr, assignments, exist, k, GEMM)
        scales, ahead = ahead, quantized.load_scales(scales_ptr, expert, column, k + BLOCK_K, GEMM)
        total = add_step(total, rows, row_scales, tensors.down, scales, scales_ptr, expert, column, k, GEMM)
    return finish_sums(total, scales_ptr, expert, column, scratch.hidden_ptr.dtype.element_ty, GEMM)


@triton.jit
def store_block_rows(
    total, tensors, bias_ptr, rows_ptr, expert, assignments, exist, column, part, KIND: tl.constexpr, S: tl.constexpr
):
    """Store a tile of a block's rows, or one split of it; the first split adds the bias."""
    columns = column + tl.arange(0, S.down.tile.block_n)
    if bias_ptr is not None:
        source = bias_ptr + expert.to(tl.int64) * S.hidden + columns
        bias = tl.load(source, mask=(columns < S.hidden) & (part == 0), other=0.0).to(tl.float32)[None, :]
        # Weights on the input do not scale the bias of the output.
        if KIND.weights_on_input:
            total += bias
        else:
            total += tl.load(tensors.weights_ptr + assignments, mask=exist, other=0.0)[:, None] * bias
    target = rows_ptr + (assignments.to(tl.int64) * S.down.k_splits + part)[:, None] * S.hidden + columns[None, :]
    tl.store(target, total.to(rows_ptr.dtype.element_ty), mask=exist[:, None] & (columns < S.hidden)[None, :])


@triton.jit
def sum_rows(topk_idx_ptr, rows_ptr, out_ptr, first, column, arrived, S: tl.constexpr):
    """Run a task of phase (3): sum the rows of a block of tokens, in order of k and of the splits."""
    K: tl.constexpr = S.top_k
    K_SPLITS: tl.constexpr = S.down.k_splits
    SUM_TOKENS: tl.constexpr = S.sum_tokens
    SUM_HIDDEN: tl.constexpr = S.sum_hidden
    tokens = first + tl.arange(0, SUM_TOKENS)
    columns = column + tl.arange(0, SUM_HIDDEN)
    inside = (tokens < S.num_tokens)[:, None] & (columns < S.hidden)[None, :]
    total = tl.zeros((SUM_TOKENS, SUM_HIDDEN), tl.float32)
    for k in tl.static_range(K):
        assignments = tokens * K + k
        expert = tl.load(topk_idx_ptr + assignments, mask=tokens < S.num_tokens, other=-1)
        exists = ((expert >= 0) & (expert < S.num_experts))[:, None] & inside
        for part in tl.static_range(K_SPLITS):
            source = rows_ptr + (assignments.to(tl.int64) * K_SPLITS + part)[:, None] * S.hidden + columns[None, :]
            total += tl.load(source, mask=exists, other=0.0).to(tl.float32)
    # A wait that expired leaves NaN.
    total = tl.where(arrived, total, float("nan"))
    target = out_ptr + tokens.to(tl.int64)[:, None] * S.hidden + columns[None, :]
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def await_tasks(counter_ptr, count):
    """Wait until `count` tasks have been counted; return whether they have."""
    finished = tl.atomic_poll(counter_ptr, count, sem="acquire", scope="gpu", timeout_ns=TIMEOUT_NS)
    # All threads read the results only after this barrier.
    tl.debug_barrier()
    return finished


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
    """Apply the expert layer to tokens `[num_tokens, hidden]`; store `out [num_tokens, hidden]`.

    `counters [3 + max_blocks]` are zero at the start: next task, finished row tasks, routed tokens, finished hidden
    tiles of each block. They are updated in place; `written_counters` is the result that aliases them.
    """
    BLOCK_N: tl.constexpr = S.down.tile.block_n
    # Do not prefetch the next task: it would wait in this program while idle programs could run it.
    task = tl.atomic_add(counters_ptr, 1, sem="relaxed", scope="gpu")
    routed = True
    if S.router is not None:
        # (0) Choose the experts of a token.
        while task < S.num_tokens:
            choose_experts(tensors, task, scratch.topk_idx_ptr, scratch.weights_ptr, S)
            count_task(counters_ptr + 2)
            task = tl.atomic_add(counters_ptr, 1, sem="relaxed", scope="gpu")
        routed = await_tasks(counters_ptr + 2, S.num_tokens)
        tensors = LayerTensors(
            tensors.x_ptr,
            tensors.x_scales_ptr,
            tensors.gate_up,
            tensors.down,
            scratch.topk_idx_ptr,
            scratch.weights_ptr,
        )
    num_blocks = sort_assignments(tensors, scratch, S)
    hidden_tiles: tl.constexpr = (S.intermediate_size + S.block_intermediate - 1) // S.block_intermediate
    row_tiles: tl.constexpr = (S.hidden + BLOCK_N - 1) // BLOCK_N
    row_tasks: tl.constexpr = row_tiles * S.down.k_splits
    sum_tiles: tl.constexpr = (S.hidden + S.sum_hidden - 1) // S.sum_hidden
    sum_tasks: tl.constexpr = (S.num_tokens + S.sum_tokens - 1) // S.sum_tokens * sum_tiles
    done_ptr = counters_ptr + 1
    hidden_counts_ptr = counters_ptr + 3
    first_hidden: tl.constexpr = S.num_tokens if S.router is not None else 0
    first_rows = first_hidden + num_blocks * hidden_tiles
    first_sums = first_rows + num_blocks * row_tasks
    while task < first_sums + sum_tasks:
        if task < first_rows:
            # (1) Compute a tile of a block's hidden rows.
            block, tile = (task - first_hidden) // hidden_tiles, (task - first_hidden) % hidden_tiles
            expert, assignments, exist = find_block(block, tensors, scratch, S)
            column = tile * S.block_intermediate
            compute_hidden_tile(
                tensors, gate_up_scales_ptr, gate_up_bias_ptr, scratch, expert, assignments, exist, column, KIND, S
            )
            if routed:  # else those that wait for it give NaN
                count_task(hidden_counts_ptr + block)
        elif task < first_sums:
            # (2) Compute a tile of a block's rows, once the block's hidden rows are complete.
            block, inside = (task - first_rows) // row_tasks, (task - first_rows) % row_tasks
            part, column = inside // row_tiles, inside % row_tiles * BLOCK_N
            expert, assignments, exist = find_block(block, tensors, scratch, S)
            arrived = await_tasks(hidden_counts_ptr + block, hidden_tiles)
            total = compute_down(tensors, down_scales_ptr, scratch, assignments, exist, expert, column, part, S)
            total = tl.where(arrived, total, float("nan"))
            store_block_rows(
                total, tensors, down_bias_ptr, scratch.rows_ptr, expert, assignments, exist, column, part, KIND, S
            )
            if routed:
                count_task(done_ptr)
        else:
            # (3) Sum the rows of some tokens, once all rows are complete.
            token = (task - first_sums) // sum_tiles * S.sum_tokens
            column = (task - first_sums) % sum_tiles * S.sum_hidden
            arrived = await_tasks(done_ptr, num_blocks * row_tasks)
            sum_rows(tensors.topk_idx_ptr, scratch.rows_ptr, out_ptr, token, column, arrived & routed, S)
        task = tl.atomic_add(counters_ptr, 1, sem="relaxed", scope="gpu")
