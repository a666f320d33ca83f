"""NumPy float64 oracle of sorting on one device, and of low-latency dispatch and combine, by the rules of `oracle`."""

import dataclasses

import numpy as np

from oracle import activate, round_up

# ---- single-device sorting ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Sorted:
    slots: np.ndarray  # [P] int32, t * K + k, -1 = padding
    weights: np.ndarray  # [P]
    block_expert: np.ndarray  # [P // block_size] int32, -1 past the end
    group_sizes: np.ndarray  # [E] int32, padded
    num_rows: int


def moe_sort(topk_idx, topk_weights, num_experts, block_size):
    """Sort assignments by expert, each expert padded to whole blocks."""
    flat, flat_weights = topk_idx.reshape(-1), topk_weights.reshape(-1)
    total = round_up(flat.size + min(num_experts, flat.size) * (block_size - 1), block_size)
    slots, weights = np.full(total, -1, np.int32), np.zeros(total, topk_weights.dtype)
    block_expert, sizes = np.full(total // block_size, -1, np.int32), np.zeros(num_experts, np.int32)
    start = 0
    for expert in range(num_experts):
        members = np.flatnonzero(flat == expert)
        slots[start : start + len(members)] = members
        weights[start : start + len(members)] = flat_weights[members]
        sizes[expert] = round_up(len(members), block_size)
        end = start + int(sizes[expert])
        block_expert[start // block_size : end // block_size] = expert
        start = end
    return Sorted(slots, weights, block_expert, sizes, start)


# ---- low latency --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LowLatencyLayout:
    """Rows of each local expert, packed by source rank, then token; a token has one row per expert."""

    source: np.ndarray  # [W, L, N] source rank, -1 past the count
    token: np.ndarray  # [W, L, N] token on its source rank, -1 past the count
    count: np.ndarray  # [W, L, W] rows from each source
    start: np.ndarray  # [W, L, W] first row of each source
    group_sizes: np.ndarray  # [W, L]

    @property
    def is_padding(self):
        return self.source < 0

    def row_of(self, source, token, expert):
        rank, local = divmod(expert, self.group_sizes.shape[1])
        if not 0 <= rank < len(self.source):
            return None
        hits = np.flatnonzero((self.source[rank, local] == source) & (self.token[rank, local] == token))
        return (rank, local, int(hits[0])) if hits.size else None


def low_latency_layout(topk_idx, num_experts, max_tokens_per_rank, num_tokens=None):
    num_ranks, tokens_per_rank, _ = topk_idx.shape
    num_local = num_experts // num_ranks
    shape = (num_ranks, num_local, num_ranks * max_tokens_per_rank)
    sources, tokens = np.full(shape, -1, np.int32), np.full(shape, -1, np.int32)
    count = np.zeros((num_ranks, num_local, num_ranks), np.int32)
    for expert in range(num_experts):
        rank, local = divmod(expert, num_local)
        row = 0
        for source in range(num_ranks):
            limit = tokens_per_rank if num_tokens is None else int(num_tokens[source])
            for token in range(min(limit, tokens_per_rank)):
                if expert in topk_idx[source, token]:
                    sources[rank, local, row], tokens[rank, local, row] = source, token
                    count[rank, local, source] += 1
                    row += 1
    start = (np.cumsum(count, axis=-1) - count).astype(np.int32)
    return LowLatencyLayout(sources, tokens, count, start, count.sum(axis=-1).astype(np.int32))


def low_latency_combine(y, topk_idx, topk_weights, lay):
    """Compute sum_k w_tk * y[row of expert topk_idx[t, k]], float64 [W, T, H]."""
    out = np.zeros((*topk_idx.shape[:2], y.shape[-1]))
    for source, token, k in np.ndindex(*topk_idx.shape):
        row = lay.row_of(source, token, int(topk_idx[source, token, k]))
        if row is not None:
            out[source, token] += float(topk_weights[source, token, k]) * y[row].astype(np.float64)
    return out


# ---- the experts between dispatch and combine ---------------------------------------------------------------------


def masked_grouped_gemm(lhs, rhs):
    """Multiply [L, M, K] by the transposed [L, N, K], float64 [L, M, N]; all rows."""
    return np.einsum("lmk,lnk->lmn", lhs.astype(np.float64), rhs.astype(np.float64))


def gated_activation(hidden, activation):
    """Activate [..., 2I] to [..., I] in float64."""
    gate, up = np.split(hidden.astype(np.float64), 2, axis=-1)
    return activate(activation, gate)[0] * up
