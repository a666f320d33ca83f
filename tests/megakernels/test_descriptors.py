"""Tensor descriptors as operands: reads outside return zero, and host descriptors match those of kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_calls import kernel

from jax_ep.core.kernel import BOUND, Config, Descriptor
from jax_ep.megakernels.launch import launch


def block(x, function, shape, **constants):
    result = jax.ShapeDtypeStruct(shape[-2:], x.dtype)
    constants |= {"ROWS": shape[-2], "COLUMNS": shape[-1]}
    return launch(kernel("blocks", function), (Descriptor(x, shape),), (result,), Config(1), constants)[0]


def padded(x, rows, columns):
    return np.pad(x, ((0, rows), (0, columns)))


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "int32"])
def test_descriptor_block_at_edge(pool, rng, name):
    x = rng.integers(1, 100, (10, 24)).astype(jnp.dtype(name))
    for row, column in ((0, 0), (4, 8), (6, 16), (8, 16), (16, 0)):
        got = block(jnp.asarray(x), "block_of_matrix", (8, 16), ROW=row, COLUMN=column)
        np.testing.assert_array_equal(np.asarray(got), padded(x, 16, 16)[row : row + 8, column : column + 16])


@pytest.mark.parametrize("compile_it", [True, False], ids=["jit", "eager"])
def test_descriptor_blocks_per_matrix(pool, rng, compile_it):
    x = rng.standard_normal((3, 10, 16)).astype(np.float32)

    def fn(x):
        return block(x, "block_of_group", (1, 8, 16), GROUP=1, ROW=8)

    got = (jax.jit(fn) if compile_it else fn)(jnp.asarray(x))
    np.testing.assert_array_equal(np.asarray(got), padded(x[1], 8, 0)[8:16])


def test_descriptor_vmap(pool, rng):
    x = rng.standard_normal((10, 24, 2)).astype(np.float32)
    got = jax.vmap(lambda x: block(x, "block_of_matrix", (8, 16), ROW=4, COLUMN=16), in_axes=2)(x)
    for i in range(2):
        np.testing.assert_array_equal(np.asarray(got[i]), padded(x[..., i], 8, 8)[4:12, 16:32])


def test_descriptor_unaligned_rows(pool, after_failures):
    with pytest.raises(Exception, match="16-byte aligned"):
        jax.block_until_ready(block(jnp.ones((8, 9)), "block_of_matrix", (8, 16), ROW=0, COLUMN=0))
    pool.reset()


def test_descriptor_strides():
    array = jax.ShapeDtypeStruct((3, 10, 16), jnp.float32)
    assert Descriptor(array, (1, 8, 16)).blocks == ((3, 10, 16), (160, 16, 1), (1, 8, 16))


@pytest.mark.parametrize(("row", "end"), [(0, 1), (70, 100), (99, 100), (2**30 - 1, 2**30)])
def test_descriptor_bounded_rows(row, end):
    """Kernels use coordinates `[BOUND, end, row - end + BOUND, column]`; tests/megakernels/test_gemm.py runs them."""
    blocks = Descriptor(jax.ShapeDtypeStruct((end, 7168), jnp.bfloat16), (64, 128), bounded=True).blocks
    for at in (row, end - 1, end):
        place = (BOUND, end, at - end + BOUND, 5)
        address = 2 * sum(i * stride for i, stride in zip(place, blocks.strides, strict=True))
        assert address % 2**64 == 2 * (at * 7168 + 5)
        assert all(i < size for i, size in zip(place, blocks.shape, strict=True)) == (at < end)
    # TMA supports strides of whole words below 2**40 bytes, and sizes up to 2**32.
    assert all(2 * stride % 16 == 0 and 2 * stride < 2**40 for stride in blocks.strides[:-1])
    assert max(blocks.shape) <= 2**32
