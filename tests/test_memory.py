"""`plan_memory` and `jax-ep doctor --plan` tell what XLA and the heap take."""

from __future__ import annotations

import json
import math
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import harness
import jax_ep
from jax_ep import __main__, context, sharding
from jax_ep.ops import memory

WIDTH, ROWS, LAYERS = 64, 32, 4
ONE = 4 * ROWS * WIDTH  # Bytes of the activations of one layer.


pytestmark = pytest.mark.usefixtures("implicit_promotion")


def of(*shape, dtype=jnp.float32, **options):
    return jax.ShapeDtypeStruct(shape, dtype, **options)


def chain(x, weights):
    for w in weights:
        x = jnp.tanh(x @ w)
    return x


def gradients(weights, x, layers=chain):
    return jax.grad(lambda weights: layers(x, weights).sum())(weights)


def microbatches(weights, x):
    def add(total, part):
        return jax.tree.map(jnp.add, total, gradients(weights, part)), None

    zeros = jax.tree.map(jnp.zeros_like, weights)
    return jax.lax.scan(add, zeros, x.reshape(2, -1, WIDTH))[0]


def either(weights, x):
    return jax.lax.cond(x[0, 0] > 0, lambda: gradients(weights, x), lambda: weights)


def scanned(x, weights):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, jnp.stack(weights))[0]


remat = partial(gradients, layers=jax.checkpoint(chain))
remat_of_scan = partial(gradients, layers=lambda x, weights: jax.checkpoint(scanned)(x, weights))
CASES = {"plain": (gradients, LAYERS), "remat": (remat, 0), "microbatches": (microbatches, LAYERS / 2 + 0.5)}
CASES |= {
    "remat of scan": (remat_of_scan, 1),
    "cond": (either, LAYERS),
    "vmap": (jax.vmap(gradients, (None, 0)), LAYERS),
}
CASES |= {"forward": (lambda weights, x: chain(x, weights), 0)}


@pytest.mark.parametrize(("step", "layers"), CASES.values(), ids=CASES)
def test_plan_memory_kept_activations(step, layers):
    """One activation per layer; with microbatches those of one, and its tokens; of a scan with remat its tokens."""
    x, weights = of(ROWS, WIDTH), [of(WIDTH, WIDTH)] * LAYERS
    plan = jax_ep.plan_memory(step, weights, x)
    assert plan.kept == pytest.approx(layers * ONE, abs=0.02 * ONE)


def test_plan_memory_step_of_flax():
    """`nnx.jit` returns objects of Flax."""
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))

    def step(model, x):
        gradients = nnx.grad(lambda model: jnp.sum(model(x)))(model)
        model.kernel[...] -= gradients["kernel"][...]

    plan = jax_ep.plan_memory(nnx.jit(step), model, of(2, 8))
    assert (plan.arguments["x"], sum(plan.arguments.values())) == (64, 64 + 4 * (8 * 4 + 4))
    before = np.asarray(model.kernel[...])
    plan.compiled(model, jnp.ones((2, 8)))
    np.testing.assert_array_equal(np.asarray(model.kernel[...]), before - 2)


@pytest.mark.slow
def test_plan_memory_flax_step_agrees_with_xla_and_arrays(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "examples"))
    from lm.model import ModelConfig
    from lm.training import TrainConfig, Trainer

    mesh = harness.make_mesh((2, 2), ("data", "expert"))
    model = ModelConfig(hidden=32, layers=2, heads=2, intermediate=32, implementation="xla")
    trainer = Trainer(TrainConfig(batch_size=4, length=32), model, mesh)
    windows = of(4, 33, dtype=jnp.int32, sharding=NamedSharding(mesh, P(("data", "expert"))))
    plan = jax_ep.plan_memory(trainer.train_step, trainer.abstract_state(), windows)
    trainer.compile()
    xla = trainer.train_step.memory_analysis()
    live = xla.argument_size_in_bytes + xla.output_size_in_bytes - xla.alias_size_in_bytes + xla.temp_size_in_bytes
    assert plan.total == pytest.approx(live, rel=0.05)
    assert plan.heap == 0
    state = trainer.initial_state()
    for name in ("model", "optimizer", "key"):
        arrays = jax.tree.leaves(getattr(state, name))
        assert plan.arguments[f"state.{name}"] == sum(a.addressable_shards[0].data.nbytes for a in arrays)
    assert plan.arguments["windows"] == 4 * 33
    assert plan.results < 0.01 * plan.total  # The state is donated.
    _, metrics = plan.compiled(state, jax.device_put(np.zeros((4, 33), np.int32), windows.sharding))
    assert np.isfinite(metrics["loss"])


