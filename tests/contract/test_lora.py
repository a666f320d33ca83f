"""LoRA adapters of experts: values and gradients against the oracle's layer of merged weights, in every layer."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

import jax_ep
import oracle
from cases import BASE, BF16, F32, FP8_WIRE, Shape, assert_close, reals
from harness import make_mesh, run, to_numpy
from jax_ep import lora
from jax_ep.sharding import MeshAxes, sharded_moe
from layers import Layer
from oracle_experts import GPT_OSS, LLAMA_4, Arrays, layer
from stored_experts import stand_for, store

SCALE = 0.5
PLAIN = jax_ep.Experts()
RANK = 3  # of the adapters
LARGER = Shape(num_tokens=8, top_k=2, num_experts=4, hidden=128, intermediate=128)


class Inputs:
    """A layer, adapters `[E, ...]` of its two weights by name, biases, and the oracle's result with merged weights."""

    def __init__(self, rng, num_ranks, shape=BASE, dtype=F32, *, experts=PLAIN, adapted=(True, True)):
        self.experts, self.shape, self.adapted = experts, shape, adapted
        self.layer = Layer(rng, "duplicates", num_ranks, shape, dtype)
        self.bases = self.layer.w_gate_up, self.layer.w_down
        self.adapters = [
            (rng.standard_normal((*w.shape[:-1], RANK)) / np.sqrt(w.shape[1]), reals(rng, len(w), RANK, w.shape[2]))
            for w in self.bases
        ]
        self.adapters = [tuple(part.astype(dtype) for part in pair) for pair in self.adapters]
        self.biases = tuple(reals(rng, len(w), w.shape[2], dtype=dtype) for w in self.bases)
        self.d_out = reals(rng, *self.layer.x.shape, dtype=dtype)

    def answer(self, **layout):
        """Return y, and cotangents of x, router weights, adapters (None: none) and biases, of all experts."""
        of = self.layer
        wide = [[part.astype(np.float64) for part in pair] for pair in self.adapters]
        merged = [
            w.astype(np.float64) + (SCALE * a @ b if use else 0)
            for w, (a, b), use in zip(self.bases, wide, self.adapted, strict=True)
        ]
        lay = oracle.layout(of.topk_idx, len(of.w_down), **layout)
        arrays = Arrays(of.x, of.topk_weights, *merged, *self.biases)
        y, d = layer(self.experts, arrays, lay, self.d_out.astype(np.float64))
        of_adapters = [
            (SCALE * dw @ b.swapaxes(1, 2), SCALE * a.swapaxes(1, 2) @ dw) if use else None
            for dw, (a, b), use in zip((d.w_gate_up, d.w_down), wide, self.adapted, strict=True)
        ]
        return y, (d.x, d.topk_weights, of_adapters, (d.b_gate_up, d.b_down))

    @property
    def args(self):
        split = functools.partial(jax.tree.map, self.layer.per_rank)
        adapters = [pair if use else None for pair, use in zip(self.adapters, self.adapted, strict=True)]
        return *self.layer.args[:3], split(self.bases), split(adapters), split(self.biases), self.d_out

    def gradients_of(self, call):
        """Return a function of `args` to the result and the cotangents of `answer`."""

        def fn(x, topk_idx, topk_weights, bases, adapters, biases, d_out):
            def apply(x, topk_weights, adapters, biases):
                weights = [
                    w if pair is None else with_adapter(w, pair) for w, pair in zip(bases, adapters, strict=True)
                ]
                options = {"biases": biases, "experts": self.experts}
                return call(x, topk_idx, topk_weights, *weights, **options)

            y, pull = jax.vjp(apply, x, topk_weights, adapters, biases)
            return y, pull(d_out)

        return fn

    def check(self, got, tolerance=None, **layout):
        got, want = (jax.tree.flatten_with_path(tree)[0] for tree in (got, self.answer(**layout)))
        for (path, g), (_, w) in zip(got, want, strict=True):
            assert np.abs(w).max() > 1e-3
            assert_close(g.reshape(w.shape), w, jax.tree_util.keystr(path), tolerance=tolerance)


