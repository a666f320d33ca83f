"""The Flax layer against NumPy in float64, and its gradients against a dense layer."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

nnx = pytest.importorskip("flax.nnx")

import jax_ep
from cases import relative_error
from harness import make_mesh
from jax_ep import Schedule
from jax_ep.core import mesh_axes
from jax_ep.flax import MoE, MoEMetrics, RouterBias, ServingArray, SharedExperts
from jax_ep.sharding import MeshAxes
from oracle_experts import sigmoid_layer

# Layers without a mesh are the reference, also on machines with several devices.
pytestmark = pytest.mark.filterwarnings("ignore:MoE. no mesh is set")
P = jax.sharding.PartitionSpec
H, INNER, E, K = 16, 24, 8, 2
SIZES = {"hidden_size": H, "intermediate_size": INNER, "num_experts": E, "num_experts_per_tok": K, "dtype": jnp.float32}
BATCH = MeshAxes(batch="data")
ON_MESH = {"axes": BATCH, "shared_experts": SharedExperts(), "router": jax_ep.Router("sigmoid", selection_bias=True)}


def data_expert_mesh(kind):
    shape = (2, max(2, min(8, jax.device_count()) // 2))
    return make_mesh(shape, ("data", "expert"), getattr(jax.sharding.AxisType, kind))


def array(variable):
    return np.asarray(variable.get_value(), np.float64)


def mlp(x, w_gate_up, w_down):
    gate, up = np.split(x @ w_gate_up, 2, axis=-1)
    return (gate / (1 + np.exp(-gate)) * up) @ w_down


def in_float64(moe, x):
    """Return output, load, balance loss and z-loss of a sigmoid-scored, bias-corrected layer."""
    tokens, router = x.reshape(-1, H).astype(np.float64), array(moe.router)
    scores = 1 / (1 + np.exp(-tokens @ router))
    chosen = np.argsort(-(scores + array(moe.router_bias)), axis=1)[:, :K]
    y, *losses = sigmoid_layer(tokens, chosen, router, array(moe.w_gate_up), array(moe.w_down))
    y += mlp(tokens, array(moe.shared_gate_up), array(moe.shared_down))
    return y.reshape(x.shape), np.bincount(chosen.reshape(-1), minlength=E), *losses


def with_bias(moe, rng):
    """Set a bias large enough to change most choices, so that ignoring it would show."""
    moe.router_bias[...] = jnp.asarray(rng.normal(size=E) * 0.3, jnp.float32)
    return moe


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.slow(unless={"kind": ["Auto"]})
def test_flax_matches_float64(kind, rng):
    mesh = data_expert_mesh(kind)
    x = rng.normal(size=(8, 3, H)).astype(np.float32)
    with jax.set_mesh(mesh):
        moe = with_bias(MoE(**SIZES, **ON_MESH, rngs=nnx.Rngs(0)), rng)
        assert moe.w_gate_up.get_value().sharding.spec[0] in ("expert", ("expert",))
        sharded = jax.device_put(x, jax.NamedSharding(mesh, P("data")))
        y, metrics = nnx.jit(lambda m, x: m(x))(moe, sharded)
        if kind == "Explicit":
            assert jax.typeof(y).sharding.spec == jax.typeof(sharded).sharding.spec
    expected, load, balance, z_loss = in_float64(moe, x)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(metrics.load, load)
    np.testing.assert_allclose(metrics.load_share, load / load.sum(), rtol=1e-6)
    np.testing.assert_allclose(metrics.load_balancing_loss, balance, rtol=1e-5)
    np.testing.assert_allclose(metrics.router_z_loss, z_loss, rtol=1e-5)
    assert int(metrics.dropped) == 0


@pytest.mark.parametrize("num_rows", [8, 5])
@pytest.mark.parametrize("kind", ["Auto", "Explicit", "one device"])
@pytest.mark.slow(unless={"kind": ["Explicit"], "num_rows": [5]})
def test_flax_token_mask(kind, num_rows, rng):
    """Masked tokens go to no routed expert and are excluded from metrics, also for numbers that do not divide."""
    mesh = None if kind == "one device" else data_expert_mesh(kind)
    x, mask = rng.normal(size=(num_rows, 3, H)).astype(np.float32), rng.uniform(size=(num_rows, 3)) < 0.6
    x[~mask] *= 100
    with jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext():
        moe = with_bias(MoE(**SIZES, **ON_MESH, rngs=nnx.Rngs(0)), rng)
        y, metrics = nnx.jit(lambda m, x, mask: m(x, token_mask=mask))(moe, jnp.asarray(x), jnp.asarray(mask))
    expected, load, balance, z_loss = in_float64(moe, x[mask])
    np.testing.assert_allclose(np.asarray(y)[mask], expected, rtol=1e-4, atol=1e-5)
    shared = mlp(x[~mask].astype(np.float64), array(moe.shared_gate_up), array(moe.shared_down))
    np.testing.assert_allclose(np.asarray(y)[~mask], shared, rtol=1e-4, atol=1e-6 * np.abs(shared).max())
    np.testing.assert_array_equal(metrics.load, load)
    np.testing.assert_allclose([metrics.load_balancing_loss, metrics.router_z_loss], [balance, z_loss], rtol=1e-5)
    with pytest.raises(ValueError, match=r"MoE: token_mask has shape \(3,\), expected rank 2"):
        moe(jnp.asarray(x), token_mask=jnp.ones(3, bool))


def weights_of(moe):
    """Return the routed layer's parameters as plain arrays without sharding."""
    names = ("router", "w_gate_up", "w_down")
    return {name: jnp.asarray(np.asarray(getattr(moe, name).get_value())) for name in names}


def dense(weights, x):
    """Apply every expert to every token in plain jax.numpy, weighted by a softmax over the K best logits."""
    best, chosen = jax.lax.top_k(x @ weights["router"], K)
    shares = (jax.nn.one_hot(chosen, E) * jax.nn.softmax(best)[:, :, None]).sum(axis=1)
    gate, up = jnp.split(jnp.einsum("th,ehi->tei", x, weights["w_gate_up"]), 2, axis=-1)
    return jnp.einsum("tei,eih,te->th", jax.nn.silu(gate) * up, weights["w_down"], shares)