def layer_step(mesh, **options):
    layer = sharding.sharded_moe(mesh, num_experts=8, **options)

    def loss(weights, *tokens):
        return layer(*tokens, *weights).astype(jnp.float32).sum()

    return jax.jit(jax.grad(loss))


def layer_arguments(mesh, num_tokens=64):
    place = partial(of, sharding=NamedSharding(mesh, P("expert")))
    weights = place(8, 32, 64, dtype=jnp.bfloat16), place(8, 32, 32, dtype=jnp.bfloat16)
    ids = place(num_tokens, 2, dtype=jnp.int32), place(num_tokens, 2)
    return [weights, place(num_tokens, 32, dtype=jnp.bfloat16), *ids]


@pytest.mark.slow
def test_plan_memory_spare_experts(mesh):
    step = layer_step(mesh, balance=jax_ep.Balance(spare_experts=2), implementation="xla")
    arguments = layer_arguments(mesh)
    step.lower(*arguments)  # A cached trace hides nothing.
    plan = jax_ep.plan_memory(step, *arguments)
    assert plan.spare_experts == 2 * 2 * (32 * 64 + 32 * 32)
    assert "copies of experts" in str(plan)
    assert "copies of experts" not in str(jax_ep.plan_memory(lambda x: x, 1.0))


def test_plan_memory_heap_is_what_the_context_reserves(two_ranks):
    plan = jax_ep.plan_memory(layer_step(two_ranks, implementation="triton"), *layer_arguments(two_ranks, 1 << 17))
    heap = context.heap("test")
    generations = {g.allocation: heap._memory.pool.heap(0, g.allocation).nbytes for g in heap.generations}
    assert plan.heap == sum(generations.values()) > 2 * (1 << 16) * 32 * 2
    assert plan.total == sum(size for name, size in plan.rows() if name.strip() == name and name != "total")


def test_plan_memory_names_arguments():
    def step(params, *rest, scale):
        return jax.tree.map(lambda p: (p + rest[0]) * scale, params)

    small = of(8)
    plan = jax_ep.plan_memory(jax.jit(step), {"a": small, "b": [small]}, small, scale=of())
    assert plan.arguments == {"params": 64, "rest": 32, "scale": 4}
    assert plan.results == pytest.approx(64, abs=16)  # and a table of addresses
    table = str(jax_ep.plan_memory(jax.jit(lambda a: a + 1, donate_argnums=0), of(1_000_000)))
    assert table.splitlines()[1:] == ["a               4.0", "symmetric heap  0.0", "total           4.0"]


