"""`explain`, and how often a call resolves what it runs."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

import harness
import jax_ep
from cases import BF16, F16, F32, FP8_WIRE
from jax_ep.ops import plan, registry
from jax_ep.quantization import quantize
from jax_ep.serving import routed_moe

T, K, E, H, INNER = 6, 2, 4, 128, 128
FP8 = jnp.float8_e4m3fn


def shapes(*arrays):
    return [jax.ShapeDtypeStruct(*array) for array in arrays]


SEVERAL = jax_ep.Schedule(single_launch=False)
TOKENS = ((T, H), BF16), ((T, K), jnp.int32), ((T, K), F32)
LAYER = shapes(*TOKENS, ((E, H, 2 * INNER), BF16), ((E, INNER, H), BF16))


def of_two_ranks():
    """The layer's arrays, those of each rank along a leading axis."""
    arrays = [jax.ShapeDtypeStruct((2, *a.shape), a.dtype) for a in LAYER[:3]]
    return arrays + [jax.ShapeDtypeStruct((2, E // 2, *a.shape[1:]), a.dtype) for a in LAYER[3:]]


def layer(**options):
    return lambda *args: jax_ep.moe(*args, num_experts=E, axis_name=(), **options)


def gradient(function, argnums=(0, 2, 3, 4)):
    return jax.grad(lambda *args: jnp.sum(function(*args).astype(F32)), argnums)


def exchange(x, idx, weights):
    sent = jax_ep.dispatch(x, idx, weights, num_experts=E, axis_name=())
    return jax_ep.combine(sent.tokens, sent.handle, axis_name=())


def fused_halves(x, idx, weights, w_gate_up, w_down):
    sent = jax_ep.dispatch_grouped_gemm(x, idx, weights, w_gate_up, num_experts=E, axis_name=())
    return jax_ep.grouped_gemm_combine(sent.hidden[:, :INNER], w_down, sent.handle, axis_name=())


def quantized(x, idx, weights, *matrices):
    return jax_ep.fused_moe(x, idx, weights, *(quantize(w, "mxfp4") for w in matrices))


def test_explain_rows():
    found = jax_ep.explain(layer(implementation="xla"), *LAYER)
    assert {row.implementation for row in found.rows} == {"xla"}
    parts = [row.part for row in found.rows]
    assert parts[:6] == ["row plan", "dispatch", "first GEMM", "activation", "second GEMM", "combine"]
    assert all("(backward)" in part for part in parts[6:]) and len(parts) == 13
    lines = str(found).splitlines()
    assert lines[0].split("  ")[0] == "part" and len(lines) == 14
    assert all(line.startswith(row.part) for line, row in zip(lines[1:], found.rows, strict=True))


def test_explain_reasons():
    """The default says why each implementation that comes first runs nothing; a repeated reason is not repeated."""
    jax_ep.finalize()
    if jax.default_backend() != "cpu":
        pytest.skip("GPUs may support the first implementation")
    found = jax_ep.explain(gradient(layer()), *LAYER)
    assert all("triton: it runs on GPUs" in row.reason for row in found.rows)
    assert str(found).count("as above") > 3


def test_explain_nothing():
    assert str(jax_ep.explain(jnp.sin, 1.0)) == "the function calls no layer or part of jax_ep"


def test_explain_reproducible():
    """The default for many rows says why it does not run."""
    if jax.default_backend() != "cpu":
        pytest.skip("XLA on GPUs has no such bits")
    schedule = jax_ep.Schedule(reproducible=True)
    found = jax_ep.explain(layer(implementation=("pallas", "xla"), schedule=schedule), *LAYER)
    rows = {row.part: row for row in found.rows}
    assert rows["first GEMM"].reason.startswith("pallas: reproducible=True, and its tiles depend on the number of rows")


def test_explain_keyword_of_its_own_name():
    run = layer(implementation="xla")
    found = jax_ep.explain(lambda *args, function: function(*args), *LAYER, function=run)
    assert found == jax_ep.explain(run, *LAYER)


def test_explain_traced_function():
    """A cached trace hides no call, in any context; the second explanation is that of the first."""
    function = jax.jit(gradient(layer(implementation="xla")))
    function.lower(*LAYER)
    found = jax_ep.explain(function, *LAYER)
    assert len(found.rows) == 13 and jax_ep.explain(function, *LAYER) == found


def test_explain_static_and_named_arguments():
    def step(name, *args, down):
        return layer(implementation=name)(*args, down)

    args, down = LAYER[:-1], LAYER[-1]
    found = jax_ep.explain(jax.jit(step, static_argnums=0), "xla", *args, down=down)
    assert len(found.rows) == 13 and jax_ep.explain(partial(step, "xla"), *args, down=down) == found


def test_explain_arguments_of_every_kind():
    """Static values by position, structures of arrays by keyword, and results that are no arrays."""
    x, _, _, *weights = LAYER
    biases = tuple(shapes(((E, 2 * INNER), BF16), ((E, H), BF16)))
    apart = jax_ep.Schedule(single_launch=False, dispatch_mode="serial", combine_mode="serial")
    routed = partial(routed_moe, schedule=apart)
    found = jax_ep.explain(routed, x, jax.ShapeDtypeStruct((T, E), F32), K, *weights, biases=biases)
    assert found.rows[0].part == "router" and len(found.rows) > 10

    def named(text, *args):
        return text, layer()(*args)

    assert jax_ep.explain(named, "x", *LAYER).rows == jax_ep.explain(layer(), *LAYER).rows


def test_explain_inside_shard_map(two_ranks):
    """With `triton` exchanges and GEMMs share launches, in the modes of the schedule."""
    pytest.importorskip("triton")
    if jax.default_backend() != "cpu":
        pytest.skip("the interpreter stands for GPUs on the CPU")
    schedule = jax_ep.Schedule(dispatch_mode="fused", combine_mode="serial")
    options = {"num_experts": E, "implementation": "triton", "schedule": schedule}
    call = harness.per_rank(partial(jax_ep.moe, **options), two_ranks)
    rows = {row.part: row for row in jax_ep.explain(gradient(call), *of_two_ranks()).rows}
    assert rows["dispatch + first GEMM"][1:] == ("triton", "fused", "")
    assert rows["second GEMM + combine"][1:] == ("triton", "serial", "the schedule asks for this mode")
    assert {row.implementation for row in rows.values()} == {"triton"}


def test_explain_balance(two_ranks):
    """A balanced call names its rows and its copies, in front of the passes."""
    call = partial(jax_ep.moe, num_experts=E, implementation="xla", balance=jax_ep.Balance(rows=1.5, spare_experts=1))
    rows = jax_ep.explain(harness.per_rank(call, two_ranks), *of_two_ranks()).rows
    details = f"{3 * T * K // 2} rows and 1 copies per rank"
    assert rows[0][:3] == ("balance: passes and copies of experts", "xla", details)


@pytest.mark.parametrize(("chosen", "inner", "copies"), [("triton", 13056, 4), ("triton", 13184, 2), ("xla", 128, 2)])
def test_explain_balance_default_copies(chosen, inner, copies, two_ranks):
    """A slot for each of the four experts at home, if copies travel by peer memory and take at most 2 GiB."""
    if chosen == "triton":
        pytest.importorskip("triton")
    sizes = (1024, 2048), (1024, 1), (1024, 1), (4, 2048, 2 * inner), (4, inner, 2048)
    arrays = [jax.ShapeDtypeStruct((2, *size), jnp.int32 if i == 1 else BF16) for i, size in enumerate(sizes)]
    options = {"num_experts": 8, "implementation": chosen, "balance": jax_ep.Balance()}
    rows = jax_ep.explain(harness.per_rank(partial(jax_ep.moe, **options), two_ranks), *arrays).rows
    assert rows[0].mode.endswith(f"rows and {copies} copies per rank")


CALLS = {
    "moe": (layer(schedule=SEVERAL), 1),
    "moe in FP8": (layer(recipe="fp8"), 1),
    "moe with FP8 on the wire": (layer(schedule=FP8_WIRE), 1),
    "dispatch and combine": (lambda *args: exchange(*args[:3]), 2),
    "fused halves": (fused_halves, 2),
}


@pytest.mark.parametrize("name", CALLS)
def test_plan_resolved_once_per_call(name, monkeypatch):
    """Whatever the gradient runs has been chosen by the call; the backward pass chooses nothing."""
    asked, choose = [], registry.choose
    monkeypatch.setattr(registry, "choose", lambda *args: asked.append(args) or choose(*args))
    call, number = CALLS[name]

    def run(x, idx, *others):
        out, pull = jax.vjp(lambda x, *others: call(x, idx, *others), x, *others)
        num_asked = len(asked)
        found = pull(out)
        assert num_asked > 0 and len(asked) == num_asked
        return found

    with plan.recording() as found:
        jax.eval_shape(run, *LAYER)
    assert len(found) == number


def test_plan_quantized_resolved_once():
    with plan.recording() as found:
        jax.eval_shape(quantized, *LAYER)
    assert len(found) == 1


@pytest.mark.parametrize(
    ("tokens", "dtype", "options", "is_first"),
    [
        (1024, BF16, {"format": "fp8"}, True),
        (1023, BF16, {"format": "fp8"}, False),
        (1024, BF16, {"format": "int8"}, True),
        (1024, F16, {"format": "fp8"}, False),
        (1024, BF16, {"format": "fp8", "activations": "fp8"}, False),
        (1024, BF16, {"format": "mxfp4"}, False),
    ],
    ids=str,
)
def test_explain_weights_dequantized_first(tokens, dtype, options, is_first, two_ranks):
    """From 512 rows of bfloat16 per expert on, weights of 8 bits whose tokens are not quantized."""
    del two_ranks

    def run(x, idx, weights, *matrices):
        matrices = (quantize(w, **options) for w in matrices)
        return jax_ep.fused_moe(x, idx, weights, *matrices, schedule=SEVERAL, implementation="triton")

    many = [jax.ShapeDtypeStruct((tokens, *a.shape[1:]), a.dtype) for a in LAYER[:3]]
    many[0] = jax.ShapeDtypeStruct(many[0].shape, dtype)
    parts = [row.part for row in jax_ep.explain(run, *many, *LAYER[3:]).rows]
    assert [part for part in parts if "GEMM of dequantized weights" in part] == [
        "first GEMM of dequantized weights",
        "second GEMM of dequantized weights",
    ] * is_first


@pytest.mark.parametrize(("tokens", "is_first"), [(512, True), (511, False)])
def test_plan_quantized_rows_in_use(tokens, is_first, two_ranks):
    """A dropless layer has room for the rows of all ranks, and about as many in use as one rank sends."""
    with plan.recording() as found, jax.set_mesh(two_ranks):
        x, idx, weights, *matrices = of_two_ranks()

        def run(x, idx, weights, *matrices):
            matrices = (quantize(w[0], "fp8") for w in matrices)
            return jax_ep.moe(x[0], idx[0], weights[0], *matrices, num_experts=E, implementation="triton")[None]

        arrays = [jax.ShapeDtypeStruct((2, tokens, *a.shape[2:]), a.dtype) for a in (x, idx, weights)]
        jax.eval_shape(jax.shard_map(run, in_specs=jax.P("expert"), out_specs=jax.P("expert")), *arrays, *matrices)
    (layer_plan,) = found
    assert layer_plan.first.dequantizes == layer_plan.second.dequantizes == is_first
