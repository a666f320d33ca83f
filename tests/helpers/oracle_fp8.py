"""The expert layer with recipe "fp8" in float64, with its roundings to FP8 and to the dtype of its tokens.

An independent implementation with loops over rows, forward and backward. Everything is rounded before it is sent or
multiplied: rows per 128 columns, weights per 128 x 128 block, and both operands of a weight gradient per column of 128
rows of the expert, counted from its first row.
"""

import numpy as np

import oracle


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

    def rounded(a):
        return a.astype(dtype).astype(np.float64)

    up, down = quantized_blocks(inputs.w_gate_up), quantized_blocks(inputs.w_down)
    x, cotangents = quantized_rows(inputs.x), quantized_rows(d_out.astype(dtype))
    y, d_x = (np.zeros((*lay.source.shape, x.shape[-1])) for _ in range(2))
    d_weights, d_up, d_down = (np.zeros(a.shape) for a in (inputs.topk_weights, up, down))
    for rank in range(len(x)):
        rows = lay.rows(rank)
        for expert in sorted({row[4] for row in rows}):
            parts = []
            for row, source, token, k, _ in (r for r in rows if r[4] == expert):
                weight = float(inputs.topk_weights[source, token, k])
                z = rounded(x[source, token] @ up[expert])
                hidden, slopes = oracle.expert_hidden(activation, z, down.shape[1])
                y[rank, row] = rounded(quantized_rows(weight * hidden) @ down[expert])
                d_row = rounded(cotangents[source, token] @ down[expert].T)
                d_weights[source, token, k] = hidden @ d_row
                d_z = rounded((weight * d_row * slopes).reshape(-1))
                d_x[rank, row] = rounded(quantized_rows(d_z) @ up[expert].T)
                parts.append((x[source, token], d_z, weight * hidden, cotangents[source, token]))
            tokens, d_zs, activated, arrived = (np.stack(part) for part in zip(*parts, strict=True))
            size = np.array([len(parts)])
            d_up[expert] = weight_gradient(tokens, d_zs, size)[0]
            d_down[expert] = weight_gradient(activated, arrived, size)[0]
    sums, d_tokens = (oracle.combine(a, lay, oracle.FP8) for a in (y, d_x))
    return sums, d_tokens, d_weights, d_up, d_down
