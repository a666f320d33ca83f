"""Per-shard calls of the kernels in kernels_for_tests."""

import importlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep.core.kernel import Config, Kernel
from jax_ep.megakernels.launch import launch

FOLDER = Path(__file__).parent / "kernels_for_tests"
W, H = 4, 8
HEAP_BYTES = 4096
BASES = tuple(range(0, HEAP_BYTES, 512))


def kernel(module, function):
    return Kernel(getattr(importlib.import_module(f"kernels_for_tests.{module}"), function))


def run_one(name, x, dtype=None, num_programs=1, **constants):
    """Launch a kernel of an array and a result of its shape."""
    result = jax.ShapeDtypeStruct(x.shape, dtype or x.dtype)
    (y,) = launch(kernel(*name), (x,), (result,), Config(num_programs), constants)
    return y


def ranks():
    return np.arange(W, dtype=np.int32)


def heap_tables(pool):
    """Return `[worker, heap, 2]`: 64-bit addresses as pairs of int32, for programs without x64."""
    return np.array([pool.heap_addresses(worker) for worker in range(W)], np.int64).view(np.int32).reshape(W, W, 2)


def exchange(rank, epoch, heaps, x, base=0):
    (y,) = launch(
        kernel("exchange", "all_to_all"),
        (rank, epoch, heaps, x),
        (jax.ShapeDtypeStruct((W, H), jnp.float32),),
        Config(num_programs=2),
        {"W": W, "H": H, "BASE": base},
    )
    return y
