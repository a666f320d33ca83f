"""sharded_moe on global arrays: specs, sharding modes, and no unnecessary collectives."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import harness
import jax_ep
from cases import reals
from harness import make_mesh
from jax_ep.core.mesh_axes import platform
from jax_ep.quantization import quantize, with_layout
from jax_ep.sharding import MeshAxes, sharded_moe
from stored_experts import quantized

N, H, K, E, INNER = 32, 16, 2, 8, 12
COLLECTIVES = ("all-gather", "all-to-all", "all-reduce", "reduce-scatter", "collective-permute")


def arguments(rng):
    """Draw global x, topk_idx, topk_weights, w_gate_up, w_down."""
    return [
        rng.normal(size=(N, H)).astype(np.float32),
        rng.integers(-1, E, size=(N, K), dtype=np.int32),
        rng.random((N, K), dtype=np.float32),
        rng.normal(size=(E, H, 2 * INNER)).astype(np.float32),
        rng.normal(size=(E, INNER, H)).astype(np.float32),
    ]


def collectives(function, *args):
    """Count the collectives of the compiled program by kind; asynchronous pairs count once."""
    text = jax.jit(function).lower(*args).compile().as_text()
    found = re.findall(rf" ({'|'.join(COLLECTIVES)})(?:-start)?\(", text)
    return collections.Counter(found)


def place(mesh, values, specs):
    return [jax.device_put(value, NamedSharding(mesh, spec)) for value, spec in zip(values, specs, strict=True)]


def spec_list(specs):
    return [specs.tokens, specs.routing, specs.routing, specs.w_gate_up, specs.w_down]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize(
    ("sizes", "names", "axes"),
    [
        ((4,), ("expert",), MeshAxes()),
        ((2, 4), ("data", "expert"), MeshAxes(batch="data")),
        ((2, 2), ("a", "b"), MeshAxes(("a", "b"))),
    ],
    ids=["expert", "data-expert", "two-axes"],
)
@pytest.mark.slow(unless={"kind": [AxisType.Explicit], "names": [("data", "expert")]})
def test_sharded_moe_collectives(kind, sizes, names, axes, rng):
    """Forward: ids, weights and tokens are gathered, sums are sent back once; nothing is resharded."""
    mesh = harness.make_mesh(sizes, names, kind)
    values = place(mesh, arguments(rng), spec_list(axes.specs))
    with jax.set_mesh(mesh):
        found = collectives(sharded_moe(num_experts=E, axes=axes, implementation="xla"), *values)
    assert found["all-gather"] <= 3, found  # XLA may merge them.
    assert found["all-to-all"] == 1, found
    assert not set(found) - {"all-gather", "all-to-all"}, found


@pytest.mark.parametrize(("over_data", "keep"), [(False, False), (False, True), (True, False)])
@pytest.mark.slow(unless={"keep": [False]})
def test_sharded_moe_backward_collectives(over_data, keep, rng):
    """Backward: cotangents, and tokens that were not saved, are gathered; those of tokens and weights are sent back.

    Over a data axis, each weight gradient needs one all-reduce.
    """
    axes = MeshAxes(batch="data") if over_data else MeshAxes()
    mesh = make_mesh((2, 4), ("data", "expert")) if over_data else make_mesh((4,), ("expert",))
    values = place(mesh, arguments(rng), spec_list(axes.specs))
    schedule = jax_ep.Schedule(keep_tokens=keep)
    layer = sharded_moe(mesh, num_experts=E, axes=axes, schedule=schedule, implementation="xla")

    def gradient(x, idx, weights, gate_up, down, cotangent):
        return jax.vjp(lambda *a: layer(a[0], idx, *a[1:]), x, weights, gate_up, down)[1](cotangent)

    found = collectives(gradient, *values, values[0])
    assert found["all-gather"] <= (4 if keep else 5), found
    assert 1 <= found["all-to-all"] <= 2, found
    assert found["all-reduce"] <= (2 if over_data else 0), found
    assert not set(found) - {"all-gather", "all-to-all", "all-reduce"}, found


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.slow(unless={"kind": [AxisType.Explicit]})
def test_sharded_moe_tensor_axis(kind, rng):
    """I split over a tensor axis, on a data x expert x tensor mesh, equals the layer on one device."""
    mesh = harness.make_mesh((2, 2, 2), ("data", "expert", "tensor"), kind)
    x, idx, weights, gate_up, down = arguments(rng)
    want = jax.jit(jax_ep.fused_moe)(x, idx, weights, gate_up, down)
    specs = MeshAxes(batch="data", tensor="tensor").specs
    values = place(mesh, [x, idx, weights, gate_up.reshape(E, H, 2, INNER), down], spec_list(specs))
    with jax.set_mesh(mesh):
        layer = sharded_moe(num_experts=E, axes=MeshAxes(batch="data", tensor="tensor"))
        got = jax.jit(layer)(*values)
        found = collectives(layer, *values)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-4)
    assert found["all-reduce"] == 1, found
    assert got.sharding.is_equivalent_to(NamedSharding(mesh, specs.tokens), got.ndim)


def test_sharded_moe_explicit_sharding_mismatch(rng):
    mesh = harness.make_mesh((4,), ("expert",), AxisType.Explicit)
    x, *rest = place(mesh, arguments(rng), spec_list(MeshAxes().specs))
    with jax.set_mesh(mesh):
        replicated = jax.sharding.reshard(x, P(None, None))
        with pytest.raises(
            ValueError, match=r"x is sharded as P\(None, None\), expected .*reshard.* under jax.set_mesh"
        ):
            sharded_moe(num_experts=E)(replicated, *rest)


OF_OTHER_MESHES = MeshAxes("ep"), MeshAxes(batch="ep"), MeshAxes(tensor="ep")
FEW_TOKENS = np.ones((23, H), np.float32), np.zeros((23, K), np.int32), np.ones((23, K), np.float32)


@pytest.mark.parametrize(
    ("changes", "options", "error", "message"),
    [
        ({0: [[1.0]]}, {}, TypeError, r"x is a list, not an array; pass .* \[N, H\]"),
        ({0: np.ones((), np.float32)}, {}, ValueError, r"x has shape \(\), expected rank 2"),
        ({1: np.zeros((N // 2, K), np.int32)}, {}, ValueError, rf"topk_idx has shape \({N // 2}, "),
        ({2: None}, {}, TypeError, "topk_weights is a NoneType"),
        ({3: None}, {}, TypeError, "w_gate_up is a NoneType"),
        ({4: np.ones((4, INNER, H), np.float32)}, {}, ValueError, rf"w_down has shape \(4, .*expected \[{E}, I, H\]"),
        ({}, {"num_experts": 6}, ValueError, "num_experts is 6, expected a multiple of 4, the ranks of axis 'expert'"),
        ({}, {"num_experts": "8"}, TypeError, "num_experts='8' is a str, expected an int"),
        ({}, {"mesh": "expert"}, TypeError, "mesh is a str, expected a jax.sharding.Mesh"),
        ({}, {"mesh": None}, ValueError, r"mesh.*(jax\.set_mesh|mesh=)"),
        *(({}, {"axes": axes}, ValueError, "'expert'.*'ep'.*MeshAxes") for axes in OF_OTHER_MESHES),
        (dict(enumerate(FEW_TOKENS)), {}, ValueError, r"\b23\b.*\b4\b.*(multiple|divisible|pad)"),
    ],
)
def test_sharded_moe_mistakes(changes, options, error, message, rng):
    values = arguments(rng)
    if options.get("num_experts") == 6:
        values[1] = np.minimum(values[1], 5)
    for place_of, value in changes.items():
        values[place_of] = value
    with pytest.raises(error, match=f"^sharded_moe: .*{message}"):
        sharded_moe(**{"mesh": harness.make_mesh((4,), ("expert",)), "num_experts": E, **options})(*values)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_sharded_moe_vmap_over_a_mesh_axis(kind, rng):
    """Stages of a pipeline: an axis of one `shard_map` with the experts, or on automatic axes the batch of `vmap`."""
    mesh = harness.make_mesh((2, 4), ("stage", "expert"), kind)
    stacked = [np.stack(both) for both in zip(arguments(rng), arguments(rng), strict=True)]

    def stages(*values):
        y = jax_ep.moe(*(value[0] for value in values), num_experts=E, axis_name="expert")
        return y[None]

    def loss(layer, *values):
        return jnp.sum(layer(*values) ** 2)

    def on_one_device(*values):
        return jnp.stack([jax_ep.fused_moe(*(value[i] for value in values)) for i in range(2)])

    spec = P("stage", "expert")
    values = place(mesh, stacked, [spec] * 5)
    with jax.set_mesh(mesh):
        layer = jax.shard_map(stages, mesh=mesh, in_specs=spec, out_specs=spec)
        got = jax.jit(jax.value_and_grad(lambda *v: loss(layer, *v), (0, 3, 4)))(*values)
        if kind == AxisType.Explicit:
            with pytest.raises(ValueError, match=r"^sharded_moe: called inside jax.vmap over explicit .* \['stage'\]"):
                jax.vmap(sharded_moe(num_experts=E))(*values)
    want = jax.jit(jax.value_and_grad(lambda *v: loss(on_one_device, *v), (0, 3, 4)))(*stacked)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3 * np.abs(b).max()), got, want)


@pytest.mark.parametrize(("num_stages", "balance"), [(4, None), (2, jax_ep.Balance())])
@pytest.mark.slow
def test_sharded_moe_vmap_with_spmd_axis_name(num_stages, balance, rng):
    """Each device computes its stages; gradients inside and outside of `vmap`, also of weights that stages share."""
    mesh = harness.make_mesh((2, 4), ("stage", "expert"))
    stacked = [np.stack(parts) for parts in zip(*(arguments(rng) for _ in range(num_stages)), strict=True)]
    values = place(mesh, stacked, [P("stage", "expert")] * 5)
    moe = sharded_moe(mesh, num_experts=E, balance=balance)

    def by_vmap(*values, in_axes=0):
        return jax.vmap(moe, in_axes, spmd_axis_name="stage")(*values)

    def one_by_one(*values, in_axes=(0,) * 5):
        pairs = tuple(zip(values, in_axes, strict=True))
        stages = ([value if axis is None else value[i] for value, axis in pairs] for i in range(num_stages))
        return jnp.stack([jax_ep.fused_moe(*stage) for stage in stages])

    def gradients(layer, *values):
        return jax.jit(jax.grad(lambda *v: jnp.sum(jnp.sin(layer(*v))), (0, 2, 3, 4)))(*values)

    def check(got, want):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max()), got, want)

    y, wanted = jax.jit(by_vmap)(*values), gradients(one_by_one, *stacked)
    check(y, one_by_one(*stacked))
    assert y.sharding.spec == P("stage", "expert")
    text = jax.jit(by_vmap).lower(*values).compile().as_text()
    assert f"f32[{num_stages // 2},{E // 4},{H},{2 * INNER}]" in text  # The weights of a device: of its stages only.
    found = gradients(by_vmap, *values)
    check(found, wanted)
    assert found[3].sharding.spec[0] == "stage"
    one = jax.grad(lambda *v: jnp.sum(jnp.sin(moe(*v))), (0, 2, 3, 4))
    check(jax.jit(jax.vmap(one, spmd_axis_name="stage"))(*values), wanted)
    axes, first = (0, 0, 0, None, None), [w[0] for w in stacked[3:]]
    shared = place(mesh, first, [P("expert")] * 2)
    found = gradients(functools.partial(by_vmap, in_axes=axes), *values[:3], *shared)
    check(found, gradients(functools.partial(one_by_one, in_axes=axes), *stacked[:3], *first))


def test_sharded_moe_vmap_over_an_axis_of_the_experts(rng):
    mesh = harness.make_mesh((2, 4), ("stage", "expert"))
    stacked = [np.stack(both) for both in zip(arguments(rng), arguments(rng), strict=True)]
    with pytest.raises(ValueError, match=r"^sharded_moe: called inside jax.vmap with spmd_axis_name=\['expert'\], "):
        jax.vmap(sharded_moe(mesh, num_experts=E), spmd_axis_name="expert")(*stacked)


def test_sharded_moe_tensor_axis_does_not_divide(rng):
    mesh = harness.make_mesh((1, 4), ("expert", "tensor"))
    x, ids, weights, _, _ = arguments(rng)
    w_gate_up, w_down = np.ones((E, H, 2, 6), np.float32), np.ones((E, 6, H), np.float32)
    with pytest.raises(ValueError, match="axis -1 of w_gate_up, I, is 6, expected a multiple of 4, the ranks"):
        sharded_moe(mesh, num_experts=E, axes=MeshAxes(tensor="tensor"))(x, ids, weights, w_gate_up, w_down)


def test_init_idempotent_finalize_releases():
    mesh = harness.make_mesh((4,), ("expert",))
    jax_ep.finalize()
    context = jax_ep.init(mesh)
    assert jax_ep.init(mesh) is context
    assert context.num_ranks == 4
    with pytest.raises(ValueError, match=r"already initialized .*finalize"):
        jax_ep.init(mesh, axis_name=("expert",))
    jax_ep.finalize()
    jax_ep.finalize()
    with pytest.raises(ValueError, match=r"^init: the mesh has axes .*'expert'.*'ep'.*axis_name"):
        jax_ep.init(mesh, axis_name="ep")
    with jax.set_mesh(mesh):
        assert jax_ep.init(axis_name=("expert",)).mesh.shape == mesh.shape
    jax_ep.finalize()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"mesh": "expert"}, TypeError, "mesh is a str, expected a jax.sharding.Mesh"),
        ({"axis_name": ()}, ValueError, "names no axis"),
        ({"axis_name": 3}, TypeError, "axis_name=3 is an int.*expected"),
        *(({name: np.zeros(2)}, ValueError, f"{name}=.*expected one of") for name in ("transport", "launcher")),
        ({"transport": "pigeon"}, ValueError, "transport='pigeon'"),
        ({"timeout_s": "3"}, TypeError, "timeout_s=.3. is a str, expected a number"),
        ({"timeout_s": float("inf")}, ValueError, "timeout_s=inf, expected more than 0 and at most"),
        ({"timeout_s": float("nan")}, ValueError, "timeout_s=nan, expected more than 0 and at most"),
        ({"transport": "shared_memory", "heap_bytes": "x"}, TypeError, "heap_bytes='x' is a str, expected an int"),
        ({"transport": "shared_memory", "heap_bytes": 0}, ValueError, "heap_bytes=0, expected a number from 1"),
    ],
)
def test_init_mistakes(options, error, message):
    if "heap_bytes" in options and jax.default_backend() != "cpu":
        pytest.skip("needs CPU devices")
    jax_ep.finalize()
    with pytest.raises(error, match=f"^init: .*{message}"):
        jax_ep.init(**options)


def test_sharded_moe_cpu_mesh_with_gpus(monkeypatch):
    """Kernels for GPUs are neither offered nor reported as missing there; the GPUs are fakes."""
    if len(jax.devices("cpu")) < 2:
        pytest.skip("needs two CPU devices")
    mesh = jax.make_mesh((2,), ("expert",), devices=jax.devices("cpu")[:2])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    platforms = []

    def body(x):
        platforms.append(platform())
        return x

    jax.eval_shape(body, jnp.ones((2, 8)))
    jax.eval_shape(jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P()), jnp.ones((2, 8)))
    assert platforms == ["gpu", "cpu"]


def test_sharded_moe_quantized_experts_checked():
    """Experts must divide over their axis, and on explicit axes be sharded over it."""
    x, ids, weights = jnp.ones((8, 64)), jnp.zeros((8, 1), jnp.int32), jnp.ones((8, 1))

    def call(kind, num_experts):
        mesh = harness.make_mesh((2,), ("expert",), kind)
        matrices = [quantized(jnp.ones((num_experts, 64, n)), "int8") for n in (128, 64)]
        put = [jax.device_put(a, NamedSharding(mesh, P("expert"))) for a in (x, ids, weights)]
        with jax.set_mesh(mesh):
            held = [jax.device_put(w, NamedSharding(mesh, P())) for w in matrices]
            jax.eval_shape(sharded_moe(mesh, num_experts=num_experts), *put, *held)

    with pytest.raises(ValueError, match="num_experts is 3"):
        call(AxisType.Auto, 3)
    call(AxisType.Auto, 4)
    with pytest.raises(ValueError, match=r"w_gate_up is sharded as .*expected .*'expert'"):
        call(AxisType.Explicit, 4)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("expert_format", ["int4", "mxfp4"])
@pytest.mark.slow
def test_sharded_moe_prepacked_experts_not_moved(expert_format, kind):
    """The layer uses them on the devices of their experts."""
    mesh = harness.make_mesh((2,), ("expert",), kind)
    sharding = NamedSharding(mesh, P("expert"))
    rng = np.random.default_rng(0)
    x, ids = jax.device_put((reals(rng, 8, 128), rng.integers(0, 4, (8, 2), dtype=np.int32)), sharding)
    weights = jax.device_put(np.full((8, 2), 0.5, np.float32), sharding)
    with jax.set_mesh(mesh):
        held = [jax.device_put(reals(rng, 4, 128, n), sharding) for n in (256, 128)]
        matrices = [quantize(w, expert_format) for w in held]
        prepacked = [with_layout(w, "prepacked") for w in matrices]
        for leaf in jax.tree.leaves((prepacked, [with_layout(w, "transposed") for w in prepacked])):
            assert tuple(leaf.sharding.spec)[:1] == ("expert",)
        call = jax.jit(sharded_moe(mesh, num_experts=4))
        np.testing.assert_array_equal(call(x, ids, weights, *prepacked), call(x, ids, weights, *matrices))


def test_sharded_moe_fp8_weights_split_at_blocks():
    mesh = harness.make_mesh((2, 2), ("data", "expert"), AxisType.Auto)
    x, ids, weights = jnp.ones((8, 128)), jnp.zeros((8, 1), jnp.int32), jnp.ones((8, 1))
    matrices = [quantized(jnp.ones((4, 128, columns)), "fp8", for_training=True) for columns in (256, 128)]
    for axes, message in (
        (MeshAxes(batch="data", fsdp="data"), "sharded_moe: H=128 of QuantizedWeights over the 2 ranks"),
        (MeshAxes(tensor="data"), r"w_gate_up stands for weights \(4, 128, 256\), expected \[4, K, 2, N"),
    ):
        run = sharded_moe(mesh, num_experts=4, recipe="fp8", axes=axes)
        with pytest.raises(ValueError, match=message):
            run(x, ids, weights, *matrices)


@pytest.mark.parametrize(
    ("kinds", "columns", "experts"),
    [(1, 2 * INNER, None), (2, INNER // 2, None), (1, INNER, None), (1, INNER, "gated"), (2, INNER, "ungated")],
)
def test_sharded_moe_tensor_axis_gate_axis(kinds, columns, experts, rng):
    """A rank's share of the columns does not show the layout; a wrong one would give wrong results."""
    mesh, (x, idx, weights, _, w_down) = make_mesh((2, 2), ("expert", "tensor")), arguments(rng)
    w_gate_up = rng.normal(size=(E, H, kinds, columns)).astype(np.float32)
    given = {} if experts is None else {"experts": jax_ep.Experts(gated=experts == "gated")}
    layer = sharded_moe(mesh, num_experts=E, axes=MeshAxes(tensor="tensor"), **given)
    want = "1, " if experts == "ungated" else "2, "
    with pytest.raises(ValueError, match=rf"w_gate_up has shape .* expected \[E, H, .*{want}"):
        layer(x, idx, weights, w_gate_up, w_down)