def stacked(num_layers, mesh, **changed):
    @nnx.split_rngs(splits=num_layers)
    @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: None})
    def make(rngs):
        return MoE(**SIZES | changed, mesh=mesh, axes=BATCH, rngs=rngs)

    return make(nnx.Rngs(1))


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.slow
def test_flax_gradients_remat_and_scan(kind, rng):
    mesh = data_expert_mesh(kind)
    x = jnp.asarray(rng.normal(size=(16, H)), jnp.float32)
    moe = stacked(2, mesh)
    assert moe.w_down.shape == (2, E, INNER, H) and moe.w_down.get_value().sharding.spec[1] in ("expert", ("expert",))

    @nnx.remat
    def layer(x, moe):
        y, metrics = moe(x)
        return x + y, metrics

    def loss(moe, x):
        scan = nnx.scan(
            layer, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0), transform_metadata={nnx.PARTITION_NAME: None}
        )
        y, metrics = scan(x, moe)
        return jnp.sum(jnp.sin(y)), metrics

    def dense_loss(weights, x):
        y, _ = jax.lax.scan(lambda x, weights: (x + dense(weights, x), None), x, weights)
        return jnp.sum(jnp.sin(y))

    with jax.set_mesh(mesh):
        step = nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True))
        (value, metrics), (of_weights, of_x) = step(moe, jax.device_put(x, jax.NamedSharding(mesh, P("data"))))
    expected, expected_gradients = jax.jit(jax.value_and_grad(dense_loss, argnums=(0, 1)))(weights_of(moe), x)
    # Terms of both signs cancel in the sum, so its error follows their number and not its value.
    np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6 * x.size)
    assert metrics.load.shape == (2, E)
    np.testing.assert_array_equal(metrics.load.sum(axis=1), 16 * K)
    gradients = {name: np.asarray(of_weights[name].get_value()) for name in expected_gradients[0]}, np.asarray(of_x)
    for leaf, expected_leaf in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected_gradients), strict=True):
        assert float(np.abs(expected_leaf).max()) > 1e-3
        np.testing.assert_allclose(leaf, expected_leaf, rtol=1e-3, atol=1e-4)


def test_flax_one_device_bfloat16(rng):
    x = jnp.asarray(rng.normal(size=(5, H)), jnp.bfloat16)
    moe = MoE(**{**SIZES, "dtype": jnp.bfloat16}, rngs=nnx.Rngs(0))
    y, metrics = nnx.jit(lambda m, x: m(x))(moe, x)
    assert y.dtype == jnp.bfloat16 and moe.w_down.dtype == jnp.float32
    wide = MoE(**SIZES, rngs=nnx.Rngs(0))
    want = jax.jit(dense)(weights_of(wide), x.astype(jnp.float32))
    np.testing.assert_allclose(np.float32(y), want, rtol=0.05, atol=0.05)
    assert int(metrics.load.sum()) == 5 * K


@pytest.mark.parametrize("on_mesh", [False, True])
@pytest.mark.slow
def test_flax_preferred_element_type_float32(on_mesh, rng):
    """With identity experts and shared experts, and in serving."""
    mesh = data_expert_mesh("Auto") if on_mesh else None
    options = {**SIZES, "dtype": jnp.bfloat16, "shared_experts": SharedExperts(), "mesh": mesh}
    options |= {"router": jax_ep.Router(num_identity_experts=2)}
    x = jnp.asarray(rng.normal(size=(16, H)), jnp.bfloat16)
    layers = [MoE(**options, preferred_element_type=dtype, rngs=nnx.Rngs(0)) for dtype in (None, jnp.float32)]
    for serves in (False, True):
        narrow, wide = (
            nnx.jit(lambda m, x, serves=serves: m(x, m.serving_weights(None) if serves else None)[0])(layer, x)
            for layer in layers
        )
        assert (narrow.dtype, wide.dtype) == (jnp.bfloat16, jnp.float32)
        np.testing.assert_allclose(np.float32(narrow), wide, rtol=0.03, atol=0.03)
        assert np.any(np.float32(wide.astype(jnp.bfloat16)) != wide)


