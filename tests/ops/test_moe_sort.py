"""moe_sort and fused_moe, which need one device and no mesh, against NumPy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import finite_differences
import jax_ep

E = 8


def _routing(kind, num_tokens, k, num_experts=E, seed=0):
    """Return expert ids in one of several patterns that are hard to sort."""
    rng = np.random.default_rng(seed)
    shape = (num_tokens, k)
    ids = {
        "uniform": lambda: rng.integers(0, num_experts, size=shape),
        "some-invalid": lambda: rng.integers(-1, num_experts, size=shape),
        "one-hot": lambda: np.full(shape, num_experts - 1),
        "duplicates": lambda: np.repeat(rng.integers(0, num_experts, size=(num_tokens, 1)), k, axis=1),
        "empty-experts": lambda: 2 * rng.integers(0, (num_experts + 1) // 2, size=shape) % num_experts,
        "all-invalid": lambda: np.full(shape, -1),
        "descending": lambda: np.sort(rng.integers(0, num_experts, size=shape), axis=1)[::-1, ::-1],
    }[kind]()
    return np.ascontiguousarray(ids, dtype=np.int32)


KINDS = ["uniform", "some-invalid", "one-hot", "duplicates", "empty-experts", "all-invalid", "descending"]


def _sorted_slots(ids, num_experts, block_size):
    """Return (slots, block_expert, group_sizes) without the tail, computed with plain lists."""
    slots, block_expert, group_sizes = [], [], []
    for expert in range(num_experts):
        rows = [slot for slot, value in enumerate(ids.reshape(-1)) if value == expert]
        rows += [-1] * (-len(rows) % block_size)
        slots += rows
        block_expert += [expert] * (len(rows) // block_size)
        group_sizes.append(len(rows))
    return slots, block_expert, group_sizes


def _static_rows(num_slots, num_experts, block_size):
    worst = num_slots + min(num_experts, num_slots) * (block_size - 1)
    return -(-worst // block_size) * block_size


@partial(jax.jit, static_argnames=("num_experts", "block_size"))
def _jit_moe_sort(topk_idx, topk_weights, *, num_experts, block_size):
    return jax_ep.moe_sort(topk_idx, topk_weights, num_experts=num_experts, block_size=block_size)


@pytest.mark.parametrize("block_size", [1, 16, 64])
@pytest.mark.parametrize(
    ("num_tokens", "k", "num_experts"), [(1, 1, 1), (1, 3, 8), (37, 2, 8), (64, 4, 5), (5, 2, 100)]
)
def test_moe_sort_matches_numpy(num_tokens, k, num_experts, block_size):
    weights = np.random.default_rng(1).uniform(0.1, 1.0, size=(num_tokens, k)).astype(np.float32)
    total = _static_rows(num_tokens * k, num_experts, block_size)
    for kind in KINDS:  # One compiled function handles every kind.
        ids = _routing(kind, num_tokens, k, num_experts)
        result = _jit_moe_sort(jnp.asarray(ids), jnp.asarray(weights), num_experts=num_experts, block_size=block_size)
        slots, block_expert, group_sizes = _sorted_slots(ids, num_experts, block_size)
        used = len(slots)
        assert result.slots.shape == (total,), kind
        assert result.block_expert.shape == (total // block_size,), kind
        np.testing.assert_array_equal(result.slots, slots + [-1] * (total - used), err_msg=kind)
        tail = [-1] * (total // block_size - len(block_expert))
        np.testing.assert_array_equal(result.block_expert, block_expert + tail, err_msg=kind)
        np.testing.assert_array_equal(result.group_sizes, group_sizes, err_msg=kind)
        assert result.num_rows.shape == (), kind
        assert int(result.num_rows) == used, kind
        padded = np.concatenate([weights.reshape(-1), [0.0]]).astype(np.float32)  # Slot -1 reads the zero.
        np.testing.assert_array_equal(result.weights, padded[np.asarray(result.slots)], err_msg=kind)


def test_moe_sort_dtypes_and_eager_use():
    ids = jnp.asarray(_routing("uniform", 9, 2))
    result = jax_ep.moe_sort(ids, num_experts=E, block_size=4)
    assert result.weights is None
    for field in ("slots", "block_expert", "group_sizes", "num_rows"):
        assert getattr(result, field).dtype == jnp.int32, field
    assert jax_ep.moe_sort(ids, jnp.ones((9, 2), jnp.float32), num_experts=E, block_size=4).weights.dtype == jnp.float32


@pytest.mark.parametrize("kind", KINDS)
def test_moe_sort_invariants(kind):
    ids, block_size = _routing(kind, 51, 3, seed=5), 16
    result = jax_ep.moe_sort(jnp.asarray(ids), num_experts=E, block_size=block_size)
    slots, group_sizes = np.asarray(result.slots), np.asarray(result.group_sizes)
    real = slots[slots >= 0]
    valid = np.flatnonzero(ids.reshape(-1) >= 0)
    # A permutation of the valid assignments: none lost, none duplicated.
    np.testing.assert_array_equal(np.sort(real), valid)
    assert (group_sizes % block_size == 0).all()
    blocks = slots.reshape(-1, block_size)
    for block, expert in zip(blocks, np.asarray(result.block_expert), strict=True):
        members = block[block >= 0]
        assert (len(members) > 0) == (expert >= 0), "a block with an expert has work, a block without has none"
        assert (ids.reshape(-1)[members] == expert).all()
        assert (np.diff(members) > 0).all(), "rows of an expert keep the order of their slots"


def test_moe_sort_traced_invalid_ids():
    ids = _routing("uniform", 20, 2)
    damaged = ids.copy()
    damaged[3, 0], damaged[7, 1], damaged[11, 0] = E, -2, 2**31 - 1
    cleaned = np.where((damaged < 0) | (damaged >= E), -1, damaged).astype(np.int32)
    weights = jnp.ones((20, 2), jnp.float32)
    sort = partial(_jit_moe_sort, num_experts=E, block_size=16)
    actual, expected = sort(jnp.asarray(damaged), weights), sort(jnp.asarray(cleaned), weights)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_moe_sort_weight_gradients():
    ids = jnp.asarray(_routing("some-invalid", 12, 2))
    cotangent = jnp.arange(1.0, _static_rows(24, E, 4) + 1.0, dtype=jnp.float32)

    def objective(weights):
        return jnp.sum(jax_ep.moe_sort(ids, weights, num_experts=E, block_size=4).weights * cotangent)

    slots = np.asarray(jax_ep.moe_sort(ids, num_experts=E, block_size=4).slots)
    expected = np.zeros(24, np.float32)
    expected[slots[slots >= 0]] = np.asarray(cotangent)[slots >= 0]
    actual = jax.grad(objective)(jnp.ones((12, 2), jnp.float32))
    np.testing.assert_array_equal(actual, expected.reshape(12, 2))


# --- fused_moe ------------------------------------------------------------------------------------------------------

FUSED_MOE = jax.jit(jax_ep.fused_moe)
ACTIVATIONS = {
    "silu": lambda a: a / (1.0 + np.exp(-a)),
    "gelu": lambda a: 0.5 * a * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (a + 0.044715 * a**3))),
    "relu": lambda a: np.maximum(a, 0.0),
}


def _numpy_moe(x, ids, weights, w_gate_up, w_down, activation):
    """Compute the expert layer one assignment at a time in float64: y_t = sum_k w_tk * (act(x Wg) * (x Wu)) Wd."""
    intermediate = w_down.shape[1]
    y = np.zeros((x.shape[0], w_down.shape[2]))
    for t, k in np.argwhere((ids >= 0) & (ids < len(w_down))):
        first = x[t] @ w_gate_up[ids[t, k]]
        hidden = ACTIVATIONS[activation](first[:intermediate])
        if w_gate_up.shape[2] == 2 * intermediate:
            hidden = hidden * first[intermediate:]
        y[t] += weights[t, k] * (hidden @ w_down[ids[t, k]])
    return y


def _layer(num_tokens, hidden, k, num_experts, intermediate, gated=True, seed=0):
    rng = np.random.default_rng(seed)
    columns = 2 * intermediate if gated else intermediate
    x = rng.normal(size=(num_tokens, hidden)).astype(np.float32)
    weights = rng.uniform(0.1, 1.0, size=(num_tokens, k)).astype(np.float32)
    w_gate_up = (rng.normal(size=(num_experts, hidden, columns)) / np.sqrt(hidden)).astype(np.float32)
    w_down = (rng.normal(size=(num_experts, intermediate, hidden)) / np.sqrt(intermediate)).astype(np.float32)
    return x, weights, w_gate_up, w_down


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_fused_moe_matches_numpy(activation, gated):
    x, weights, w_gate_up, w_down = _layer(23, 20, 3, E, 12, gated=gated)
    compiled = jax.jit(partial(jax_ep.fused_moe, experts=jax_ep.Experts(activation, gated=gated)))
    for kind in KINDS:
        ids = _routing(kind, 23, 3)
        actual = compiled(*map(jnp.asarray, (x, ids, weights, w_gate_up, w_down)))
        wide = [a.astype(np.float64) for a in (x, weights, w_gate_up, w_down)]
        expected = _numpy_moe(wide[0], ids, *wide[1:], activation)
        assert actual.shape == x.shape
        assert actual.dtype == jnp.float32
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5, err_msg=kind)


@pytest.mark.parametrize(
    ("num_tokens", "hidden", "k", "num_experts", "intermediate"),
    [(1, 1, 1, 1, 1), (1, 7, 5, 3, 2), (130, 9, 2, 64, 3)],
)
def test_fused_moe_shapes(num_tokens, hidden, k, num_experts, intermediate):
    x, weights, w_gate_up, w_down = _layer(num_tokens, hidden, k, num_experts, intermediate)
    ids = _routing("some-invalid", num_tokens, k, num_experts)
    actual = FUSED_MOE(*map(jnp.asarray, (x, ids, weights, w_gate_up, w_down)))
    wide = [a.astype(np.float64) for a in (x, weights, w_gate_up, w_down)]
    expected = _numpy_moe(wide[0], ids, *wide[1:], "silu")
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_fused_moe_narrow_dtypes(dtype):
    x, weights, w_gate_up, w_down = _layer(23, 32, 2, E, 16)
    ids = _routing("uniform", 23, 2)
    narrow = [jnp.asarray(a).astype(dtype) for a in (x, w_gate_up, w_down)]
    actual = FUSED_MOE(narrow[0], jnp.asarray(ids), jnp.asarray(weights), *narrow[1:])
    assert actual.dtype == dtype
    wide = [np.asarray(a.astype(jnp.float32)).astype(np.float64) for a in narrow]
    expected = _numpy_moe(wide[0], ids, weights.astype(np.float64), *wide[1:], "silu")
    # The hidden layer is rounded to `dtype` before the second GEMM, and the result once more.
    bound = 4.0 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(actual.astype(jnp.float32)), expected, rtol=bound, atol=bound)


def test_fused_moe_no_valid_expert():
    x, weights, w_gate_up, w_down = _layer(6, 8, 2, E, 4)
    ids = _routing("all-invalid", 6, 2)
    actual = FUSED_MOE(*map(jnp.asarray, (x, ids, weights, w_gate_up, w_down)))
    np.testing.assert_array_equal(actual, np.zeros_like(x))


def test_fused_moe_traced_invalid_ids():
    x, weights, w_gate_up, w_down = _layer(6, 8, 2, E, 4)
    ids = _routing("uniform", 6, 2)
    damaged = ids.copy()
    damaged[0, 0], damaged[4, 1] = E, -7
    actual = FUSED_MOE(*map(jnp.asarray, (x, damaged, weights, w_gate_up, w_down)))
    expected = _numpy_moe(*(a.astype(np.float64) for a in (x,)), damaged, weights, w_gate_up, w_down, "silu")
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("activation", "gated"), [("silu", True), ("gelu", False)])
def test_fused_moe_gradients_match_finite_differences(activation, gated):
    arrays = _layer(5, 4, 2, 3, 3, gated=gated, seed=7)
    cotangent = np.random.default_rng(8).normal(size=(5, 4)).astype(np.float32)

    def objective(x, weights, w_gate_up, w_down, ids):
        y = jax_ep.fused_moe(x, ids, weights, w_gate_up, w_down, experts=jax_ep.Experts(activation, gated=gated))
        return jnp.sum(y * cotangent)

    gradients = jax.jit(jax.grad(objective, argnums=(0, 1, 2, 3)))
    for kind in ("some-invalid", "duplicates", "one-hot"):
        ids = _routing(kind, 5, 2, num_experts=3, seed=2)

        def reference(x, weights, w_gate_up, w_down, ids=ids):
            return float((_numpy_moe(x, ids, weights, w_gate_up, w_down, activation) * cotangent).sum())

        expected = finite_differences.gradients(reference, arrays)
        actual = gradients(*map(jnp.asarray, arrays), jnp.asarray(ids))
        for name, got, want in zip(("x", "topk_weights", "w_gate_up", "w_down"), actual, expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5, err_msg=f"{kind}, {name}")


def test_fused_moe_gradient_no_valid_expert():
    arrays = _layer(4, 4, 2, 3, 3)
    ids = jnp.full((4, 2), -1, jnp.int32)

    def objective(x, weights, w_gate_up, w_down):
        return jnp.sum(jax_ep.fused_moe(x, ids, weights, w_gate_up, w_down))

    for gradient in jax.jit(jax.grad(objective, argnums=(0, 1, 2, 3)))(*map(jnp.asarray, arrays)):
        np.testing.assert_array_equal(gradient, np.zeros(gradient.shape, np.float32))


def test_fused_moe_deterministic():
    arrays = _layer(64, 16, 4, E, 8)
    ids = _routing("uniform", 64, 4)
    arguments = jnp.asarray(arrays[0]), jnp.asarray(ids), *map(jnp.asarray, arrays[1:])
    first = np.asarray(FUSED_MOE(*arguments))
    for _ in range(3):
        np.testing.assert_array_equal(FUSED_MOE(*arguments), first)


def test_fused_moe_scan_and_remat():
    x, weights, w_gate_up, w_down = map(jnp.asarray, _layer(6, 8, 2, E, 4))
    ids = jnp.asarray(_routing("uniform", 6, 2))

    @jax.checkpoint
    def layer(x):
        return x + jax_ep.fused_moe(x, ids, weights, w_gate_up, w_down)

    def scanned(x):
        return jnp.sum(jax.lax.scan(lambda c, _: (layer(c), None), x, length=2)[0] ** 2)

    value, gradient = jax.jit(jax.value_and_grad(scanned))(x)
    plain_value, plain_gradient = jax.jit(jax.value_and_grad(lambda x: jnp.sum(layer(layer(x)) ** 2)))(x)
    np.testing.assert_allclose(value, plain_value, rtol=1e-6)
    np.testing.assert_allclose(gradient, plain_gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("number", [2**32, 2**32 + 1, 2**31, -(2**31) - 1, 3])
@pytest.mark.parametrize("kind", [int, np.int64, np.asarray], ids=["int", "scalar", "array"])
def test_moe_sort_num_tokens_beyond_32_bits(number, kind):
    ids = np.array([[1], [0], [1]], np.int32)
    got = jax_ep.moe_sort(ids, num_experts=2, block_size=2, num_tokens=kind(number))
    assert (np.asarray(got.slots) >= 0).sum() == (3 if number > 0 else 0)


def test_moe_sort_ids_beyond_32_bits():
    ids = np.array([[2**32 + 1], [0], [1], [-(2**33)]], np.int64)
    slots = np.asarray(jax_ep.moe_sort(ids, num_experts=2, block_size=2, num_tokens=4).slots)
    assert sorted(slots[slots >= 0]) == [1, 2]
    with pytest.raises(ValueError, match="topk_idx contains"):
        jax_ep.moe_sort(ids, num_experts=2, block_size=2)


@pytest.mark.parametrize(
    ("first", "error", "match"),
    [
        (0.0, TypeError, "first_expert is a float"),
        (False, TypeError, "first_expert is a bool"),
        (jnp.int32(0), TypeError, "first_expert is an array.*static"),
        (np.array([0, 1]), TypeError, "first_expert is a ndarray"),
        (-1, ValueError, "first_expert=-1, expected at least 0"),
        (2, ValueError, "reach past num_experts=2"),
    ],
)
def test_moe_sort_invalid_first_expert(first, error, match):
    with pytest.raises(error, match=match):
        jax_ep.moe_sort(np.array([[1]], np.int32), num_experts=2, block_size=2, first_expert=first)


def test_moe_sort_traced_first_expert():
    sort = lambda first: jax_ep.moe_sort(np.array([[1]], np.int32), num_experts=2, block_size=2, first_expert=first)  # noqa: E731
    with pytest.raises(TypeError, match=r"first_expert is a traced array, expected a Python int; it must be static"):
        jax.jit(sort)(1)
