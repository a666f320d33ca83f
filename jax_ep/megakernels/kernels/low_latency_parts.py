"""Low-latency dispatch and combine in two launches each, between which the device multiplies rows of other tokens.

The exchange is that of low_latency.py, and so is what a handle says. But nothing is worked on while other things of the
same exchange travel, so a greeting at the end of what starts it stands for all flags (low_latency_slots.py). Rows go
back one by one, of a token that names an expert twice once; so sums are those of low_latency_gemm_combine.py.

Each launch takes something of the one before it, if only as `after_ptr`, which nobody reads: so XLA launches them in
the order in which they are called, one after the other, in CUDA graphs too.
"""

import triton
import triton.language as tl

from .failures import poison
from .low_latency import (
    SLOTS,
    assign_rows,
    clear_slots,
    copy_tokens,
    count_rows,
    send_ids,
    send_token,
)
from .low_latency_buffers import part_of, pick
from .low_latency_gemm_combine import add_received
from .low_latency_slots import (
    LANES,
    await_slots,
    await_started,
    end_finish,
    end_start,
    free,
    next_slots,
    started_slots,
)
from .protocol import await_flag, next_task, open_launch
from .structs import Rows
from .table import DONE
from .tiles import num_turns, task_of_turn
from .trace import (
    COPY_EVENT,
    COUNT_EVENT,
    OWN,
    PUSH_EVENT,
    SUM_EVENT,
    WAIT_EVENT,
    ZERO_EVENT,
    stamp,
    trace,
    trace_exchange,
)


@triton.jit
def low_latency_dispatch_start(
    x, ids_ptr, num_tokens_ptr, after_ptr, peers, started, S: tl.constexpr, HEAP: tl.constexpr
):
    """Sends T tokens from FIRST on, of `x [., H]` and `ids [., K]`, and all their ids.

    Its tasks: (ids) send the ids of these tokens to a rank, W tasks; (send) send a token to each rank that has one of
    its experts.
    """
    launch, alive = open_launch(peers, HEAP)
    T: tl.constexpr = S.T
    W: tl.constexpr = S.W
    wire: tl.constexpr = tl.float8e4nv if S.GROUP > 0 else x.values_ptr.dtype.element_ty
    buffers, lanes = next_slots(launch, HEAP)
    count = T
    if S.COUNTED:
        count = tl.minimum(tl.maximum(tl.load(num_tokens_ptr), S.FIRST) - S.FIRST, T)
    part = Rows(x.values_ptr + S.FIRST * S.H, x.scales_ptr + S.FIRST * S.G)
    part_ids_ptr = ids_ptr + S.FIRST * S.K
    has_place = 0
    for turn in range(num_turns(W + T)):
        task = task_of_turn(turn)
        if has_place == 0:
            alive = await_slots(launch, buffers, lanes, alive, task, HEAP)
            has_place = 1
        began = stamp(HEAP)
        if task < W:
            peer_rank = (launch.rank + 1 + task) % W
            buffer, own = pick(buffers.outgoing, peer_rank), peer_rank == launch.rank
            send_ids(part_ids_ptr, count, buffer, started, own, alive, S)
        else:
            send_token(part, part_ids_ptr, task - W, count, alive, buffers.outgoing, launch.rank, wire, S)
        trace(launch, PUSH_EVENT, began, task, HEAP)
    if end_start(launch, buffers, lanes, started.exchange_ptr, alive, HEAP):
        poison(started.exchange_ptr, 2 * triton.next_power_of_2(W))
        poison(started.own_ids_ptr, S.M * S.K)
        poison(started.num_invalid_ptr, 1)


