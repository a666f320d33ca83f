"""Activations with biases on every implementation: values and gradients against the oracle."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
import oracle
from cases import BASE, BF16, F32, Shape, assert_close, reals, relative_error
from harness import compiled, run
from jax_ep.quantization import quantize
from layers import Layer, with_gradients
from oracle_experts import GPT_OSS, LLAMA_4, Arrays, layer

WIDE = Shape(hidden=128, intermediate=128)
CASES = {
    "gpt-oss": (GPT_OSS, True),
    "llama 4": (LLAMA_4, False),
    "biases of plain experts": (jax_ep.Experts("gelu_exact"), True),
    "no gates": (jax_ep.Experts("relu_squared", gated=False, clamp=1.0), True),
    "weights and biases on the input": (jax_ep.Experts("gelu", weight_on="input"), True),
}


class Inputs:
    """Random inputs of a layer with experts, and the oracle's result."""

    def __init__(self, rng, experts, bias, num_ranks, shape, dtype):
        self.experts, self.shape = experts, shape
        self.layer = Layer(rng, "duplicates", num_ranks, shape, dtype, gated=experts.gated)
        self.layer.w_gate_up *= 3  # So that limits are reached.
        num_experts, hidden, columns = self.layer.w_gate_up.shape
        self.biases = (reals(rng, num_experts, columns, dtype=dtype), reals(rng, num_experts, hidden, dtype=dtype))
        self.biases = self.biases if bias else (None, None)
        self.d_out = reals(rng, *self.layer.x.shape, dtype=dtype)

    @property
    def args(self):
        return *self.layer.args, *(None if b is None else self.layer.per_rank(b) for b in self.biases)

    def answer(self, **layout):
        of = self.layer
        lay = oracle.layout(of.topk_idx, len(of.w_down), **layout)
        arrays = Arrays(of.x, of.topk_weights, of.w_gate_up, of.w_down, *self.biases)
        out, gradient = layer(self.experts, arrays, lay, self.d_out.astype(np.float64))
        by_rank = [of.per_rank(part) for part in gradient[2:] if part is not None]
        return out, (gradient.x, gradient.topk_weights, *by_rank)


def moe(implementation, inputs, **options):
    run = functools.partial(jax_ep.moe, num_experts=inputs.shape.num_experts, implementation=implementation)

    def call(x, topk_idx, topk_weights, w_gate_up, w_down, b_gate_up, b_down):
        arrays = (x, topk_idx, topk_weights, w_gate_up, w_down)
        return run(*arrays, experts=inputs.experts, biases=(b_gate_up, b_down), **options)

    return call


def assert_near(got, want, what):
    """Compare in the norm: a sum that rounds to the other side of a limit has another derivative."""
    error = relative_error(got, want)
    assert error < 0.05, f"{what}: off by {error}"


IN_BF16 = ("gpt-oss", "llama 4")


@pytest.mark.parametrize(
    ("case", "dtype"), [*((case, F32) for case in CASES), *((case, BF16) for case in IN_BF16)], ids=str
)
@pytest.mark.slow(unless={"dtype": [BF16]})
def test_experts_values_and_gradients(implementation, case, dtype, expert_mesh, rng):
    inputs = Inputs(rng, *CASES[case], 2, BASE, dtype)
    y, *gradients = run(with_gradients(moe(implementation, inputs)), expert_mesh(2), *inputs.args, inputs.d_out)
    want, wanted = inputs.answer()
    assert_close(y, want, "y")
    names = ("x", "weights", "w_gate_up", "w_down", "b_gate_up", "b_down")
    for name, g, w in zip(names, gradients, wanted, strict=False):
        if dtype == F32:
            assert_close(g, w, name)
        else:
            assert_near(g, w, name)


