"""low_latency_moe with the tokens of all ranks on each rank, and the experts of a rank in one launch."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
from cases import BF16, Shape, assert_close
from harness import compiled, per_rank
from layers import Layer
from oracle_experts import GPT_OSS
from stored_experts import dense, store

IMPLEMENTATIONS = ("triton",)
SHAPE = Shape(num_tokens=5, top_k=3, num_experts=8, hidden=256, intermediate=128)
GATHERED = jax_ep.Schedule(single_launch=True)
TOLERANCE = 2e-2  # three roundings to bfloat16, one after another


def layer(implementation, **options):
    """Return the layer, which stores its weights in a format, if one is given as `stored`."""
    stored, sizes = options.pop("stored", None), {"num_experts": SHAPE.num_experts, "implementation": implementation}

    sizes |= {"schedule": GATHERED} | options

    def fn(x, topk_idx, topk_weights, w_gate_up, w_down, *biases):
        if stored is not None:
            w_gate_up, w_down = store(w_gate_up, stored), store(w_down, stored)
        given = {"biases": biases} if biases else {}
        return jax_ep.low_latency_moe(x, topk_idx, topk_weights, w_gate_up, w_down, **sizes, **given)

    return fn


def as_stored(problem, stored):
    """Return the problem with the weights that the format stands for."""
    for name in ("w_gate_up", "w_down"):
        setattr(problem, name, np.asarray(dense(store(getattr(problem, name), stored), dtype=BF16)))
    return problem


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.slow(unless={"ranks": [2]})
def test_low_latency_gathered_routings(implementation, ranks, expert_mesh, rng, subtests):
    call = compiled(layer(implementation), expert_mesh(ranks))
    for routing in ("uniform", "duplicates", "some_without_expert", "one_hot_every_slot", "out_of_range"):
        with subtests.test(routing):
            problem = Layer(rng, routing, ranks, SHAPE, BF16)
            got = call(*problem.args)
            assert got.dtype == BF16
            assert_close(got, problem.oracle().forward(), tolerance=TOLERANCE)


@pytest.mark.parametrize(
    ("stored", "gluon"),
    [("mxfp4 prepacked", True), ("mxfp4 prepacked", False), ("int4 prepacked", True), ("fp8", False), ("int8", False)],
)
@pytest.mark.slow(unless={"stored": ["mxfp4 prepacked"]})
def test_low_latency_gathered_formats(implementation, stored, gluon, expert_mesh, rng):
    problem = Layer(rng, "some_without_expert", 2, SHAPE, BF16)
    with jax_ep.tuning.override("fused_moe", gluon=gluon):
        got = compiled(layer(implementation, stored=stored), expert_mesh(2))(*problem.args)
    assert_close(got, as_stored(problem, stored).oracle().forward(), tolerance=TOLERANCE)


def test_low_latency_gathered_by_default(implementation, expert_mesh, rng):
    """Without a schedule, ranks gather tokens for prepacked weights."""
    problem, mesh, parts = Layer(rng, "uniform", 2, SHAPE, BF16), expert_mesh(2), {}
    for stored in ("mxfp4 prepacked", "fp8", None):
        call = per_rank(layer(implementation, stored=stored, schedule=None), mesh)
        parts[stored] = [row.part for row in jax_ep.explain(call, *problem.args).rows]
    assert parts.pop("mxfp4 prepacked") == ["dispatch of all tokens to all ranks", "layer in one launch", "combine"]
    assert all("layer in one launch" not in found for found in parts.values())


def test_low_latency_gathered_padding(implementation, expert_mesh, rng):
    """Tokens without experts, whose number differs by rank, get zeros; other numbers change nothing."""
    problem, counts = Layer(rng, "uniform", 2, SHAPE, BF16), np.array([2, 5], np.int32)
    ignored = np.arange(SHAPE.num_tokens) >= counts[:, None]
    problem.topk_idx[ignored] = -1
    want, problem.x[ignored], problem.topk_weights[ignored] = problem.oracle().forward(), np.nan, np.nan
    got = compiled(layer(implementation, max_tokens_per_rank=9), expert_mesh(2))(*problem.args)
    assert_close(got, want, tolerance=TOLERANCE)
    assert not got[ignored].any()


@pytest.mark.parametrize("kind", [GPT_OSS, jax_ep.Experts(weight_on="input")], ids=["gpt-oss", "weights on the input"])
@pytest.mark.slow
def test_low_latency_gathered_experts(implementation, kind, expert_mesh, rng):
    """With biases, as the layer that dispatches rows."""
    problem, mesh = Layer(rng, "some_without_expert", 2, SHAPE, BF16), expert_mesh(2)
    biases = [rng.standard_normal((2, 4, n)).astype(BF16) for n in (2 * SHAPE.intermediate, SHAPE.hidden)]
    call = layer(implementation, experts=kind)
    rows = functools.partial(jax_ep.low_latency_moe, num_experts=8, experts=kind, implementation="xla")
    want = compiled(lambda *args: rows(*args[:5], biases=args[5:]), mesh)(*problem.args, *biases)
    assert_close(compiled(call, mesh)(*problem.args, *biases), want, tolerance=TOLERANCE)


@pytest.mark.parametrize("dtype", [jnp.float32, BF16])
@pytest.mark.slow
def test_low_latency_gathered_result_dtype(implementation, dtype, expert_mesh, rng):
    problem = Layer(rng, "uniform", 2, SHAPE, BF16)
    got = compiled(layer(implementation, preferred_element_type=dtype), expert_mesh(2))(*problem.args)
    assert got.dtype == dtype
    assert_close(got.astype(np.float32), problem.oracle().forward(), tolerance=TOLERANCE)


def test_low_latency_gathered_refused(implementation, expert_mesh, rng):
    problem = Layer(rng, "uniform", 2, dataclasses.replace(SHAPE, hidden=252), BF16)
    with pytest.raises(ValueError, match=r"^low_latency_moe: single_launch=True, but .* sizes that are multiples of 8"):
        compiled(layer(implementation), expert_mesh(2))(*problem.args)
    one = Layer(rng, "uniform", 1, SHAPE, BF16)
    x, *others = (a[0] for a in one.args)
    call = layer(implementation, axis_name=())
    with pytest.raises(TypeError, match="low_latency_moe has no gradient"):
        jax.grad(lambda x: call(x, *others).sum())(jnp.asarray(x))
