"""grouped_gemm and both of its gradients, without a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
import oracle
from cases import BF16, F16, F32, assert_close, assert_same_bits, integers, reals
from harness import check_directional_derivatives, refusals_skip, to_numpy
from jax_ep.core.expert_matrices import SplitWeights, joined
from jax_ep.core.facts import GemmFacts
from jax_ep.ops import grouped_gemm
from jax_ep.ops import plan as plans
from jax_ep.types import Options

OPERATION = "grouped_gemm"
# name: (rows M, group sizes); rows past the sum hold NaN.
GROUPS = {
    "even": (24, [6, 6, 6, 6]),
    "ragged": (24, [1, 11, 0, 12]),
    "spare rows": (24, [3, 0, 5, 2]),
    "first only": (24, [24, 0, 0, 0]),
    "last only": (24, [0, 0, 0, 7]),
    "no rows used": (24, [0, 0, 0, 0]),
}
FEW_GROUPS = ["ragged", "last only"]
OTHER_GROUPS = [name for name in GROUPS if name not in FEW_GROUPS]


def with_gradients(implementation, **options):
    @jax.jit
    def fn(lhs, rhs, group_sizes, d_out):
        out, vjp = jax.vjp(
            lambda a, b: jax_ep.grouped_gemm(a, b, group_sizes, implementation=implementation, **options), lhs, rhs
        )
        return out, *vjp(d_out)

    def call(*args):
        with refusals_skip():  # Also here, because a subtest would report the error before the test's own hook.
            return to_numpy(fn(*args))

    return call


def poison(array, group_sizes):
    """Set the rows past the groups to NaN."""
    out = array.copy()
    out[group_sizes.sum() :] = np.nan
    return out


def check(call, rng, rows, sizes, inner, columns, dtype):
    """Check results and gradients, with NaN in the rows past the groups, which are zero in results."""
    sizes = np.array(sizes, np.int32)
    lhs, rhs = reals(rng, rows, inner, dtype=dtype), reals(rng, sizes.size, inner, columns, dtype=dtype)
    d_out = reals(rng, rows, columns, dtype=dtype)
    got = call(poison(lhs, sizes), rhs, sizes, poison(d_out, sizes))
    want = oracle.grouped_gemm(lhs, rhs, sizes), *oracle.grouped_gemm_gradients(lhs, rhs, sizes, d_out)
    for what, g, w in zip(("out", "d_lhs", "d_rhs"), got, want, strict=True):
        assert g.dtype == dtype, what
        assert_close(g, w, what)
    for g in got[:2]:
        assert not g[sizes.sum() :].any(), "rows past the groups are not zero"


@pytest.mark.parametrize(
    ("dtype", "names"), [(BF16, FEW_GROUPS), (BF16, OTHER_GROUPS), (F16, FEW_GROUPS), (F32, list(GROUPS))], ids=str
)
@pytest.mark.slow(unless={"implementation": ["xla", "triton"]})
@pytest.mark.slow_interpreted(unless={"names": [FEW_GROUPS], "dtype": [BF16]})
def test_grouped_gemm_groups(implementation, dtype, names, rng, subtests):
    call = with_gradients(implementation)
    for name in names:
        rows, sizes = GROUPS[name]
        with subtests.test(name):
            check(call, rng, rows, sizes, 9, 5, dtype)


@pytest.mark.parametrize(("rows", "groups", "inner", "columns"), [(1, 1, 1, 1), (300, 3, 130, 67), (5, 64, 8, 8)])
def test_grouped_gemm_shapes(implementation, rows, groups, inner, columns, rng):
    """Products of small integers are exact in float32, so any lost or doubled row shows."""
    bounds = np.sort(rng.integers(0, rows, groups - 1, endpoint=True))
    group_sizes = np.diff(np.concatenate([[0], bounds, [rows]])).astype(np.int32)
    lhs, rhs = integers(rng, rows, inner), integers(rng, groups, inner, columns)
    d_out = integers(rng, rows, columns)
    got = with_gradients(implementation)(lhs, rhs, group_sizes, d_out)
    np.testing.assert_array_equal(got[0], oracle.grouped_gemm(lhs, rhs, group_sizes))
    for g, w in zip(got[1:], oracle.grouped_gemm_gradients(lhs, rhs, group_sizes, d_out), strict=True):
        np.testing.assert_array_equal(g, w)


@pytest.mark.slow_interpreted
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.slow(unless={"dtype": [BF16]})
def test_grouped_gemm_remainders(implementation, dtype, rng):
    """Groups of all sizes around those of tiles, empty ones at both ends, and rows past them."""
    sizes = [0, 1, 63, 64, 65, 127, 128, 129, 0]
    check(with_gradients(implementation), rng, sum(sizes) + 7, sizes, 24, 13, dtype)


# In Mosaic's interpreter NumPy multiplies, and warns about infinities.
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.slow_interpreted
def test_grouped_gemm_nan_stays_in_group(implementation, dtype, rng):
    group_sizes = np.array([30, 0, 17, 70, 9], np.int32)
    lhs, rhs = reals(rng, 126, 16, dtype=dtype), reals(rng, 5, 16, 8, dtype=dtype)
    d_out = reals(rng, 126, 8, dtype=dtype)
    want = oracle.grouped_gemm(lhs, rhs, group_sizes), *oracle.grouped_gemm_gradients(lhs, rhs, group_sizes, d_out)
    bad = slice(30, 47)  # The rows of group 2.
    lhs[bad], d_out[bad] = np.nan, np.inf
    got = with_gradients(implementation)(lhs, rhs, group_sizes, d_out)
    for what, g, w, affected in zip(("out", "d_lhs", "d_rhs"), got, want, (bad, bad, 2), strict=True):
        assert not np.isfinite(g[affected].astype(np.float32)).all(), what
        assert_close(np.delete(g, affected, axis=0), np.delete(w, affected, axis=0), what)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.slow(unless={"transpose": [True]})
@pytest.mark.slow_interpreted
def test_grouped_gemm_two_arrays(implementation, transpose, rng):
    """Weights in two arrays give the bits of those in one, forward and gradients."""
    sizes = np.array([30, 0, 17, 70, 9, 5], np.int32)
    lhs, rhs, d_out = (
        reals(rng, 150, 72, dtype=BF16),
        reals(rng, 6, 72, 136, dtype=BF16),
        reals(rng, 150, 136, dtype=BF16),
    )
    if transpose:
        rhs = np.swapaxes(rhs, 1, 2)
    options = Options("grouped_gemm", (), (implementation,))
    plan = plans.gemm(options, GemmFacts(lhs.dtype, 150, 72, 136, 6, lhs.dtype))

    @jax.jit
    def call(rhs):
        def multiply(lhs, rhs):
            return grouped_gemm.multiply(plan, transpose, lhs.dtype, lhs, rhs, sizes)

        out, pull = jax.vjp(multiply, jnp.asarray(lhs), rhs)
        return out, *pull(d_out)

    want, got = call(rhs), call(SplitWeights(rhs[:4], rhs[4:]))
    for g, w in zip((*got[:2], joined(got[2])), want, strict=True):
        assert_same_bits(np.asarray(g), np.asarray(w))


@pytest.mark.parametrize("sizes", [[-5, 40, -1, 20], [90, 90, 90], [2**31 - 1, 2**31 - 1, 7], [-(2**31), 2**31 - 1]])
@pytest.mark.slow(unless={"implementation": ["xla", "triton"]})
def test_grouped_gemm_invalid_sizes(implementation, sizes, rng):
    """Nothing is read or written outside of the arrays; negative sizes are 0, and the last row ends every group."""
    lhs, rhs = integers(rng, 100, 40, dtype=BF16), integers(rng, len(sizes), 40, 70, dtype=BF16)
    d_out = integers(rng, 100, 70, dtype=BF16)
    got = with_gradients(implementation)(lhs, rhs, np.array(sizes, np.int32), d_out)
    want = oracle.grouped_gemm(lhs, rhs, sizes), *oracle.grouped_gemm_gradients(lhs, rhs, sizes, d_out)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(g, w.astype(BF16))


@pytest.mark.slow_interpreted
def test_grouped_gemm_preferred_element_type(implementation, rng):
    """16-bit inputs with a float32 result are accumulated and returned without rounding to 16 bits."""
    group_sizes = np.array([2, 0, 4], np.int32)
    lhs, rhs, d_out = reals(rng, 6, 33, dtype=BF16), reals(rng, 3, 33, 4, dtype=BF16), reals(rng, 6, 4)
    call = with_gradients(implementation, preferred_element_type=jnp.float32)
    out, d_lhs, d_rhs = call(lhs, rhs, group_sizes, d_out)
    assert [a.dtype for a in (out, d_lhs, d_rhs)] == [F32, BF16, BF16]
    assert_close(out, oracle.grouped_gemm(lhs, rhs, group_sizes), "out")
    want = oracle.grouped_gemm_gradients(lhs, rhs, group_sizes, d_out)
    assert_close(d_lhs, want[0], "d_lhs")
    assert_close(d_rhs, want[1], "d_rhs")


def test_grouped_gemm_finite_differences(implementation, rng, float64):
    group_sizes = np.array([2, 0, 3], np.int32)
    lhs, rhs, probe = (rng.standard_normal(s) for s in ((6, 3), (3, 3, 2), (6, 2)))

    def value(a, b):
        return jnp.sum(jnp.sin(jax_ep.grouped_gemm(a, b, group_sizes, implementation=implementation)) * probe)

    check_directional_derivatives(jax.jit(jax.value_and_grad(value, argnums=(0, 1))), (lhs, rhs), rng)


@pytest.mark.parametrize("loop", ["scan", "vmap"])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.slow(unless={"implementation": ["xla", "triton"], "loop": ["vmap"], "dtype": [BF16]})
def test_grouped_gemm_in_a_loop(implementation, dtype, loop, rng, subtests):
    """Each step gives the result of a single call, although kernels may write into the stacked results."""
    xs = (
        integers(rng, 3, 20, 32, dtype=dtype),
        np.array([[5, 0, 12], [0, 20, 0], [1, 9, 3]], np.int32),
        integers(rng, 3, 20, 24, dtype=dtype),
    )
    rhs = integers(rng, 3, 32, 24, dtype=dtype)

    def step(lhs, group_sizes, d_out):
        out, vjp = jax.vjp(lambda a, b: jax_ep.grouped_gemm(a, b, group_sizes, implementation=implementation), lhs, rhs)
        return out, *vjp(d_out)

    def scan(*xs):
        return jax.lax.scan(lambda _, x: (None, step(*x)), None, xs)[1]

    together = to_numpy(jax.jit(jax.vmap(step) if loop == "vmap" else scan)(*xs))
    alone = [to_numpy(jax.jit(step)(*one)) for one in zip(*xs, strict=True)]
    for name, got, want in zip(("out", "d_lhs", "d_rhs"), together, zip(*alone, strict=True), strict=True):
        with subtests.test(name):
            assert np.abs(got.astype(F32)).max() > 0
            assert_same_bits(got, np.stack(want), name)
