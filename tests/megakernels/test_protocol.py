"""Safety of kernels of several ranks: bounded waits, errors after a failure, heaps of a given size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import harness
import jax_ep
from jax_ep import context
from jax_ep.placement import with_copies
from layers import round_trip

W, T, K, E, H = 2, 5, 2, 4, 8
OPTIONS = {"num_experts": E, "implementation": "triton"}


def inputs(seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(W, T, H)).astype(np.float32), rng.integers(0, E, size=(W, T, K), dtype=np.int32)


def test_protocol_timeout_names_ranks(mesh):
    jax_ep.init(mesh, transport="shared_memory", timeout_s=1)
    # Launches wait for all ranks without a limit; only waits within a kernel expire.
    context.heap("test")._memory.pool.timeout_s = harness.PATIENCE_S
    x, ids = inputs()
    np.testing.assert_array_equal(harness.run(round_trip, mesh, x, ids), K * x)
    heap = context.heap("test")
    epochs = harness.words_of(heap, heap.data, 1)
    epochs[64] += 1  # It expects one more launch with rank 0, so neither sees the epoch that it waits for.
    # If the check of this call ran too early, that of a later call reports it.
    with pytest.raises(Exception, match="timed out"):
        [harness.run(round_trip, mesh, x, ids) for _ in range(2)]
    story = heap.failure()
    assert story is not None
    assert "rank 0" in story and "rank 1" in story
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"is unusable after a failure.*finalize"):
        context.heap("dispatch")
    jax_ep.finalize()
    jax_ep.init(mesh, transport="shared_memory")
    np.testing.assert_array_equal(harness.run(round_trip, mesh, x, ids), K * x)


def test_protocol_heap_too_small(mesh):
    jax_ep.init(mesh, transport="shared_memory", heap_bytes=8 << 20)
    x, ids = inputs()
    wide = np.zeros((W, T, 1 << 19), np.float32)
    with pytest.raises(ValueError, match=r"heap_bytes=8388608 per device, but this call needs \d+.*heap_bytes=\d+"):
        harness.run(round_trip, mesh, wide, ids)
    np.testing.assert_array_equal(harness.run(round_trip, mesh, x, ids), K * x)

    def copies(x, ids):
        d = jax_ep.dispatch(x, ids, balance=jax_ep.Balance(), **OPTIONS)
        return with_copies(jnp.zeros((E // W, 1 << 10, 1 << 11), jnp.float32), d.handle)

    message = r"^with_copies: .*heap_bytes=8388608 per device.* Or pass a smaller Balance\(spare_experts=\)"
    with pytest.raises(ValueError, match=message):
        harness.run(copies, mesh, x, ids)
    jax_ep.finalize()
    with pytest.raises(ValueError, match=r"heap_bytes=4096, expected at least \d+"):
        jax_ep.init(mesh, transport="shared_memory", heap_bytes=4096)


def test_protocol_token_sent_once_per_rank(rng):
    """Counted at the destination, in slots `[sender, slot]` of each rank's heap."""
    num_ranks, tokens, top_k, experts, hidden = 4, 7, 4, 8, 256
    jax_ep.finalize()
    mesh = harness.make_mesh((num_ranks,), (harness.EXPERT,))
    jax_ep.init(mesh, transport="shared_memory")
    ids = np.argsort(rng.random((num_ranks, tokens, experts)), axis=2)[..., :top_k].astype(np.int32)
    x = rng.normal(size=(num_ranks, tokens, hidden)).astype(np.float32)
    run = harness.compiled(lambda x, ids: jax_ep.dispatch(x, ids, **OPTIONS | {"num_experts": experts}).tokens, mesh)
    run(x, ids)  # The heap grows here.
    heap = context.heap("test")
    start, shape = heap.data.start + heap.layout.data, (num_ranks, tokens, 4 * hidden)
    areas = [heap._memory.pool.heap(rank, heap.data.allocation)[start:][: np.prod(shape)] for rank in range(num_ranks)]
    for area in areas:
        area[:] = 0xA5
    run(x, ids)
    # The ids of all ranks, 448 bytes, also arrive in the first slot.
    slots = [area.reshape(shape)[..., 512:] for area in areas]
    arrived = np.stack([(slot != 0xA5).any(axis=2).sum(axis=1) for slot in slots], axis=1)
    owners = ids // (experts // num_ranks)
    wanted = np.stack([(owners == rank).any(axis=2).sum(axis=1) for rank in range(num_ranks)], axis=1)
    np.fill_diagonal(wanted, 0)  # Own tokens are not sent.
    np.testing.assert_array_equal(arrived, wanted)
    assert wanted.sum() < (owners != np.arange(num_ranks)[:, None, None]).sum(), "no token is saved: nothing is tested"
    jax_ep.finalize()


def test_init_replaces_implicit_context(mesh):
    implicit = context._outside_of_traces(lambda: context._check(mesh, "expert", "shared_memory", None, 30.0))
    context._current, context._is_implicit = implicit, True
    x, ids = inputs()
    np.testing.assert_array_equal(harness.run(round_trip, mesh, x, ids), K * x)
    assert jax_ep.init(mesh, transport="shared_memory", timeout_s=7).timeout_s == 7
    np.testing.assert_array_equal(harness.run(round_trip, mesh, x, ids), K * x)
    with pytest.raises(ValueError, match="already initialized"):
        jax_ep.init(mesh, transport="shared_memory", timeout_s=8)
