"""`jax_ep.Experts` as a value: rejected fields, and that equal values are one to `jit`."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
from jax_ep import Experts
from jax_ep.serving import serving_weights
from stored_experts import dense

WRONG = [
    ({"activation": "swish"}, ValueError, "swish", "silu"),
    ({"activation": 3}, TypeError, r"\bint\b", "JAX function"),
    ({"gated": 1}, TypeError, "gated=1", "True or False"),
    ({"clamp": 0.0}, ValueError, r"clamp=0\.0", "positive"),
    ({"clamp": 1e-46}, ValueError, "clamp=1e-46", "positive"),
    ({"up_offset": 1e39}, ValueError, r"up_offset=1e\+39", "finite float32"),
    ({"clamp": "7"}, TypeError, "clamp", "number"),
    ({"alpha": float("nan")}, ValueError, "alpha=nan", "finite"),
    ({"up_offset": True}, TypeError, "up_offset", "number"),
    ({"weight_on": "both"}, ValueError, "both", "'output' or 'input'"),
    ({"activation": "relu", "alpha": 2.0}, ValueError, "alpha", "silu"),
    ({"gated": False, "interleaved": True}, ValueError, "interleaved", "without a gate"),
    ({"gated": False, "up_offset": 1.0}, ValueError, "up_offset", "without a gate"),
    ({"activation": jax.nn.silu, "clamp": 1.0}, ValueError, "clamp", "custom activation"),
]


@pytest.mark.parametrize(("fields", "error", "got", "remedy"), WRONG, ids=[" ".join(w[0]) for w in WRONG])
def test_experts_wrong_values(fields, error, got, remedy):
    with pytest.raises(error) as caught:
        Experts(**fields)
    assert re.search(got, str(caught.value)) and re.search(remedy, str(caught.value)), caught.value


def test_experts_equal_values_compile_once():
    traced = []

    @jax.jit
    def layer(x):
        traced.append(x)
        ids, weights = jnp.zeros((2, 1), jnp.int32), jnp.ones((2, 1))
        options = {"experts": Experts(clamp=2.0), "implementation": "xla"}
        return jax_ep.fused_moe(x, ids, weights, jnp.ones((1, 4, 6)), jnp.ones((1, 3, 4)), **options)

    layer(jnp.ones((2, 4))), layer(jnp.zeros((2, 4)))
    assert len(traced) == 1 and Experts(clamp=2.0) == Experts(clamp=2) and len({Experts(), Experts()}) == 1


def test_experts_fp8_padding_with_gates(rng):
    """Columns of zeros are added to gate and up, in either layout, and to biases."""
    inner, hidden = 96, 128
    w = jnp.asarray(rng.standard_normal((2, hidden, 2 * inner)), jnp.float32)
    bias = jnp.asarray(rng.standard_normal((2, 2 * inner)), jnp.float32)
    down = jnp.asarray(rng.standard_normal((2, inner, hidden)), jnp.float32)
    for experts in (Experts(), Experts(interleaved=True), Experts("relu", gated=False)):
        columns = 2 * inner if experts.gated else inner
        make = jax.jit(partial(serving_weights, format="fp8", experts=experts))
        found = make(w[..., :columns], down, biases=(bias[:, :columns], None))
        values = np.asarray(dense(found.w_gate_up, dtype=jnp.float32)).mT
        assert values.shape == (2, columns // inner * 128, hidden)
        pick = [values, np.asarray(found.b_gate_up)[..., None]]
        if experts.interleaved:
            pick = [x.reshape(2, 128, 2, -1).swapaxes(1, 2) for x in pick]
        kinds, biases = (x.reshape(2, columns // inner, 128, -1) for x in pick)
        assert not kinds[:, :, inner:].any() and not biases[:, :, inner:].any()
        assert kinds[:, :, :inner].any(axis=-1).all() and biases[:, :, :inner].all()


def test_experts_custom_activation_not_padded():
    w, down = jnp.ones((2, 128, 96)), jnp.ones((2, 96, 128))
    with pytest.raises(ValueError, match=r"96.*128"):
        serving_weights(w, down, "fp8", experts=Experts(jnp.tanh))