def test_sharded_moe_tensor_axis_custom_activation(rng):
    mesh, (x, idx, weights, _, w_down) = make_mesh((2, 2), ("expert", "tensor")), arguments(rng)
    w = rng.normal(size=(E, H, 3, INNER)).astype(np.float32)
    product = lambda h: jnp.prod(h.reshape(h.shape[0], 3, -1), axis=1)  # noqa: E731
    # Automatic axes take arrays that are not sharded.
    layer = sharded_moe(mesh, num_experts=E, axes=MeshAxes(tensor="tensor"), experts=jax_ep.Experts(product))
    got = layer(x, idx, weights, w, w_down)
    on_one_device = functools.partial(jax_ep.fused_moe, experts=jax_ep.Experts(product))
    want = jax.jit(on_one_device)(x, idx, weights, w.reshape(E, H, -1), w_down)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"biases": (None, np.zeros((E, H))), "token_mask": None}, r"\['biases', 'token_mask'\] are arrays"),
        ({"batch_axes": "data"}, r"unknown keywords \['batch_axes'\], expected axes= or some of .*MeshAxes"),
        ({"axis_name": "ep", "router": 3}, r"unknown keywords \['axis_name', 'router'\]"),
        ({"axes": "expert"}, r"axes is a str, expected a jax_ep.sharding.MeshAxes"),
    ],
)
def test_sharded_moe_unknown_option(given, match):
    with pytest.raises(TypeError, match=match):
        sharded_moe(num_experts=E, **given)


