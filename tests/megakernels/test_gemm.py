"""The grouped GEMM kernels in the interpreter: all ways to cover groups of all sizes, against NumPy."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import facts_of
import oracle
from cases import BF16, F32
from jax_ep import context, tuning
from jax_ep.core.kernel import BOUND, Descriptor
from jax_ep.megakernels import grouped_gemm
from jax_ep.megakernels.activation import gather_rows
from jax_ep.megakernels.grouped_gemm import Tiles, WeightTiles
from jax_ep.ops import registry
from jax_ep.types import Options

TALL = Tiles(block_n=32, block_k=16, num_stages=2)
FORWARD = {
    "as chosen": None,
    "tall": TALL,
    "stored by TMA": dataclasses.replace(TALL, tma_store=True),
    "stored by TMA in halves": dataclasses.replace(TALL, tma_store=True, store_parts=2),
    "bands of two": dataclasses.replace(TALL, block_m=32, group_m=2),
}
WEIGHTS = {
    "as chosen": None,
    "stored by TMA": WeightTiles(block_m=32, block_n=32, block_r=64, group_m=1, tma_store=True),
    "stored by TMA in halves": WeightTiles(block_m=32, block_n=64, block_r=32, tma_store=True, store_parts=2),
    "stored in quarters": WeightTiles(block_m=32, block_n=64, block_r=32, store_parts=4),
}
# There are 13 more rows past the groups.
GROUPS = {
    "remainders": [0, 1, 63, 64, 65, 127, 128, 129, 0],
    "one large": [300, 3, 0, 129],
    "one": [200],
    "odd number of tasks, full at the end": [100, 128, 128],
    "odd number of tasks, small at the end": [128, 128, 20],
    "all empty": [0, 0, 0],
}
SPARE = 13
K, N = 40, 70  # Not whole tiles, and N is not in whole 16-byte words.


# Sums of their products are exact in float32 in any order.
integers = partial(cases.integers, dtype=BF16)


def poisoned(x, sizes):
    x = x.copy()
    x[sum(sizes) :] = np.nan
    return x


def with_tiles(operation, tiles):
    return tuning.override(operation, **({} if tiles is None else dataclasses.asdict(tiles)))


def run_forward(lhs, rhs, sizes, *, transpose=False, tiles=None):
    rhs = rhs.swapaxes(1, 2) if transpose else rhs
    call = partial(grouped_gemm.grouped_gemm, transpose=transpose, out_dtype=jnp.float32)
    with with_tiles("grouped_gemm", tiles):
        return np.asarray(call(jnp.asarray(lhs), jnp.asarray(rhs), jnp.asarray(sizes, jnp.int32)))


def run_weights(lhs, rhs, sizes, *, tiles=None):
    call = partial(grouped_gemm.weight_gradient, out_dtype=jnp.float32)
    with with_tiles("weight_gradient", tiles):
        return np.asarray(call(jnp.asarray(lhs), jnp.asarray(rhs), jnp.asarray(sizes, jnp.int32)))


@pytest.mark.parametrize("transpose", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.slow(unless={"name": ["as chosen", "stored by TMA"], "transpose": [False]})
def test_triton_gemm_forward(pool, rng, subtests, name, transpose):
    for groups, sizes in GROUPS.items():
        with subtests.test(groups):
            lhs, rhs = integers(rng, sum(sizes) + SPARE, K), integers(rng, len(sizes), K, N)
            got = run_forward(poisoned(lhs, sizes), rhs, sizes, transpose=transpose, tiles=FORWARD[name])
            np.testing.assert_array_equal(got, oracle.grouped_gemm(lhs, rhs, sizes))


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.slow(unless={"name": ["as chosen", "stored by TMA"]})
def test_triton_gemm_weights(pool, rng, subtests, name):
    for groups, sizes in GROUPS.items():
        with subtests.test(groups):
            lhs, rhs = integers(rng, sum(sizes) + SPARE, K), integers(rng, sum(sizes) + SPARE, N)
            got = run_weights(poisoned(lhs, sizes), poisoned(rhs, sizes), sizes, tiles=WEIGHTS[name])
            nothing = np.zeros((len(sizes), K, N))
            np.testing.assert_array_equal(got, oracle.grouped_gemm_gradients(lhs, nothing, sizes, rhs)[1])


@pytest.mark.parametrize("sizes", [[0, 5, 70, 0, 21], [-5, 40, -1, 20], [2**31 - 1, 7]], ids=str)
def test_triton_gather_rows(pool, rng, sizes):
    """Rows without a token are zero; tokens without a row hold NaN."""
    num_rows, num_tokens = 100 + SPARE, 70
    used = min(sum(max(size, 0) for size in sizes), num_rows)
    index = rng.integers(-1, num_tokens, num_rows).astype(np.int32)
    tokens = integers(rng, num_tokens, N)
    want = np.where((index < 0)[:, None], 0, tokens[index])
    tokens[np.setdiff1d(np.arange(num_tokens), index[:used])] = np.nan
    got = gather_rows(jnp.asarray(tokens), jnp.asarray(index), jnp.asarray(sizes, jnp.int32))
    np.testing.assert_array_equal(np.asarray(got)[:used], want[:used])


def test_triton_gemm_many_groups(pool, rng):
    sizes = rng.multinomial(300, np.ones(1000) / 1000)
    lhs, rhs = integers(rng, 310, 16), integers(rng, 1000, 16, 8)
    np.testing.assert_array_equal(run_forward(poisoned(lhs, sizes), rhs, sizes), oracle.grouped_gemm(lhs, rhs, sizes))


def test_triton_gemm_unsupported_uses_portable_loop(monkeypatch):
    """float32, mixed results, empty arrays, too many groups: also where `triton` is named alone."""
    monkeypatch.setattr(context, "transport", lambda: "shared_memory")
    options = Options("grouped_gemm", (), ("triton",))
    assert registry.choose(options, facts_of.gemm(BF16)).implementation == "triton"
    for facts in (
        facts_of.gemm(F32),
        facts_of.gemm(BF16, out_dtype=jnp.float16),
        facts_of.gemm(BF16, num_rows=0),
        facts_of.gemm(BF16, groups=1025),
    ):
        part = registry.choose(options, facts)
        assert part.implementation == "xla" and part.reason.startswith("triton: ")


@pytest.mark.parametrize(("row", "end"), [(0, 1), (70, 100), (99, 100), (2**30 - 1, 2**30)])
def test_triton_gemm_bounded_rows(row, end):
    """Kernels use coordinates `[BOUND, end, row - end + BOUND, column]`."""
    blocks = Descriptor(jax.ShapeDtypeStruct((end, 7168), jnp.bfloat16), (64, 128), bounded=True).blocks
    for at in (row, end - 1, end):
        place = (BOUND, end, at - end + BOUND, 5)
        address = 2 * sum(i * stride for i, stride in zip(place, blocks.strides, strict=True))
        assert address % 2**64 == 2 * (at * 7168 + 5)
        assert all(i < size for i, size in zip(place, blocks.shape, strict=True)) == (at < end)
    # TMA supports strides of whole words below 2**40 bytes, and sizes up to 2**32.
    assert all(2 * stride % 16 == 0 and 2 * stride < 2**40 for stride in blocks.strides[:-1])
    assert max(blocks.shape) <= 2**32
