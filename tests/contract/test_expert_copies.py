"""Copies of experts on other ranks, and their gradients back home, for random plans: bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import BF16, F32, assert_close
from harness import compiled
from jax_ep.ops import registry

LOCAL, SPARE = 3, 2


def random_copies(rng, num_ranks):
    """Experts of other ranks in some slots of each rank, `[W, S]`; used slots come first."""
    copies = np.full((num_ranks, SPARE), -1, np.int32)
    for rank in range(num_ranks):
        others = [e for e in range(num_ranks * LOCAL) if e // LOCAL != rank]
        count = rng.integers(SPARE + 1)
        copies[rank, :count] = rng.permutation(others)[:count]
    return copies


def in_loop(copy):
    """Add gradients in each step of a scan: slices of stacked arrays, and results that are stacked."""

    def fn(copies, gradient):
        def step(order, gradients):
            total, order = copy.add_gradients(("expert",), copies, gradients[:LOCAL], gradients[LOCAL:], order)
            return order, total

        return jax.lax.scan(step, copies[0], jnp.stack([gradient, gradient]))[1]

    return fn


@pytest.mark.parametrize("dtype", [F32, BF16, np.uint8], ids=str)
@pytest.mark.parametrize("shape", [(6, 40), (3, 5)], ids=str)
def test_expert_copies(implementation, dtype, shape, expert_mesh, rng, subtests):
    if implementation == "pallas":
        pytest.skip("pallas moves no experts")
    mesh, num_ranks = expert_mesh(4), 4
    copy = registry.EXPERT_COPIES.by(implementation)

    def fn(copies, w, gradient):
        fetched, order = copy.fetch_copies(("expert",), copies, w, copies[0], zeroed=True)
        return fetched, *copy.add_gradients(("expert",), copies, gradient[:LOCAL], gradient[LOCAL:], order)

    call, call_in_loop = compiled(fn, mesh), compiled(in_loop(copy), mesh, axes=("expert",))
    for number in range(3):
        with subtests.test(number):
            copies = random_copies(rng, num_ranks) if number else np.full((num_ranks, SPARE), -1, np.int32)
            w = (50 * rng.random((num_ranks, LOCAL, *shape))).astype(dtype)
            gradient = rng.standard_normal((num_ranks, LOCAL + SPARE, *shape))
            gradient = gradient.astype(BF16 if dtype == np.uint8 else dtype)
            everywhere = np.broadcast_to(copies, (num_ranks, *copies.shape))
            fetched, total, order = call(everywhere, w, gradient)
            np.testing.assert_array_equal(order, everywhere[:, 0])
            flat = w.reshape(-1, *shape)
            used = (copies >= 0)[:, :, None, None]
            np.testing.assert_array_equal(fetched, np.where(used, flat[copies], 0).astype(dtype))
            want = gradient[:, :LOCAL].astype(np.float64).reshape(-1, *shape)
            np.add.at(want, copies[copies >= 0], gradient[:, LOCAL:][copies >= 0].astype(np.float64))
            assert total.dtype == gradient.dtype
            # The same in a loop over layers, whose slices and updates XLA can move into the launches.
            got = call_in_loop(everywhere, gradient)
            np.testing.assert_array_equal(got, np.stack([total, total], 1))
            # Several copies are rounded once: added in bfloat16, they would be off by more.
            assert_close(total.reshape(want.shape), want, "gradients", tolerance=1e-6 if dtype == F32 else 2**-8)
