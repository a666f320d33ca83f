"""The launches of a program share one check of the status record and one table of addresses."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import harness
import jax_ep
from jax_ep.ffi import library

LAYERS = 3


def low_latency(x, ids, weights):
    d = jax_ep.low_latency_dispatch(
        x, ids, num_experts=4, max_tokens_per_rank=4, quantize=False, implementation="triton"
    )
    return jax_ep.low_latency_combine(d.tokens, ids, weights, d.handle, implementation="triton")


def throughput(x, ids, weights):
    d = jax_ep.dispatch(x, ids, weights, num_experts=4, implementation="triton")
    return jax_ep.combine(d.tokens * d.weights[:, None], d.handle, implementation="triton")


def unrolled(layer, x, *routing):
    for _ in range(LAYERS):
        x = layer(x, *routing)
    return x


def scanned(layer, x, *routing):
    return jax.lax.scan(lambda x, _: (layer(x, *routing), None), x, None, length=LAYERS)[0]


@pytest.mark.parametrize("layer", [low_latency, throughput])
@pytest.mark.parametrize("loop", [unrolled, scanned])
@pytest.mark.slow(unless={"loop": [scanned]})
def test_custom_calls_shared_per_program(layer, loop, two_ranks):
    """A check runs on the host: between two launches it would split their CUDA graph."""
    fn = jax.jit(harness.per_rank(lambda *arguments: loop(layer, *arguments), two_ranks))
    arguments = np.ones((2, 4, 64), np.float32), np.ones((2, 4, 2), np.int32), np.ones((2, 4, 2), np.float32)
    compiled = fn.lower(*map(jnp.asarray, arguments)).compile().as_text()
    # With an operand: calls without one fetch the device number for each launch of the interpreter.
    calls = re.findall(r'custom-call\([^)]+\), custom_call_target="(\w+)"', compiled)
    assert {name: calls.count(name) for name in (library.CHECK_STATUS, library.POINTER_TABLE)} == {
        library.CHECK_STATUS: 1,
        library.POINTER_TABLE: 1,
    }
