"""NumPy float64 reference, in a global view, for everything that jax_ep computes across ranks.

Every array has a leading rank axis: `x [W, T, H]`, `topk_idx [W, T, K]`, `y [W, R, H]`; expert weights are global,
`[E, ...]`. Nothing here imports the package or JAX. The rules of row order and capacity are written independently, as
plain loops over rows; oracle_experts.py has the layer.
"""

import dataclasses
import math

import ml_dtypes
import numpy as np

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
FP8_MAX = np.float32(448.0)


def round_up(value, multiple):
    return -(-value // multiple) * multiple


def default_num_rows(num_ranks, num_tokens, top_k, num_local, alignment):
    """Return the worst-case number of rows of the dropless layout: every assignment of every rank goes to one rank."""
    slots = num_ranks * num_tokens * top_k
    return slots if alignment == 1 else round_up(slots + min(num_local, slots) * (alignment - 1), alignment)


@dataclasses.dataclass(frozen=True)
class Layout:
    """The (source rank, token, k) of every row of every receiving rank; -1 marks padding."""

    source: np.ndarray  # [W, R]
    token: np.ndarray  # [W, R]
    slot: np.ndarray  # [W, R], the k of the row
    expert: np.ndarray  # [W, R], global expert id
    group_sizes: np.ndarray  # [W, L] int32, padding included
    dropped: np.ndarray  # [W] int32, rows dropped on the receiving rank
    num_invalid: np.ndarray  # [W] int32, out-of-range ids among the rank's own tokens
    num_tokens: int
    top_k: int

    @property
    def is_padding(self):
        return self.source < 0

    def rows(self, rank):
        """Return the non-padding rows of one rank: (row, source, token, k, expert)."""
        columns = (self.source, self.token, self.slot, self.expert)
        return [(i, *(int(c[rank, i]) for c in columns)) for i in np.flatnonzero(self.source[rank] >= 0)]


def layout(topk_idx, num_experts, *, capacity=None, alignment=1):
    """Order rows by expert, source rank, token, k; pad groups to `alignment`; drop rows past `capacity`."""
    num_ranks, num_tokens, top_k = topk_idx.shape
    num_local = num_experts // num_ranks
    num_rows = default_num_rows(num_ranks, num_tokens, top_k, num_local, alignment) if capacity is None else capacity
    columns = np.full((4, num_ranks, num_rows), -1, np.int64)
    group_sizes = np.zeros((num_ranks, num_local), np.int32)
    dropped = np.zeros(num_ranks, np.int32)
    for expert in range(num_experts):
        rank, local = divmod(expert, num_local)
        start = int(group_sizes[rank, :local].sum())
        slots = np.argwhere(topk_idx == expert)  # argwhere uses the order source, token, k
        for i, (source, token, k) in enumerate(slots):
            if start + i < num_rows:
                columns[:, rank, start + i] = source, token, k, expert
            else:
                dropped[rank] += 1
        group_sizes[rank, local] = min(round_up(len(slots), alignment), num_rows - start)
    invalid = (topk_idx < -1) | (topk_idx >= num_experts)
    num_invalid = invalid.sum(axis=(1, 2)).astype(np.int32)
    return Layout(*columns, group_sizes, dropped, num_invalid, num_tokens, top_k)


def hierarchical_layout(topk_idx, num_experts, num_local_ranks, **options):
    """Order rows by expert, local rank, node, token and k: the layout with ranks numbered in that order."""
    num_ranks = len(topk_idx)
    order = np.arange(num_ranks).reshape(-1, num_local_ranks).T.reshape(-1)
    lay = layout(topk_idx[order], num_experts, **options)
    lay.source[...] = np.where(lay.source < 0, -1, order[lay.source])
    lay.num_invalid[order] = lay.num_invalid.copy()
    return lay


def gather(values, lay):
    """Dispatch [W, T, ...] per token to [W, R, ...] or [W, L, N, ...] per row, bit for bit; zeros in padding."""
    rows = np.zeros(lay.source.shape + values.shape[2:], values.dtype)
    real = ~lay.is_padding
    rows[real] = values[lay.source[real], lay.token[real]]
    return rows


def gather_weights(topk_weights, lay):
    """Dispatch [W, T, K] to [W, R], with zeros in padding."""
    rows = np.zeros(lay.source.shape, topk_weights.dtype)
    real = ~lay.is_padding
    rows[real] = topk_weights[lay.source[real], lay.token[real], lay.slot[real]]
    return rows


def scatter_weights(d_rows, lay):
    """Transpose `gather_weights`, bit for bit: every assignment has at most one row."""
    out = np.zeros((lay.source.shape[0], lay.num_tokens, lay.top_k), d_rows.dtype)
    real = ~lay.is_padding
    out[lay.source[real], lay.token[real], lay.slot[real]] = d_rows[real]
    return out


def to_wire(values, wire_dtype):
    """Return the values after sending them in `wire_dtype`: rounded, or quantized in blocks of 128."""
    if wire_dtype is None:
        return values
    single = values.astype(np.float32)
    if np.dtype(wire_dtype) == FP8:
        return dequantize(*quantize(single)).astype(values.dtype)
    return single.astype(wire_dtype).astype(values.dtype)


def combine(y, lay, wire_dtype=None):
    """Combine [W, R, H] to float64 [W, T, H]: partial sums per rank are cast to the wire dtype, then summed."""
    num_ranks = y.shape[0]
    out = np.zeros((num_ranks, lay.num_tokens, y.shape[-1]))
    for rank in range(num_ranks):
        partial = np.zeros_like(out)
        for row, source, token, _, _ in lay.rows(rank):
            partial[source, token] += y[rank, row].astype(np.float64)
        out += to_wire(partial, wire_dtype)
    return out


# ---- FP8 ----------------------------------------------------------------------------------------------------------


def quantize(x, group_size=128):
    """Quantize [..., H] to (float8_e4m3fn [..., H], float32 scales [..., H // group_size]), scale = amax / 448."""
    groups = x.astype(np.float32).reshape(*x.shape[:-1], -1, group_size)
    scales = np.abs(groups).max(axis=-1) / FP8_MAX
    divisor = np.where(scales == 0, np.float32(1), scales)[..., None]
    values = np.clip(groups / divisor, -FP8_MAX, FP8_MAX).astype(FP8)
    return values.reshape(x.shape), scales


def dequantize(values, scales, dtype=np.float32):
    groups = values.astype(np.float32).reshape(*scales.shape, values.shape[-1] // scales.shape[-1])
    return (groups * scales[..., None]).reshape(values.shape).astype(dtype)


# ---- grouped GEMM -------------------------------------------------------------------------------------------------


def grouped_gemm(lhs, rhs, group_sizes):
    """Multiply [M, K] x [G, K, N] to float64 [M, N]; rows past the groups are zero."""
    out = np.zeros((lhs.shape[0], rhs.shape[2]))
    for group, rows in rows_of_groups(group_sizes):
        out[rows] = lhs[rows].astype(np.float64) @ rhs[group].astype(np.float64)
    return out


def grouped_gemm_gradients(lhs, rhs, group_sizes, d_out):
    """Return (d_lhs [M, K], d_rhs [G, K, N]) in float64; rows past the groups get zero."""
    d_lhs, d_rhs = np.zeros(lhs.shape), np.zeros(rhs.shape)
    for group, rows in rows_of_groups(group_sizes):
        d_lhs[rows] = d_out[rows].astype(np.float64) @ rhs[group].astype(np.float64).T
        d_rhs[group] = lhs[rows].astype(np.float64).T @ d_out[rows].astype(np.float64)
    return d_lhs, d_rhs


def rows_of_groups(group_sizes):
    """Return pairs of a group and the slice of its rows; negative sizes are 0."""
    ends = np.cumsum([0, *np.maximum(group_sizes, 0)], dtype=np.int64).tolist()
    return enumerate(map(slice, ends, ends[1:]))


# ---- activations --------------------------------------------------------------------------------------------------

GELU_SCALE = np.sqrt(2 / np.pi)
GELU_CUBIC = 0.044715


def activate(name, z):
    """Return the activation and its derivative."""
    if name == "relu":
        return np.maximum(z, 0), (z > 0).astype(np.float64)
    if name == "silu":
        sigmoid = 1 / (1 + np.exp(-z))
        return z * sigmoid, sigmoid * (1 + z * (1 - sigmoid))
    if name == "gelu":
        tanh = np.tanh(GELU_SCALE * (z + GELU_CUBIC * z**3))
        inner = GELU_SCALE * (1 + 3 * GELU_CUBIC * z**2)
        return 0.5 * z * (1 + tanh), 0.5 * (1 + tanh) + 0.5 * z * (1 - tanh**2) * inner
    if name == "gelu_exact":
        share = 0.5 * (1 + np.vectorize(math.erf, [np.float64])(z / np.sqrt(2)))
        return z * share, share + z * np.exp(-0.5 * z**2) / np.sqrt(2 * np.pi)
    if name == "relu_squared":
        return np.maximum(z, 0) ** 2, 2 * np.maximum(z, 0)
    raise ValueError(f"unknown activation {name!r}")
