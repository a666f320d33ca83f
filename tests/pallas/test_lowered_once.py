"""A process lowers a launch once for all programs, whatever mesh they are for."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

from harness import make_mesh
from jax_ep.core.mesh_axes import varying_axes
from jax_ep.pallas.lowered import lowered_once

ROWS = jax.ShapeDtypeStruct((8, 3), jnp.float32)


@pytest.fixture
def launch():
    """A launch, and how it has been traced."""
    traced = []

    def scale(x, y, *, interpret, factor):
        traced.append((x.shape, interpret, factor))
        return x * factor + y

    return lowered_once(scale), traced


def lower(function, *shapes):
    return jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


def test_programs_share_it(launch):
    run, traced = launch
    for bias in range(3):
        text = lower(lambda x, bias=bias: run(x, x, interpret=False, factor=2.0) + bias, ROWS)
        assert "multiply" in text
    jax.clear_caches()
    lower(lambda x: jax.lax.scan(lambda c, _: (run(c, x, interpret=False, factor=2.0), None), x, None, 3)[0], ROWS)
    assert traced == [((8, 3), False, 2.0)]
    lower(lambda x: run(x, x, interpret=False, factor=3.0), ROWS)
    lower(lambda x: run(x, x, interpret=False, factor=3.0), jax.ShapeDtypeStruct((4, 3), jnp.float32))
    assert [(shape[0], factor) for shape, _, factor in traced] == [(8, 2.0), (8, 3.0), (4, 3.0)]


def test_numbers_of_64_bits_are_another_launch(launch):
    run, traced = launch
    for x64 in (False, True, False):
        with jax.enable_x64(x64):
            lower(lambda x: run(x, x, interpret=False, factor=2.0), ROWS)
    assert len(traced) == 2


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("check_vma", [True, False])
def test_shards(launch, kind, check_vma):
    run, traced = launch
    mesh, seen = make_mesh((2, 2), ("expert", "data"), kind), []
    both, one = PartitionSpec(("expert", "data")), PartitionSpec("expert")

    def shard(x, y):
        out = run(x, y, interpret=False, factor=2.0)  # one operand varies over both axes, the other over one
        seen.append(varying_axes(out))
        return out

    sharded = jax.shard_map(shard, mesh=mesh, in_specs=(both, one), out_specs=both, check_vma=check_vma)

    def program(x, y):
        if kind is AxisType.Explicit:
            x, y = jax.reshard(x, both), jax.reshard(y, one)
        return sharded(x, y)

    with jax.set_mesh(mesh):
        lower(program, ROWS, jax.ShapeDtypeStruct((4, 3), jnp.float32))
    assert traced == [((2, 3), False, 2.0)]
    if check_vma:
        assert seen == [{"expert", "data"}]
    lower(lambda x: run(x, x, interpret=False, factor=2.0), jax.ShapeDtypeStruct((2, 3), jnp.float32))
    assert len(traced) == 1


def test_interpreted_launches_are_traced_as_they_are(launch):
    run, traced = launch
    x = jnp.ones((2, 2))
    assert run(x, x, interpret=True, factor=2.0).tolist() == [[3, 3], [3, 3]]
    assert traced == [((2, 2), True, 2.0)]


def test_errors_of_the_launch_reach_the_caller():
    def refuse(x, *, interpret):
        raise ValueError("no such tiles")

    with pytest.raises(ValueError, match="no such tiles"):
        lower(lambda x: lowered_once(refuse)(x, interpret=False), ROWS)
