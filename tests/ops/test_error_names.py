"""Errors start with the function that the user called, whichever function detects the mistake."""

import inspect
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from harness import make_mesh
from jax_ep import sharding
from jax_ep.integrations import maxtext
from mistakes import GOOD, SIZES, array, f32, function, i32, trace

T, K, E, _, H, INNER, _, _, _, _ = SIZES

BAD = {"None": None, "text": "text", "list": [1, 2], "negative": -1, "huge": 2**40, "vector": f32(3)}
BAD |= {"four axes": f32(3, 2, 5, 7), "integers": array(jnp.int8, T, H), "empty": f32(0, 0), "strings": np.array(["a"])}
BAD |= {"objects": np.array([object()]), "numbers": np.array([1, 2]), "class": jnp.float32, "key": jax.random.key(0)}
QUICK = ("text", "four axes")
OURS = (TypeError, ValueError, NotImplementedError, OverflowError)


@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k in QUICK else pytest.mark.slow) for k in BAD])
@pytest.mark.parametrize("name", GOOD)
def test_error_names_every_argument(name, kind):
    """Pass a bad value for each argument in turn; some are accepted."""
    wrong = {}
    for argument in inspect.signature(function(name)).parameters:
        try:
            trace(name, **{argument: BAD[kind]})
        except OURS as error:
            message = str(error)
            is_ours = message.startswith(f"{name}: ") and re.search("expected|pass |; ", message)
            if not is_ours or re.search(r"\ba [aeiou]\w*, ", message, re.IGNORECASE):
                wrong[argument] = message
    assert not wrong


@pytest.mark.parametrize("option", [{"recipe": "int2"}, {"schedule": 3}, {"implementation": "numpy"}])
def test_error_of_maxtext_before_any_layer(option):
    """A machine without MaxText says so only after these."""
    with pytest.raises((TypeError, ValueError), match=r"jax_ep\.integrations\.maxtext\.use: .*(pass|choose)"):
        maxtext.use(**option)


GLOBAL = (f32(8, H), i32(8, K), f32(8, K), f32(E, H, 2 * INNER), f32(E, INNER, H))
CHANGES = {
    "tokens of integers": (0, i32(8, H)),
    "tokens of another dtype": (0, array(jnp.bfloat16, 8, H)),
    "ids of floats": (1, f32(8, K)),
    "fewer ids": (1, i32(4, K)),
    "other weights": (2, f32(8, K + 1)),
    "matrices of other tokens": (3, f32(E, H + 1, 2 * INNER)),
    "fewer experts": (3, f32(E - 4, H, 2 * INNER)),
    "other columns": (3, f32(E, H, 3 * INNER)),
    "a matrix too few": (4, f32(E - 4, INNER, H)),
    "other results": (4, f32(E, INNER, H + 1)),
    "no array": (4, None),
}
OPTIONS = {"implementation": "numpy", "recipe": "int2", "preferred_element_type": "float7", "schedule": 3}
OPTIONS |= {"experts": "silu"}


@pytest.mark.parametrize("kind", [*CHANGES, *OPTIONS])
@pytest.mark.parametrize("name", ["fused_moe", "sharded_moe", "moe over nodes"])
def test_error_names_layer(name, kind):
    arrays, options = list(GLOBAL), {}
    if kind in CHANGES:
        position, value = CHANGES[kind]
        arrays[position] = value
    else:
        options[kind] = OPTIONS[kind]
    if name == "sharded_moe":
        mesh = make_mesh((4,), ("expert",))
        call = lambda *arrays: sharding.sharded_moe(mesh, num_experts=E, **options)(*arrays)  # noqa: E731
    elif name == "fused_moe":
        call = partial(jax_ep.fused_moe, **options)
    else:
        topology = jax_ep.Topology("node", "local")
        layer = partial(jax_ep.moe, num_experts=E, axis_name=topology, **options)
        specs = {"in_specs": P(topology.axes), "out_specs": P(topology.axes)}
        call = jax.shard_map(layer, mesh=make_mesh((2, 2), topology.axes), **specs)
    with pytest.raises(OURS, match=f"^{name.split()[0]}: "):
        jax.eval_shape(call, *arrays)


def test_error_names_missing_derivative():
    """The error is found in the backward pass, after the call has returned."""
    layer = partial(jax_ep.fused_moe, recipe="fp8")
    x, idx, weights = jnp.ones((4, 128)), jnp.zeros((4, 1), jnp.int32), jnp.ones((4, 1))
    w_gate_up, w_down = jnp.ones((1, 128, 256)), jnp.ones((1, 128, 128))
    first = jax.grad(lambda x: layer(x, idx, weights, w_gate_up, w_down).sum())
    with pytest.raises(TypeError, match=r"^fused_moe\b"):
        jax.eval_shape(jax.grad(lambda x: first(x).sum()), x)