def with_adapter(w, pair):
    return lora.LoraWeights(w, *pair, SCALE)


def moe(implementation, shape=BASE, **options):
    return functools.partial(jax_ep.moe, num_experts=shape.num_experts, implementation=implementation, **options)


def check_moe(inputs, mesh, implementation, tolerance=None, layout=None, **options):
    call = inputs.gradients_of(moe(implementation, inputs.shape, **options))
    inputs.check(run(call, mesh, *inputs.args), tolerance, **layout or {})


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_lora_moe(implementation, dtype, mesh, rng):
    check_moe(Inputs(rng, mesh.size, dtype=dtype), mesh, implementation, 4e-2 if dtype == BF16 else None)


OPTIONS = {
    "kept tokens": {"schedule": jax_ep.Schedule(keep_tokens=True)},
    "balance": {"balance": jax_ep.Balance(1.0, 1)},
    "reproducible": {"schedule": jax_ep.Schedule(reproducible=True)},
}


@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.slow
def test_lora_moe_options(implementation, case, expert_mesh, rng):
    check_moe(Inputs(rng, 2), expert_mesh(2), implementation, **OPTIONS[case])


@pytest.mark.slow
def test_lora_moe_capacity(implementation, expert_mesh, rng):
    check_moe(Inputs(rng, 2), expert_mesh(2), implementation, layout={"capacity": 8}, capacity=8)


@pytest.mark.slow
def test_lora_topology(implementation, rng):
    """Tokens cross nodes once, and each node runs the layer."""
    inputs, topology = Inputs(rng, 4), jax_ep.Topology(node="node", local="expert")
    call = inputs.gradients_of(moe(implementation, axis_name=topology))
    inputs.check(run(call, make_mesh((2, 2), ("node", "expert")), *inputs.args, axes=(("node", "expert"),)))


@pytest.mark.slow
def test_lora_moe_fp8_wire(implementation, expert_mesh, rng):
    check_moe(Inputs(rng, 2, LARGER), expert_mesh(2), implementation, 0.2, schedule=FP8_WIRE)


@pytest.mark.parametrize("experts", [GPT_OSS, LLAMA_4], ids=["gpt-oss", "llama 4"])
@pytest.mark.slow(unless={"implementation": ["xla"]})
def test_lora_moe_experts(implementation, experts, expert_mesh, rng):
    check_moe(Inputs(rng, 2, experts=experts), expert_mesh(2), implementation)


@pytest.mark.slow
def test_lora_moe_custom_activation(implementation, expert_mesh, rng):
    """The same as the layer of merged weights."""
    inputs = Inputs(rng, 2, experts=jax_ep.Experts(lambda rows: jnp.tanh(rows[:, ::2])))
    call = moe(implementation)

    def merged(*args, **options):
        return call(*args[:3], *map(lora.merge, args[3:]), **options)

    got, want = (run(inputs.gradients_of(f), expert_mesh(2), *inputs.args) for f in (call, merged))
    jax.tree.map(lambda g, w: assert_close(g, w, tolerance=1e-4), got, want)


@pytest.mark.parametrize("adapted", [(True, False), (False, True)], ids=["gate_up", "down"])
@pytest.mark.parametrize("format", [None, "int8"])
@pytest.mark.slow(unless={"implementation": ["xla"], "format": ["int8"], "adapted": [(True, False)]})
def test_lora_one_weight_only(implementation, format, adapted, expert_mesh, rng):
    inputs = Inputs(rng, 2, LARGER, adapted=adapted)
    check_quantized(inputs, expert_mesh(2), implementation, format)


