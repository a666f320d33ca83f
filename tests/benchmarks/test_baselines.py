"""The baselines of benchmarks/layer.py compute the layer, so that their times mean something."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_ep
import layers
from cases import F32, Shape, assert_close, reals
from harness import compiled
from jax_ep.tools.benchmark import baselines
from layers import NAMES, Layer

SHAPE = Shape(num_tokens=24, top_k=3, num_experts=8, hidden=12, intermediate=10)
KINDS = ("uniform", "zipf", "one_hot_every_slot")
ALL_SLOTS = SHAPE.num_tokens * SHAPE.top_k  # of one rank


def inputs(rng, kind, num_ranks, dtype=F32):
    layer = Layer(rng, kind, num_ranks, SHAPE, dtype)
    return *layer.args, reals(rng, *layer.x.shape, dtype=dtype)


def with_gradients(layer, mesh, **options):
    return compiled(layers.with_gradients(partial(layer, num_experts=SHAPE.num_experts, **options)), mesh)


def package(mesh):
    """The package's portable implementation, which the contract suite holds to the oracle."""
    return with_gradients(jax_ep.moe, mesh, implementation="xla")


def check(got, wanted, tolerance=1e-5):
    for name, g, w in zip(NAMES, got, wanted, strict=True):
        assert g.dtype == w.dtype, name
        assert_close(g, w, name, tolerance=tolerance)


def emulated_ragged_all_to_all(
    operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name, axis_index_groups=None
):
    """Do what XLA lacks on CPU devices; if sizes or offsets contradict, all bits of the result are ones."""
    sources, me = lax.all_gather(operand, axis_name), lax.axis_index(axis_name)
    first, count, place = (lax.all_gather(a, axis_name)[:, me] for a in (input_offsets, send_sizes, output_offsets))
    row = lax.iota(jnp.int32, output.shape[0])
    bad = jnp.any(recv_sizes != count) | jnp.any(place + count > output.shape[0])
    bad |= jnp.any(first + count > operand.shape[0]) | jnp.any(jnp.minimum(jnp.minimum(first, place), count) < 0)
    written = jnp.zeros_like(row)
    for source in range(sources.shape[0]):
        inside = (row >= place[source]) & (row < place[source] + count[source])
        taken = sources[source][jnp.where(inside, first[source] + row - place[source], 0)]
        output = jnp.where(inside.reshape(-1, *[1] * (output.ndim - 1)), taken, output)
        written += inside.astype(jnp.int32)
    bits = jnp.full_like(output, -1, dtype=f"i{output.dtype.itemsize}")
    return jnp.where(bad | jnp.any(written > 1), lax.bitcast_convert_type(bits, output.dtype), output)


@pytest.fixture
def exchange_everywhere(monkeypatch):
    """On GPUs the benchmark itself compares results."""
    if jax.default_backend() == "cpu":
        monkeypatch.setattr(lax, "ragged_all_to_all", emulated_ragged_all_to_all)


@pytest.mark.usefixtures("exchange_everywhere")
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_results_and_gradients(num_ranks, expert_mesh, rng, subtests):
    """Where there is room for every row."""
    mesh = expert_mesh(num_ranks)
    expected = package(mesh)
    calls = {
        "capacity": with_gradients(baselines.capacity_layer, mesh, capacity=ALL_SLOTS),
        "ragged": with_gradients(baselines.ragged_layer, mesh, capacity=num_ranks * ALL_SLOTS),
    }
    for kind in KINDS:
        args = inputs(rng, kind, num_ranks)
        wanted = expected(*args)
        for name, call in calls.items():
            with subtests.test(f"{name}, {kind}"):
                check(call(*args), wanted)


@pytest.mark.parametrize("capacity", [1, 5])
def test_capacity_layer_drops_the_later_slots_of_an_expert(capacity, expert_mesh, rng):
    x, ids, *rest = inputs(rng, "zipf", 2)
    kept = ids.copy()
    for of_rank in kept.reshape(2, -1):
        for expert in range(SHAPE.num_experts):
            of_rank[np.nonzero(of_rank == expert)[0][capacity:]] = -1
    assert (kept != ids).any() and (kept != -1).any()
    layer = with_gradients(baselines.capacity_layer, expert_mesh(2), capacity=capacity)
    check(layer(x, ids, *rest), package(expert_mesh(2))(x, kept, *rest))