GPU_TEXT = """HloModule jit_step, is_scheduled=true

%body (p: (s32[], bf16[4,8], f32[8])) -> (s32[], bf16[4,8], f32[8]) {
  ROOT %p = (s32[], bf16[4,8]{1,0}, f32[8]{0}) parameter(0)
}

ENTRY %main (w.1: f32[8], x: bf16[2,8]) -> (f32[8], f32[]) {
  %w.1 = f32[8]{0} parameter(0), metadata={op_name="w"}
  %x = bf16[2,8]{1,0:T(8,128)(2,1)} parameter(1), metadata={op_name="x"}
  %zero = s32[] constant(0)
  %stack = bf16[4,8]{1,0} broadcast(%zero), metadata={op_name="jit(step)/jvp(while)"}
  %init = (s32[], bf16[4,8]{1,0}, /*index=2*/f32[8]{0}) tuple(%zero, %stack, %w.1)
  %loop = (s32[], bf16[4,8]{1,0}, f32[8]{0}) while(%init), body=%body, metadata={op_name="jit(step)/jvp(while)"}
  %saved = bf16[4,8]{1,0} get-tuple-element(%loop), index=1
  %weights = f32[8]{0} get-tuple-element(%loop), index=2
  %rows = (bf16[16,8]{1,0}, f8e4m3fn[5]{0}, u8[999]{0}) custom-call(%x), metadata={op_name="jit(step)/jvp()/ffi_call"}
  %values = bf16[16,8]{1,0} get-tuple-element(%rows), index=0
  %scales = f8e4m3fn[5]{0} get-tuple-element(%rows), index=1
  %copy = bf16[16,8]{1,0} copy(%values)
  %host = f32[64]{0:S(5)} copy(%w.1), metadata={op_name="jit(step)/jvp()/offload"}
  %start = ((f32[8]{0}), f32[8]{0}, u32[]) all-gather-start(%weights), metadata={op_name="jit(step)/jvp()/gather"}
  %done = f32[8]{0} all-gather-done(%start), metadata={op_name="jit(step)/jvp()/gather"}
  %loss = f32[] fusion(%values, %done), calls=%body, metadata={op_name="jit(step)/jvp()/sum"}
  %back = f32[8]{0} fusion(%copy, %saved, %scales, %done, %weights, %host), metadata={op_name="transpose(jvp())/x"}
  %inherits = f32[8]{0} copy(%back)
  %sum = f32[8]{0} add(%inherits, %done), metadata={op_name="jit(step)/transpose(jvp())/add"}
  ROOT %out = (f32[8]{0}, f32[]) tuple(%sum, %loss)
}
"""


def test_plan_memory_reads_the_text_of_gpu_programs():
    """Loops keep their operands' memory; what a custom call makes counts where it is read, once."""
    computations = memory._computations(GPU_TEXT)
    stack, copy, scales, gathered = 2 * 4 * 8, 2 * 16 * 8, 5, 4 * 8
    assert memory._kept(computations, "ENTRY") == stack + copy + scales + gathered
    parsed = {value.name: value.sizes for value in memory._instructions(computations["ENTRY"])}
    assert parsed["x"] == [32]
    assert parsed["rows"] == [256, 5, 999]
    assert parsed["host"] == [0]


def test_plan_memory_errors():
    for step, name in ((3, "an int"), (jax.jit(jnp.sin).lower(1.0).compile(), "a Compiled")):
        with pytest.raises(TypeError, match=f"^plan_memory: step is {name}, expected a function; pass the training"):
            jax_ep.plan_memory(step)


@pytest.mark.parametrize("value", [2**70, -(2**31) - 1, 2**7000], ids=["huge", "negative", "digits"])
def test_plan_memory_integer_beyond_its_dtype(value):
    with pytest.raises(ValueError, match=r"^plan_memory: args\[0\]\['n'\] is .{1,40}, expected an int32, from -"):
        jax_ep.plan_memory(lambda x: x["n"] + 1, {"n": value})
    step = jax.jit(lambda n, x: x + n % 7, static_argnums=0)
    assert jax_ep.plan_memory(step, value, of(8)).arguments == {"x": 32}


def test_plan_memory_overflow_of_the_step_is_its_own():
    with pytest.raises(OverflowError, match="math range error"):
        jax_ep.plan_memory(lambda x: x * math.exp(1e9), of(8))


SHAPES = [(-1,), (0, -1), (2**63,), (2**70,), (2**62, 0), (2**40, 2**40), jax.export.symbolic_shape("b, 4")]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_plan_memory_shapes_that_xla_does_not_represent(shape):
    with pytest.raises(ValueError, match=r"^plan_memory: kwargs\['x'\] has shape .*, expected integers of at least 0"):
        jax_ep.plan_memory(lambda x: jnp.tanh(x), x=of(*shape))


