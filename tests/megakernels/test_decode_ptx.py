"""The kernels of the decoder of `jax-ep bench serve` compile to PTX without a GPU, and spill no registers."""

import jax
import jax.numpy as jnp
import pytest
from compiling import compiled

from jax_ep.core.kernel import element_type
from jax_ep.tools.benchmark import decode, decoder

PROGRAMS = {"attend": 2, "route": 1}  # that share a multiprocessor


def types_of(argument):
    if argument is None:
        return None
    if isinstance(argument, tuple):
        return type(argument)(*map(types_of, argument))
    return f"*{element_type(argument.dtype)}"


@pytest.mark.usefixtures("on_h200", "implicit_promotion")
@pytest.mark.parametrize("texts", [1, 16, 64])
@pytest.mark.parametrize("name", ["qwen3-30b", "gpt-oss-120b"])
def test_decode_ptx(name, texts, monkeypatch):
    model, calls = decoder.MODELS[name], {}

    def record(kernel, operands, results, config, constants, **options):
        arguments = [types_of(x) for x in (*operands, *results)]
        names = [name for name in kernel.body.arg_names if name not in constants]
        types = dict(zip(names, arguments, strict=True))
        calls[kernel.name, str(types)] = kernel, types, constants, config
        return tuple(None if x is None else jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), x) for x in results)

    monkeypatch.setattr(decode, "launch", record)
    monkeypatch.setattr(decoder, "_run_experts", lambda model, weights, x, *rest, decodes: x)
    params = decoder.abstract_params(model, 2, "bfloat16")
    state = jax.eval_shape(lambda: decoder.init_state(model, 2, texts, 1024))
    jax.eval_shape(lambda *arguments: decoder.step(model, *arguments), params, state)
    assert {kernel.name for kernel, *_ in calls.values()} == {*PROGRAMS}
    for kernel, types, constants, config in calls.values():
        compiled(kernel, types, constants, config, wide=False, programs=PROGRAMS[kernel.name])
