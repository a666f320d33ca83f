"""The interpreter pool: failures of kernels, of workers, and of programs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_calls import FOLDER, H, W, exchange, heap_tables, ranks, run_one

from jax_ep import interpreter


def test_kernel_that_raises(pool, mesh4, after_failures):
    def fn(x):
        return run_one(("elementwise", "fail"), x, jax.ShapeDtypeStruct((1,), jnp.int32), LIMIT=3)

    run = jax.jit(harness.per_rank(fn, mesh4))
    with pytest.raises(Exception, match=r"(?s)kernel fail, worker 3:.*elementwise\.py.*the limit is reached"):
        jax.block_until_ready(run(ranks()[:, None]))
    with pytest.raises(Exception, match=r"(?s)the limit is reached.*refuses launches until it is reset"):
        jax.block_until_ready(run(ranks()[:, None] * 0))
    pool.reset()
    np.testing.assert_array_equal(np.asarray(run(ranks()[:, None] - 1)), ranks()[:, None] - 1)


def test_failure_stops_peers_that_wait(pool, mesh4, after_failures):
    def fn(rank, heaps, x):
        limited = run_one(("elementwise", "fail"), x, jax.ShapeDtypeStruct((1,), jnp.int32), LIMIT=3)
        return exchange(rank, limited[0], heaps, jnp.zeros((W, H), jnp.float32))

    start = time.perf_counter()
    with pytest.raises(Exception, match="the limit is reached"):
        jax.block_until_ready(jax.jit(harness.per_rank(fn, mesh4))(ranks(), heap_tables(pool), ranks()[:, None]))
    pool.reset()  # waits until the others have stopped too
    assert time.perf_counter() - start < 15, "the others waited for the rank that failed"


def test_no_pool(after_failures):
    interpreter.set_pool(None)
    with pytest.raises(Exception, match="no interpreter pool"):
        jax.block_until_ready(
            run_one(("elementwise", "fail"), jnp.zeros(1, jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32), LIMIT=3)
        )


def test_mesh_larger_than_pool(pool, after_failures):
    mesh = harness.make_mesh((2 * W,), (harness.EXPERT,))

    def fn(x):
        return run_one(("elementwise", "fail"), x, jax.ShapeDtypeStruct((1,), jnp.int32), LIMIT=30)

    with pytest.raises(Exception, match="a mesh of 8 devices, but the interpreter pool has 4"):
        jax.block_until_ready(jax.jit(harness.per_rank(fn, mesh))(np.zeros((2 * W, 1), np.int32)))


def test_worker_killed(after_failures):
    pool = interpreter.Pool(1, 64)
    interpreter.set_pool(pool)
    try:
        os.kill(pool._workers[0].process.pid, 9)
        for _ in range(2):
            with pytest.raises(Exception, match=r"worker 0 \(process \d+\) died with exit code -9"):
                jax.block_until_ready(
                    run_one(
                        ("elementwise", "fail"), jnp.zeros(1, jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32), LIMIT=3
                    )
                )
        with pytest.raises(RuntimeError, match=r"workers \[0\] have died"):
            pool.reset()
    finally:
        interpreter.set_pool(None)
        pool.close()
    pool.close()


def test_missing_peer_is_named():
    pool = interpreter.Pool(2, 64, gang_timeout_s=0.2)
    request = interpreter.Launch(str(FOLDER / "elementwise.py"), "fail", (), (), 1, {})
    with pytest.raises(RuntimeError, match=r"worker 1 waited 0\.2 s for its peers, but only workers \[1\] of 2"):
        pool.launch(request, worker=1, group_size=2, site=0)
    pool.close()


def test_exit_leaves_nothing_behind():
    """A program that neither closes its pool nor finishes its kernel prints no warning, and its worker ends with it."""
    program = """
from jax_ep.interpreter import Pool
pool = Pool(1, 64)
print(pool._workers[0].process.pid)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr == ""
    assert not Path(f"/proc/{done.stdout.strip()}").exists()