def test_flax_capacity_counts_drops(rng):
    mesh = data_expert_mesh("Auto")
    capacity, tokens = 3, 16
    moe = MoE(**SIZES, axes=BATCH, capacity=capacity, mesh=mesh, rngs=nnx.Rngs(0))
    x = rng.normal(size=(tokens, H)).astype(np.float32)
    y, metrics = nnx.jit(lambda m, x: m(x))(moe, jnp.asarray(x))
    chosen = np.argsort(-(x @ array(moe.router)), axis=1)[:, :K]
    ranks = mesh.shape["expert"]
    # Each half of the batch has its own expert ranks.
    rows = [np.bincount((half // (E // ranks)).ravel(), minlength=ranks) for half in np.split(chosen, 2)]
    dropped = sum(int(np.maximum(row - capacity, 0).sum()) for row in rows)
    assert dropped > 0 and int(metrics.dropped) == dropped
    assert int(metrics.load.sum()) == tokens * K
    complete = np.isclose(y, jax.jit(dense)(weights_of(moe), x), rtol=1e-4, atol=1e-5).all(axis=1)
    assert 0 < tokens - int(complete.sum()) <= dropped


def test_flax_bias_update_moves_load(rng):
    x = jnp.asarray(rng.normal(size=(256, H)), jnp.float32)
    moe = MoE(**SIZES, router=jax_ep.Router("sigmoid", selection_bias=True), rngs=nnx.Rngs(3))
    # Initially uneven, far beyond what fixed-size steps leave at the end.
    moe.router_bias[...] = jnp.linspace(-0.3, 0.3, E)
    step = nnx.jit(lambda m, x: m(x)[1].load)
    before = np.asarray(step(moe, x))
    for _ in range(100):
        moe.update_bias(step(moe, x), rate=0.01)
    after = np.asarray(step(moe, x))
    assert after.max() - after.min() < 0.2 * (before.max() - before.min())
    gradients = nnx.eval_shape(nnx.grad(lambda m: m(x)[0].sum()), moe)
    assert not any(isinstance(leaf, RouterBias) for _, leaf in nnx.to_flat_state(gradients))


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.slow(unless={"kind": ["Explicit"]})
def test_flax_experts_that_ranks_do_not_divide(kind, rng):
    """Nine experts on two or four ranks are those of one device: values, gradients, metrics, serving, balance."""
    sizes = SIZES | {"num_experts": 9}
    options = {"router": jax_ep.Router("sigmoid", selection_bias=True, logit_bias=True), "use_bias": True}
    mesh = data_expert_mesh(kind)
    alone = MoE(**sizes, **options, rngs=nnx.Rngs(0))
    alone.b_gate_up[...] = jnp.asarray(rng.normal(size=alone.b_gate_up.shape), jnp.float32)
    tokens = jnp.asarray(rng.normal(size=(8, 2, H)), jnp.float32)

    def loss(moe, x):
        y, metrics = moe(x)
        return jnp.sum(y**2) + metrics.router_z_loss + metrics.load_balancing_loss, (y, metrics)

    run = nnx.jit(nnx.value_and_grad(loss, has_aux=True))
    (_, (want, wanted)), of_alone = run(alone, tokens)
    x = jax.device_put(tokens, jax.NamedSharding(mesh, P(("data", "expert"))))
    for balance in (None, jax_ep.Balance()):
        spread = MoE(**sizes, **options, axes=BATCH, mesh=mesh, balance=balance, rngs=nnx.Rngs(0))
        assert spread.router.shape == (H, 9) and spread.w_down.shape[0] == 9 + -9 % mesh.shape["expert"]
        np.testing.assert_array_equal(np.asarray(spread.w_down[...])[:9], alone.w_down[...])
        biases = np.zeros(spread.b_gate_up.shape, np.float32)
        biases[:9] = alone.b_gate_up[...]
        spread.b_gate_up.set_value(jax.device_put(biases, spread.b_gate_up[...].sharding))
        # A restored bias has the devices of the one before, and those of the tokens.
        spread.router_bias.set_value(jax.device_put(jnp.zeros(9), spread.router_bias[...].sharding))
        (_, (got, metrics)), of_spread = run(spread, x)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
        for name in ("load", "load_balancing_loss", "router_z_loss", "topk_idx", "dropped"):
            np.testing.assert_allclose(getattr(metrics, name), getattr(wanted, name), rtol=1e-5, err_msg=name)
        for name in ("router", "b_router", "w_gate_up", "w_down", "b_gate_up", "b_down"):
            gradient = np.asarray(of_spread[name][...])
            if "router" not in name:
                assert not gradient[9:].any()
                gradient = gradient[:9]
            np.testing.assert_allclose(gradient, of_alone[name][...], rtol=1e-3, atol=1e-4, err_msg=name)
    stored, ranks = spread.num_stored_experts, mesh.shape["expert"]
    by_rank = np.pad(np.asarray(metrics.load), (0, stored - 9)).reshape(ranks, -1).sum(axis=1)
    rank_load = metrics.summary(ranks, num_stored_experts=stored)["rank_load"]
    np.testing.assert_allclose(rank_load, by_rank.max() / by_rank.mean(), rtol=1e-6)
    spread.update_bias(metrics.load)
    alone.update_bias(wanted.load)
    np.testing.assert_array_equal(spread.router_bias[...], alone.router_bias[...])
    apply = nnx.jit(lambda moe, x: moe(x)[0])
    np.testing.assert_allclose(apply(spread.to_serving(None), x), apply(alone, tokens), rtol=1e-4, atol=1e-5)


def test_flax_uneven_experts_made_without_the_mesh():
    moe = MoE(**SIZES | {"num_experts": 9}, rngs=nnx.Rngs(0))
    with jax.set_mesh(data_expert_mesh("Auto")), pytest.raises(ValueError, match=r"9, .* construct the layer with"):
        moe(jnp.ones((8, H)))


def test_flax_vmap_over_a_mesh_axis():
    with jax.set_mesh(data_expert_mesh("Explicit")):
        graph, state = nnx.split(MoE(**SIZES, rngs=nnx.Rngs(0)))
        layer = jax.vmap(lambda x: nnx.merge(graph, state)(x)[0], spmd_axis_name="data")
        with pytest.raises(ValueError, match=r"^MoE: called inside jax.vmap over explicit .* \['data'\], .*jax_ep.moe"):
            layer(jnp.ones((2, 8, H)))


@pytest.mark.slow
def test_flax_vmap_over_stages(rng):
    """Output, losses and gradients of stacked layers, split over a mesh axis, are those of one layer after another."""
    with jax.set_mesh(make_mesh((2, 2, 2), ("stage", "data", "expert"))):
        options = {"axes": BATCH, "balance": jax_ep.Balance(), "shared_experts": SharedExperts()}
        make = nnx.vmap(lambda rngs: MoE(**SIZES, **options, rngs=rngs))
        graph, state = nnx.split(nnx.split_rngs(splits=4)(make)(nnx.Rngs(0)))
        x = jnp.asarray(rng.normal(size=(4, 16, H)).astype(np.float32))

        def one(state, x):
            y, metrics = nnx.merge(graph, state)(x)
            return y, metrics.load_balancing_loss + metrics.router_z_loss

        def one_by_one(state, x):
            found = [one(jax.tree.map(lambda v: v[i], state), x[i]) for i in range(4)]  # noqa: B023
            return jax.tree.map(lambda *parts: jnp.stack(parts), *found)

        def loss(state, x, layers):
            y, losses = layers(state, x)
            return jnp.sum(jnp.sin(y)) + jnp.sum(losses)

        run = jax.jit(jax.value_and_grad(loss, (0, 1)), static_argnames="layers")
        got, want = (run(state, x, layers) for layers in (jax.vmap(one, spmd_axis_name="stage"), one_by_one))
    assert got[1][1].sharding.spec[0] == "stage"
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, want)


def test_flax_mistakes():
    mesh = data_expert_mesh("Auto")
    with pytest.raises(ValueError, match=r"MoE: the mesh has axes \('data', 'expert'\), expected"):
        MoE(H, INNER, 8, 2, axes=MeshAxes("model"), mesh=mesh, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"MoE: update_bias .*selection_bias=True"):
        MoE(**SIZES, rngs=nnx.Rngs(0)).update_bias(jnp.zeros(E))


def serve_layer(kind, hidden=128, inner=96, **options):
    mesh = data_expert_mesh(kind)
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_experts": E, "num_experts_per_tok": K}
    moe = MoE(**sizes, **ON_MESH, mesh=mesh, dtype=jnp.float32, rngs=nnx.Rngs(3), **options)
    sharding = jax.NamedSharding(mesh, P())
    return moe, jax.device_put(jax.random.normal(jax.random.key(4), (11, 1, hidden)), sharding)


@pytest.mark.parametrize(("hidden", "inner", "compiled"), [(128, 96, True), (256, 384, False)])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.slow
def test_flax_serving_weights_same_layer(kind, hidden, inner, compiled):
    """Eleven tokens do not divide among the devices, as in decoding; the weights have one block or several."""
    moe, x = serve_layer(kind, hidden, inner)
    apply = nnx.jit(lambda moe, x, serving: moe(x, serving))
    want, want_metrics = apply(moe, x, None)
    for fp8, tolerance in ((False, 1e-5), (True, 0.1)):
        make = functools.partial(
            MoE.serving_weights, **({"format": "fp8", "activations": "fp8"} if fp8 else {"format": None})
        )
        serving = (nnx.jit(make) if compiled else make)(moe)
        got, metrics = apply(moe, x, serving)
        error = relative_error(got, want)
        assert error < tolerance and (error > 1e-3) == fp8
        np.testing.assert_array_equal(metrics.load, want_metrics.load)


def test_flax_serving_path_token_limit(monkeypatch):
    moe, x = serve_layer("Auto")
    broken = jax.tree.map(lambda w: w * jnp.nan, moe.serving_weights(None))

    def run(serving):
        return np.asarray(nnx.jit(lambda moe, x, serving: moe(x, serving)[0])(moe, x, serving))

    assert not np.isfinite(run(broken)).any()
    monkeypatch.setattr("jax_ep.flax.LOW_LATENCY_TOKENS", 1)
    np.testing.assert_array_equal(run(broken), run(None))


def test_flax_serving_experts_on_one_device():
    """Each device that has all experts serves its tokens, in launches that these modes cannot select."""
    mesh = make_mesh((2, 1), ("data", "expert"), (jax.sharding.AxisType.Auto,) * 2)
    schedule = Schedule(dispatch_mode="fused", combine_mode="scatter")
    options = {"hidden_size": 128, "intermediate_size": 96, "num_experts": E, "num_experts_per_tok": K}
    apart, on_mesh = (
        MoE(**options, axes=BATCH, mesh=of, schedule=schedule, use_bias=True, rngs=nnx.Rngs(3)) for of in (None, mesh)
    )
    x = jax.random.normal(jax.random.key(4), (6, 128), jnp.bfloat16)
    got, want = (nnx.jit(lambda moe: moe(x, moe.serving_weights("fp8"))[0])(moe) for moe in (on_mesh, apart))
    assert relative_error(got, want) < 1e-2


@pytest.mark.parametrize("format", [None, "int8", "fp8_channel"])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.slow(unless={"format": ["int8"]})
def test_flax_to_serving_partition_specs(kind, format):
    """The metadata of a layer that serves only says where its arrays are, as restoring a checkpoint needs."""
    with jax.set_mesh(data_expert_mesh(kind)):
        moe = MoE(**SIZES, axes=BATCH, use_bias=True, rngs=nnx.Rngs(0))
        for layer, layers in ((moe, ()), (stacked(2, None), (None,))):
            state = nnx.state(layer.to_serving(format), ServingArray)
            specs = jax.tree.leaves(nnx.get_partition_spec(state), is_leaf=lambda x: isinstance(x, P))
            assert set(specs) == {P(*layers, "expert")}
            for array, spec in zip(jax.tree.leaves(state), specs, strict=True):
                assert array.sharding.is_equivalent_to(jax.NamedSharding(jax.sharding.get_mesh(), spec), array.ndim)


@pytest.mark.slow
def test_flax_serving_fp8_any_schedule(monkeypatch):
    """Small and large batches compute in FP8 with the same weights, in launches that a schedule cannot select."""
    schedule = Schedule(dispatch_mode="serial", combine_mode="serial", num_warps=4)
    moe, x = serve_layer("Auto", inner=96, schedule=schedule, recipe="fp8")
    server = moe.to_serving("fp8", activations="fp8")

    def run():
        return nnx.jit(lambda moe, x: moe(x)[0])(server, x)

    few = run()
    monkeypatch.setattr("jax_ep.flax.LOW_LATENCY_TOKENS", 1)
    many = run()
    # One path applies the router weight to the activated rows, the other to the result, so their roundings differ.
    assert 0 < relative_error(many, few) < 0.05


@nnx.scan(in_axes=(nnx.Carry, None, None, 0), out_axes=nnx.Carry)
def add_gradients(total, moe, weights, x):
    """Run one microbatch through consecutive layers, each with its part of the weights."""

    @nnx.remat
    def layer(x, moe, weights):
        return x + moe(x, weights)[0]

    def loss(moe, x):
        y = nnx.scan(layer, in_axes=(nnx.Carry, 0, 0), out_axes=nnx.Carry)(x, moe, weights)
        return jnp.sum(jnp.sin(y.astype(jnp.float32)))

    return jax.tree.map(jnp.add, total, nnx.grad(loss)(moe, x))


@functools.partial(nnx.jit, static_argnames="is_once")
def gradients_of_microbatches(moe, microbatches, is_once):
    zeros = jax.tree.map(jnp.zeros_like, nnx.state(moe, nnx.Param))
    return add_gradients(zeros, moe, moe.training_weights() if is_once else None, microbatches)


@pytest.mark.parametrize("kind", ["one device", "Auto", "Explicit"])
@pytest.mark.slow
def test_flax_training_weights_quantized_once(kind, rng):
    """Stacked layers in a scan, inside another over microbatches: gradients have the same bits as without."""
    mesh = None if kind == "one device" else data_expert_mesh(kind)
    x = jnp.asarray(rng.normal(size=(2, 8, 2, 128)), jnp.bfloat16)
    changed = {"hidden_size": 128, "intermediate_size": 128, "dtype": jnp.bfloat16, "recipe": "fp8"}
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        moe = stacked(2, mesh, **changed)
        x = x if mesh is None else jax.device_put(x, jax.NamedSharding(mesh, P(None, ("data", "expert"))))
        got, want = (gradients_of_microbatches(moe, x, is_once) for is_once in (True, False))
    assert len(jax.tree.leaves(want)) == 3
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.dtype == jnp.float32 and np.abs(np.asarray(w)).max() > 0
        np.testing.assert_array_equal(np.asarray(g), np.asarray(w))


def test_flax_training_weights_wrong_layer():
    sizes = SIZES | {"hidden_size": 128, "intermediate_size": 128}

    def check():
        moe, x = MoE(**sizes, recipe="fp8", rngs=nnx.Rngs(0)), jnp.ones((4, 128), jnp.float32)
        weights, plain = moe.training_weights(), MoE(**sizes, rngs=nnx.Rngs(0))
        with pytest.raises(ValueError, match=r"training_weights: recipe is None, expected recipe='fp8'"):
            plain.training_weights()
        with pytest.raises(ValueError, match=r"are QuantizedWeights with a master, which need recipe='fp8'"):
            plain(x, weights)
        with pytest.raises(ValueError, match="this layer is for serving only"):
            moe.to_serving("fp8")(x, weights)
        with pytest.raises(TypeError, match="MoE: weights is a tuple, expected ExpertWeights or None"):
            moe(x, (weights.w_gate_up, weights.w_down))
        wide = MoE(**sizes | {"intermediate_size": 256}, recipe="fp8", rngs=nnx.Rngs(0))
        with pytest.raises(ValueError, match=r"w_gate_up.values is float8_e4m3fn\[8, 256, 128\], expected float8"):
            wide(x, weights)

    nnx.eval_shape(check)


@pytest.mark.slow
def test_flax_explicit_and_automatic_axes(rng):
    """Flax creates no parameters on such a mesh; a layer created without it runs there."""
    mesh = make_mesh((2, 2), ("data", "expert"), (jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto))
    layer = MoE(**SIZES, axes=BATCH, rngs=nnx.Rngs(0))
    x = jnp.asarray(rng.normal(size=(6, H)), jnp.float32)
    apply = nnx.jit(lambda layer, x: layer(x)[0])
    want = apply(layer, x)
    with jax.set_mesh(mesh):
        got = apply(layer, x)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("x", "error", "match"),
    [
        ([[1.0]], TypeError, "x is a list, .*a JAX or NumPy array"),
        (np.ma.array(np.ones((2, H)), mask=True), TypeError, "x is a MaskedArray, not an array"),
        (jnp.ones((2, 5)), ValueError, r"shape \(2, 5\), expected \[..., 16\]; .* hidden_size"),
        *((jnp.ones((3, H), dtype), TypeError, "x has dtype") for dtype in (jnp.int32, jnp.bool_, jnp.float8_e4m3fn)),
    ],
)
def test_flax_wrong_input(x, error, match):
    with pytest.raises(error, match=f"MoE.*: .*{match}"):
        MoE(**SIZES, rngs=nnx.Rngs(0))(x)


@pytest.mark.parametrize("router", [None, lambda x: None], ids=["router", "custom router"])
def test_flax_stacked_layers_called_as_one(router):
    create = nnx.vmap(lambda rngs: MoE(**SIZES, router=router, rngs=rngs))
    layers = nnx.split_rngs(splits=3)(create)(nnx.Rngs(0))
    with pytest.raises(
        ValueError, match=r"^MoE: the parameters have leading axes \[3\], .* inside nnx.scan or nnx.vmap"
    ):
        layers(jnp.ones((4, H)))


@pytest.mark.parametrize("serves", [True, False])
def test_flax_symbolic_number_of_tokens(serves):
    """Few tokens for serving take another layer, so `jax.export` must know which; others need no comparison."""
    words = "Symbolic dimension comparison 'n' <= .* constraints=" if serves else "x has n rows, a symbolic number"
    tokens = jax.ShapeDtypeStruct((*jax.export.symbolic_shape("n"), H), jnp.float32)
    with jax.set_mesh(jax.make_mesh((1,), ("expert",), devices=jax.devices()[:1])):
        moe = MoE(**SIZES, rngs=nnx.Rngs(0))
        with pytest.raises(NotImplementedError, match=f"^MoE: {words}"):
            jax.export.export(jax.jit(moe.to_serving(None) if serves else moe))(tokens)


def test_flax_called_inside_shard_map():
    mesh = make_mesh((4,), ("expert",))
    moe = MoE(**SIZES, mesh=mesh, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"^MoE: called inside jax.shard_map over \['expert'\], .*jax_ep.moe"):
        jax.shard_map(lambda x: moe(x)[0], mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))(jnp.ones((4, H)))
    other = make_mesh((2,), ("expert",))
    with jax.set_mesh(other), pytest.raises(ValueError, match=r"^MoE: the mesh is .* expected that of jax.set_mesh"):
        moe(jnp.ones((4, H)))


