"""A late rank changes no result, whichever rank it is, wherever it is late, and with any other work."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from lateness import ON_GPU, asleep, busy, in_order

import harness
import jax_ep
from cases import BF16, Shape, probabilities, reals
from routings import ROUTINGS

SHAPE = Shape(num_tokens=61, top_k=2, num_experts=8, hidden=512 if ON_GPU else 128)
NOBODY = -1
OPTIONS = {"num_experts": SHAPE.num_experts, "implementation": "triton"}


def inputs(num_ranks, num_tokens, seed, routing="zipf"):
    rng = np.random.default_rng(seed)
    shape = Shape(num_tokens, SHAPE.top_k, SHAPE.num_experts, SHAPE.hidden)
    ids = ROUTINGS[routing](rng, num_ranks, shape)
    return reals(rng, num_ranks, num_tokens, SHAPE.hidden, dtype=BF16), ids, probabilities(rng, *ids.shape)


def weighted(d):
    return d.tokens * d.weights[:, None].astype(d.tokens.dtype)


def combine(y, d):
    return jax_ep.combine(y, d.handle, implementation="triton")


@pytest.mark.parametrize("delay", [busy, asleep])
def test_stragglers_late_rank(delay, mesh, same_bits):
    """One rank is late before the dispatch, and another one before the combine."""
    num_ranks = mesh.size

    def fn(x, ids, weights, late):
        rank = jax.lax.axis_index(harness.EXPERT)
        d = jax_ep.dispatch(delay(x, rank == late), ids, weights, **OPTIONS)
        y = delay(weighted(d), (late >= 0) & (rank == (late + 1) % num_ranks))
        return d.tokens, combine(y, d)

    run = harness.compiled(fn, mesh, replicated=(3,))
    arguments = inputs(num_ranks, SHAPE.num_tokens, 0)
    want = run(*arguments, np.int32(NOBODY))
    assert np.abs(want[1].astype(np.float32)).max() > 0
    for late in range(num_ranks):
        same_bits(run(*arguments, np.int32(late)), want)


def test_stragglers_two_batches(mesh, same_bits):
    """All-to-alls of two sizes alternate, and in each layer another rank is late in one of the two."""
    num_ranks, num_layers = mesh.size, 4 if ON_GPU else 2

    def layers(batches, late):
        def layer(batches, i):
            is_late = (jax.lax.axis_index(harness.EXPERT) == (late + i) % num_ranks) & (late >= 0)
            sent, previous = [], ()
            for number, (x, ids, weights) in enumerate(batches):
                x = busy(in_order(x, *previous), is_late & (number == i % 2))
                sent.append(jax_ep.dispatch(x, ids, weights, **OPTIONS))
                previous = (sent[-1].tokens,)
            done = []
            for d, (x, ids, weights) in zip(sent, batches, strict=True):
                done.append((x + combine(in_order(weighted(d), *previous), d), ids, weights))
                previous = (done[-1][0],)
            return done, None

        return [x for x, _, _ in jax.lax.scan(layer, batches, jnp.arange(num_layers))[0]]

    first = inputs(num_ranks, SHAPE.num_tokens, 1)
    second = inputs(num_ranks, SHAPE.num_tokens // 3, 2, "some_without_expert")
    run = harness.compiled(lambda *a: layers([a[:3], a[3:6]], a[6]), mesh, replicated=(6,))
    alone = harness.compiled(lambda *a: layers([a[:3]], a[3]), mesh, replicated=(3,))
    want = [*alone(*first, np.int32(NOBODY)), *alone(*second, np.int32(NOBODY))]
    for late in (NOBODY, *range(num_ranks)):
        same_bits(run(*first, *second, np.int32(late)), want)


def test_stragglers_overlapping_groups(one_process, same_bits):
    """Programs on different groups are launched without waiting; a rank that is late in one delays the others."""
    count = jax.device_count()
    if count < 3:
        pytest.skip(f"needs 3 devices, {count} present")
    devices = np.array(jax.devices())
    groups = [(0, 1), (1, 2), tuple(range(min(count, 4))), (0, 2), (1, 0)]

    def fn(x, ids, weights, late):
        x = busy(x, jax.lax.axis_index(harness.EXPERT) == late)
        d = jax_ep.dispatch(x, ids, weights, **OPTIONS)
        return combine(weighted(d), d)

    calls = []
    for seed, group in enumerate(groups):
        mesh = Mesh(devices[list(group)], (harness.EXPERT,), axis_types=(AxisType.Auto,))
        run = jax.jit(harness.per_rank(fn, mesh, replicated=(3,)))
        arguments = inputs(len(group), SHAPE.num_tokens, seed)
        calls.append((run, arguments, np.asarray(run(*arguments, np.int32(NOBODY)))))
    for turn in range(10 if ON_GPU else 1):
        results = []
        for number, (run, arguments, _) in enumerate(calls):
            results.append(run(*arguments, np.int32(turn % 2 if number == turn % len(calls) else NOBODY)))
            if not ON_GPU:  # The interpreter's devices start programs in any order.
                jax.block_until_ready(results[-1])
        for result, (_, _, want) in zip(results, calls, strict=True):
            same_bits(result, want)
