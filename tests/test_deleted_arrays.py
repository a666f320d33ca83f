"""Arrays that were donated, whose values are gone, are an error that names the argument."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
from jax_ep import lora, placement, routing, tracing

T, H, E, K = 8, 128, 4, 2
ONE_DEVICE = {"num_experts": E, "axis_name": ()}
X, IDS, WEIGHTS = jnp.ones((T, H)), jnp.zeros((T, K), jnp.int32), jnp.ones((T, K))
MATRICES = jnp.ones((E, H, 2 * H)), jnp.ones((E, H, H))


def deleted(x):
    gone = jnp.array(x, copy=True)
    gone.delete()
    return gone


@functools.cache
def dispatched():
    return jax_ep.dispatch(X, IDS, WEIGHTS, **ONE_DEVICE)


def deleted_handle():
    return jax.tree.map(deleted, dispatched().handle)


CALLS = {
    "dispatch: x": lambda: jax_ep.dispatch(deleted(X), IDS, WEIGHTS, **ONE_DEVICE),
    "dispatch: topk_idx": lambda: jax_ep.dispatch(X, deleted(IDS), WEIGHTS, **ONE_DEVICE),
    "dispatch: part of the handle": lambda: jax_ep.dispatch(X, None, **ONE_DEVICE, handle=deleted_handle()),
    "combine: part of the handle": lambda: jax_ep.combine(dispatched().tokens, deleted_handle(), axis_name=()),
    "row_experts: part of the handle": lambda: jax_ep.row_experts(deleted_handle()),
    "moe: w_down": lambda: jax_ep.moe(X, IDS, WEIGHTS, MATRICES[0], deleted(MATRICES[1]), **ONE_DEVICE),
    "topk_router: logits": lambda: jax_ep.topk_router(deleted(jnp.ones((T, E))), K),
    "update_router_bias: rate": lambda: jax_ep.update_router_bias(jnp.ones(E), jnp.ones(E), rate=deleted(jnp.ones(()))),
    "sparsemixer_router: key": lambda: routing.sparsemixer_router(jnp.ones((T, E)), key=deleted(jax.random.PRNGKey(0))),
    "lora.init: key": lambda: lora.init(deleted(jax.random.PRNGKey(0)), MATRICES[0], 2),
    "plan: loads": lambda: placement.plan(deleted(jnp.ones(E)), num_slots=E, num_ranks=1),
}


@pytest.mark.parametrize(("what", "call"), CALLS.items(), ids=CALLS)
def test_deleted_array_error(what, call):
    with pytest.raises(ValueError, match=f"{what} is a deleted array, expected its values; pass"):
        call()


def test_float0_gradient_error():
    gradient = np.zeros((4, 2), jax.dtypes.float0)  # as jax.grad(allow_int=True) has them
    here = placement.plan(np.ones(4), num_slots=4, num_ranks=1)
    with pytest.raises(TypeError, match=r"has dtype .*float0.*, expected numbers"):
        placement.move(gradient, here, here, axis_name=())


@pytest.mark.parametrize(
    "traces", [np.array(2), jnp.ones(()), memoryview(np.ones((2, 2)))], ids=["scalar", "jax", "view"]
)
def test_merge_array_error(traces):
    with pytest.raises(TypeError, match=r"merge: traces is .*, expected a list of Trace"):
        tracing.merge(traces)
