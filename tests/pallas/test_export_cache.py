"""A launch is lowered once for all programs of a process on any mesh, and read from files by other processes."""

import contextlib
import gc
import hashlib
import os
import threading

import jax
import jax.numpy as jnp
import pytest
from jax import export
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.sharding import AxisType, PartitionSpec

from harness import PATIENCE_S, make_mesh
from jax_ep.core.mesh_axes import varying_axes
from jax_ep.pallas import export_cache, lowering_cache
from jax_ep.pallas.export_cache import _compile_ahead, lowered_once

ROWS = jax.ShapeDtypeStruct((8, 3), jnp.float32)


def make_launch():
    """Create a launch that is new to the process, and a record of its tracing."""
    traced = []

    def scale(x, y, *, interpret, factor):
        traced.append((x.shape, interpret, factor))
        return x * factor + y

    return lowered_once(scale), traced


@pytest.fixture(autouse=True)
def cache():
    """Set the folder of JAX's cache; initially none."""
    before = jax.config.jax_compilation_cache_dir

    def use(folder):
        if folder is not None:
            pytest.importorskip("flatbuffers")
        jax.config.update("jax_compilation_cache_dir", folder if folder is None else str(folder))

    use(None)
    yield use
    use(before)


@pytest.fixture
def folder(cache, tmp_path):
    """An empty folder of JAX's cache."""
    cache(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch):
    """Disable compilation ahead, as without GPUs."""
    monkeypatch.setattr(export_cache, "_compile_ahead", lambda *facts: None)


@pytest.fixture
def launch():
    return make_launch()


def lower(function, *shapes):
    return jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


def test_export_cache_shared_by_programs(launch):
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


def test_export_cache_key_x64(launch):
    run, traced = launch
    for x64 in (False, True, False):
        with jax.enable_x64(x64):
            lower(lambda x: run(x, x, interpret=False, factor=2.0), ROWS)
    assert len(traced) == 2


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("check_vma", [True, False])
def test_export_cache_shards(launch, kind, check_vma):
    run, traced = launch
    mesh, seen = make_mesh((2, 2), ("expert", "data"), kind), []
    both, one = PartitionSpec(("expert", "data")), PartitionSpec("expert")

    def shard(x, y):
        out = run(x, y, interpret=False, factor=2.0)  # One operand varies over both axes, the other over one.
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


def test_export_cache_skips_interpreter(launch):
    run, traced = launch
    x = jnp.ones((2, 2))
    assert run(x, x, interpret=True, factor=2.0).tolist() == [[3, 3], [3, 3]]
    assert traced == [((2, 2), True, 2.0)]


def test_export_cache_errors_reach_caller():
    def refuse(x, *, interpret):
        raise ValueError("no such tiles")

    with pytest.raises(ValueError, match="no such tiles"):
        lower(lambda x: lowered_once(refuse)(x, interpret=False), ROWS)


def lower_here(factor=2.0, rows=ROWS):
    """Lower in a process without earlier launches; return the program, and how often its launch was traced."""
    run, traced = make_launch()
    return lower(lambda x: run(x, x, interpret=False, factor=factor), rows), len(traced)


def test_export_cache_files_shared_by_processes(folder):
    first, *others = [lower_here() for _ in range(3)]
    assert first[1] == 1 and others == [(first[0], 0)] * 2
    (kept,) = folder.iterdir()
    assert [path.name[:6] for path in kept.iterdir()] == ["scale-"]
    assert lower_here(factor=3.0)[1] == 1
    with jax.enable_x64(True):
        assert lower_here()[1] == 1
    assert len(list(kept.iterdir())) == 3


def test_export_cache_truncated_files(folder):
    text, _ = lower_here()
    (path,) = folder.glob("*/*")
    content = path.read_bytes()
    for damaged in (b"", content[:-1], content[:40] + b"x" + content[41:]):
        path.write_bytes(damaged)
        assert lower_here() == (text, 1)
        assert lower_here() == (text, 0)


