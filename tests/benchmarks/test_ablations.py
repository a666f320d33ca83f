"""What the ablations compare are the same sums by other orders and transfers; and how many transfers there are."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reports import check_report, run_quickly

import ablations
import harness
import jax_ep
from jax_ep import context
from lib import ablation_variants, growth, inputs, layer_chains
from lib.ablation_variants import COMBINE, DISPATCH, FUSED, NO_INTERLEAVING, NO_SAVING, NO_SORTING, without

RANKS, TOKENS = 4, 70  # three blocks of dispatch + GEMM for each peer
UNTOUCHED = 0xA5


@pytest.fixture(scope="module")
def case():
    pytest.importorskip("triton")
    jax_ep.finalize()
    mesh = inputs.expert_mesh(RANKS)
    jax_ep.init(mesh, transport="shared_memory", timeout_s=harness.PATIENCE_S)
    weights = inputs.make_weights(mesh, inputs.MODELS["tiny"])
    yield layer_chains.make_case(mesh, "tiny", "zipf", TOKENS, weights)
    jax_ep.finalize()


def result(case, variant):
    """Of one call, on all ranks."""

    def body(touched, fixed):
        fixed = tuple(ablation_variants.local(a) if isinstance(a, layer_chains.Handle) else a for a in fixed)
        return variant.step(touched, fixed, jnp.zeros((), jnp.int32))

    return np.asarray(jax.jit(case.shard_map(body))(variant.touched, variant.fixed).astype(jnp.float32))


def data_areas(num_bytes):
    """What lies where tokens arrive, of each rank."""
    heap = context.heap("test")
    start = heap.data.start + heap.layout.data
    return [heap._memory.pool.heap(n, heap.data.allocation)[start : start + num_bytes] for n in range(RANKS)]


def arrivals(case, variant, slots):
    """`[W, W]` by sender and receiver: in how many slots `[sender, slot]` of a heap something has been stored."""
    row_bytes = 2 * case.model.hidden
    result(case, variant)  # the heap grows before
    for area in data_areas(RANKS * slots * row_bytes):
        area[:] = UNTOUCHED
    result(case, variant)
    areas = np.stack([area.reshape(RANKS, slots, row_bytes) for area in data_areas(RANKS * slots * row_bytes)])
    found = (areas != UNTOUCHED).any(axis=3).sum(axis=2).T
    return found * (1 - np.eye(RANKS, dtype=int))  # combine has its own sums there too, which do not travel


@pytest.mark.parametrize("what", [DISPATCH, *(pytest.param(name, marks=pytest.mark.slow) for name in (COMBINE, FUSED))])
def test_transfers_are_the_fewest_there_can_be(case, what):
    """Counted where they arrive: one for each token and other rank with an expert of it, and what the report says.

    Without token saving, one for each token and expert.
    """
    travel = growth.travelling(case.ids, RANKS, case.model.experts)
    assert travel.tokens.sum() < travel.pairs.sum(), "nothing is saved: nothing is tested"
    variants = ablation_variants.variants(case, (what,))
    apart = without(what, NO_SAVING)
    slots = {apart: TOKENS * case.model.top_k}
    for name, variant in variants.items():
        found = arrivals(case, variant, slots.get(name, TOKENS))
        wanted = travel.pairs if name == apart else travel.tokens
        np.testing.assert_array_equal(found, wanted.T if what == COMBINE else wanted, err_msg=name)
        assert ablations.sent(case, name)["sent_bytes"] == found.sum() / RANKS * 2 * case.model.hidden


@pytest.mark.slow
def test_results_are_the_same(case):
    found = {name: result(case, variant) for name, variant in ablation_variants.variants(case).items()}
    for what in (DISPATCH, FUSED):
        assert np.abs(found[what]).max() > 0
        for decision in (NO_SAVING, NO_SORTING, NO_INTERLEAVING)[: 3 if what == FUSED else 1]:
            np.testing.assert_array_equal(found[without(what, decision)], found[what], err_msg=decision)
    np.testing.assert_allclose(found[without(COMBINE, NO_SAVING)], found[COMBINE], rtol=0.05, atol=0.05)


def test_orders_of_sends(case):
    """Without sorting: tokens in their own order, and each expert waits for its own and for those before it."""
    handle = ablation_variants._plan(case, case.inputs[2])
    orders = {}
    for make in (ablation_variants.order_sends, ablation_variants.unsorted_sends):
        run = jax.jit(case.shard_map(lambda h, make=make: tuple(make(ablation_variants.local(h)))))
        parts = (np.asarray(part) for part in run(handle))
        orders[make.__name__] = [part.reshape(RANKS, RANKS, *part.shape[1:]) for part in parts]
    local = case.model.experts // RANKS
    ids = case.ids.reshape(RANKS, TOKENS, -1)
    by_first, (order, sends, needed) = orders["order_sends"], orders["unsorted_sends"]
    np.testing.assert_array_equal(sends, by_first[1].reshape(sends.shape))
    assert (order != by_first[0]).any(), "the orders are one: nothing is tested"
    for source in range(RANKS):
        for rank in range(RANKS):
            going = [t for t in range(TOKENS) if (ids[source, t] // local == rank).any()]
            assert order[source, rank][: len(going)].tolist() == going
            for expert in range(local):
                wanted = [
                    n
                    for n, t in enumerate(going, 1)
                    if ((ids[source, t] - rank * local) <= expert)[ids[source, t] // local == rank].any()
                ]
                assert needed[rank, source, expert] == max(wanted, default=0)


@pytest.mark.slow
def test_a_quick_run(tmp_path):
    shown = run_quickly("ablations.py", tmp_path, "--ranks", "2", "--operations", DISPATCH)
    content = json.loads((tmp_path / "ablations.json").read_text())
    check_report(content)
    with_it, apart = content["rows"]
    assert with_it["sent_bytes"] <= with_it["pairs_bytes"] == apart["sent_bytes"]
    assert f"{apart['variant']} / with it" in shown