def check_quantized(inputs, mesh, implementation, format, activations=None, tolerance=1e-4, **options):
    """The base is what quantized weights stand for, forward and in gradients."""
    of = inputs.layer
    if format is not None:
        stored = [store(w.astype(F32), format, activations=activations) for w in inputs.bases]
        inputs.bases = tuple(stand_for(w).astype(F32) for w in stored)
    call = inputs.gradients_of(moe(implementation, inputs.shape, **options))
    args = list(inputs.args)
    if format is not None:
        args[3] = tuple(jax.tree.map(of.per_rank, w) for w in stored)
    inputs.check(run(call, mesh, *args), tolerance)


@pytest.mark.parametrize("stored", ["int8", "int4", "int4 prepacked", "mxfp4", "fp8", "fp8_channel"])
@pytest.mark.slow(unless={"stored": ["int8", "int4 prepacked"], "implementation": ["xla"]})
def test_lora_quantized_base(implementation, stored, expert_mesh, rng):
    check_quantized(Inputs(rng, 2, LARGER), expert_mesh(2), implementation, stored)


@pytest.mark.parametrize("activations", ["fp8", "int8"])
@pytest.mark.slow
def test_lora_quantized_tokens(implementation, activations, expert_mesh, rng):
    """Rounded tokens are near the others, and have their gradient."""
    inputs = Inputs(rng, 2, LARGER)
    check_quantized(inputs, expert_mesh(2), implementation, activations, activations, 0.2)


@pytest.mark.slow
def test_lora_quantized_balance(implementation, expert_mesh, rng):
    options = OPTIONS["balance"]
    check_quantized(Inputs(rng, 2, LARGER), expert_mesh(2), implementation, "int8", **options)


def test_lora_transformations(rng):
    """`jax.checkpoint` and `scan` over stacked layers, on one device."""
    inputs = Inputs(rng, 1)
    call = functools.partial(jax_ep.fused_moe, implementation="xla")

    def stacked(x, topk_idx, topk_weights, *weights, **options):
        @jax.checkpoint
        def block(x, weights):
            return call(x, topk_idx, topk_weights, *weights, **options), None

        return jax.lax.scan(block, x, jax.tree.map(lambda w: w[None], weights))[0]

    args = jax.tree.map(lambda a: a[0], (inputs.args[:-1], inputs.d_out))
    got = jax.jit(inputs.gradients_of(stacked))(*args[0], args[1])
    inputs.check(to_numpy(got))


AXES = {"data": MeshAxes(batch="data"), "fsdp": MeshAxes(batch="data", fsdp="data"), "tensor": MeshAxes(tensor="data")}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("axes", AXES)
@pytest.mark.slow(unless={"axes": ["tensor"], "kind": [AxisType.Explicit]})
def test_lora_sharded_moe(axes, kind, rng):
    """Adapters are split as their weights are."""
    axes = AXES[axes]
    mesh, inputs = make_mesh((2, 2), ("data", "expert"), kind), Inputs(rng, 4)
    size, specs = inputs.shape.intermediate, axes.specs

    def columns(w):
        return w.reshape(*w.shape[:-1], 2, size) if axes.tensor else w

    def call(x, topk_idx, topk_weights, w_gate_up, w_down, biases, experts):
        w_gate_up = dataclasses.replace(w_gate_up, base=columns(w_gate_up.base), b=columns(w_gate_up.b))
        x, topk_idx, topk_weights = (v.reshape(-1, v.shape[-1]) for v in (x, topk_idx, topk_weights))
        tokens = place(x, specs.tokens), place(topk_idx, specs.routing), place(topk_weights, specs.routing)
        weights = placed(w_gate_up, specs.w_gate_up), placed(w_down, specs.w_down)
        biases = place(columns(biases[0]), specs.b_gate_up), place(biases[1], specs.b_down)
        y = sharded_moe(mesh, num_experts=inputs.shape.num_experts, axes=axes)(*tokens, *weights, biases=biases)
        return place(y, ()).reshape(inputs.layer.x.shape)

    def place(x, spec):
        move = jax.sharding.reshard if kind == AxisType.Explicit else jax.lax.with_sharding_constraint
        return move(x, NamedSharding(mesh, jax.P(*spec)))

    def placed(w, spec):
        a, b = place(w.a, spec[:2]), place(w.b, (spec[0], None, *spec[2:]))
        return dataclasses.replace(w, base=place(w.base, spec), a=a, b=b)

    x, topk_idx, topk_weights, _, _, _, d_out = inputs.args
    args = x, topk_idx, topk_weights, inputs.bases, inputs.adapters, inputs.biases, d_out
    with jax.set_mesh(mesh):
        got = jax.jit(inputs.gradients_of(call))(*jax.tree.map(jnp.asarray, args))
    inputs.check(to_numpy(got))