@pytest.mark.parametrize(
    "what", [*("nothing", "text", "end", "module", "launch"), *("sizes", "structure", "pipe", "folder", "huge")]
)
def test_export_cache_foreign_files(what, folder):
    """Also with a correct digest; another structure has the operands' shapes, but takes them as one tuple."""
    rows = jax.ShapeDtypeStruct((3, 2), jnp.float32) if what == "sizes" else ROWS
    other, _ = lower_here(factor=3.0, rows=rows)
    (path,) = folder.glob("*/*")
    payload = path.read_bytes()[lowering_cache._DIGEST_BYTES :]
    path.unlink()
    text, _ = lower_here()
    (path,) = folder.glob("*/*")
    module = payload.index(b"ML\xefR")
    payloads = {"nothing": b"", "text": b"no launch", "end": payload[:-100], "launch": payload, "sizes": payload}
    swapped = export.export(jax.jit(lambda pair: pair[0] + pair[1]), platforms=("cuda",))((ROWS, ROWS))
    payloads["structure"] = bytes(swapped.serialize())
    payloads["module"] = payload[: module + 4] + bytes(200) + payload[module + 204 :]
    path.unlink()
    if what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    elif what == "huge":
        path.touch()
        os.truncate(path, 1 << 40)
    else:
        digest = hashlib.sha256(payload).digest() if what == "launch" else lowering_cache._digest(path, payloads[what])
        path.write_bytes(digest + payloads[what])
    context = pytest.warns(UserWarning, match="is not cached") if what == "folder" else contextlib.nullcontext()
    with context:
        assert lower_here() == (text, 1)
    if what != "folder":
        assert lower_here() == (text, 0)
    assert other != text


@pytest.fixture
def limit():
    """Set the limit of JAX's cache."""
    before = jax.config.jax_compilation_cache_max_size
    yield lambda num_bytes: jax.config.update("jax_compilation_cache_max_size", num_bytes)
    jax.config.update("jax_compilation_cache_max_size", before)


def test_export_cache_evicts_least_recently_used(limit, folder):
    lower_here(factor=1.0)
    (first,) = folder.glob("*/*")
    lower_here(factor=2.0)
    second = next(path for path in folder.glob("*/*") if path != first)
    for age, path in enumerate((second, first), start=1):
        os.utime(path, (age, age))  # The second is older.
    assert lower_here(factor=2.0)[1] == 0  # And is used again.
    limit(first.stat().st_size + second.stat().st_size)
    assert lower_here(factor=3.0)[1] == 1
    assert not first.exists() and second.exists()
    assert [lower_here(factor=factor)[1] for factor in (2.0, 3.0, 1.0)] == [0, 0, 1]


@pytest.mark.parametrize("num_bytes", [0, 100])
def test_export_cache_file_above_limit(num_bytes, limit, folder):
    lower_here(factor=2.0)
    limit(num_bytes)
    assert [lower_here(factor=3.0)[1] for _ in range(2)] == [1, 1]
    assert lower_here(factor=2.0)[1] == 0  # The existing file stays.


@pytest.mark.parametrize("what", ["sources_digest", "jaxlib", "jax", "devices"])
def test_export_cache_key_version_and_device(what, folder, monkeypatch):
    lower_here()
    if what == "sources_digest":
        monkeypatch.setattr(lowering_cache, "sources_digest", lambda folder: "others")
    elif what == "devices":
        kind = type("Device", (), {"device_kind": "another GPU"})()
        monkeypatch.setattr(lowering_cache.jax, "local_devices", lambda: [kind])
    else:
        monkeypatch.setattr(getattr(lowering_cache, what), "__version__", "0.0.1")
    assert [lower_here()[1] for _ in range(2)] == [1, 0]


@pytest.mark.parametrize("why", ["no folder", "not in use", "remote", "no flatbuffers"])
def test_export_cache_disabled(why, cache, tmp_path, monkeypatch):
    cache({"no folder": None, "remote": "gs://bucket/folder"}.get(why, tmp_path))
    if why == "no flatbuffers":
        monkeypatch.setattr(lowering_cache.importlib.util, "find_spec", lambda name: None)
    try:
        jax.config.update("jax_enable_compilation_cache", why != "not in use")
        assert [lower_here()[1] for _ in range(2)] == [1, 1]
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    assert list(tmp_path.iterdir()) == []


def test_export_cache_eviction_skips_other_kinds(cache, limit, tmp_path):
    others = tmp_path / "jax_ep_lowered"
    (others / "folder").mkdir(parents=True)
    (others / "loop").symlink_to("loop")
    cache(tmp_path)
    limit(1 << 20)
    assert [lower_here()[1] for _ in range(2)] == [1, 0]


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 3000, "."], ids=["NUL", "surrogate", "long", "occupied"])
def test_export_cache_impossible_folder(name, cache, tmp_path):
    (tmp_path / "jax_ep_lowered").write_text("not a folder")
    cache(f"{tmp_path}/{name}")
    with pytest.warns(UserWarning, match=r"^a lowered kernel is not cached for other processes: .{1,200}$"):
        assert lower_here()[1] == 1


@pytest.fixture
def wait():
    """Wait until all threads that the test has started have ended."""
    before = set(threading.enumerate())

    def until_they_end():
        for thread in set(threading.enumerate()) - before:
            thread.join()

    return until_they_end


