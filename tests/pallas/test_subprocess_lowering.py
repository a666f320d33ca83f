"""Launches that are lowered in separate processes: the same code, which programs wait for when they are lowered."""

import contextlib
import functools
import pickle
import re
import subprocess
import sys
import threading
import time
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from harness import PATIENCE_S, make_mesh
from jax_ep.core.mesh_axes import varying_axes
from jax_ep.pallas import export_cache, grouped_gemm, subprocess_lowering
from jax_ep.pallas import launch as launches
from jax_ep.pallas.export_cache import lowered_once
from jax_ep.pallas.tiling import ForwardTiles, WeightTiles

pytest.importorskip("flatbuffers")
BF16, I32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.int32)
Array = jax.ShapeDtypeStruct
ROWS = Array((8, 3), jnp.float32)
PRODUCT = Array((64, 64), BF16), Array((2, 64, 128), BF16), Array((2,), I32)
FORWARD = {"transpose": False, "out_dtype": BF16, "tiles": ForwardTiles((16, 32), band=2)}
GRADIENT = {"out_dtype": BF16, "tiles": WeightTiles(128, 6)}


def make_launch():
    """Create a launch that is new to the process, and records of its tracings: shape, factor, for shapes only, mesh."""
    traced = []

    def scale(x, y, *, interpret, factor):
        traced.append((x.shape, factor, launches._shapes_alone.wanted, jax.sharding.get_abstract_mesh().empty))
        return {"out": x * factor + y}

    return lowered_once(scale), traced


def lower(function, *shapes):
    return jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


@pytest.fixture
def processes(monkeypatch):
    """Simulate GPUs and cores without files of earlier processes; return the threads that have started a process."""
    begun = []

    def run(*args, **options):
        begun.append(threading.current_thread())
        return begin(*args, **options)

    begin = subprocess.run
    monkeypatch.setattr(subprocess_lowering.subprocess, "run", run)
    monkeypatch.setattr(subprocess_lowering, "most_processes", lambda: 2)
    monkeypatch.setattr(export_cache, "cached_or_made", lambda launch, facts, make: make())
    return begun


numbered = pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="Mosaic's names have numbers of the process")


def kernels(text):
    """Return the names under which Mosaic knows kernels: hashes of their lowered code without source locations."""
    return sorted(re.findall(r'kernel_hash = "([^"]*)"', text))


def kernels_here(launch, shapes, static, x64=False):
    return kernels(
        subprocess_lowering.export_launch(launch.__wrapped__, shapes, tuple(static.items()), x64).mlir_module()
    )


@numbered
@pytest.mark.slow
def test_subprocess_lowering_same_launch(processes):
    """One launch is lowered here and the other in a process."""

    def both(x, matrices, sizes):
        product = grouped_gemm._launch_forward(x, matrices, sizes, interpret=False, **FORWARD)
        return product, grouped_gemm._launch_gradient(x, product, sizes, interpret=False, **GRADIENT)

    found = kernels(lower(both, *PRODUCT))
    rows, _, sizes = PRODUCT
    forward = kernels_here(grouped_gemm._launch_forward, PRODUCT, FORWARD)
    gradient = kernels_here(grouped_gemm._launch_gradient, (rows, Array((64, 128), BF16), sizes), GRADIENT)
    assert len(processes) == 1 and len(found) == 3
    assert found == sorted(forward + gradient)


@numbered
@pytest.mark.slow
@pytest.mark.parametrize("x64", [False, True])
def test_subprocess_lowering_passes_state(x64, processes, monkeypatch):
    """The process gets the number of multiprocessors, and the x64 setting."""
    device = type("Device", (), {"core_count": 1})()
    monkeypatch.setattr(subprocess_lowering.jax, "local_devices", lambda: [device])
    launch = grouped_gemm._launch_forward
    made = subprocess_lowering.lower(launch.__wrapped__, PRODUCT, tuple(FORWARD.items()), x64)
    found = kernels(made.mlir_module())
    assert found != kernels_here(launch, PRODUCT, FORWARD, x64)
    monkeypatch.setattr(launches, "_cores", 1)
    assert found == kernels_here(launch, PRODUCT, FORWARD, x64)


def test_subprocess_lowering_tracing_does_not_wait(processes, monkeypatch):
    go, exported = threading.Event(), subprocess_lowering.export_launch

    def export_later(*args):
        assert go.wait(PATIENCE_S)
        return exported(*args)

    monkeypatch.setattr(export_cache, "export_launch", export_later)
    run, traced = make_launch()
    program = jax.jit(lambda x: run(x, x, interpret=False, factor=2.0)["out"] + 1).trace(ROWS)
    assert [alone for *_, alone, _ in traced] == [True] and program.out_info.shape == (8, 3)
    threading.Timer(0.1, go.set).start()
    assert "multiply" in program.lower(lowering_platforms=("cuda",)).as_text()
    lower(lambda x: run(x, x, interpret=False, factor=2.0)["out"] * 3, ROWS)
    assert [alone for *_, alone, _ in traced] == [True, False], "lowered once"
    assert all(knows_no_mesh for *_, knows_no_mesh in traced) and processes == []


def test_subprocess_lowering_shards(processes):
    run, traced = make_launch()
    mesh, seen = make_mesh((2, 2), ("expert", "data")), []
    both, one = PartitionSpec(("expert", "data")), PartitionSpec("expert")

    def shard(x, y):
        out = run(x, y, interpret=False, factor=2.0)["out"]
        seen.append(varying_axes(out))
        return out

    sharded = jax.shard_map(shard, mesh=mesh, in_specs=(both, one), out_specs=both)
    assert "multiply" in lower(sharded, ROWS, Array((4, 3), jnp.float32))
    assert seen == [{"expert", "data"}] and {shape for shape, *_ in traced} == {(2, 3)}
    assert all(knows_no_mesh for *_, knows_no_mesh in traced)


