"""Router weights: they travel with tokens and return with sums, under the same flags.

A token's top_k weights go to each rank that the token goes to, at assignment `[source rank, token, k]` of its heap, and
from there, or from the caller's own array, to the rows of the assignments. Values of rows return to assignment
`[token, k]` of the source. An assignment has a row on one rank at most, so nothing is added up and all bits survive.
"""

import triton
import triton.language as tl

from .indices import as_column, indices, indices_in_row
from .protocol import data_of


@triton.jit
def assignments_of(tokens, inside, TOP_K: tl.constexpr):
    """Return the assignments of tokens, `[tokens, power of two]`, and a mask of those that exist."""
    k = indices_in_row(triton.next_power_of_2(TOP_K))
    return as_column(tokens) * TOP_K + k, as_column(inside) & (k < TOP_K)


@triton.jit
def push_weights(weights_ptr, tokens, mask, launch, peer, S: tl.constexpr, HEAP: tl.constexpr):
    """Send the weights of this rank's tokens that go to `peer`."""
    assignments, exists = assignments_of(tokens, mask, S.top_k)
    weights = tl.load(weights_ptr + assignments, mask=exists)
    received_ptr = data_of(launch, peer.device, weights_ptr.dtype.element_ty, HEAP, S.weights_offset)
    tl.store(received_ptr + launch.rank * (S.num_tokens * S.top_k) + assignments, weights, mask=exists)


@triton.jit
def weights_to_rows(weights_ptr, assignment_to_row_ptr, tokens, mask, out_ptr, TOP_K: tl.constexpr):
    """Store the weights of tokens in their rows here."""
    assignments, exists = assignments_of(tokens, mask, TOP_K)
    row = tl.load(assignment_to_row_ptr + assignments, mask=exists, other=-1)
    tl.store(out_ptr + row, tl.load(weights_ptr + assignments, mask=row >= 0), mask=row >= 0)


@triton.jit
def clear_weights(out_ptr, row_to_assignment_ptr, first, ROWS: tl.constexpr, NUM_ROWS: tl.constexpr):
    """Zero the weights of the padding rows among ROWS rows from `first` on."""
    rows = first + indices(ROWS)
    empty = tl.load(row_to_assignment_ptr + rows, mask=rows < NUM_ROWS, other=0) < 0
    tl.store(out_ptr + rows, 0, mask=empty)


@triton.jit
def weights_of(assignments, own_ptr, received_ptr, first, end):
    """Load the weights of assignments, zero for negative ones.

    Those from `first` to `end` - 1 did not travel; the others are in the heap.
    """
    own = (assignments >= first) & (assignments < end)
    # From the L2 cache: peers have written what the L1 cache may hold as it was before.
    received = tl.load(
        received_ptr + assignments, mask=(assignments >= 0) & (own == 0), other=0.0, cache_modifier=".cg"
    )
    return tl.where(own, tl.load(own_ptr + (assignments - first), mask=own, other=0.0), received)


@triton.jit
def store_row_weights(
    weights_ptr,
    row_to_assignment_ptr,
    out_ptr,
    row,
    size,
    launch,
    S: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HEAP: tl.constexpr,
):
    """Store the weights of up to BLOCK_M of `size` rows from `row` on, once their tokens are here; zero for padding.

    Weights of this rank's tokens are in `weights [num_tokens, top_k]`, those of other tokens in the heap.
    """
    lines = indices(BLOCK_M)
    assignment = tl.load(row_to_assignment_ptr + row + lines, mask=lines < size, other=-1)
    first = launch.rank * (S.num_tokens * S.top_k)
    received_ptr = data_of(launch, launch.device, weights_ptr.dtype.element_ty, HEAP, S.weights_offset)
    weights = weights_of(assignment, weights_ptr, received_ptr, first, first + S.num_tokens * S.top_k)
    tl.store(out_ptr + row + lines, weights, mask=lines < size)


@triton.jit
def return_weights(
    weights_ptr,
    topk_idx_ptr,
    assignment_to_row_ptr,
    tokens,
    launch,
    peer,
    S: tl.constexpr,
    LOCAL_EXPERTS: tl.constexpr,
    HEAP: tl.constexpr,
):
    """Store the values `weights [num_rows]` of rows at a peer's assignments; dropped assignments get zero."""
    assignments, exists = assignments_of(tokens, tokens < S.num_tokens, S.top_k)
    first = peer.rank * (S.num_tokens * S.top_k)
    expert = tl.load(topk_idx_ptr + first + assignments, mask=exists, other=-1)
    # Only assignments to experts of this rank: each is written by one rank.
    here = (expert >= launch.rank * LOCAL_EXPERTS) & (expert < launch.rank * LOCAL_EXPERTS + LOCAL_EXPERTS)
    row = tl.load(assignment_to_row_ptr + first + assignments, mask=here, other=-1)
    values = tl.load(weights_ptr + row, mask=row >= 0, other=0.0)
    arrived_ptr = data_of(launch, peer.device, weights_ptr.dtype.element_ty, HEAP, S.weights_offset)
    tl.store(arrived_ptr + assignments, values, mask=here)


@triton.jit
def take_weights(
    topk_idx_ptr, tokens, out_ptr, launch, S: tl.constexpr, LOCAL_EXPERTS: tl.constexpr, HEAP: tl.constexpr
):
    """Copy the values returned for this rank's assignments to `out [num_tokens, top_k]`; zero without an expert."""
    assignments, exists = assignments_of(tokens, tokens < S.num_tokens, S.top_k)
    expert = tl.load(topk_idx_ptr + launch.rank * (S.num_tokens * S.top_k) + assignments, mask=exists, other=-1)
    chosen = (expert >= 0) & (expert < HEAP.num_ranks * LOCAL_EXPERTS)
    arrived_ptr = data_of(launch, launch.device, out_ptr.dtype.element_ty, HEAP, S.weights_offset)
    tl.store(out_ptr + assignments, tl.load(arrived_ptr + assignments, mask=chosen, other=0.0), mask=exists)