def test_lora_sharded_moe_without_adapters(rng):
    mesh, shapes = make_mesh((2, 2), ("data", "expert"), AxisType.Auto), ((8, 6), (4, 6, 2, 8), (4, 8, 6))
    x, *weights = (reals(rng, *shape) for shape in shapes)
    layer = sharded_moe(mesh, num_experts=4, axes=AXES["tensor"])
    call = jax.jit(functools.partial(layer, x, rng.integers(0, 4, (8, 2), np.int32), reals(rng, 8, 2)))
    assert_close(to_numpy(call(*map(lora.LoraWeights, weights))), to_numpy(call(*weights)))


@pytest.mark.parametrize("stored", [None, "int8"])
def test_lora_grouped_gemm(implementation, stored, rng):
    sizes, groups, depth, columns, rank = np.array([3, 0, 5], np.int32), 3, 32, 24, 3
    lhs, d_y = reals(rng, 10, depth), reals(rng, 10, columns)
    lhs[8:] = np.nan
    base = reals(rng, groups, depth, columns)
    given, base = (base, base) if stored is None else (store(base, stored), stand_for(store(base, stored)))
    a, b = reals(rng, groups, depth, rank), reals(rng, groups, rank, columns)

    def fn(lhs, base, a, b, d_y):
        def call(lhs, a, b):
            w = lora.LoraWeights(base, a, b, SCALE)
            return jax_ep.grouped_gemm(lhs, w, sizes, implementation=implementation)

        y, pull = jax.vjp(call, lhs, a, b)
        return y, pull(d_y)

    y, (d_lhs, d_a, d_b) = to_numpy(jax.jit(fn)(lhs, given, a, b, d_y))
    w = base.astype(np.float64) + SCALE * (a.astype(np.float64) @ b)
    assert_close(y, oracle.grouped_gemm(lhs, w, sizes), "y", tolerance=1e-4)
    want, d_w = oracle.grouped_gemm_gradients(lhs, w, sizes, d_y)
    assert_close(d_lhs, want, "d_lhs", tolerance=1e-4)
    assert_close(d_a, SCALE * d_w @ b.swapaxes(1, 2), "d_a", tolerance=1e-4)
    assert_close(d_b, SCALE * a.swapaxes(1, 2) @ d_w, "d_b", tolerance=1e-4)
    assert not y[8:].any() and not d_lhs[8:].any()


@pytest.mark.parametrize("stored", [None, "int4"])
def test_lora_init_and_merge(stored, rng):
    """New adapters change nothing; merged ones are in the weights."""
    w = reals(rng, 2, 128, 24)
    base, dense = (w, w) if stored is None else (store(w, stored), stand_for(store(w, stored)))
    found = lora.init(jax.random.key(0), base, 5, scale=SCALE, dtype=F32)
    assert (found.a.shape, found.b.shape, found.scale, found.shape) == ((2, 128, 5), (2, 5, 24), SCALE, w.shape)
    assert 0.8 < np.std(found.a) / np.sqrt(2 / 128) < 1.2
    assert_close(to_numpy(lora.merge(found)), dense)
    b = reals(rng, 2, 5, 24)
    merged = to_numpy(lora.merge(dataclasses.replace(found, b=b)))
    assert_close(merged, dense + SCALE * np.asarray(found.a, np.float64) @ b)
    split = lora.init(jax.random.key(0), w.reshape(2, 128, 2, 12)[None], 5)
    assert (split.a.shape, split.b.shape) == ((1, 2, 128, 5), (1, 2, 5, 2, 12))


