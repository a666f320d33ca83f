"""The weighted activation and its gradient in the interpreter, against the oracle."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
from cases import assert_close
from jax_ep.core.activations import ACTIVATIONS
from jax_ep.megakernels import activation as kernels

# Groups that end within a block of rows, and columns that end within a block of columns.
ROWS, INNER, SIZES = 23, 520, [5, 0, 13]
VARIANTS = [(name, gated) for name in ACTIVATIONS for gated in (True, False)]


def inputs(rng, gated, dtype=jnp.bfloat16):
    """Some hidden values are far out, where exponentials overflow; what lies past the groups is NaN."""
    hidden = rng.standard_normal((ROWS, INNER * (2 if gated else 1))) * rng.choice([1, 30], (ROWS, 1))
    hidden[0, :4] = 300, -300, 0, -0.0
    weights, d_rows = rng.random(ROWS).astype(np.float32), rng.standard_normal((ROWS, INNER))
    arrays = [x.astype(dtype) for x in (hidden, d_rows)]
    for x in (*arrays, weights):
        x[sum(SIZES) :] = np.nan
    return arrays[0], weights, arrays[1], np.array(SIZES, np.int32)


def expected(name, gated, hidden, weights, d_rows):
    """Rows, d_hidden and d_weights in float64."""
    hidden, weights, d_rows = (x.astype(np.float64) for x in (hidden, weights, d_rows))
    with np.errstate(over="ignore"):
        value, slope = oracle.activate(name, hidden[:, :INNER])
    up = hidden[:, INNER:] if gated else np.ones_like(value)
    d_products = d_rows * weights[:, None]
    d_hidden = [d_products * up * slope, d_products * value]
    rows = value * up
    return rows * weights[:, None], np.concatenate(d_hidden[: 1 + gated], axis=1), np.sum(rows * d_rows, axis=1)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(("name", "gated"), VARIANTS)
def test_values_and_gradients(pool, rng, name, gated, dtype):
    hidden, weights, d_rows, sizes = inputs(rng, gated, dtype)
    used = sum(SIZES)
    options = {"activation": name, "gated": gated}
    rows = kernels.activate(*map(jnp.asarray, (hidden, weights, sizes)), **options)
    gradient = kernels.activate_gradient(*map(jnp.asarray, (hidden, weights, d_rows, sizes)), **options)
    got = [np.asarray(x) for x in (rows, *gradient)]
    assert [x.dtype for x in got] == [dtype, dtype, np.float32]
    wanted = expected(name, gated, hidden[:used], weights[:used], d_rows[:used])
    for part, g, w in zip(("rows", "d_hidden", "d_weights"), got, wanted, strict=True):
        assert_close(g[:used], w, part)
    assert not got[2][used:].any(), "weights without a row have no gradient"
    for part in got[:2]:
        assert (part[used:].view(np.uint16) == 0xFFFF).all(), "rows past the groups were written"


def test_the_portable_formulas_agree(pool, rng):
    """To rounding, on the rows in use, whatever JAX makes of them."""
    hidden, weights, d_rows, sizes = inputs(rng, True)
    for x in (hidden, weights, d_rows):
        x[sum(SIZES) :] = 0
    calls = (
        partial(kernels.activate, activation="silu", gated=True),
        partial(kernels.activate_gradient, activation="silu", gated=True),
    )
    arrays = [jnp.asarray(x) for x in (hidden, weights, d_rows)]
    double = [jnp.asarray(x, jnp.float32) for x in (hidden, weights, d_rows)]
    used = sum(SIZES)
    for call, number in zip(calls, (2, 3), strict=True):
        got = jax.tree.leaves(call(*arrays[:number], jnp.asarray(sizes)))
        wanted = jax.tree.leaves(call(*double[:number], jnp.asarray(sizes)))
        for g, w in zip(got, wanted, strict=True):
            assert_close(np.asarray(g)[:used], np.asarray(w)[:used], "portable")


def test_nan_and_infinity_stay_in_their_elements(pool, rng):
    hidden, weights, d_rows, sizes = inputs(rng, True)
    hidden[2, 7], hidden[3, INNER + 9] = np.nan, np.inf
    for name in ACTIVATIONS:
        options = {"activation": name, "gated": True}
        rows = np.asarray(kernels.activate(*map(jnp.asarray, (hidden, weights, sizes)), **options))[: sum(SIZES)]
        assert np.isnan(rows[2, 7]) and np.isfinite(np.delete(rows, [2, 3], axis=0)).all()
        arrays = map(jnp.asarray, (hidden, weights, d_rows, sizes))
        d_hidden, d_weights = map(np.asarray, kernels.activate_gradient(*arrays, **options))
        assert np.isfinite(np.delete(d_hidden[: sum(SIZES)], [2, 3], axis=0)).all()
        assert np.isnan(d_weights[2]) and np.isfinite(np.delete(d_weights, [2, 3])).all()
