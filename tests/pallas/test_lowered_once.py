"""A launch is lowered once for all programs of a process, whatever mesh they are for, and from files in others."""

import os

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

from harness import make_mesh
from jax_ep.core.mesh_axes import varying_axes
from jax_ep.pallas import kept
from jax_ep.pallas.lowered import lowered_once

ROWS = jax.ShapeDtypeStruct((8, 3), jnp.float32)


def make_launch():
    """A launch as a process finds it, and how it has been traced."""
    traced = []

    def scale(x, y, *, interpret, factor):
        traced.append((x.shape, interpret, factor))
        return x * factor + y

    return lowered_once(scale), traced


@pytest.fixture(autouse=True)
def cache():
    """Sets the folder of JAX's cache; none at first, whatever the tests have."""
    before = jax.config.jax_compilation_cache_dir

    def use(folder):
        jax.config.update("jax_compilation_cache_dir", folder if folder is None else str(folder))

    use(None)
    yield use
    use(before)


@pytest.fixture
def launch():
    return make_launch()


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


def lower_here(factor=2.0):
    """By a process that has lowered nothing: the program, and how often its launch was traced for that."""
    run, traced = make_launch()
    return lower(lambda x: run(x, x, interpret=False, factor=factor), ROWS), len(traced)


def test_other_processes_find_it_in_files(cache, tmp_path):
    pytest.importorskip("flatbuffers")
    cache(tmp_path)
    first, *others = [lower_here() for _ in range(3)]
    assert first[1] == 1 and others == [(first[0], 0)] * 2
    (folder,) = tmp_path.iterdir()
    assert [path.name[:6] for path in folder.iterdir()] == ["scale-"]
    assert lower_here(factor=3.0)[1] == 1
    with jax.enable_x64(True):
        assert lower_here()[1] == 1
    assert len(list(folder.iterdir())) == 3


def test_files_that_are_not_whole_are_made_again(cache, tmp_path):
    pytest.importorskip("flatbuffers")
    cache(tmp_path)
    text, _ = lower_here()
    (path,) = tmp_path.glob("*/*")
    content = path.read_bytes()
    for damaged in (b"", content[:-1], content[:40] + b"x" + content[41:]):
        path.write_bytes(damaged)
        assert lower_here() == (text, 1)
        assert lower_here() == (text, 0)


@pytest.fixture
def limit():
    """Sets the limit of JAX's cache."""
    before = jax.config.jax_compilation_cache_max_size
    yield lambda num_bytes: jax.config.update("jax_compilation_cache_max_size", num_bytes)
    jax.config.update("jax_compilation_cache_max_size", before)


def test_files_used_longest_ago_make_room_for_others(cache, limit, tmp_path):
    pytest.importorskip("flatbuffers")
    cache(tmp_path)
    lower_here(factor=1.0)
    (first,) = tmp_path.glob("*/*")
    lower_here(factor=2.0)
    second = next(path for path in tmp_path.glob("*/*") if path != first)
    for age, path in enumerate((second, first), start=1):
        os.utime(path, (age, age))  # the second is older
    assert lower_here(factor=2.0)[1] == 0  # and is used again
    limit(first.stat().st_size + second.stat().st_size)
    assert lower_here(factor=3.0)[1] == 1
    assert not first.exists() and second.exists()
    assert [lower_here(factor=factor)[1] for factor in (2.0, 3.0, 1.0)] == [0, 0, 1]


@pytest.mark.parametrize("num_bytes", [0, 100])
def test_a_file_above_the_limit_is_not_written(num_bytes, cache, limit, tmp_path):
    pytest.importorskip("flatbuffers")
    cache(tmp_path)
    lower_here(factor=2.0)
    limit(num_bytes)
    assert [lower_here(factor=3.0)[1] for _ in range(2)] == [1, 1]
    assert lower_here(factor=2.0)[1] == 0  # what is there stays


@pytest.mark.parametrize("what", ["sources_digest", "jaxlib", "jax", "devices"])
def test_files_are_for_one_version_and_kind_of_device(what, cache, tmp_path, monkeypatch):
    pytest.importorskip("flatbuffers")
    cache(tmp_path)
    lower_here()
    if what == "sources_digest":
        monkeypatch.setattr(kept, "sources_digest", lambda folder: "others")
    elif what == "devices":
        kind = type("Device", (), {"device_kind": "another GPU"})()
        monkeypatch.setattr(kept.jax, "local_devices", lambda: [kind])
    else:
        monkeypatch.setattr(getattr(kept, what), "__version__", "0.0.1")
    assert [lower_here()[1] for _ in range(2)] == [1, 0]


@pytest.mark.parametrize("why", ["no folder", "not in use", "remote", "no flatbuffers"])
def test_where_nothing_is_kept(why, cache, tmp_path, monkeypatch):
    cache({"no folder": None, "remote": "gs://bucket/folder"}.get(why, tmp_path))
    if why == "no flatbuffers":
        monkeypatch.setattr(kept.importlib.util, "find_spec", lambda name: None)
    try:
        jax.config.update("jax_enable_compilation_cache", why != "not in use")
        assert [lower_here()[1] for _ in range(2)] == [1, 1]
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written(cache, tmp_path):
    pytest.importorskip("flatbuffers")
    (tmp_path / "jax_ep_lowered").write_text("not a folder")
    cache(tmp_path)
    with pytest.warns(UserWarning, match="a lowered kernel is not kept for other processes"):
        assert lower_here()[1] == 1