def compilations(call, caplog):
    """Count the programs that a second call compiles."""
    jax.block_until_ready(call())
    caplog.clear()
    with jax.log_compiles(True):
        jax.block_until_ready(call())
    return sum(record.getMessage().startswith("Compiling") for record in caplog.records)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_sharded_moe_eager_compiled_once(kind, rng, caplog):
    mesh = harness.make_mesh((2, 4), ("data", "expert"), kind)
    values = place(mesh, arguments(rng), spec_list(MeshAxes(batch="data").specs))
    options = {"num_experts": E, "axes": MeshAxes(batch="data"), "implementation": ["xla"]}
    assert compilations(lambda: sharded_moe(mesh, **options)(*values), caplog) == 0


def test_sharded_moe_eager_recompiled_for_mesh(rng):
    """With the same sizes and names, but other devices, or other kinds of axes."""
    given = arguments(rng)
    want = jax_ep.fused_moe(*given, implementation="xla")
    if jax.device_count() < 8:
        pytest.skip("needs 8 devices")
    for kind in (AxisType.Auto, AxisType.Explicit):
        for devices in (jax.devices()[:4], jax.devices()[4:8]):
            mesh = jax.make_mesh((4,), ("expert",), axis_types=(kind,), devices=devices)
            with jax.set_mesh(mesh):
                got = sharded_moe(num_experts=E, implementation="xla")(*place(mesh, given, spec_list(MeshAxes().specs)))
            assert got.sharding.device_set == set(devices)
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_sharded_moe_eager_custom_activation_closure(rng):
    mesh, given, factor = make_mesh((2,), ("expert",)), arguments(rng), [1.0]
    experts = jax_ep.Experts(lambda h: h[:, :INNER] * h[:, INNER:] * factor[0])
    first = sharded_moe(mesh, num_experts=E, experts=experts, implementation="xla")(*given)
    factor[0] = 2.0
    second = sharded_moe(mesh, num_experts=E, experts=experts, implementation="xla")(*given)
    np.testing.assert_allclose(second, 2 * np.asarray(first), rtol=1e-5)