@pytest.mark.parametrize("case", ["plain", "gpt-oss in halves", "gpt-oss"])
@pytest.mark.slow(unless={"case": ["plain"]})
def test_experts_inference_matches_training(implementation, case, expert_mesh, rng):
    """Up to the rounding of hidden rows, which do not exist without gradients."""
    halves = dataclasses.replace(GPT_OSS, interleaved=False)
    experts = {"plain": jax_ep.Experts(), "gpt-oss in halves": halves, "gpt-oss": GPT_OSS}[case]
    inputs = Inputs(rng, experts, False, 2, BASE, BF16)
    call, mesh = moe(implementation, inputs), expert_mesh(2)
    y = run(call, mesh, *inputs.args)
    trained, *_ = run(with_gradients(call), mesh, *inputs.args, inputs.d_out)
    assert_close(y, trained)
    assert_close(y, inputs.answer()[0])


@pytest.mark.parametrize("mode", ["scatter", "serial"])
def test_experts_bias_combine_modes(implementation, mode, expert_mesh, rng):
    if implementation == "xla":
        pytest.skip("xla has one mode, that of test_experts_values_and_gradients")
    inputs = Inputs(rng, GPT_OSS, True, 2, WIDE, BF16)
    schedule = jax_ep.Schedule(combine_mode=mode)
    call = with_gradients(moe(implementation, inputs, schedule=schedule))
    y, *gradients = run(call, expert_mesh(2), *inputs.args, inputs.d_out)
    want, wanted = inputs.answer()
    assert_close(y, want, mode)
    for g, w in zip(gradients, wanted, strict=True):
        assert_near(g, w, mode)


def test_experts_dropped_rows_have_no_bias(implementation, expert_mesh, rng):
    inputs = Inputs(rng, GPT_OSS, True, 2, BASE, F32)
    got = run(moe(implementation, inputs, capacity=7), expert_mesh(2), *inputs.args)
    assert_close(got, inputs.answer(capacity=7)[0], "moe")


@pytest.mark.slow(unless={"implementation": ["triton"]})
def test_experts_fp8_gemm(implementation, expert_mesh, rng):
    """About as far from the exact layer as one without biases; limits would make the derivatives jump."""
    inputs = Inputs(rng, dataclasses.replace(GPT_OSS, clamp=None), True, 2, WIDE, BF16)
    call = moe(implementation, inputs, recipe="fp8")
    y, *gradients = run(with_gradients(call), expert_mesh(2), *inputs.args, inputs.d_out)
    want, wanted = inputs.answer()
    for g, w in zip((y, *gradients), (want, *wanted), strict=True):
        assert relative_error(g, w) < 0.15


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("case", ["gpt-oss", "llama 4", "no gates"])
@pytest.mark.slow(unless={"case": ["gpt-oss"]})
def test_experts_low_latency(implementation, case, fp8, expert_mesh, rng):
    inputs = Inputs(rng, *CASES[case], 2, WIDE, BF16)

    def call(x, topk_idx, weights, w_gate_up, w_down, b_gate_up, b_down):
        matrices = [quantize(w, "fp8", activations="fp8") if fp8 else w for w in (w_gate_up, w_down)]
        options = {"num_experts": inputs.shape.num_experts, "implementation": implementation}
        options |= {"experts": inputs.experts, "biases": (b_gate_up, b_down)}
        return jax_ep.low_latency_moe(x, topk_idx, weights, *matrices, **options)

    got, want = run(call, expert_mesh(2), *inputs.args), inputs.answer()[0]
    assert relative_error(got, want) < (0.12 if fp8 else 0.01)


