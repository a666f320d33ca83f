"""The expert layer with recipe "fp8" in float64, with its roundings to FP8 and to the dtype of its tokens.

An independent implementation, expert by expert, forward and backward. Everything is rounded before it is sent or
multiplied: rows per 128 columns, weights per 128 x 128 block, and both operands of a weight gradient per column of 128
rows of the expert, counted from its first row.
"""

import numpy as np

import jax_ep
import oracle
from oracle_experts import expert_rows


def quantized_blocks(w):
    """Round `[E, K, N]` to FP8 with one scale per 128 x 128 block, whole blocks only."""
    experts, depth, columns = w.shape
    blocks = w.astype(np.float32).reshape(experts, depth // 128, 128, columns // 128, 128).transpose(0, 1, 3, 2, 4)
    flat = oracle.dequantize(*oracle.quantize(blocks.reshape(*blocks.shape[:3], -1), 128 * 128), np.float64)
    return flat.reshape(blocks.shape).transpose(0, 1, 3, 2, 4).reshape(w.shape)


def quantized_rows(x):
    """Round `[..., H]` per 128 columns."""
    return oracle.to_wire(x.astype(np.float32), oracle.FP8).astype(np.float64)


def quantized_columns(x):
    """Round the rows `[n, H]` of one expert per column of 128 rows; the last block may be shorter."""
    out = np.zeros(x.shape)
    for start in range(0, len(x), 128):
        block = x[start : start + 128].T
        whole = np.zeros((block.shape[0], 128))
        whole[:, : block.shape[1]] = block
        out[start : start + 128] = quantized_rows(whole)[:, : block.shape[1]].T
    return out


def weight_gradient(lhs, rhs, group_sizes):
    """Multiply `[M, K]` and `[M, N]` rows, rounded column-wise, to float64 `[G, K, N]`."""
    out = np.zeros((len(group_sizes), lhs.shape[1], rhs.shape[1]))
    for group, rows in oracle.rows_of_groups(group_sizes):
        out[group] = quantized_columns(lhs[rows].astype(np.float64)).T @ quantized_columns(rhs[rows].astype(np.float64))
    return out


def layer(inputs, d_out, activation="silu"):
    """Return the result of a `layers.Layer`, and the cotangents of x, router weights and both weights for `d_out`."""
    dtype, lay = inputs.x.dtype, oracle.layout(inputs.topk_idx, len(inputs.w_down))
    experts = jax_ep.Experts(activation, gated=inputs.w_gate_up.shape[2] > inputs.w_down.shape[1])

    def rounded(a):
        return a.astype(dtype).astype(np.float64)

    up, down = quantized_blocks(inputs.w_gate_up), quantized_blocks(inputs.w_down)
    x, cotangents = quantized_rows(inputs.x), quantized_rows(d_out.astype(dtype))
    y, d_x = (np.zeros((*lay.source.shape, x.shape[-1])) for _ in range(2))
    d_weights, d_up, d_down = (np.zeros(a.shape) for a in (inputs.topk_weights, up, down))
    for rank in range(len(x)):
        rows = lay.rows(rank)
        for expert in sorted({row[4] for row in rows}):
            row, source, token, k = np.array([row[:4] for row in rows if row[4] == expert]).T
            tokens, arrived = x[source, token], cotangents[source, token]
            hidden, d_rows = rounded(tokens @ up[expert]), rounded(arrived @ down[expert].T)
            weights = inputs.topk_weights[source, token, k]
            activated, gradient = expert_rows(experts, hidden, weights, d_rows)
            y[rank, row] = rounded(quantized_rows(activated) @ down[expert])
            d_weights[source, token, k] = gradient.weights
            d_hidden = rounded(gradient.hidden)
            d_x[rank, row] = rounded(quantized_rows(d_hidden) @ up[expert].T)
            size = np.array([len(row)])
            d_up[expert] = weight_gradient(tokens, d_hidden, size)[0]
            d_down[expert] = weight_gradient(activated, arrived, size)[0]
    sums, d_tokens = (oracle.combine(a, lay, oracle.FP8) for a in (y, d_x))
    return sums, d_tokens, d_weights, d_up, d_down
