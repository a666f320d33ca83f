"""The oracle against an independent brute-force version, and its gradients against finite differences."""

import dataclasses

import numpy as np
import pytest

import oracle
import oracle_serving
from cases import BASE, F32, Shape, integers, reals
from routings import ROUTINGS

W = 4


@pytest.mark.parametrize("alignment", [1, 4])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_oracle_layout_is_sorted_assignments(rng, routing, alignment):
    topk_idx = ROUTINGS[routing](rng, W, BASE)
    lay = oracle.layout(topk_idx, BASE.num_experts, alignment=alignment)
    num_local = BASE.num_experts // W
    slots = [(int(topk_idx[at]), *at) for at in np.ndindex(*topk_idx.shape) if 0 <= topk_idx[at] < BASE.num_experts]
    assert lay.dropped.sum() == 0
    for rank in range(W):
        mine = sorted(slot for slot in slots if slot[0] // num_local == rank)
        assert [(e, s, t, k) for _, s, t, k, e in lay.rows(rank)] == mine
        counts = [sum(slot[0] == rank * num_local + i for slot in mine) for i in range(num_local)]
        assert all(size % alignment == 0 and 0 <= size - n < alignment
                   for size, n in zip(lay.group_sizes[rank], counts, strict=True))  # fmt: skip
        starts = np.cumsum(lay.group_sizes[rank]) - lay.group_sizes[rank]
        for row, _, _, _, expert in lay.rows(rank):
            local = expert - rank * num_local
            assert starts[local] <= row < starts[local] + counts[local]


@pytest.mark.parametrize("capacity", [4, 12, 20, 200])
def test_oracle_capacity_keeps_prefix(rng, capacity):
    topk_idx = ROUTINGS["zipf"](rng, W, BASE)
    whole = oracle.layout(topk_idx, BASE.num_experts, alignment=4, capacity=400)
    cut = oracle.layout(topk_idx, BASE.num_experts, alignment=4, capacity=capacity)
    for rank in range(W):
        kept = [row for row in whole.rows(rank) if row[0] < capacity]
        assert cut.rows(rank) == kept
        assert cut.dropped[rank] == len(whole.rows(rank)) - len(kept)
        used = np.minimum(np.cumsum(whole.group_sizes[rank]), capacity)
        np.testing.assert_array_equal(np.cumsum(cut.group_sizes[rank]), used)


def test_oracle_gather_and_combine_are_transposes(rng):
    topk_idx = ROUTINGS["duplicates"](rng, W, BASE)
    lay = oracle.layout(topk_idx, BASE.num_experts, alignment=4)
    x, y = integers(rng, W, BASE.num_tokens, 5), integers(rng, *lay.source.shape, 5)
    assert np.vdot(oracle.gather(x, lay), y) == np.vdot(x, oracle.combine(y, lay))
    weights, d_rows = integers(rng, *topk_idx.shape), integers(rng, *lay.source.shape)
    assert np.vdot(oracle.gather_weights(weights, lay), d_rows) == np.vdot(weights, oracle.scatter_weights(d_rows, lay))


def test_oracle_combine_rounds_partial_sums():
    topk_idx = np.array([[[0, 1]], [[-1, -1]]], np.int32)  # One token, one expert on each of two ranks.
    lay = oracle.layout(topk_idx, 2)
    y = np.zeros((2, *lay.source.shape[1:], 1), F32)
    y[0, 0], y[1, 0] = 257, 257  # bfloat16 holds only 256 and 258; ties go to even.
    assert oracle.combine(y, lay)[0, 0, 0] == 514
    assert oracle.combine(y, lay, np.dtype("bfloat16"))[0, 0, 0] == 512


def test_oracle_fp8_rounds_to_nearest(rng):
    grid = np.arange(256, dtype=np.uint8).view(oracle.FP8).astype(np.float64)
    grid = grid[np.isfinite(grid)]
    assert grid.max() == oracle.FP8_MAX
    x = reals(rng, 3, 256) * np.exp(4 * reals(rng, 3, 256))
    values, scales = oracle.quantize(x)
    for row, column in np.ndindex(*x.shape):
        scale = np.abs(x[row]).reshape(2, 128).max(-1)[column // 128] / oracle.FP8_MAX
        assert scales[row, column // 128] == scale
        quotient = np.float64(x[row, column] / scale)
        assert abs(float(values[row, column]) - quotient) == np.abs(grid - quotient).min()
    np.testing.assert_array_equal(oracle.dequantize(values, scales), values.astype(F32) * scales.repeat(128, -1))


def test_oracle_fp8_zeros():
    values, scales = oracle.quantize(np.zeros((2, 128), F32))
    assert not values.astype(F32).any()
    assert np.isfinite(scales).all()


def dense_moe(x, topk_idx, topk_weights, w_gate_up, w_down, gated, act):
    """Apply every expert to every token, then a weighted one-hot sum, without row lists."""
    z = np.einsum("wth,ehc->wtec", x, w_gate_up)
    size = w_down.shape[1]
    hidden = act(z[..., :size]) * (z[..., size:] if gated else 1)
    out = np.einsum("wtei,eih->wteh", hidden, w_down)
    gates = (topk_weights[..., None] * (topk_idx[..., None] == np.arange(len(w_down)))).sum(-2)
    return np.einsum("wte,wteh->wth", gates, out)


ACTIVATIONS = {
    "relu": lambda z: z * (z > 0),
    "silu": lambda z: z / (1 + np.exp(-z)),
    "gelu": lambda z: z / (1 + np.exp(-2 * np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))),
}


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_oracle_moe_and_gradients(rng, activation, gated):
    shape = Shape(num_tokens=3, top_k=3, num_experts=4, hidden=5, intermediate=3)
    topk_idx = ROUTINGS["some_without_expert"](rng, 2, shape)
    topk_idx[0, 0] = 1  # One expert three times.
    arrays = {
        "x": rng.standard_normal((2, 3, 5)),
        "topk_weights": rng.standard_normal((2, 3, 3)),
        "w_gate_up": rng.standard_normal((4, 5, 6 if gated else 3)),
        "w_down": rng.standard_normal((4, 3, 5)),
    }
    layer = oracle.MoE(**arrays, lay=oracle.layout(topk_idx, 4), activation=activation)
    want = dense_moe(topk_idx=topk_idx, gated=gated, act=ACTIVATIONS[activation], **arrays)
    np.testing.assert_allclose(layer.forward(), want, rtol=1e-12, atol=1e-12)
    cotangent = rng.standard_normal(want.shape)
    for (name, value), gradient in zip(arrays.items(), layer.gradients(cotangent), strict=True):
        for at in np.ndindex(*value.shape):
            ends = []
            for step in (1e-6, -1e-6):
                moved = value.copy()
                moved[at] += step
                ends.append(np.vdot(dataclasses.replace(layer, **{name: moved}).forward(), cotangent))
            np.testing.assert_allclose(gradient[at], (ends[0] - ends[1]) / 2e-6, rtol=1e-5, atol=1e-6)


def test_oracle_dropped_rows(rng):
    topk_idx = np.zeros((1, 3, 1), np.int32)  # Three rows for one expert, room for two.
    x, weights = rng.standard_normal((1, 3, 2)), np.ones((1, 3, 1))
    lay = oracle.layout(topk_idx, 1, capacity=2)
    out = oracle.MoE(x, weights, np.eye(2)[None], np.eye(2)[None], lay, "relu").forward()
    np.testing.assert_array_equal(out[0], np.maximum(x[0], 0) * [[1], [1], [0]])


def test_oracle_grouped_gemm(rng):
    lhs, rhs = integers(rng, 7, 3), integers(rng, 3, 3, 2)
    owner = [0, 0, 2, 2, 2, -1, -1]
    want = np.stack([lhs[i] @ rhs[g] if g >= 0 else np.zeros(2) for i, g in enumerate(owner)])
    np.testing.assert_array_equal(oracle.grouped_gemm(lhs, rhs, np.array([2, 0, 3])), want)
    d_out, d_lhs, d_rhs = integers(rng, 7, 2), np.zeros((7, 3)), np.zeros((3, 3, 2))
    for row, group in enumerate(owner):
        if group >= 0:
            d_lhs[row] = rhs[group] @ d_out[row]
            d_rhs[group] += np.outer(lhs[row], d_out[row])
    got = oracle.grouped_gemm_gradients(lhs, rhs, np.array([2, 0, 3]), d_out)
    np.testing.assert_array_equal(got[0], d_lhs)
    np.testing.assert_array_equal(got[1], d_rhs)


def test_oracle_moe_sort_example():
    topk_idx = np.array([[2, 0], [2, -1], [9, 2]], np.int32)
    weights = np.arange(1, 7, dtype=F32).reshape(3, 2)
    got = oracle_serving.moe_sort(topk_idx, weights, num_experts=4, block_size=2)
    assert got.slots.tolist() == [1, -1, 0, 2, 5, -1, -1, -1, -1, -1]  # P = round_up(6 + 4 * 1, 2)
    assert got.weights.tolist() == [2, 0, 1, 3, 6, 0, 0, 0, 0, 0]
    assert got.block_expert.tolist() == [0, 2, 2, -1, -1]
    assert got.group_sizes.tolist() == [2, 0, 4, 0]
    assert got.num_rows == 6


def test_oracle_low_latency_example(rng):
    # Two ranks, two experts, two tokens; token 1 of rank 0 has expert 1 twice.
    topk_idx = np.array([[[0, 1], [1, 1]], [[1, -1], [0, 1]]], np.int32)
    lay = oracle_serving.low_latency_layout(topk_idx, 2, max_tokens_per_rank=2)
    assert lay.token[0, 0].tolist() == [0, 1, -1, -1]
    assert lay.source[0, 0].tolist() == [0, 1, -1, -1]
    assert lay.token[1, 0].tolist() == [0, 1, 0, 1]
    assert lay.count[1, 0].tolist() == [2, 2]
    assert lay.start[1, 0].tolist() == [0, 2]
    assert lay.group_sizes.tolist() == [[2], [4]]
    y, weights = integers(rng, 2, 1, 4, 3), integers(rng, 2, 2, 2)
    out = oracle_serving.low_latency_combine(y, topk_idx, weights, lay)
    np.testing.assert_array_equal(out[0, 1], (weights[0, 1, 0] + weights[0, 1, 1]) * y[1, 0, 1])
    np.testing.assert_array_equal(out[1, 0], weights[1, 0, 0] * y[1, 0, 2])
    fewer = oracle_serving.low_latency_layout(topk_idx, 2, 2, num_tokens=np.array([1, 2]))
    assert fewer.token[1, 0].tolist() == [0, 0, 1, -1]
