"""Ten thousand all-to-alls in a row, in few launches, each with the same bits as the first."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import harness
import jax_ep
import oracle
from cases import BF16, Shape, assert_close, assert_same_bits, probabilities, reals
from routings import ROUTINGS

ON_GPU = jax.default_backend() == "gpu"
ITERATIONS, LAUNCHES = (10_000, 4) if ON_GPU else (6, 2)
SHAPE = Shape(num_tokens=37, top_k=3, num_experts=8, hidden=256 if ON_GPU else 128)


def exchange(x, ids, weights, wire_dtype):
    """Return the rows of the experts, and their weighted sums."""
    options = {"implementation": "triton", "schedule": jax_ep.Schedule(wire_dtype=wire_dtype)}
    d = jax_ep.dispatch(x, ids, weights, num_experts=SHAPE.num_experts, **options)
    return d.tokens, jax_ep.combine(d.tokens * d.weights[:, None].astype(x.dtype), d.handle, **options)


def count_different_bits(got, want):
    bits = [jax.lax.bitcast_convert_type(a, jnp.uint16) for a in (got, want)]
    return jnp.sum(bits[0] != bits[1], dtype=jnp.int32)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("wire", ["bf16", "fp8"])
def test_soak_same_bits(wire, mesh):
    """Two inputs alternate, so that stale data of an iteration is wrong for the next one."""
    rng, num_ranks = np.random.default_rng(0), mesh.size
    wire_dtype = jnp.float8_e4m3fn if wire == "fp8" else None
    ids = np.stack([ROUTINGS[name](rng, num_ranks, SHAPE) for name in ("zipf", "some_without_expert")], axis=1)
    x = reals(rng, num_ranks, 2, SHAPE.num_tokens, SHAPE.hidden, dtype=BF16)
    weights = probabilities(rng, *ids.shape)

    def firsts(x, ids, weights):
        def step(_, turn):
            return None, exchange(x[turn], ids[turn], weights[turn], wire_dtype)

        return jax.lax.scan(step, None, jnp.arange(2))[1]

    def mismatches(x, ids, weights, rows, sums):
        def step(count, i):
            turn = i % 2
            got = exchange(x[turn], ids[turn], weights[turn], wire_dtype)
            return count + sum(count_different_bits(a, b[turn]) for a, b in zip(got, (rows, sums), strict=True)), None

        # Of the inputs' type: the count differs between ranks.
        zero = 0 * ids[0, 0, 0]
        return jax.lax.scan(step, zero, jnp.arange(ITERATIONS // LAUNCHES))[0]

    rows, sums = harness.run(firsts, mesh, x, ids, weights)
    for turn in range(2 if wire == "bf16" else 0):  # Another test checks that FP8 is right.
        lay = oracle.layout(ids[:, turn], SHAPE.num_experts)
        assert_same_bits(rows[:, turn], oracle.gather(x[:, turn], lay), f"rows of input {turn}")
        scaled = rows[:, turn] * oracle.gather_weights(weights[:, turn], lay).astype(BF16)[..., None]
        assert_close(sums[:, turn], oracle.combine(scaled, lay), f"sums of input {turn}")
    count = harness.compiled(mismatches, mesh)
    for _ in range(LAUNCHES):
        np.testing.assert_array_equal(count(x, ids, weights, rows, sums), np.zeros(num_ranks, np.int32))
    assert LAUNCHES * (ITERATIONS // LAUNCHES) == ITERATIONS