def test_experts_custom_activation(implementation, expert_mesh, rng):
    """A custom activation with its own parameters, whose gradient ignores rows without a token."""
    inputs = Inputs(rng, jax_ep.Experts(), False, 2, BASE, BF16)
    slope = rng.standard_normal((2, BASE.intermediate)).astype(np.float32)

    def loss(slope, x, topk_idx, weights, w_gate_up, w_down, d_out, experts):
        y = jax_ep.moe(
            x, topk_idx, weights, w_gate_up, w_down,
            num_experts=BASE.num_experts, experts=experts, implementation=implementation,
        )  # fmt: skip
        return jnp.sum(y.astype(jnp.float32) * d_out.astype(jnp.float32))

    def own(slope, *args):
        def function(hidden):
            gate, up = jnp.split(hidden.astype(jnp.float32), 2, axis=-1)
            return (jnp.tanh(gate * slope[None]) * up).astype(hidden.dtype)

        return loss(slope, *args, jax_ep.Experts(function))

    d_slope, d_x = run(jax.grad(own, (0, 1)), expert_mesh(2), slope, *inputs.layer.args, inputs.d_out)
    of, shape = inputs.layer, BASE
    wide = [a.astype(np.float64) for a in (of.x, of.topk_weights, of.w_gate_up, of.w_down, inputs.d_out, slope)]
    x, weights, w_gate_up, w_down, d_out, slopes = wide
    want_slope, want_x = np.zeros(slope.shape), np.zeros(x.shape)
    for source, token, k in np.ndindex(of.topk_idx.shape):
        expert = of.topk_idx[source, token, k]
        if expert < 0:
            continue
        own_slope = slopes[expert // (shape.num_experts // 2)]
        gate, up = np.split(x[source, token] @ w_gate_up[expert], 2)
        d_rows = weights[source, token, k] * (w_down[expert] @ d_out[source, token])
        bent = d_rows * up * (1 - np.tanh(gate * own_slope) ** 2)
        want_slope[expert // (shape.num_experts // 2)] += bent * gate
        d_hidden = np.concatenate([bent * own_slope, d_rows * np.tanh(gate * own_slope)])
        want_x[source, token] += w_gate_up[expert] @ d_hidden
    assert_close(d_slope, want_slope, "slope", tolerance=0.05)
    assert_close(d_x, want_x, "x", tolerance=0.05)


@pytest.mark.parametrize("count", [0, 3, 99])
@pytest.mark.slow(unless={"count": [3]})
@pytest.mark.slow_interpreted
def test_experts_padding(implementation, count, expert_mesh, rng):
    """Tokens whose ids are all -1 may hold anything, and get zeros."""
    inputs = Inputs(rng, GPT_OSS, True, 2, BASE, F32)
    past = np.arange(BASE.num_tokens)[None, :] >= np.array([count, 5])[:, None]
    call, ids = with_gradients(moe(implementation, inputs)), np.where(past[:, :, None], -1, inputs.layer.topk_idx)
    x, _, *others = inputs.args
    padded = np.where(past[:, :, None], np.nan, x).astype(F32)
    want, *wanted = run(call, expert_mesh(2), x, ids, *others, inputs.d_out)
    got, *gradients = run(call, expert_mesh(2), padded, ids, *others, inputs.d_out)
    np.testing.assert_array_equal(got, want)
    for g, w in zip(gradients, wanted, strict=True):
        np.testing.assert_array_equal(g, w)
    assert not got[past].any()


def test_dispatch_num_tokens(implementation, expert_mesh, rng):
    of = Layer(rng, "uniform", 2, BASE)

    def rows(x, topk_idx, num_tokens):
        options = {"num_experts": BASE.num_experts, "implementation": implementation}
        found = jax_ep.dispatch(x, topk_idx, num_tokens=num_tokens, **options)
        return found.group_sizes, found.tokens, jax_ep.row_experts(found.handle)

    counts = np.array([2, 4], np.int32)
    sizes, tokens, experts = compiled(rows, expert_mesh(2))(of.x, of.topk_idx, counts)
    ids = np.where(np.arange(BASE.num_tokens)[None, :, None] < counts[:, None, None], of.topk_idx, -1)
    lay = oracle.layout(ids, BASE.num_experts)
    for rank in range(2):
        found = list(lay.rows(rank))
        assert sizes[rank].sum() == len(found)
        num_local = BASE.num_experts // 2
        for row, source, token, _, expert in found:
            np.testing.assert_array_equal(tokens[rank, row], of.x[source, token])
            assert experts[rank, row] == expert % num_local
        assert (np.delete(experts[rank], [row for row, *_ in found]) == -1).all()