def test_lora_explain(rng):
    inputs = Inputs(rng, 1)
    weights = [with_adapter(w, pair) for w, pair in zip(inputs.bases, inputs.adapters, strict=True)]
    found = jax_ep.explain(jax_ep.fused_moe, *(a[0] for a in inputs.args[:3]), *weights, implementation="xla")
    assert [row.part for row in found.rows if ": adapter" in row.part] == [
        *("first GEMM: adapter a", "first GEMM: adapter b", "second GEMM: adapter a", "second GEMM: adapter b")
    ]


def test_lora_errors(rng):
    inputs = Inputs(rng, 1, LARGER)
    args = tuple(a[0] for a in inputs.args[:3])
    up, down = (with_adapter(w, pair) for w, pair in zip(inputs.bases, inputs.adapters, strict=True))
    replace, fused = dataclasses.replace, jax_ep.fused_moe
    with pytest.raises(ValueError, match=r"fused_moe: recipe='fp8' with LoraWeights.*leave recipe out"):
        fused(*args, up, down, recipe="fp8")
    with pytest.raises(ValueError, match=r"mode='scatter' with LoraWeights.*leave it"):
        fused(*args, up, down, schedule=jax_ep.Schedule(combine_mode="scatter"))
    with pytest.raises(ValueError, match=r"w_down.b has shape \(4, 3, 128\), expected \[4, 2, 128\]; make them with"):
        fused(*args, up, replace(down, a=down.a[..., :2]))
    with pytest.raises(TypeError, match=r"w_gate_up.a has dtype bfloat16, expected float32"):
        fused(*args, replace(up, a=up.a.astype(BF16)), down)
    with pytest.raises(ValueError, match="pass both or none"):
        fused(*args, replace(up, b=None), down)
    with pytest.raises(TypeError, match=r"low_latency_moe: w_gate_up is LoraWeights.*jax_ep.lora.merge"):
        jax_ep.low_latency_moe(*args, up, down, num_experts=4, axis_name=())
    with pytest.raises(TypeError, match=r"quantize: w is LoraWeights.*jax_ep.lora.merge"):
        jax_ep.quantize(up, "int8")
    with pytest.raises(TypeError, match=r"lora.merge: w is .*expected LoraWeights"):
        lora.merge(up.base)
    with pytest.raises(ValueError, match=r"lora.init: rank=0"):
        lora.init(jax.random.key(0), up.base, 0)
    master = jax_ep.quantize(up.base, "fp8", for_training=True)
    with pytest.raises(ValueError, match=r"lora.init: w has a master"):
        lora.init(jax.random.key(0), master, 2)
    for wrong in (jax_ep.QuantizedWeights(None), jax_ep.QuantizedWeights(3, 4, "fp8")):
        with pytest.raises(TypeError, match=r"lora.init: w.values is an? \w+, not an array"):
            lora.init(jax.random.key(0), wrong, 2)
    for key in (None, 3, 2**40, "0", np.zeros(3, np.uint32), jax.random.split(jax.random.key(0))):
        with pytest.raises(TypeError, match=r"^lora.init: key is an? .*expected one key; pass jax.random.key\(seed\)"):
            lora.init(key, up.base, 2)