def test_subprocess_lowering_results_are_shapes(processes):
    """Result shapes never trace the kernel."""
    run = functools.partial(grouped_gemm._launch_forward, interpret=False, **FORWARD)
    found = jax.eval_shape(run, *PRODUCT)
    assert (found.shape, found.dtype) == ((64, 128), BF16)

    def body(*refs, **scratch):
        raise AssertionError("traced")

    asked = Array((4,), I32), (Array((2, 3), BF16),)
    with launches.shapes_alone():
        found = launches.launch("name", body, (), asked, {}, 1, False)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), found) == jax.tree.map(lambda x: (x.shape, x.dtype), asked)
    with pytest.raises(AssertionError, match="traced"):
        launches.launch("name", body, (jnp.ones(4),), asked, {}, 1, False)


def test_subprocess_lowering_errors_reach_caller(processes):
    def refuse(x, *, interpret):
        if not launches._shapes_alone.wanted:
            raise ValueError("no such tiles")
        return x

    traced = jax.jit(functools.partial(lowered_once(refuse), interpret=False)).trace(ROWS)
    for _ in range(2):
        with pytest.raises(ValueError, match="no such tiles"):
            traced.lower(lowering_platforms=("cuda",))


def test_subprocess_lowering_waiting_order():
    places, taken, done = export_cache._Places(), [], threading.Event()

    def take():
        with places.one(1) as is_here:
            taken.append(is_here)
            assert done.wait(PATIENCE_S)

    with contextlib.ExitStack() as other_place, places.one(1) as is_here:
        assert is_here and not other_place.enter_context(places.one(1))
        waiting = [threading.Thread(target=take) for _ in range(2)]
        for thread in waiting:
            thread.start()
        other_place.close()
        wait_until(lambda: taken)
        assert taken == [False]
    wait_until(lambda: len(taken) == 2)
    assert taken == [False, True]
    done.set()
    for thread in waiting:
        thread.join(PATIENCE_S)


def wait_until(condition):
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_subprocess_lowering_ignores_current_folder(tmp_path, monkeypatch):
    """Unless this process does: `python -m` would search there first."""
    (tmp_path / "inspect.py").write_text("raise ImportError('planted')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    with pytest.raises(RuntimeError, match="has no attribute 'none'"):
        subprocess_lowering.lower(type("L", (), {"__module__": "inspect", "__qualname__": "none"}), (), (), False)


@pytest.mark.parametrize("how", ["fails", "cannot begin", "never ends", "cannot be asked", "answers something else"])
def test_subprocess_lowering_falls_back(how, processes, monkeypatch):
    """This process is busy until the other one fails."""
    monkeypatch.setattr(export_cache, "_places", export_cache._Places())
    busy = contextlib.ExitStack()
    assert busy.enter_context(export_cache._places.one(0))

    def run(command, **options):
        busy.close()
        if how == "cannot begin":
            raise OSError("no memory")
        if how == "never ends":
            raise subprocess.TimeoutExpired(command, 300)
        if how == "answers something else":
            return subprocess.CompletedProcess(command, 0, b"a word of sitecustomize.py", b"")
        return subprocess.CompletedProcess(command, 1, b"", b"no memory")

    monkeypatch.setattr(subprocess_lowering.subprocess, "run", run)
    factor = Unsent(2.0) if how == "cannot be asked" else 2.0
    monkeypatch.setattr(Unsent, "asked", busy.close)
    run, _ = make_launch()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        text = lower(lambda x: run(x, x, interpret=False, factor=factor)["out"], ROWS)
    assert "multiply" in text
    messages = [str(warning.message) for warning in caught if "JAX_EP_LOWERING_PROCESSES=0" in str(warning.message)]
    assert len(messages) == 1 and "kernel of scale failed" in messages[0]


class Unsent(float):
    """A number that cannot be sent to another process."""

    asked = staticmethod(lambda: None)

    def __reduce__(self):
        self.asked()
        raise pickle.PicklingError("not for other processes")


@pytest.mark.parametrize(
    ("cores", "backend", "asked", "most"),
    [
        *((16, "gpu", None, 6), (8, "gpu", None, 4), (7, "gpu", None, 0), (16, "cpu", None, 0)),
        *((16, "gpu", "0", 0), (16, "gpu", "3", 3)),
    ],
)
def test_subprocess_lowering_process_count(cores, backend, asked, most, monkeypatch):
    monkeypatch.setattr(subprocess_lowering.os, "sched_getaffinity", lambda process: set(range(cores)))
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.delenv(subprocess_lowering.VARIABLE, raising=False)
    if asked is not None:
        monkeypatch.setenv(subprocess_lowering.VARIABLE, asked)
    assert subprocess_lowering.most_processes() == most
    monkeypatch.setattr(subprocess_lowering.importlib.util, "find_spec", lambda name: None)
    assert subprocess_lowering.most_processes() == 0


def test_subprocess_lowering_invalid_process_count(monkeypatch):
    monkeypatch.setattr(subprocess_lowering.os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setenv(subprocess_lowering.VARIABLE, "all")
    with pytest.raises(ValueError, match="JAX_EP_LOWERING_PROCESSES='all', expected the number"):
        subprocess_lowering.most_processes()