@pytest.mark.parametrize(("kind", "other"), [("Auto", "Explicit"), ("Explicit", "Auto")])
def test_flax_mesh_with_axes_of_another_kind(kind, other):
    mesh = data_expert_mesh(kind)
    with (
        jax.set_mesh(data_expert_mesh(other)),
        pytest.raises(ValueError, match=rf"^MoE: the mesh has the axes .*{kind}.*expected those of jax.set_mesh"),
    ):
        MoE(**SIZES, mesh=mesh, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_flax_inside_shard_map_over_another_axis(kind):
    mesh = data_expert_mesh(kind)
    with jax.set_mesh(mesh):
        graph, state = nnx.split(MoE(**SIZES, rngs=nnx.Rngs(0)))

        def layer(state, x):
            return nnx.merge(graph, state)(x)[0]

        specs = {"in_specs": (P(), P("data")), "out_specs": P("data")}
        layer = jax.shard_map(layer, axis_names={"data"}, **specs)
        x = jax.device_put(jnp.ones((8, H)), jax.NamedSharding(mesh, P("data")))
        assert jax.eval_shape(layer, state, x).shape == x.shape


def test_flax_serving_weights_of_layer_with_capacity():
    moe = MoE(**SIZES, capacity=4, mesh=jax.make_mesh((1,), ("expert",), devices=jax.devices()[:1]), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"^serving_weights: capacity=4, expected None.*; set moe\.capacity = None"):
        moe.serving_weights("int8")
    moe.capacity = None
    assert moe.to_serving("int8").w_down is None


def test_flax_stacked_layers_partition_spec():
    """As docs/flax.md says: without the metadata, a checkpoint would be restored with experts' axes on layers."""
    with jax.set_mesh(data_expert_mesh("Explicit")):
        stack = nnx.vmap(lambda rngs: MoE(**SIZES, rngs=rngs), in_axes=0, transform_metadata={nnx.PARTITION_NAME: None})
        layers = stack(nnx.Rngs(0).split(3))
    spec = nnx.get_partition_spec(nnx.state(layers))["w_down"].get_value()
    assert spec == P(None, "expert") and layers.w_down[...].sharding.spec == P(None, "expert", None, None)


def _routing_of(**changes):
    ids = jnp.zeros((6, K), jnp.int32)
    fields = {"topk_idx": ids, "topk_weights": jnp.ones((6, K)), "scores": jnp.ones((6, E))} | changes
    return lambda tokens: jax_ep.types.Routing(**fields)


@pytest.mark.parametrize(
    ("router", "error", "match"),
    [
        (lambda tokens: None, TypeError, "MoE: router returned a NoneType, expected a jax_ep.types.Routing"),
        (lambda tokens: (tokens, tokens, tokens), TypeError, "MoE: router returned a tuple"),
        (_routing_of(scores=None), TypeError, "MoE: scores returned by router is a NoneType"),
        *(
            (_routing_of(topk_idx=jnp.zeros((6, K), dtype)), TypeError, "topk_idx returned by router has dtype")
            for dtype in (jnp.float32, jnp.int8)
        ),
        (_routing_of(topk_idx=jnp.zeros((5, K), jnp.int32)), ValueError, r"returned by router has shape \(5, 2\)"),
        (
            _routing_of(topk_weights=jnp.ones((6, K), jnp.int32)),
            TypeError,
            "topk_weights returned by router has dtype int32, expected one of bfloat16",
        ),
        (_routing_of(topk_weights=jnp.ones((6, 1))), ValueError, r"has shape \(6, 1\), expected \[6, 2\]"),
        (_routing_of(scores=jnp.ones((6, 2 * E))), ValueError, rf"\(6, 16\), expected \[6, {E}\]; .* not their logits"),
    ],
)
def test_flax_router_fn_invalid_result(router, error, match):
    """A router for other experts would lose tokens without counting them as dropped."""
    moe = MoE(**SIZES, router=router, rngs=nnx.Rngs(0))
    with pytest.raises(error, match=match):
        moe(jnp.ones((6, H)))


@pytest.mark.parametrize("shape", [(H,), (2, 1, 3, H)], ids=len)
@pytest.mark.slow(unless={"shape": [(2, 1, 3, H)]})
def test_flax_shared_experts_custom_activation(shape):
    """The function gets `[R, N]`, as for routed experts, for any token axes."""
    seen = []

    def activation(rows):
        seen.append(rows.ndim)
        gate, up = jnp.split(rows, 2, axis=1)
        return jax.nn.silu(gate) * up

    x = jax.random.normal(jax.random.key(1), shape)
    make = functools.partial(MoE, **SIZES, shared_experts=SharedExperts())
    own = make(experts=jax_ep.Experts(activation), rngs=nnx.Rngs(0))
    got, want = (nnx.jit(lambda layer, x: layer(x)[0])(layer, x) for layer in (own, make(rngs=nnx.Rngs(0))))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert set(seen) == {2}


@pytest.mark.parametrize(
    ("result", "shown"), [(None, "NoneType"), (jnp.ones((1, 3)), r"\[1, 3\]")], ids=["none", "array"]
)
def test_flax_shared_experts_activation_invalid_result(result, shown):
    def activation(rows):
        return result if rows.shape[1] == 2 * 40 else jax.nn.silu(rows[:, :INNER]) * rows[:, INNER:]

    layer = MoE(
        **SIZES,
        shared_experts=SharedExperts(intermediate_size=40),
        experts=jax_ep.Experts(activation),
        rngs=nnx.Rngs(0),
    )
    with pytest.raises(
        ValueError, match=rf"MoE: the activation maps hidden rows \[1, 80\] to {shown}, expected \[1, 40"
    ):
        layer(jnp.ones((1, H)))


@pytest.mark.parametrize("place", ["itself", "in a model"])
@pytest.mark.slow(unless={"place": ["in a model"]})
def test_flax_tabulate(place):
    """`nnx.tabulate` converts outputs to plain lists and dicts."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.norm, self.moe = nnx.RMSNorm(H, rngs=rngs), MoE(**SIZES, shared_experts=SharedExperts(), rngs=rngs)

        def __call__(self, x):
            y, metrics = self.moe(self.norm(x))
            return x + y, [metrics, metrics]

    model = MoE(**SIZES, rngs=nnx.Rngs(0)) if place == "itself" else Model(nnx.Rngs(0))
    table = nnx.tabulate(model, jnp.ones((2, 3, H)), compute_flops=True, console_kwargs={"width": 300})
    assert "load_balancing_loss" in table and "w_gate_up" in table


def test_flax_metrics_items_and_attributes():
    metrics = jax.jit(lambda m: m)(MoEMetrics(load=jnp.arange(4), dropped=jnp.zeros((), jnp.int32)))
    assert isinstance(metrics, MoEMetrics) and metrics["load"] is metrics.load
    np.testing.assert_allclose(metrics.load_share, np.arange(4) / 6, rtol=1e-6)
    with pytest.raises(AttributeError, match="MoEMetrics has no attribute 'loads'"):
        metrics.loads
    metrics.load = 2 * metrics.load
    assert jax.tree.leaves(metrics)[0] is metrics["load"] and int(metrics["load"].sum()) == 12
    with pytest.raises(KeyError, match="load"):
        MoEMetrics().summary()


@pytest.mark.filterwarnings("default:MoE. no mesh is set")
def test_flax_no_mesh_warns_once(recwarn):
    if jax.device_count() == 1:
        pytest.skip("needs several devices")
    mesh_axes.warn_of_no_mesh.cache_clear()
    x = jnp.ones((2, H))
    one = jax.make_mesh((1,), ("expert",), devices=jax.devices()[:1])
    nnx.eval_shape(lambda moe: moe(x), MoE(**SIZES, mesh=one, rngs=nnx.Rngs(0)))
    assert not recwarn.list
    for _ in range(2):
        nnx.eval_shape(lambda moe: moe(x), MoE(**SIZES, rngs=nnx.Rngs(0)))
    assert ["jax.set_mesh(mesh)" in str(found.message) for found in recwarn.list] == [True]


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"hidden_size": 0}, ValueError, "hidden_size=0, expected"),
        ({"num_experts_per_tok": 9}, ValueError, "num_experts_per_tok=9 exceeds the 8 experts that can be chosen"),
        ({"router": jax_ep.Router(num_groups=8)}, ValueError, "num_experts_per_tok=2 exceeds the 1 experts"),
        (
            {"router": jax_ep.Router(num_groups=3)},
            ValueError,
            "the number of experts is 8, expected a multiple of 3, num_groups",
        ),
        (
            {"router": jax_ep.Router("sparsemixer"), "num_experts_per_tok": 3},
            ValueError,
            "num_experts_per_tok=3 of 8 experts",
        ),
        ({"capacity": 4}, ValueError, "capacity=4 .* expected a mesh, but there is none"),
        ({"router": "sigmoid"}, TypeError, "router is a str, expected a jax_ep.Router, or a callable"),
        ({"num_experts_per_tok": 2.0}, TypeError, "num_experts_per_tok=2.0 is a float, expected an int"),
        ({"experts": "gelu"}, TypeError, "experts is a str, expected a jax_ep.Experts"),
        ({"shared_experts": 1}, TypeError, "shared_experts is an int, expected a jax_ep.flax.SharedExperts"),
        ({"axes": "expert"}, TypeError, "axes is a str, expected a jax_ep.sharding.MeshAxes"),
        ({"dtype": None}, TypeError, "dtype=None is not a dtype"),
        ({"schedule": "serial"}, TypeError, "schedule is a str, expected a jax_ep.Schedule"),
        ({"implementation": "numpy"}, ValueError, "implementation='numpy' names .*'numpy'"),
        ({"implementation": 3}, TypeError, "implementation=3 is an int, expected a name"),
        ({"capacity": 0}, ValueError, "capacity=0, expected at least 1"),
        *(
            ({name: [jnp.ones(2)]}, TypeError, f"{name}.* is (a list|not a dtype), expected")
            for name in ("hidden_size", "capacity", "balance", "mesh", "dtype", "preferred_element_type")
        ),
        ({"implementation": memoryview(b"x")}, TypeError, "implementation=.* is a memoryview, expected a name"),
        ({"capacity": "4"}, TypeError, "capacity='4' is a str, expected an int"),
        ({"dtype": jnp.int32}, TypeError, "dtype=.*int32.*, expected one of bfloat16"),
        ({"param_dtype": jnp.complex64}, TypeError, "param_dtype=.*, expected one of bfloat16"),
        ({"use_bias": "yes"}, TypeError, "use_bias='yes' is a str, expected True or False"),
        ({"kernel_init": "normal"}, TypeError, "kernel_init is a str, expected a function"),
        ({"kernel_init": lambda *_: 0.02}, TypeError, "the result of kernel_init is a float, not an array"),
        ({"kernel_init": lambda *_: jnp.zeros(3)}, ValueError, r"the result of kernel_init has shape \(3,\), expected"),
        ({"rngs": 0}, TypeError, "rngs is an int, expected an nnx.Rngs"),
        ({"rngs": nnx.Rngs(dropout=0)}, ValueError, r"rngs has the streams \['dropout'\], expected 'params' or"),
        ({"hidden_size": -(10**5000)}, ValueError, "hidden_size=.{1,100}, expected at least 1"),
        ({"num_experts_per_tok": "2" * 9999}, TypeError, "num_experts_per_tok=.{1,100} is a str, expected an int"),
        ({"mesh": (8,)}, TypeError, "mesh is a tuple, expected a jax.sharding.Mesh"),
        ({"preferred_element_type": jnp.int8}, TypeError, "preferred_element_type=.*, expected one of"),
    ],
)
def test_flax_wrong_option(options, error, match):
    with pytest.raises(error, match=f"^MoE: {match}"):
        MoE(**SIZES | {"rngs": nnx.Rngs(0)} | options)


def lora_layer(where, **options):
    """Return a layer with adapters that are not zero, and its tokens."""
    axes = {"tensor": MeshAxes(tensor="data"), "fsdp": MeshAxes(batch="data", fsdp="data")}.get(where, BATCH)
    in_mesh = contextlib.nullcontext if where is None else functools.partial(jax.set_mesh, data_expert_mesh("Explicit"))
    sizes = SIZES | {"hidden_size": 128, "intermediate_size": 64}
    with in_mesh():
        moe = MoE(**sizes, axes=axes, use_bias=True, rngs=nnx.Rngs(0))
        moe = moe.to_serving(**options) if options else moe
        moe.add_lora(3, scale=0.5, rngs=nnx.Rngs(1))
        for name in ("w_gate_up_lora_b", "w_down_lora_b"):
            b = getattr(moe, name)
            b[...] = jax.random.normal(jax.random.key(2), b.shape, out_sharding=jax.typeof(b[...]).sharding)
    return moe, in_mesh, np.random.default_rng(3).normal(size=(16, 128)).astype(np.float32)


def lora_gradients(moe, x):
    loss = nnx.value_and_grad(lambda moe, x: jnp.sum(jnp.sin(moe(x)[0])), argnums=nnx.DiffState(0, nnx.LoRAParam))
    return nnx.jit(loss)(moe, x)


@pytest.mark.parametrize("where", [None, "data", "fsdp", "tensor"])
@pytest.mark.slow(unless={"where": [None]})
def test_flax_lora(where):
    """The value is that of merged weights, and gradients follow the chain rule of them; all else is frozen."""
    moe, in_mesh, x = lora_layer(where)
    with in_mesh():
        value, found = lora_gradients(moe, x)
        merged = nnx.clone(moe)
        merged.lora_scale = None
        pairs = {n: [getattr(moe, f"{n}_lora_{part}")[...] for part in "ab"] for n in ("w_gate_up", "w_down")}
        for name, (a, b) in pairs.items():
            w = getattr(merged, name)
            w[...] = jax_ep.lora.merge(jax_ep.lora.LoraWeights(w[...], a, b, 0.5))
        loss = nnx.value_and_grad(lambda moe, x: jnp.sum(jnp.sin(moe(x)[0])))
        want, gradients = nnx.jit(loss)(merged, x)
        np.testing.assert_allclose(value, want, rtol=1e-5)
        few = nnx.jit(lambda moe, x: moe(x, moe.serving_weights(None))[0].sum())(moe, x)
        np.testing.assert_allclose(few, moe(x)[0].sum(), rtol=1e-3, atol=1e-3)
    for name, (a, b) in pairs.items():
        d_w, a, b = (np.asarray(v, np.float64) for v in (gradients[name][...], a, b))
        d_w, b = (v.reshape(*v.shape[:2], -1) for v in (d_w, b))
        for part, d in (("a", d_w @ b.swapaxes(1, 2)), ("b", a.swapaxes(1, 2) @ d_w)):
            got = np.asarray(found[f"{name}_lora_{part}"][...])
            np.testing.assert_allclose(got.reshape(d.shape), 0.5 * d, rtol=1e-3, atol=1e-4 * np.abs(d).max())


def test_flax_lora_mistakes():
    """A layer to which adapters could not be added stays as it was."""
    moe = MoE(**SIZES, rngs=nnx.Rngs(0))
    for options, kind, text in (
        ({"scale": float("nan")}, ValueError, "scale=nan, expected a finite float32"),
        ({"scale": 10**5000}, ValueError, "scale=.{1,100}, expected a finite float32"),
        ({"scale": 0.0}, ValueError, "scale=0.0, expected a float32 other than 0"),
        ({"scale": jnp.ones(())}, TypeError, "scale is an array, expected a number"),
        ({"rank": 0}, ValueError, "rank=0, expected at least 1"),
        ({"rngs": nnx.Rngs(dropout=0)}, ValueError, "rngs has the streams"),
    ):
        with pytest.raises(kind, match=f"^MoE: {text}"):
            moe.add_lora(**{"rank": 2, "rngs": nnx.Rngs(0)} | options)
        assert moe.lora_scale is None and not any("lora" in name for name in nnx.state(moe, nnx.Param))
    moe.add_lora(2, scale=np.float64(0.5), rngs=nnx.Rngs(0))
    assert type(moe.lora_scale) is float


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("format", [None, "int8"])
def test_flax_lora_of_stacked_layers(kind, format):
    """The mesh splits the experts of the adapters, not the layers."""
    mesh = data_expert_mesh(kind)
    with jax.set_mesh(mesh):
        moe = stacked(3, None)
        moe = moe if format is None else moe.to_serving(format)
        moe.add_lora(2, rngs=nnx.Rngs(0))
        state = nnx.state(moe, nnx.LoRAParam)
        specs = jax.tree.leaves(nnx.get_partition_spec(state), is_leaf=lambda x: isinstance(x, P))
        for array, spec in zip(jax.tree.leaves(state), specs, strict=True):
            assert tuple(spec)[:2] == (None, "expert") and array.sharding.spec[:2] == (None, "expert")


@pytest.mark.parametrize("where", [None, "data"])
@pytest.mark.slow
def test_flax_lora_of_quantized_weights(where):
    """A layer made by `to_serving` trains adapters, which it uses for few tokens, too."""
    moe, in_mesh, x = lora_layer(where, format="int8")
    with in_mesh():
        value, gradients = lora_gradients(moe, x)
        np.testing.assert_allclose(value, jnp.sum(jnp.sin(moe(x)[0])), rtol=1e-4)
        assert sorted(gradients) == sorted(f"{n}_lora_{part}" for n in ("w_gate_up", "w_down") for part in "ab")
        assert all(float(jnp.abs(g[...]).max()) > 1e-3 for g in gradients.values())
        merged = moe.to_serving(None)
        assert merged.lora_scale is None and not nnx.state(merged, nnx.LoRAParam)
        np.testing.assert_allclose(merged(x)[0], moe(x)[0], rtol=1e-4, atol=1e-4)
        assert relative_error(moe(x, moe.serving_weights("int8"))[0], moe(x)[0]) < 0.02
        moe.w_down_lora_b[...] *= 0
        moe.w_gate_up_lora_b[...] *= 0
        without = moe(x)[0]
        moe.lora_scale = None
        np.testing.assert_allclose(without, moe(x)[0], atol=0.02)


@pytest.mark.filterwarnings("error:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("kind", [np.int8, np.uint8], ids=lambda kind: kind.__name__)
@pytest.mark.slow(unless={"kind": [np.uint8]})
def test_moe_sizes_numpy_integers(kind):
    sizes = {"hidden_size": 120, "intermediate_size": 100, "num_experts": 124, "num_experts_per_tok": 3}
    mesh, x = make_mesh((1,), ("expert",)), jnp.cos(jnp.arange(960.0)).reshape(8, 120)

    def run(of):
        given = {name: of(size) for name, size in sizes.items()}
        shared = SharedExperts(of(2), intermediate_size=of(100))
        moe = MoE(**given, shared_experts=shared, dtype=jnp.float32, mesh=mesh, rngs=nnx.Rngs(0))
        return moe(x)[0]

    np.testing.assert_array_equal(run(kind), run(int))
