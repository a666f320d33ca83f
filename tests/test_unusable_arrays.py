"""Donated arrays, and arrays on different devices or meshes, are an error that names the argument."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_ep
from harness import make_mesh
from jax_ep import lora, placement, quantization, routing, tracing

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


@pytest.mark.parametrize("run", [lambda f: f(), jax.eval_shape], ids=["eager", "traced"])
def test_plan_ref_error(run):
    loads = jax.new_ref(jnp.ones(E))
    with pytest.raises(TypeError, match=r"plan: loads is a Ref, expected an array; pass its values"):
        run(lambda: placement.plan(loads, num_slots=E, num_ranks=1))


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


def slots(x):
    """Return a placement whose arrays are where x is."""
    here = placement.Placement(np.arange(8), num_experts=8, num_ranks=1)
    return jax.tree.map(lambda part: jax.device_put(part, x.sharding.update(spec=P())), here)


APART = {
    "load_balancing_loss": (lambda x, y: jax_ep.load_balancing_loss(x, y.astype(jnp.int32)), "scores", "topk_idx"),
    "update_router_bias": (jax_ep.update_router_bias, "bias", "load"),
    "topk_router": (lambda x, y: jax_ep.topk_router(x, 2, token_mask=y[:, 0] > 0), "logits", "token_mask"),
    "dequantize_fp8": (
        lambda x, y: quantization.dequantize_fp8(x.astype(jnp.float8_e4m3fn), y, jnp.float32),
        "values",
        "scales",
    ),
    "lora.merge": (
        lambda x, y: lora.merge(lora.LoraWeights(x[None], jnp.ones((1, 8, 8)), y[None])),
        r"w\.base",
        r"w\.b",
    ),
    "remap": (lambda x, y: slots(x).remap(y.astype(jnp.int32), axis_name=()), "the placement.*", "topk_idx"),
    "expand": (lambda x, y: slots(x).expand({"w": y}, axis_name=()), "the placement.*", r"tree\['w'\]"),
    "sum_copies": (lambda x, y: slots(x).sum_copies({"w": y}, axis_name=()), "the placement.*", r"tree\['w'\]"),
}


# Ids on another mesh of the same devices are mapped.
PLACES = [(name, place) for name in APART for place in ("mesh", "device") if (name, place) != ("remap", "mesh")]


@pytest.mark.parametrize(("name", "place"), PLACES)
def test_arrays_apart_error(name, place):
    function, first, second = APART[name]
    mesh = make_mesh((2, 2), ("data", "expert"), AxisType.Explicit)
    other = make_mesh((4,), ("other",), AxisType.Explicit)
    x = jax.device_put(jnp.ones((8, 4)), jax.sharding.NamedSharding(mesh, P("data")))
    places = {"mesh": jax.sharding.NamedSharding(other, P("other")), "device": jax.devices()[1]}
    match = rf"{name}: {first} is on .*, {second} on .*, expected arrays on the same devices and mesh; move one"
    with pytest.raises(ValueError, match=match):
        function(x, jax.device_put(jnp.ones((8, 4)), places[place]))