# Value, whether it turns adapters off, and the error of lora.init.
WRONG_SCALES = {
    "nan": (np.nan, False, ValueError, "=nan, expected a finite float32"),
    "infinite": (-np.inf, False, ValueError, "=-inf, expected a finite float32"),
    "infinite in float16": (np.float16(np.inf), False, ValueError, "=.*inf.*, expected a finite float32"),
    "beyond float32": (1e39, False, ValueError, "=1e\\+39, expected a finite float32"),
    "of 5001 digits": (10**5000, False, ValueError, "=.{1,100}, expected a finite float32"),
    "zero": (0, True, ValueError, "=0, expected a float32 other than 0"),
    "subnormal": (1e-45, True, ValueError, "=1e-45, expected a float32 other than 0"),
    "complex": (1j, False, TypeError, "=1j is a complex, expected a number"),
    "a string": ("1", False, TypeError, "='1' is a str, expected a number"),
    "a bool": (True, False, TypeError, "=True is a bool, expected a number"),
    "an array": (np.ones(()), False, TypeError, " is a ndarray, expected a number"),
}


@pytest.mark.parametrize("name", WRONG_SCALES)
def test_lora_wrong_scale(name, rng):
    """Adapters would make results NaN, or never learn; `LoraWeights` may turn them off."""
    scale, turns_off, kind, text = WRONG_SCALES[name]
    w = reals(rng, 2, 4, 6)
    with pytest.raises(kind, match=f"^lora.init: scale{text}"):
        lora.init(jax.random.key(0), w, 2, scale=scale)
    made = lora.LoraWeights(w, reals(rng, 2, 4, 2), reals(rng, 2, 2, 6), scale)
    for function, call in (("lora.merge: w", lora.merge), ("grouped_gemm: rhs", grouped)):
        if turns_off:
            np.testing.assert_array_equal(call(made), call(w) if call is grouped else w)
            continue
        with pytest.raises(kind, match=rf"^{function}\.scale{text}"):
            call(made)


def grouped(w):
    return jax_ep.grouped_gemm(np.ones((3, 4), F32), w, np.array([1, 2], np.int32))


# Shapes or values of base, a and b of [2, 4, 6].
WRONG_PARTS = {
    "without b": ((2, 4, 6), (2, 4, 3), None, ValueError, "w has one of a and b, expected both"),
    "without a": ((2, 4, 6), None, (2, 3, 6), ValueError, "w has one of a and b, expected both"),
    "another rank": ((2, 4, 6), (2, 4, 3), (2, 2, 6), ValueError, r"w.b has shape \(2, 2, 6\), expected \[2, 3, 6\]"),
    "one adapter": ((2, 4, 6), (1, 4, 3), (1, 3, 6), ValueError, r"w.a has shape \(1, 4, 3\), expected \[2, 4,"),
    "another depth": ((2, 4, 6), (2, 5, 3), (2, 3, 6), ValueError, r"w.a has shape \(2, 5, 3\), expected \[2, 4, r\]"),
    "other columns": ((2, 4, 6), (2, 4, 3), (2, 3, 7), ValueError, r"w.b has shape \(2, 3, 7\), expected \[2, 3, 6\]"),
    "columns together": ((2, 4, 2, 3), (2, 4, 3), (2, 3, 6), ValueError, r"w.b has .* expected rank 4, \[2, 3, 2, 3\]"),
    "one for all experts": ((2, 4, 6), (4, 3), (3, 6), ValueError, r"w.a has shape \(4, 3\), expected rank 3 or more"),
    "no rank": ((2, 4, 6), (2, 4, 0), (2, 0, 6), ValueError, "w.a has shape .* expected r >= 1"),
    "a number": ((2, 4, 6), 3, (2, 3, 6), TypeError, "w.a is an int, not an array"),
    "a string": ((2, 4, 6), (2, 4, 3), "b", TypeError, "w.b is a str, not an array"),
    "no base": (None, None, None, TypeError, "w.base is a NoneType, not an array"),
}


@pytest.mark.parametrize("name", WRONG_PARTS)
def test_lora_merge_of_parts_that_do_not_fit(name):
    *parts, kind, text = WRONG_PARTS[name]
    w = lora.LoraWeights(*(jnp.ones(part) if isinstance(part, tuple) else part for part in parts))
    with pytest.raises(kind, match=f"^lora.merge: {text}"):
        lora.merge(w)
