"""`jax_ep.flax.MoE` on meshes with tensor and fsdp axes, with other routers, and in serving only."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

nnx = pytest.importorskip("flax.nnx")

import jax_ep
from cases import relative_error
from harness import make_mesh
from jax_ep.flax import MoE, ServingArray
from jax_ep.sharding import MeshAxes
from oracle_experts import GPT_OSS

# Layers without a mesh are the reference, also on machines with several devices.
pytestmark = pytest.mark.filterwarnings("ignore:MoE. no mesh is set")
P = jax.sharding.PartitionSpec
H, INNER, E, K = 16, 24, 8, 2
SIZES = {"hidden_size": H, "intermediate_size": INNER, "num_experts": E, "num_experts_per_tok": K, "dtype": jnp.float32}
LAYERS = {
    "plain": {},
    "gpt-oss": {"experts": GPT_OSS, "use_bias": True, "router": jax_ep.Router(logit_bias=True)},
    "no gates": {"experts": jax_ep.Experts("relu", gated=False), "use_bias": True},
}
AXES = {
    "tensor": MeshAxes(batch="data", tensor="tensor"),
    "fsdp": MeshAxes(batch="data", fsdp="data"),
    "both": MeshAxes(batch="data", tensor="tensor", fsdp="data"),
}


def mesh_of(kind):
    return make_mesh((2, 2, 2), ("data", "expert", "tensor"), getattr(jax.sharding.AxisType, kind))


def fill(moe, rng):
    """Draw random parameters, including biases, with their shardings."""
    for _, param in nnx.iter_graph(nnx.state(moe, nnx.Param)):
        if isinstance(param, nnx.Param):
            old = param.get_value()
            param.set_value(jax.device_put(jnp.asarray(0.4 * rng.normal(size=old.shape), old.dtype), old.sharding))
    return moe


def on_one_device(moe, options):
    """Return the same layer without a mesh: gates in halves, as on a tensor axis."""
    experts = options.get("experts", jax_ep.Experts())
    plain = MoE(**SIZES, **options | {"experts": moe.experts if experts.gated else experts}, rngs=nnx.Rngs(0))
    for name in ("router", "b_router", "w_gate_up", "w_down", "b_gate_up", "b_down"):
        if (param := getattr(moe, name)) is not None:
            value = np.asarray(param.get_value())
            getattr(plain, name).set_value(jnp.asarray(value.reshape(getattr(plain, name).get_value().shape)))
    return plain


@nnx.jit
def value_and_gradients(moe, x, cotangent):
    def loss(moe, x):
        y, metrics = moe(x)
        return jnp.sum(y * cotangent), (y, metrics)

    (_, results), gradients = nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True)(moe, x)
    return *results, gradients


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.slow(unless={"name": ["gpt-oss"], "kind": ["Explicit"]})
def test_flax_tensor_and_fsdp_axes(name, kind, rng):
    """Values and gradients match one device, and gradients are sharded like their parameters."""
    mesh, options = mesh_of(kind), LAYERS[name]
    x, cotangent = (rng.normal(size=(8, 2, H)).astype(np.float32) for _ in range(2))
    with jax.set_mesh(mesh):
        moe = fill(MoE(**SIZES, **options, axes=AXES["both"], rngs=nnx.Rngs(0)), rng)
        spread = jax.NamedSharding(mesh, P(("data", "expert")))
        y, _, (of_params, of_x) = value_and_gradients(moe, *(jax.device_put(a, spread) for a in (x, cotangent)))
    assert moe.w_gate_up.get_value().addressable_shards[0].data.size == moe.w_gate_up.get_value().size // 8
    plain = on_one_device(moe, options)
    want, _, (wanted, wanted_x) = value_and_gradients(plain, jnp.asarray(x), jnp.asarray(cotangent))
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(of_x, wanted_x, rtol=1e-3, atol=1e-3)
    for key, leaf in nnx.to_pure_dict(of_params).items():
        one = nnx.to_pure_dict(wanted)[key]
        np.testing.assert_allclose(np.asarray(leaf).reshape(one.shape), one, rtol=1e-3, atol=2e-3, err_msg=key)
        placed = getattr(moe, key).get_value().sharding
        if key in ("w_gate_up", "w_down"):
            assert leaf.sharding.is_equivalent_to(placed, leaf.ndim), key


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.slow
def test_flax_balance(kind, rng):
    """All tokens choose the experts of one rank; the layer and its gradients are those without balance."""
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        axes = MeshAxes(batch="data", tensor="tensor")
        plain = fill(MoE(**SIZES, axes=axes, rngs=nnx.Rngs(0)), rng)
        router = plain.router.get_value()
        plain.router.set_value(jnp.where(jnp.arange(E)[None] < K, 9.0, router))
        balanced = MoE(**SIZES, axes=axes, balance=jax_ep.Balance(1.0, 1), rngs=nnx.Rngs(0))
        nnx.update(balanced, nnx.state(plain))
        spread = jax.NamedSharding(mesh, P(("data", "expert")))
        x = jax.device_put(np.abs(rng.normal(size=(24, H))).astype(np.float32), spread)
        cotangent = jax.device_put(rng.normal(size=(24, H)).astype(np.float32), spread)
        (y, metrics, gradients), (*wanted, without, wanted_gradients) = (
            value_and_gradients(moe, x, cotangent) for moe in (balanced, plain)
        )
    found = (jax.tree.leaves(values) for values in ((y, gradients), (*wanted, wanted_gradients)))
    for got, want in zip(*found, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4 * np.abs(want).max())
    # On each data shard, 12 tokens with 2 experts at the first of two ranks: both ranks compute half of the rows.
    assert set(metrics) - set(without) == {"rows_before", "rows_after", "copies", "passes"}
    want = {"rows_before": [24, 0, 24, 0], "rows_after": [12] * 4, "copies": [0, 1, 0, 1], "passes": [1] * 4}
    assert {name: metrics[name].tolist() for name in want} == want
    scalars = {name: float(value) for name, value in metrics.summary().items()}
    assert scalars.items() >= {"rank_load_before": 2, "rank_load_after": 1, "copies": 2, "passes": 1}.items()


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("axes", AXES)
@pytest.mark.slow
def test_flax_training_weights_tensor_and_fsdp_axes(axes, kind, rng):
    """Values and gradients match those without, bit for bit; FP8 values are sharded like their parameters."""
    mesh = mesh_of(kind)
    sizes = SIZES | {"hidden_size": 256, "intermediate_size": 256, "dtype": jnp.bfloat16, "recipe": "fp8"}
    x, cotangent = (rng.normal(size=(8, 2, 256)).astype(np.float32) for _ in range(2))

    @nnx.jit
    def both_ways(moe, weights, x, cotangent):
        return nnx.value_and_grad(lambda moe, x: jnp.sum(moe(x, weights)[0] * cotangent), argnums=(0, 1))(moe, x)

    with jax.set_mesh(mesh):
        moe = fill(MoE(**sizes, axes=AXES[axes], use_bias=True, rngs=nnx.Rngs(0)), rng)
        spread = jax.NamedSharding(mesh, P(("data", "expert")))
        arrays = [jax.device_put(a, spread) for a in (x, cotangent)]
        weights = nnx.jit(lambda moe: moe.training_weights())(moe)
        got, want = (jax.tree.leaves(both_ways(moe, w, *arrays)) for w in (weights, None))
        if kind == "Explicit" and axes != "tensor":
            small = MoE(**sizes | {"hidden_size": 128}, axes=AXES[axes], rngs=nnx.Rngs(0))
            message = "training_weights: H=128 of QuantizedWeights over the 2 ranks of 'data', expected"
            with pytest.raises(ValueError, match=message):
                small.training_weights()
    for w in (weights.w_gate_up, weights.w_down):
        split = {
            part.addressable_shards[0].data.size * 2 ** (3 if axes == "both" else 2) for part in (w.values, w.values_kn)
        }
        assert split == {w.values.size}
    for g, w in zip(got, want, strict=True):
        assert np.abs(np.asarray(w, np.float32)).max() > 0
        np.testing.assert_array_equal(np.asarray(g, np.float32), np.asarray(w, np.float32))


@pytest.mark.parametrize(
    ("kind", "fp8"), [("Auto", False), ("Explicit", True), ("Explicit", False), ("one device", True)]
)
@pytest.mark.slow
def test_flax_serving_without_second_copy(kind, fp8, rng):
    """Small and large batches use the same FP8 experts, without another copy."""
    sizes = SIZES | {"hidden_size": 128, "intermediate_size": 128}
    options = LAYERS["gpt-oss"] | ({} if kind == "one device" else {"axes": AXES["both"]})
    few, many = (rng.normal(size=(n, 128)).astype(np.float32) for n in (8, 1024))
    mesh = None if kind == "one device" else mesh_of(kind)
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        moe = fill(MoE(**sizes, **options, rngs=nnx.Rngs(0)), rng)
        serving = moe.to_serving("fp8", activations="fp8") if fp8 else moe.to_serving(None)
        kept = jax.tree.leaves(nnx.state(serving))
        assert max(array.size for array in kept) == E * 128 * 2 * 128
        assert sum(array.dtype == jnp.float8_e4m3fn for array in kept) == (2 if fp8 else 0)
        assert moe.w_gate_up is not None and serving.w_gate_up is None
        assert len(nnx.state(serving, ServingArray)) == 1
        for x in (few, many):
            if kind == "Explicit":
                x = jax.device_put(x, jax.NamedSharding(mesh, P("data")))
            got, want = (np.asarray(nnx.jit(lambda m, x: m(x)[0])(layer, x)) for layer in (serving, moe))
            assert relative_error(got, want) < (0.08 if fp8 else 1e-5), len(x)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.slow
def test_flax_custom_router(kind, rng):
    """A custom router module, with parameters that get gradients, on a mesh."""

    class Router(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(H, E, use_bias=False, rngs=rngs)

        def __call__(self, tokens):
            return jax_ep.topk_router(2 * self.linear(tokens), K)

    x = rng.normal(size=(16, H)).astype(np.float32)
    router = Router(nnx.Rngs(1))
    own = MoE(**SIZES, rngs=nnx.Rngs(0))
    own.router.set_value(2 * router.linear.kernel.get_value())
    want, wanted = own(jnp.asarray(x))
    with jax.set_mesh(mesh_of(kind)):
        moe = MoE(**SIZES, router=router, axes=MeshAxes(batch="data"), rngs=nnx.Rngs(0))
        assert moe.router is None
        for name in ("w_gate_up", "w_down"):
            place = getattr(moe, name).get_value().sharding
            getattr(moe, name).set_value(jax.device_put(getattr(own, name).get_value(), place))
        y, metrics = nnx.jit(lambda m, x: m(x))(moe, jnp.asarray(x))
        slopes = nnx.grad(lambda m: jnp.sum(m(jnp.asarray(x))[0] ** 2))(moe)
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(metrics.load, wanted.load)
    np.testing.assert_allclose(metrics.load_balancing_loss, wanted.load_balancing_loss, rtol=1e-5)
    assert float(metrics.router_z_loss) == 0
    assert np.abs(np.asarray(slopes["router_fn"]["linear"]["kernel"].get_value())).max() > 0


@pytest.mark.parametrize("on_mesh", [False, True])
@pytest.mark.slow
def test_flax_identity_experts(on_mesh, rng):
    x = rng.normal(size=(12, H)).astype(np.float32)
    with jax.set_mesh(mesh_of("Auto")) if on_mesh else contextlib.nullcontext():
        router = jax_ep.Router(renormalize=False, scale=3.0, selection_bias=True, num_identity_experts=4)
        moe = fill(MoE(**SIZES, router=router, rngs=nnx.Rngs(0)), rng)
        mask = jnp.arange(12) < 10
        y, metrics = nnx.jit(lambda m, x: m(x, token_mask=mask))(moe, jnp.asarray(x))
    scores = np.asarray(jax.nn.softmax(jnp.asarray(x) @ np.asarray(moe.router.get_value())))
    chosen = np.argsort(-scores, axis=1, kind="stable")[:, :K]
    weights = 3.0 * np.take_along_axis(scores, chosen, axis=1)
    kept = np.where(np.asarray(mask)[:, None], chosen, -1)
    experts = jnp.asarray(np.where(kept < E, kept, -1), jnp.int32)
    matrices = (jnp.asarray(np.asarray(w.get_value())) for w in (moe.w_gate_up, moe.w_down))
    want = jax_ep.fused_moe(jnp.asarray(x), experts, jnp.asarray(weights), *matrices, implementation="xla")
    want = np.asarray(want) + np.where(kept >= E, weights, 0).sum(1)[:, None] * x
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(metrics.load, np.bincount(kept[kept >= 0], minlength=E + 4))
    assert (kept >= E).any() and not np.asarray(y)[10:].any()


def test_flax_sparsemixer(rng):
    moe = fill(MoE(**SIZES, router=jax_ep.Router("sparsemixer"), rngs=nnx.Rngs(0)), rng)
    x = jnp.asarray(rng.normal(size=(12, H)), jnp.float32)

    @jax.jit
    def with_parts(x, router, *weights):
        ids, topk_weights, *_ = jax_ep.routing.sparsemixer_router(x @ router)
        return jax_ep.fused_moe(x, ids, topk_weights, *weights, implementation="xla")

    want = with_parts(x, *(w.get_value() for w in (moe.router, moe.w_gate_up, moe.w_down)))
    np.testing.assert_allclose(nnx.jit(lambda moe, x: moe(x)[0])(moe, x), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [None, "Auto", "Explicit"])
@pytest.mark.slow(unless={"kind": ["Explicit"]})
def test_flax_no_tokens(kind):
    """Losses are 0, and so are gradients."""
    with jax.set_mesh(mesh_of(kind)) if kind else contextlib.nullcontext():
        moe = MoE(**SIZES, rngs=nnx.Rngs(0))

        def loss(moe, x):
            y, metrics = moe(x)
            return y.sum() + metrics.load_balancing_loss + metrics.router_z_loss, (y, metrics)

        gradients, (y, metrics) = nnx.jit(nnx.grad(loss, has_aux=True))(moe, jnp.ones((2, 0, H)))
        assert (y.shape, metrics.topk_idx.shape) == ((2, 0, H), (2, 0, K))
        assert not any(np.any(leaf) for leaf in jax.tree.leaves((gradients, metrics)))


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit], ids=str)
@pytest.mark.parametrize(
    ("axes", "changed", "match"),
    [
        ({"tensor": "other"}, {"intermediate_size": 5}, r"^MoE: intermediate_size, I, is 5, expected a multiple of 2"),
        ({"batch": "other", "fsdp": "other"}, {"hidden_size": 7}, r"^MoE: H is 7, expected a multiple of 2"),
    ],
)
def test_flax_sizes_that_axes_do_not_divide(axes, changed, match, kind):
    """A layer that is made on a mesh names the size and the axis, as one that is called there does."""
    mesh = make_mesh((2, 2), ("other", "expert"), kind)
    sizes = {"hidden_size": 8, "intermediate_size": 4, "num_experts": 4, "num_experts_per_tok": 2} | changed
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=match):
        MoE(**sizes, axes=MeshAxes(**axes), rngs=nnx.Rngs(0))


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("other", ["Auto", "Explicit"])
def test_moe_arrays_of_another_mesh(kind, other):
    types = jax.sharding.AxisType
    make_mesh((2, 2), ("data", "expert"))  # Skips if there are too few devices.
    mesh = jax.make_mesh((2,), ("expert",), axis_types=(getattr(types, kind),), devices=jax.devices()[:2])
    theirs = jax.make_mesh(
        (2, 2), ("data", "expert"), axis_types=(getattr(types, other),) * 2, devices=jax.devices()[:4]
    )
    x = jax.device_put(jnp.ones((8, H)), jax.sharding.NamedSharding(theirs, P("data")))
    moe = MoE(**SIZES, mesh=mesh, rngs=nnx.Rngs(0))
    match = r"x is on another mesh, on .*devices \[0, 1, 2, 3\], expected the mesh of the layer, .*device_put"
    with pytest.raises(ValueError, match=f"MoE: {match}"):
        moe(x)
    idx, (w_gate_up, w_down) = jnp.zeros((8, K), jnp.int32), (moe.w_gate_up[...], moe.w_down[...])
    layer = jax_ep.sharding.sharded_moe(mesh, num_experts=E)
    with pytest.raises(ValueError, match=f"sharded_moe: {match}"):
        layer(x, idx, jnp.ones((8, K)), w_gate_up, w_down)


class Model(nnx.Module):
    """A whole model: embedding, attention, experts, and a head."""

    def __init__(self, rngs):
        self.embed, self.norm = nnx.Embed(32, H, rngs=rngs), nnx.RMSNorm(H, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, H, decode=False, rngs=rngs)
        self.moe = MoE(**SIZES, axes=MeshAxes(batch="data"), rngs=rngs)
        self.head = nnx.Linear(H, 32, rngs=rngs)

    def __call__(self, ids, spec):
        x = self.embed(ids, out_sharding=spec)
        x = x + self.attention(self.norm(x), is_causal=True)
        return self.head(x + self.moe(x)[0])


@pytest.mark.slow
def test_whole_model_on_both_kinds_of_mesh(rng):
    """Logits and gradients on automatic and on explicit axes are those of one device."""
    ids, found = jnp.asarray(rng.integers(0, 32, (8, 6)), jnp.int32), {}

    def loss(model, ids, spec):
        return jnp.mean(jax.nn.logsumexp(model(ids, spec), axis=-1))

    run = nnx.jit(nnx.value_and_grad(loss), static_argnums=2)
    found["one device"] = run(Model(nnx.Rngs(0)), ids, None)
    for kind in ("Auto", "Explicit"):
        with jax.set_mesh(make_mesh((2, 2), ("data", "expert"), getattr(jax.sharding.AxisType, kind))):
            spread = jax.device_put(ids, P(("data", "expert")))
            spec = P(("data", "expert"), None, None) if kind == "Explicit" else None
            found[kind] = run(Model(nnx.Rngs(0)), spread, spec)
    want, *others = (jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(x[1]))) | {"": x[0]} for x in found.values())
    for got in others:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), got, want)
