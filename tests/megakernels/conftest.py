"""Simulated GPUs on the CPU for the tests of this folder: one pool of four workers per file. Needs Triton."""

import importlib.util
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from kernel_calls import HEAP_BYTES, W

import harness
import jax_ep
from jax_ep import context, interpreter
from jax_ep.megakernels import compile


@pytest.fixture(autouse=True)
def needs_triton(request):
    """Run tests of this folder on CPU devices; modules with ALSO_ON_GPUS also run on the GPUs of one process."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed: pip install 'triton>=3.9'")
    if jax.default_backend() != "cpu" and not getattr(request.module, "ALSO_ON_GPUS", False):
        pytest.skip("the interpreter stands for GPUs on the CPU")
    if jax.process_count() > 1:
        pytest.skip("a context of several processes is not made anew")


@pytest.fixture
def on_h200(monkeypatch):
    """Use the sizes and choices of an H200, without running anything."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(compile, "device_capability", lambda: 90)
    device = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0", core_count=132)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])


@pytest.fixture(scope="module")
def shared_pool():
    pool = interpreter.Pool(W, HEAP_BYTES, timeout_s=harness.PATIENCE_S)
    yield pool
    pool.close()


@pytest.fixture
def pool(shared_pool):
    shared_pool.reset()
    interpreter.set_pool(shared_pool)
    yield shared_pool
    interpreter.set_pool(None)


@pytest.fixture
def no_context():
    """No context, before the test and after it."""
    jax_ep.finalize()
    yield
    jax_ep.finalize()


@pytest.fixture
def mesh(no_context):
    """Two ranks without a context."""
    return harness.make_mesh((2,), (harness.EXPERT,))


@pytest.fixture
def mesh4():
    return harness.make_mesh((W,), (harness.EXPERT,))


@pytest.fixture
def two_impatient_ranks():
    """Two ranks with their own context, whose kernels time out after a second of idle time."""
    jax_ep.finalize()
    mesh = harness.make_mesh((2,), (harness.EXPERT,))
    jax_ep.init(mesh, transport="shared_memory", timeout_s=1)
    context.heap("test")._memory.pool.timeout_s = harness.PATIENCE_S
    yield mesh
    jax_ep.finalize()


@pytest.fixture
def after_failures():
    """JAX raises the last failure of a callback again at exit, unless the device has run something since."""
    yield
    mesh = harness.make_mesh((jax.device_count(),), (harness.EXPERT,))
    same = harness.per_rank(lambda x: jax.pure_callback(np.asarray, x, x, vmap_method="sequential"), mesh)
    jax.block_until_ready(jax.jit(same)(np.zeros(jax.device_count(), np.float32)))
    jax.effects_barrier()
