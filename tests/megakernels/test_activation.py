"""The weighted activation and its gradient in the interpreter, against the oracle."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from cases import assert_close, assert_same_bits
from jax_ep import Experts
from jax_ep.core.activations import HiddenRows
from jax_ep.megakernels import activation as kernels
from jax_ep.types import ACTIVATIONS
from oracle_experts import GPT_OSS, LLAMA_4, expert_rows

# Groups that end within a block of rows, and columns that end within a block of columns.
ROWS, INNER, SIZES = 23, 520, [5, 0, 13]
GROUPS = np.repeat(np.arange(len(SIZES)), SIZES)
PLAIN = [Experts(name, gated=gated) for name in ACTIVATIONS for gated in (True, False)]
OTHERS = [GPT_OSS, LLAMA_4, Experts("relu_squared", clamp=2.0), Experts("gelu", gated=False, weight_on="input")]


def inputs(rng, experts, dtype=jnp.bfloat16, bias=False):
    """Draw hidden values, some so large that exponentials overflow; rows past the groups are NaN."""
    columns = INNER * (2 if experts.gated else 1)
    hidden = rng.standard_normal((ROWS, columns)) * rng.choice([1, 30], (ROWS, 1))
    hidden[0, :4] = 300, -300, 0, -0.0
    weights, d_rows = rng.random(ROWS).astype(np.float32), rng.standard_normal((ROWS, INNER))
    arrays = [x.astype(dtype) for x in (hidden, d_rows)]
    for x in (*arrays, weights):
        x[sum(SIZES) :] = np.nan
    biases = rng.standard_normal((len(SIZES), columns)).astype(dtype) if bias else None
    return arrays[0], weights, biases, arrays[1], np.array(SIZES, np.int32)


def run(experts, hidden, weights, bias, d_rows, sizes):
    """Return rows, and cotangents of hidden rows and of weights."""
    operands = HiddenRows(*(None if x is None else jnp.asarray(x) for x in (hidden, weights, bias, sizes)))
    rows = kernels.activate(experts, operands)
    *gradient, again = kernels.activate_gradient(experts, operands, jnp.asarray(d_rows), keep=True)
    assert_same_bits(again, rows)
    *alone, nothing = kernels.activate_gradient(experts, operands, jnp.asarray(d_rows), keep=False)
    for one, other in zip(alone, gradient, strict=True):
        assert_same_bits(one, other)
    assert nothing is None
    return [np.asarray(x) for x in (rows, *gradient)]


@pytest.mark.parametrize(
    ("experts", "bias", "dtype"),
    [(experts, False, jnp.bfloat16) for experts in PLAIN]
    + [(experts, False, jnp.float16) for experts in PLAIN if experts.activation != "relu_squared"]  # It overflows.
    + [(experts, False, jnp.bfloat16) for experts in OTHERS]
    + [(experts, True, jnp.bfloat16) for experts in OTHERS if experts.weight_on == "output"],
    ids=str,
)
def test_activation_values_and_gradients(pool, rng, experts, bias, dtype):
    hidden, weights, biases, d_rows, sizes = inputs(rng, experts, dtype, bias)
    used = sum(SIZES)
    got = run(experts, hidden, weights, biases, d_rows, sizes)
    assert [x.dtype for x in got] == [dtype, dtype, np.float32]
    rows, gradient = expert_rows(experts, hidden[:used], weights[:used], d_rows[:used], biases, GROUPS)
    wanted = (rows, gradient.hidden, gradient.weights)
    for part, g, w in zip(("rows", "d_hidden", "d_weights"), got, wanted, strict=True):
        assert_close(g[:used], w, part)
    assert not got[2][used:].any(), "weights without a row have no gradient"
    for part in got[:2]:
        assert (part[used:].view(np.uint16) == 0xFFFF).all(), "rows past the groups were written"


def test_activation_nan_and_infinity(pool, rng):
    for experts in (*(Experts(name) for name in ACTIVATIONS), dataclasses.replace(GPT_OSS, interleaved=False)):
        hidden, weights, _, d_rows, sizes = inputs(rng, experts)
        hidden[2, 7], hidden[3, INNER + 9] = np.nan, np.inf
        rows, d_hidden, d_weights = run(experts, hidden, weights, None, d_rows, sizes)
        rows = rows[: sum(SIZES)]
        assert np.isnan(rows[2, 7]) and np.isfinite(np.delete(rows, [2, 3], axis=0)).all()
        assert np.isfinite(np.delete(d_hidden[: sum(SIZES)], [2, 3], axis=0)).all()
        assert np.isnan(d_weights[2]) and np.isfinite(np.delete(d_weights, [2, 3])).all()
