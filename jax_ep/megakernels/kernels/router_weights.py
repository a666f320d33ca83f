"""Router weights, which travel with the tokens and come back with the sums, under the same flags.

A token's K weights go to each rank that the token goes to, into slots `[source rank, token, k]` of its heap, and from
there, or from the caller's own array, to the rows of the slots. The values of rows go back into slot `[token, k]` of
the source. A slot has a row on one rank at most, so nothing is added up, and all bits stay as they are.
"""

import triton
import triton.language as tl

from .protocol import data_of


@triton.jit
def slots_of(tokens, inside, TOP_K: tl.constexpr):
    """The slots of tokens `[N]`, `[N, power of two]`, and which of them exist: those of the tokens `inside`."""
    k = tl.arange(0, triton.next_power_of_2(TOP_K))[None, :]
    return tokens[:, None] * TOP_K + k, inside[:, None] & (k < TOP_K)


@triton.jit
def push_weights(weights_ptr, tokens, mask, launch, peer, S: tl.constexpr, HEAP: tl.constexpr):
    """Sends to `peer` the weights of those of this rank's tokens that go there."""
    slots, exists = slots_of(tokens, mask, S.top_k)
    weights = tl.load(weights_ptr + slots, mask=exists)
    received_ptr = data_of(launch, peer.device, weights_ptr.dtype.element_ty, HEAP, S.weights_offset)
    tl.store(received_ptr + launch.rank * (S.num_tokens * S.top_k) + slots, weights, mask=exists)


@triton.jit
def weights_to_rows(weights_ptr, slot_row_ptr, tokens, mask, out_ptr, TOP_K: tl.constexpr):
    """Stores the weights of tokens in their rows here, those that have one."""
    slots, exists = slots_of(tokens, mask, TOP_K)
    row = tl.load(slot_row_ptr + slots, mask=exists, other=-1)
    tl.store(out_ptr + row, tl.load(weights_ptr + slots, mask=row >= 0), mask=row >= 0)


@triton.jit
def clear_weights(out_ptr, row_slot_ptr, first, ROWS: tl.constexpr, NUM_ROWS: tl.constexpr):
    """Zeroes the weights of those of ROWS rows from `first` on that belong to no slot."""
    rows = first + tl.arange(0, ROWS)
    empty = tl.load(row_slot_ptr + rows, mask=rows < NUM_ROWS, other=0) < 0
    tl.store(out_ptr + rows, tl.zeros((ROWS,), out_ptr.dtype.element_ty), mask=empty)


@triton.jit
def store_row_weights(
    weights_ptr, row_slot_ptr, out_ptr, row, size, launch, S: tl.constexpr, BLOCK_M: tl.constexpr, HEAP: tl.constexpr
):
    """Stores the weights of the first BM of `size` rows from `row` on, once the tokens are here; zero for padding.

    They are in `weights [T, K]` for this rank's tokens, and in the heap for those of others.
    """
    lines = tl.arange(0, BLOCK_M)
    slot = tl.load(row_slot_ptr + row + lines, mask=lines < size, other=-1)
    first = launch.rank * (S.num_tokens * S.top_k)
    own = (slot >= first) & (slot < first + S.num_tokens * S.top_k)
    received_ptr = data_of(launch, launch.device, weights_ptr.dtype.element_ty, HEAP, S.weights_offset)
    received = tl.load(received_ptr + slot, mask=(slot >= 0) & (own == 0), other=0.0)
    weights = tl.where(own, tl.load(weights_ptr + (slot - first), mask=own, other=0.0), received)
    tl.store(out_ptr + row + lines, weights, mask=lines < size)


@triton.jit
def return_weights(
    weights_ptr,
    ids_ptr,
    slot_row_ptr,
    tokens,
    launch,
    peer,
    S: tl.constexpr,
    LOCAL_EXPERTS: tl.constexpr,
    HEAP: tl.constexpr,
):
    """Stores the values `weights [R]` of rows in the slots of a peer's tokens; zero where a slot's row was dropped."""
    slots, exists = slots_of(tokens, tokens < S.num_tokens, S.top_k)
    first = peer.rank * (S.num_tokens * S.top_k)
    expert = tl.load(ids_ptr + first + slots, mask=exists, other=-1)
    here = (expert >= launch.rank * LOCAL_EXPERTS) & (expert < launch.rank * LOCAL_EXPERTS + LOCAL_EXPERTS)
    row = tl.load(slot_row_ptr + first + slots, mask=here, other=-1)
    values = tl.load(weights_ptr + row, mask=row >= 0, other=0.0)
    arrived_ptr = data_of(launch, peer.device, weights_ptr.dtype.element_ty, HEAP, S.weights_offset)
    tl.store(arrived_ptr + slots, values, mask=here)


@triton.jit
def take_weights(ids_ptr, tokens, out_ptr, launch, S: tl.constexpr, LOCAL_EXPERTS: tl.constexpr, HEAP: tl.constexpr):
    """Copies to `out [T, K]` what came back for the slots of this rank's tokens; zero for slots without an expert."""
    slots, exists = slots_of(tokens, tokens < S.num_tokens, S.top_k)
    expert = tl.load(ids_ptr + launch.rank * (S.num_tokens * S.top_k) + slots, mask=exists, other=-1)
    chosen = (expert >= 0) & (expert < HEAP.num_ranks * LOCAL_EXPERTS)
    arrived_ptr = data_of(launch, launch.device, out_ptr.dtype.element_ty, HEAP, S.weights_offset)
    tl.store(out_ptr + slots, tl.load(arrived_ptr + slots, mask=chosen, other=0.0), mask=exists)