@triton.jit
def low_latency_dispatch_finish(started, after_ptr, peers, out, plan, S: tl.constexpr, HEAP: tl.constexpr):
    """What was sent to `out [L, W * M, H]`, and the rest of the handle; as the dispatch in one launch.

    Its tasks: (assign) as there, L tasks; (copy) as there; (clear) as there. With DIRECT copies come first.
    """
    launch, alive = open_launch(peers, HEAP)
    W: tl.constexpr = S.W
    T: tl.constexpr = S.T
    M: tl.constexpr = S.M
    K: tl.constexpr = S.K
    L: tl.constexpr = S.L
    BLOCK_T: tl.constexpr = S.tile.BLOCK_T
    DIRECT: tl.constexpr = S.tile.DIRECT
    copies: tl.constexpr = (T + BLOCK_T - 1) // BLOCK_T * W
    assign_start: tl.constexpr = copies if DIRECT else 0
    copy_start: tl.constexpr = 0 if DIRECT else L
    clear_start: tl.constexpr = L + copies
    STARTED: tl.constexpr = S.STARTED
    buffers, lanes, alive = started_slots(launch, started.exchange_ptr, alive, HEAP)
    free(launch, buffers, lanes, HEAP)
    numbers = buffers.epochs * LANES + lanes
    # Not in each task: nothing of this exchange is still under way that one could work beside.
    alive = await_started(launch, buffers, alive, -1, HEAP, STARTED)
    assigned = 0
    task = next_task(launch)
    while task < clear_start + (W * (M - T) * K + SLOTS - 1) // SLOTS:
        began = stamp(HEAP)
        if task >= clear_start:
            clear_slots((task - clear_start) * SLOTS, plan.slot_row_ptr, S)
            trace(launch, ZERO_EVENT, began, task, HEAP)
        elif (task >= assign_start) & (task < assign_start + L):
            assign_rows(task - assign_start, buffers.incoming, launch, plan, S)
            trace(launch, COUNT_EVENT, began, task, HEAP)
        else:
            block, source_rank = (task - copy_start) // W, (launch.rank + task - copy_start) % W
            tokens = block * BLOCK_T + tl.arange(0, BLOCK_T)
            if DIRECT:
                rows = count_rows(source_rank * T + block, buffers.incoming, launch.rank, S)
            else:
                if assigned == 0:
                    done = launch.control + DONE
                    # Also after a failure: own tasks always end, and without what they store rows would be random.
                    ended = await_flag(launch, done, L, launch.rank, alive | 1, task, HEAP)
                    alive = alive & ended
                    assigned = 1
                    trace_exchange(launch, WAIT_EVENT, began, task, -1, OWN, HEAP)
                    began = stamp(HEAP)
                k = tl.arange(0, S.tile.CHOICES)[None, :]
                slots = ((source_rank * M + tokens) * K)[:, None] + k
                rows = tl.load(plan.slot_row_ptr + slots, mask=(tokens < T)[:, None] & (k < K), other=-1)
                rows = tl.where(rows < L * W * M, rows, -1)
            mask = tl.max(rows, axis=1) >= 0
            if (tl.max(mask.to(tl.int32), axis=0) > 0) & (alive != 0):
                copy_tokens(rows, tokens, mask, pick(buffers.incoming, source_rank), out, S)
                trace(launch, COPY_EVENT, began, task, HEAP)
        task = next_task(launch)
    if end_finish(launch, numbers, HEAP):
        poison(out.values_ptr, L * W * M * S.H)
        if S.G > 0:
            poison(out.scales_ptr, L * W * M * S.G)
        poison(plan.token_ptr, L * W * M)
        poison(plan.slot_row_ptr, W * M * K)
        # Numbers that can be used, and a poisoned row for each expert.
        ranks = tl.arange(0, S.tile.RANKS)
        zeros = tl.zeros((S.tile.RANKS,), tl.int32)
        for expert in range(L):
            tl.store(plan.sizes_ptr + expert, 1)
            tl.store(plan.start_ptr + expert * W + ranks, zeros, mask=ranks < W)
            tl.store(plan.count_ptr + expert * W + ranks, zeros, mask=ranks < W)