@pytest.fixture
def ahead(monkeypatch, wait):
    """Record what is compiled ahead in a process with GPUs and cores, and whether it saw the caller's mesh."""
    compiled = []

    def compile_ahead(launch, shapes, x64):
        knows_mesh = not jax.sharding.get_abstract_mesh().empty
        compiled.append((launch.platforms, shapes, x64, knows_mesh))

    def found():
        wait()
        return compiled

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setattr(export_cache, "_compile_ahead", compile_ahead)
    return found


@pytest.mark.parametrize("x64", [False, True])
def test_export_cache_compiles_ahead_once(x64, launch, ahead):
    run, _ = launch
    with jax.enable_x64(x64), jax.set_mesh(make_mesh((2, 2), ("expert", "data"))):
        for bias in range(2):
            lower(lambda x, bias=bias: run(x, x, interpret=False, factor=2.0) + bias, ROWS)
    assert ahead() == [(("cuda",), (ROWS, ROWS), x64, False)]
    lower(lambda x: run(x, x, interpret=False, factor=3.0), ROWS)
    assert len(ahead()) == 2


def test_export_cache_file_hit_not_compiled_ahead(folder, ahead):
    assert [lower_here()[1] for _ in range(3)] == [1, 0, 0]
    assert len(ahead()) == 1


@pytest.mark.parametrize("why", ["interpreted", "no GPU", "one core"])
def test_export_cache_no_compile_ahead(why, launch, ahead, monkeypatch):
    run, traced = launch
    if why == "no GPU":
        monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    if why == "one core":
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3})
    if why == "interpreted":
        run(jnp.ones((8, 3)), jnp.ones((8, 3)), interpret=True, factor=2.0)
    else:
        lower(lambda x: run(x, x, interpret=False, factor=2.0), ROWS)
    assert len(traced) == 1 and ahead() == []


def test_export_cache_exit_waits_for_compilation(launch, ahead, wait, monkeypatch):
    run, _ = launch
    program, seen = threading.Event(), []

    def compile_ahead(*facts):
        seen.append((program.wait(PATIENCE_S), threading.current_thread().daemon))

    monkeypatch.setattr(export_cache, "_compile_ahead", compile_ahead)
    lower(lambda x: run(x, x, interpret=False, factor=2.0), ROWS)
    program.set()
    wait()
    assert seen == [(True, False)]


def exported_for_here(function, *shapes):
    return export.export(jax.jit(function), disabled_checks=[export.DisabledSafetyCheck.custom_call("unregistered")])(
        *shapes
    )


@pytest.fixture
def eager_cache(cache, tmp_path):
    """Set a folder of JAX's cache that keeps every program."""
    limit = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    cache(tmp_path)
    reset_cache()  # It reads the name of its folder once.
    yield tmp_path
    jax.config.update("jax_persistent_cache_min_compile_time_secs", limit)
    reset_cache()


@pytest.mark.parametrize("x64", [False, True])
def test_export_cache_compiled_program_freed(x64, eager_cache, monkeypatch):
    def num_executables():
        gc.collect()
        return len(jax.devices()[0].client.live_executables())

    def compile_and_count(self):
        compiled = compile_(self)
        counts.append(num_executables() - before)
        return compiled

    before, counts, compile_ = num_executables(), [], jax.stages.Lowered.compile
    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_and_count)
    shape = jax.ShapeDtypeStruct((8, 3), jnp.dtype("float64" if x64 else "float32"))
    with jax.enable_x64(x64):
        launch = exported_for_here(lambda x: x * 2, shape)
    _compile_ahead(launch, (shape,), x64)
    assert counts == [1] and num_executables() == before
    assert not any(path.is_file() for path in eager_cache.iterdir())  # XLA has a folder there on GPUs.
    with jax.enable_x64(x64):
        jax.jit(launch.call).lower(shape).compile()
    assert any(path.is_file() for path in eager_cache.iterdir())  # Other programs leave files.


def test_export_cache_xla_error_raised_in_program():
    launch = exported_for_here(jax.ffi.ffi_call("unregistered", ROWS), ROWS)
    _compile_ahead(launch, (ROWS,), False)
    with pytest.raises(jax.errors.JaxRuntimeError, match="unregistered"):
        jax.jit(launch.call).lower(ROWS).compile()


def test_export_cache_other_errors_printed(launch, ahead, wait, monkeypatch):
    run, _ = launch
    printed = []
    for_tpu = export.export(jax.jit(lambda x: x), platforms=("tpu",))(ROWS)
    monkeypatch.setattr(threading, "excepthook", printed.append)
    monkeypatch.setattr(export_cache, "_compile_ahead", lambda *facts: _compile_ahead(for_tpu, (ROWS,), False))
    assert "multiply" in lower(lambda x: run(x, x, interpret=False, factor=2.0), ROWS)
    wait()
    (error,) = printed
    assert error.exc_type is ValueError and "platforms" in str(error.exc_value)
