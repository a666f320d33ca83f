"""Rows of a grouped GEMM that travel to their sources one by one, and their sums there: parts of gemm_combine.py."""

import triton
import triton.language as tl

from .listed_sums import write_list
from .protocol import data_of


@triton.jit
def row_addresses(
    row_slot_ptr,
    launch,
    row,
    end,
    dtype: tl.constexpr,
    T: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    BM: tl.constexpr,
    HEAP: tl.constexpr,
):
    """Addresses of BM rows in the heaps of the ranks that their tokens came from, or 0 for those from `end` on."""
    rows = row + tl.arange(0, BM)
    slot = tl.load(row_slot_ptr + rows, mask=rows < end, other=-1)
    travels = slot >= 0
    source = tl.load(launch.group_ptr + tl.where(travels, slot // (T * K), 0))
    heap = tl.load(launch.table_ptr + source)
    offset = tl.where(travels, slot % (T * K), 0).to(tl.int64) * (H * dtype.primitive_bitwidth // 8)
    return tl.where(travels, heap + HEAP.DATA + offset, 0)


@triton.jit
def store_rows(total, addresses, column, dtype: tl.constexpr, H: tl.constexpr, BN: tl.constexpr):
    """Stores a tile's columns of the rows at these addresses."""
    columns = (column + tl.arange(0, BN))[None, :]
    target = tl.multiple_of(addresses.to(tl.pointer_type(dtype))[:, None] + columns, (16, 16))
    tl.store(target, total.to(dtype), mask=(addresses != 0)[:, None] & (columns < H))


@triton.jit
def clear_dropped(
    ids_ptr,
    slot_row_ptr,
    launch,
    dtype: tl.constexpr,
    T: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    L: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEAP: tl.constexpr,
):
    """This program's share of the zeros at the sources, for slots that should have a row here but found no place."""
    blocks: tl.constexpr = (T + ROWS - 1) // ROWS
    for index in range(tl.program_id(0), HEAP.W * blocks, tl.num_programs(0)):
        source_rank = index // blocks
        tokens = index % blocks * ROWS + tl.arange(0, ROWS)
        base = data_of(launch, tl.load(launch.group_ptr + source_rank), dtype, HEAP)
        for k in range(K):
            slots = (source_rank * T + tokens) * K + k
            expert = tl.load(ids_ptr + slots, mask=tokens < T, other=-1)
            dropped = (expert >= launch.rank * L) & (expert < launch.rank * L + L)
            dropped = dropped & (tl.load(slot_row_ptr + slots, mask=tokens < T, other=0) < 0)
            if tl.max(dropped.to(tl.int32), axis=0) > 0:
                for h in range(0, H, COLUMNS):
                    columns = h + tl.arange(0, COLUMNS)[None, :]
                    target = tl.multiple_of(base + (tokens * K + k).to(tl.int64)[:, None] * H + columns, (16, 16))
                    tl.store(target, tl.zeros((ROWS, COLUMNS), dtype), mask=dropped[:, None] & (columns < H))


@triton.jit
def list_slots(
    list_ptr,
    ids_ptr,
    rank,
    first_token,
    T: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    TOKENS: tl.constexpr,
    CHOICES: tl.constexpr,
    LENGTH: tl.constexpr,
):
    """Lists the slots of TOKENS tokens of this rank that have an expert, in order of k; returns how many."""
    tokens = first_token + tl.arange(0, TOKENS)
    k = tl.arange(0, CHOICES)[None, :]
    slots = tokens[:, None] * K + k
    inside = (tokens < T)[:, None] & (k < K)
    expert = tl.load(ids_ptr + rank * T * K + slots, mask=inside, other=-1)
    chosen = (expert >= 0) & (expert < E)
    return write_list(list_ptr, slots, chosen, tokens, tokens < T, LENGTH)
