"""One pool of four workers for the tests of a file; it needs Triton, and stands for GPUs on the CPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import harness
import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from kernel_calls import HEAP_BYTES, W

from jax_ep import interpreter


@pytest.fixture(autouse=True)
def needs_triton() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed: pip install 'triton>=3.9'")
    if jax.default_backend() != "cpu":
        pytest.skip("the interpreter stands for GPUs on the CPU")


@pytest.fixture(scope="module")
def shared_pool() -> Iterator[interpreter.Pool]:
    pool = interpreter.Pool(W, HEAP_BYTES)
    yield pool
    pool.close()


@pytest.fixture
def pool(shared_pool: interpreter.Pool) -> Iterator[interpreter.Pool]:
    shared_pool.reset()
    interpreter.set_pool(shared_pool)
    yield shared_pool
    interpreter.set_pool(None)


@pytest.fixture
def mesh4() -> Mesh:
    return harness.make_mesh((W,), (harness.EXPERT,))


@pytest.fixture
def after_failures() -> Iterator[None]:
    """JAX raises the last failure of a callback once more at exit, unless something has run on the device since."""
    yield
    mesh = harness.make_mesh((jax.device_count(),), (harness.EXPERT,))
    same = harness.per_rank(lambda x: jax.pure_callback(np.asarray, x, x, vmap_method="sequential"), mesh)
    jax.block_until_ready(jax.jit(same)(np.zeros(jax.device_count(), np.float32)))
    jax.effects_barrier()
