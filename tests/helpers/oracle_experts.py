"""Layers of experts, the activations between their matmuls, and derivatives of both, in float64."""

from typing import NamedTuple

import numpy as np

import jax_ep
import oracle

GPT_OSS = jax_ep.Experts(interleaved=True, alpha=1.702, clamp=7.0, up_offset=1.0)
LLAMA_4 = jax_ep.Experts(weight_on="input")


class Gradient(NamedTuple):
    """Cotangents of hidden rows `[R, N]`, of their weights `[R]`, and of the biases `[G, N]`."""

    hidden: np.ndarray
    weights: np.ndarray
    bias: np.ndarray


def _pieces(experts, hidden):
    """Split hidden rows into gate and up; up is one without gates."""
    if not experts.gated:
        return hidden, np.ones_like(hidden)
    if experts.interleaved:
        return hidden[:, 0::2], hidden[:, 1::2]
    return tuple(np.split(hidden, 2, axis=1))


def _activate(experts, gate):
    if experts.activation != "silu":
        return oracle.activate(experts.activation, gate)
    value, slope = oracle.activate("silu", experts.alpha * gate)
    return value / experts.alpha, slope


def expert_rows(experts, hidden, weights, d_rows, bias=None, groups=None):
    """Return rows `[R, I]` and the gradient for their cotangent `d_rows`; `bias [G, N]` belongs to `groups [R]`."""
    hidden, weights, d_rows = (x.astype(np.float64) for x in (hidden, weights, d_rows))
    on_input = experts.weight_on == "input"
    wide = hidden * weights[:, None] if on_input else hidden
    if bias is not None:
        wide = wide + bias.astype(np.float64)[groups]
    gate, up = _pieces(experts, wide)
    limit = np.inf if experts.clamp is None else experts.clamp
    with np.errstate(over="ignore"):
        value, slope = _activate(experts, np.minimum(gate, limit))
    factor = np.clip(up, -limit, limit) + experts.up_offset if experts.gated else up
    rows = value * factor
    d_products = d_rows if on_input else d_rows * weights[:, None]
    d_gate = d_products * slope * factor * (gate <= limit)
    d_up = d_products * value * (np.abs(up) <= limit)
    d_wide = d_gate
    if experts.gated:
        d_wide = np.empty_like(wide)
        gates, others = _pieces(experts, d_wide)  # Views.
        gates[...], others[...] = d_gate, d_up
    d_bias = np.zeros((0, wide.shape[1]))
    if bias is not None and groups is not None:
        d_bias = np.zeros(bias.shape)
        np.add.at(d_bias, groups, d_wide)
    if on_input:
        return rows, Gradient(d_wide * weights[:, None], np.sum(d_wide * hidden, axis=1), d_bias)
    return rows * weights[:, None], Gradient(d_wide, np.sum(rows * d_rows, axis=1), d_bias)


class Arrays(NamedTuple):
    """Arrays of a layer, or their cotangents: tokens of all ranks, and weights and biases of all experts, or None."""

    x: np.ndarray
    topk_weights: np.ndarray
    w_gate_up: np.ndarray
    w_down: np.ndarray
    b_gate_up: np.ndarray | None = None
    b_down: np.ndarray | None = None


def layer(experts, arrays, lay, d_out):
    """Return the output and cotangents of the layer; hidden rows are rounded as there: derivatives jump at limits."""
    wide = Arrays(*(None if a is None else a.astype(np.float64) for a in arrays))
    found = [row[1:] for rank in range(len(arrays.x)) for row in lay.rows(rank)]
    source, token, k, expert = np.array(found, np.int64).reshape(-1, 4).T
    x, weights, d_y = wide.x[source, token], wide.topk_weights[source, token, k], d_out[source, token]
    hidden = np.einsum("rh,rhn->rn", x, wide.w_gate_up[expert]).astype(arrays.x.dtype).astype(np.float64)
    d_rows = np.einsum("rh,rih->ri", d_y, wide.w_down[expert])
    rows, of_rows = expert_rows(experts, hidden, weights, d_rows, wide.b_gate_up, expert)
    y = np.einsum("ri,rih->rh", rows, wide.w_down[expert])
    scales = weights if experts.weight_on == "output" else np.ones_like(weights)
    gradient = Arrays(*(None if a is None else np.zeros(a.shape) for a in wide))
    if wide.b_down is not None:
        y += scales[:, None] * wide.b_down[expert]
        np.add.at(gradient.b_down, expert, scales[:, None] * d_y)
        gradient.b_gate_up[...] = of_rows.bias
        if experts.weight_on == "output":
            gradient.topk_weights[source, token, k] += np.sum(d_y * wide.b_down[expert], axis=1)
    gradient.topk_weights[source, token, k] += of_rows.weights
    np.add.at(gradient.x, (source, token), np.einsum("rn,rhn->rh", of_rows.hidden, wide.w_gate_up[expert]))
    np.add.at(gradient.w_gate_up, expert, np.einsum("rh,rn->rhn", x, of_rows.hidden))
    np.add.at(gradient.w_down, expert, np.einsum("ri,rh->rih", rows, d_y))
    out = np.zeros(wide.x.shape)
    np.add.at(out, (source, token), y)
    return out, gradient


class MoE(NamedTuple):
    """A layer with global weights `w_gate_up [E, H, 2I or I]`, `w_down [E, I, H]`, of the rows of a layout."""

    x: np.ndarray
    topk_weights: np.ndarray
    w_gate_up: np.ndarray
    w_down: np.ndarray
    lay: oracle.Layout
    activation: str = "silu"

    def _layer(self, d_out):
        experts = jax_ep.Experts(self.activation, gated=self.w_gate_up.shape[2] > self.w_down.shape[1])
        return layer(experts, Arrays(*(a.astype(np.float64) for a in self[:4])), self.lay, d_out)

    def forward(self):
        return self._layer(np.zeros(self.x.shape))[0]

    def gradients(self, d_out):
        """Return (dx, dtopk_weights, dw_gate_up, dw_down) for the cotangent `d_out [W, T, H]`."""
        return self._layer(d_out)[1][:4]


def sigmoid_layer(x, topk_idx, router, w_gate_up, w_down):
    """Return output, balance loss and z-loss of tokens `[N, H]` with these experts, by renormalized sigmoid scores."""
    logits, num_experts = x @ router, router.shape[1]
    scores = 1 / (1 + np.exp(-logits))
    weights = np.where(topk_idx < 0, 0, np.take_along_axis(scores, np.maximum(topk_idx, 0), 1))
    weights /= np.maximum(weights.sum(1, keepdims=True), 1e-300)
    lay = oracle.layout(topk_idx[None], num_experts)
    y = MoE(x[None], weights[None], w_gate_up, w_down, lay).forward()[0]
    load = np.bincount(topk_idx[topk_idx >= 0], minlength=num_experts)
    share = (scores / scores.sum(1, keepdims=True)).mean(0)
    return y, num_experts * (load / load.sum()) @ share, np.mean(np.log(np.exp(logits).sum(1)) ** 2)
