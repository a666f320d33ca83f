"""The kernels of the decoder of `jax-ep bench serve` against NumPy in float64, and a step with and without them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
from cases import relative_error
from jax_ep.tools.benchmark import decode, decoder, harness
from jax_ep.tools.benchmark.train import rms_norm, rotate

ALSO_ON_GPUS = True
TEXTS, HEADS, KV_HEADS, SIZE, LENGTH = 2, 6, 2, 32, 200


pytestmark = pytest.mark.usefixtures("implicit_promotion", *(["two_ranks"] if jax.default_backend() == "cpu" else []))


def random(rng, *shape, dtype=jnp.bfloat16):
    return jnp.asarray(rng.standard_normal(shape), dtype)


def wide(x):
    return np.asarray(x, np.float64)


@pytest.mark.parametrize(("tokens", "experts", "top_k", "biased"), [(1, 16, 2, False), (17, 40, 5, True)])
def test_route_equals_topk_router(rng, tokens, experts, top_k, biased):
    x, weights = random(rng, tokens, 192), random(rng, 192, experts) / 8
    bias = random(rng, experts) if biased else None
    topk_idx, topk_weights, zeros = decode.route(x, weights, bias, jnp.zeros(tokens, jnp.int32), top_k)
    logits = wide(x) @ wide(weights) + (wide(bias) if biased else 0)
    expected = jax_ep.topk_router(jnp.asarray(logits, jnp.float32), top_k)
    np.testing.assert_array_equal(topk_idx, expected.topk_idx)
    np.testing.assert_allclose(topk_weights, expected.topk_weights, atol=1e-5)
    assert not np.asarray(zeros).any()


def attention(query, keys, values, sinks):
    """Attention of one text's `query [heads, D]` to `[positions, kv_heads, D]`."""
    mixed = []
    for head, row in enumerate(query):
        logits = keys[:, head % KV_HEADS] @ row / np.sqrt(SIZE)
        weights = np.exp(logits)
        total = weights.sum() + (0 if sinks is None else np.exp(sinks[head]))
        mixed.append(weights / total @ values[:, head % KV_HEADS])
    return np.concatenate(mixed)


@pytest.mark.parametrize("position", [0, 130, LENGTH - 1])
@pytest.mark.parametrize(("programs", "window"), [(1, None), (24, None), (24, 70)])
def test_attend_equals_oracle(rng, monkeypatch, programs, position, window):
    """With norms and no window, or with sinks and a window; the positions of a text in one part, or in several."""
    monkeypatch.setattr(decode, "num_programs", lambda *_: programs)
    rows = random(rng, TEXTS, (HEADS + 2 * KV_HEADS) * SIZE)
    cache = tuple(random(rng, TEXTS, LENGTH, KV_HEADS, SIZE) for _ in range(2))
    norm = random(rng, HEADS + KV_HEADS, SIZE, dtype=jnp.float32) if window is None else None
    sinks = None if window is None else random(rng, HEADS)
    options = {"heads": HEADS, "base": 10_000.0, "norm": norm, "sinks": sinks, "window": window}
    run = jax.jit(lambda *arguments: decode.attend(*arguments, **options))
    got, after, zeros = run(rows, cache, jnp.int32(position), jnp.zeros(TEXTS * KV_HEADS, jnp.int32))
    assert not np.asarray(zeros).any()

    heads = rows.reshape(TEXTS, 1, -1, SIZE)
    normed = heads[:, :, : HEADS + KV_HEADS]
    rotated = wide(rotate(normed if norm is None else rms_norm(normed, norm), position))[:, 0]
    keys, values = map(wide, cache)
    keys[:, position], values[:, position] = rotated[:, HEADS:], wide(heads)[:, 0, HEADS + KV_HEADS :]
    np.testing.assert_allclose(wide(after[0]), keys, atol=0.05)  # the angle's rounding moves a new key by a bit
    np.testing.assert_array_equal(wide(after[1]), values)
    seen = slice(max(0, position + 1 - (window or LENGTH)), position + 1)
    sinks = None if sinks is None else wide(sinks)
    expected = np.stack([attention(rotated[i, :HEADS], keys[i, seen], values[i, seen], sinks) for i in range(TEXTS)])
    assert relative_error(got, expected) < 0.01


@pytest.mark.parametrize("name", ["tiny", "tiny-gpt-oss"])
def test_step_in_kernels_equals_plain_step(monkeypatch, name):
    model, layers, position = decoder.MODELS[name], 2, 33
    params = decoder.init_params(model, layers, "bfloat16")
    state = decoder.init_state(model, layers, 3, 40)._replace(position=jnp.int32(position))
    found = []
    for uses_kernels in (False, True):
        monkeypatch.setattr(decoder, "uses_kernels", lambda uses_kernels=uses_kernels: uses_kernels)
        jax.clear_caches()  # of `run_layer`
        found.append(jax.jit(lambda *arguments: decoder.step(model, *arguments))(params, state))
    (expected, expected_logits), (got, logits) = found
    assert harness.norm_of_difference(logits, expected_logits) < 0.03
    for a, b in zip(jax.tree.leaves(got.cache), jax.tree.leaves(expected.cache), strict=True):
        assert harness.norm_of_difference(a, b) < 0.03
    assert int(got.position) == position + 1