@triton.jit
def low_latency_combine_start(y_ptr, slot_row_ptr, peers, exchange_ptr, S: tl.constexpr, HEAP: tl.constexpr):
    """Sends rows of `y [L, W * M, H]` to the ranks of their tokens.

    A task is BLOCK_H columns of what the experts here have for one token of one rank.
    """
    launch, alive = open_launch(peers, HEAP)
    W: tl.constexpr = S.W
    K: tl.constexpr = S.K
    H: tl.constexpr = S.H
    BLOCK_H: tl.constexpr = S.BLOCK_H
    blocks: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    choices = tl.arange(0, S.CHOICES)
    buffers, lanes = next_slots(launch, HEAP)
    has_place = 0
    for turn in range(num_turns(S.T * W * blocks)):
        task = task_of_turn(turn)
        if has_place == 0:
            alive = await_slots(launch, buffers, lanes, alive, task, HEAP)
            has_place = 1
        began = stamp(HEAP)
        token, peer_rank = task // (W * blocks), (launch.rank + 1 + task // blocks) % W
        columns = task % blocks * BLOCK_H + tl.arange(0, BLOCK_H)
        slots = (peer_rank * S.M + token) * K + choices
        rows = tl.load(slot_row_ptr + slots, mask=(choices < K) & (alive != 0), other=-1)
        target = part_of(pick(buffers.outgoing, peer_rank), S.VALUES, y_ptr.dtype.element_ty)
        for k in tl.static_range(K):
            row = pick(rows, k)
            is_first = tl.max(((choices < k) & (rows == row)).to(tl.int32), axis=0) == 0
            if (row >= 0) & is_first:
                source = tl.multiple_of(y_ptr + row.to(tl.int64) * H + columns, 16)
                values = tl.load(source, mask=columns < H)
                place = target + (token * K + k).to(tl.int64) * H + columns
                tl.store(tl.multiple_of(place, 16), values, mask=columns < H)
        trace(launch, PUSH_EVENT, began, task, HEAP)
    if end_start(launch, buffers, lanes, exchange_ptr, alive, HEAP):
        poison(exchange_ptr, 2 * triton.next_power_of_2(W))


@triton.jit
def low_latency_combine_finish(first, second, weights_ptr, peers, out_ptr, S: tl.constexpr, HEAP: tl.constexpr):
    """What was sent back in two exchanges, of tokens before SECOND and from there on, to weighted sums `[T, H]`."""
    launch, alive = open_launch(peers, HEAP)
    H: tl.constexpr = S.H
    K: tl.constexpr = S.K
    SECOND: tl.constexpr = S.SECOND
    SUM: tl.constexpr = tl.float64 if out_ptr.dtype.element_ty == tl.float64 else tl.float32
    FIRST_STARTED: tl.constexpr = S.FIRST_STARTED
    SECOND_STARTED: tl.constexpr = S.SECOND_STARTED
    blocks: tl.constexpr = (H + S.BLOCK_H - 1) // S.BLOCK_H
    of_first, first_lanes, alive = started_slots(launch, first.exchange_ptr, alive, HEAP)
    of_second, second_lanes, alive = started_slots(launch, second.exchange_ptr, alive, HEAP)
    free(launch, of_first, first_lanes, HEAP)
    free(launch, of_second, second_lanes, HEAP)
    numbers = of_first.epochs * LANES + first_lanes
    has_first, has_second = 0, 0
    task = next_task(launch)
    while task < S.T * blocks:
        token, h = task // blocks, task % blocks * S.BLOCK_H
        if token < SECOND:
            if has_first == 0:
                alive = await_started(launch, of_first, alive, task, HEAP, FIRST_STARTED)
                has_first = 1
            began = stamp(HEAP)
            add_received(out_ptr, first.own_ids_ptr, weights_ptr, token, h, of_first.incoming, SUM, S)
            trace(launch, SUM_EVENT, began, task, HEAP)
        else:
            if has_second == 0:
                alive = await_started(launch, of_second, alive, task, HEAP, SECOND_STARTED)
                has_second = 1
            began = stamp(HEAP)
            rest_ptr, rest_weights_ptr = out_ptr + SECOND * H, weights_ptr + SECOND * K
            own_ids_ptr, place = second.own_ids_ptr, token - SECOND
            add_received(rest_ptr, own_ids_ptr, rest_weights_ptr, place, h, of_second.incoming, SUM, S)
            trace(launch, SUM_EVENT, began, task, HEAP)
        task = next_task(launch)
    if end_finish(launch, numbers, HEAP):
        poison(out_ptr, S.T * H)