def test_plan_memory_arrays_that_end_the_compiler(mesh):
    """XLA's compiler for CPU devices divides by zero, which ends the process."""
    huge = of(2**38, sharding=NamedSharding(mesh, P("expert")))
    for step, arguments, name in (
        (lambda x: ~x, [of(2**36, dtype=jnp.bool_)], r"args\[0\] has shape \(68719476736,\) on 1 CPU"),
        (lambda x, y: {"z": x @ y}, [of(2**20, 4), of(4, 2**16)], r"result\['z'\] has shape \(1048576, 65536\)"),
        (jnp.tanh, [huge], r"args\[0\] has shape \(274877906944,\) on 4 CPU"),
        (lambda x, y: jnp.sort(x @ y).sum(), [of(2**20, 4), of(4, 2**17)], r"a result of stablehlo.dot_general has sh"),
    ):
        with pytest.raises(ValueError, match=f"^plan_memory: {name}.* expected fewer than 68719476736 elements"):
            jax_ep.plan_memory(step, *arguments)
    half = of(2**37, sharding=huge.sharding)
    assert jax_ep.plan_memory(lambda x: jnp.tanh(x), half).arguments == {"x": 2**37}


def test_plan_memory_of_any_size():
    """With the flag that errors name, XLA compiles these programs."""
    code = """
import jax, jax.numpy as jnp, jax_ep
for step, *arguments in (
    (lambda x: ~x, jax.ShapeDtypeStruct((2**36,), bool)),
    (lambda x: jnp.tanh(x).sum(), jax.ShapeDtypeStruct((2**44, 3), "float32")),
    (lambda x, y: jnp.sort(x @ y).sum(), jax.ShapeDtypeStruct((2**20, 4), "float32"), jnp.ones((4, 2**17))),
):
    print(sum(jax_ep.plan_memory(step, *arguments).arguments.values()))
"""
    done = harness.run_command(sys.executable, "-c", code, XLA_FLAGS=memory.NOT_TILED)
    assert done.returncode == 0, done.stderr
    assert [int(size) for size in done.stdout.split()] == [2**36, 12 * 2**44, 2**24 + 2**21]


def test_plan_memory_keyword_of_its_own_name():
    """Training steps take their number as "step"."""
    assert jax_ep.plan_memory(lambda x, step: x * step, of(8), step=of()).arguments == {"x": 32, "step": 4}


def test_plan_memory_names_arguments_in_any_language():
    plan = jax_ep.plan_memory(lambda größe, weights: größe + weights["ä"], of(8), {"ä": of(8)})
    assert plan.arguments == {"größe": 32, "weights": 32}


@pytest.mark.slow
def test_doctor_plan(capsys):
    arguments = ["doctor", "--plan", "tiny", "--tokens", "32", "--length", "16", "--layers", "1"]
    assert __main__.main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["state"] == pytest.approx(2 * found["params"], rel=0.01)
    assert found["total"] > found["kept for the backward pass"] > 0
    assert __main__.main([*arguments, "--variant", "jax_ep balance"]) == 0
    assert "copies of experts" in capsys.readouterr().out
    for wrong, message in {
        ("--plan", "large"): "--plan 'large': expected one of small,",
        ("--variant", "fast"): "--variant 'fast': expected one of jax_ep,",
        ("--variant", ""): "--variant '': expected one of jax_ep,",
        ("--length", "5"): "--tokens 32: expected a multiple of --length 5.",
    }.items():
        assert __main__.main([*arguments, *wrong]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        __main__.main(["doctor", "--plan", "tiny", "--layers", "1000"])
    assert "argument --layers: '1000', expected an integer from 1 to 64" in capsys.readouterr().err
    assert __main__.main(["doctor", "--layers", "2"]) == 2
    assert "--layers: expected --plan MODEL with it" in capsys.readouterr().err
