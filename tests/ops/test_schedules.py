"""`Schedule`: its valid values, the functions that accept it, and that it does not change results."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import harness
import jax_ep
from cases import BF16, F32, assert_same_bits, reals
from harness import EXPERT, in_turn, run
from jax_ep import Schedule
from jax_ep.sharding import sharded_moe
from mistakes import trace

OTHER = Schedule(
    num_communicating_programs=3, num_combining_programs=3, num_warps=2, tokens_per_block=2, rows_in_flight=3
)
TAKES_ONE = [
    *("dispatch", "combine", "dispatch_grouped_gemm", "grouped_gemm_combine", "moe", "fused_moe"),
    *("low_latency_dispatch", "low_latency_combine", "low_latency_gemm_combine", "low_latency_moe"),
]


@pytest.mark.parametrize("name", TAKES_ONE)
def test_schedule_accepted(name):
    """An implementation ignores numbers that it does not use."""
    shapes = [jax.tree.map(lambda x: x.shape, trace(name, schedule=s)) for s in (None, Schedule(), OTHER)]
    assert shapes[0] == shapes[1] == shapes[2]


def test_schedule_sharded_moe():
    mesh = harness.make_mesh((2,), (EXPERT,))
    shapes = ((8, 4), (8, 2), (8, 2), (4, 4, 6), (4, 3, 4))
    arrays = [jax.ShapeDtypeStruct(shape, jnp.int32 if i == 1 else F32) for i, shape in enumerate(shapes)]
    layer = sharded_moe(mesh, num_experts=4, implementation="xla", schedule=OTHER)
    assert jax.eval_shape(layer, *arrays).shape == (8, 4)
    layer = sharded_moe(mesh, num_experts=4, implementation="xla", schedule=Schedule(combine_mode="scatter"))
    with pytest.raises(NotImplementedError, match="mode='scatter'"):
        jax.eval_shape(layer, *arrays)


@pytest.mark.filterwarnings("ignore:MoE. no mesh is set")
@pytest.mark.parametrize("on_mesh", [False, True], ids=["one device", "mesh"])
def test_schedule_flax(on_mesh):
    nnx = pytest.importorskip("flax.nnx")
    from jax_ep.flax import MoE

    mesh = harness.make_mesh((2,), (EXPERT,)) if on_mesh else None
    options = {"mesh": mesh, "implementation": "xla", "rngs": nnx.Rngs(0)}
    layers = [MoE(8, 4, 4, 2, **options, schedule=s) for s in (OTHER, Schedule(dispatch_mode="fused"))]
    x = jax.ShapeDtypeStruct((6, 8), BF16)
    assert nnx.eval_shape(lambda layer, x: layer(x)[0], layers[0], x).shape == (6, 8)
    with pytest.raises(NotImplementedError, match="mode='fused'"):
        nnx.eval_shape(lambda layer, x: layer(x)[0], layers[1], x)


SCHEDULES = {
    "default": Schedule(),
    "few programs": Schedule(num_communicating_programs=1, num_combining_programs=1),
    "small blocks": Schedule(tokens_per_block=1, num_warps=2, rows_in_flight=1),
    "large blocks": Schedule(tokens_per_block=16, num_warps=16, rows_in_flight=10, num_combining_programs=2),
}


def test_schedule_handle_independent(two_ranks, rng):
    """Handles do not depend on the schedule: dispatch and combine accept any handle, with the same bits."""
    x, ids = reals(rng, 2, 9, 24, dtype=BF16), rng.integers(0, 4, (2, 9, 2), np.int32)

    def round_trip(schedule, x, handle):
        options = {"schedule": schedule, "implementation": "triton"}
        rows = jax_ep.dispatch(x, None, num_experts=4, handle=handle, **options).tokens
        return jax_ep.combine(rows, handle, **options), rows

    def fn(x, ids):
        handle = jax_ep.dispatch(x, ids, num_experts=4, schedule=OTHER, implementation="triton").handle
        return in_turn([(functools.partial(round_trip, schedule), (x, handle)) for schedule in SCHEDULES.values()])

    default, *others = run(fn, two_ranks, x, ids)
    for name, found in zip(list(SCHEDULES)[1:], others, strict=True):
        for what, got, want in zip(("sums", "rows"), found, default, strict=True):
            assert_same_bits(got, want, f"{what}, {name}")
