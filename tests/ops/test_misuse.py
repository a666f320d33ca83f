"""Calls in the wrong context, with wrong handles or implementations, and values out of range."""

import inspect
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import harness
import jax_ep
from jax_ep.ops import registry
from mistakes import (
    DISPATCH,
    GOOD,
    NEEDS_AXIS,
    SIZES,
    Traced,
    check,
    dispatch_handle,
    f32,
    fp8,
    fp8_weights,
    function,
    i32,
    is_array,
    low_latency_handle,
    mesh_of,
    number,
    program,
    trace,
)

T, K, E, W, H, INNER, _, MAX_T, L, _ = SIZES

HAS_IMPLEMENTATIONS = [*NEEDS_AXIS, "grouped_gemm", "fused_moe"]


@pytest.mark.parametrize("name", NEEDS_AXIS)
def test_misuse_outside_shard_map(name):
    # Handles must be created inside shard_map.
    made = {key: _handle_of_one_rank(arg, W) for key, arg in GOOD[name].items() if isinstance(arg, Traced)}
    check(ValueError, ["expert", r"jax\.shard_map"], trace, name, inside=False, **made)


@pytest.mark.parametrize("name", NEEDS_AXIS)
def test_misuse_unknown_axis(name):
    # The error also names the mesh's own axis, which the caller most likely meant.
    check(ValueError, ["'ep'", "'expert'", "axis_name", r"shard_map|mesh"], trace, name, axis_name="ep")


def test_misuse_vmap_axis():
    def body(x, ids, weights):
        return jax_ep.dispatch(x, ids, weights, num_experts=E).tokens

    shapes = f32(W, T, H), i32(W, T, K), f32(W, T, K)
    fragments = ["dispatch", "expert", r"jax\.shard_map"]
    check(ValueError, fragments, lambda: jax.eval_shape(jax.vmap(body, axis_name="expert"), *shapes))


def test_load_balancing_loss_unknown_axis():
    fragments = ["load_balancing_loss", "expert", r"jax\.shard_map"]
    check(ValueError, fragments, trace, "load_balancing_loss", inside=False, axis_name="expert")


@pytest.mark.parametrize("axis_name", [3, None], ids=str)
@pytest.mark.parametrize("name", ["dispatch", "combine", "moe", "low_latency_dispatch"])
def test_misuse_axis_name_type(name, axis_name):
    check(TypeError, ["axis_name", type(axis_name).__name__, "str|tuple|name"], trace, name, axis_name=axis_name)


def _handle_of_one_rank(traced, size):
    """Return shapes of the handle that one rank of a mesh of `size` holds."""
    mesh = mesh_of(size)
    make = jax.shard_map(
        lambda: jax.tree.map(lambda leaf: leaf[None], traced.make()), mesh=mesh, in_specs=(), out_specs=P("expert")
    )
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), jax.eval_shape(make))


@pytest.mark.parametrize("name", ["combine", "grouped_gemm_combine", "low_latency_combine", *DISPATCH])
def test_handle_other_axis_size(name):
    traced = low_latency_handle() if name.startswith("low_latency") else dispatch_handle()
    handle = _handle_of_one_rank(traced, 2)  # L = 4 experts on each of 2 ranks, R = 24 rows.
    rows, local = handle.layout.capacity, handle.layout.num_local_experts
    fitting = {"y": f32(local, 2 * MAX_T, H) if name.startswith("low") else f32(rows, H)}
    if name == "grouped_gemm_combine":
        fitting = {"h": f32(rows, INNER), "w": f32(local, INNER, H)}
    if name in DISPATCH:
        fitting = {"topk_idx": None}
    check(ValueError, ["handle", number(2), number(W), "mesh|axis|rank"], trace, name, handle=handle, **fitting)


CONSUMERS = ["combine", "grouped_gemm_combine", "low_latency_combine", "low_latency_gemm_combine", *DISPATCH]


@pytest.mark.parametrize("name", [*CONSUMERS, "row_experts"])
def test_handle_of_all_ranks(name):
    made = low_latency_handle() if name.startswith("low_latency") else dispatch_handle()
    stacked = Traced(lambda: jax.tree.map(lambda leaf: leaf[None], made.make()))
    changes = {"topk_idx": None} if name in DISPATCH else {}
    check(ValueError, [f"^{name}: handle", "4 axes", "expected 3"], trace, name, inside=True, handle=stacked, **changes)


@pytest.mark.parametrize("used", [("a", "c"), ("b", "a")], ids="-".join)
@pytest.mark.parametrize("name", CONSUMERS)
def test_handle_other_axis_same_size(name, used):
    """Also with the same axes in another order, which changes rank numbers."""
    made = ("a", "b")
    mesh = harness.make_mesh((2, 2, 2), ("a", "b", "c"))
    arrays = {key: value for key, value in GOOD[name].items() if is_array(value)}
    arguments = {key: value for key, value in GOOD[name].items() if not is_array(value)}
    arguments |= {"topk_idx": None} if name in DISPATCH else {}
    arrays = {key: value for key, value in arrays.items() if key not in arguments}

    def call(axis_name, arrays):
        traced = (low_latency_handle if name.startswith("low_latency") else dispatch_handle)(axis_name=made)
        return function(name)(**(arguments | arrays | {"handle": traced.make()}), axis_name=axis_name)

    def run(axis_name):
        body = jax.shard_map(lambda arrays: jax.tree.map(lambda leaf: leaf[None], call(axis_name, arrays)),
                             mesh=mesh, in_specs=P(), out_specs=P(("a", "b", "c")))  # fmt: skip
        return jax.eval_shape(body, arrays)

    assert jax.tree.leaves(run(made))
    fragments = [f"^{name}:", "handle", r"\('a', 'b'\)", re.escape(str(used)), "axis_name of the dispatch"]
    check(ValueError, fragments, run, used)


def _concrete(name):
    rng = np.random.default_rng(0)
    return {
        key: jnp.asarray(rng.uniform(size=value.shape), value.dtype) if is_array(value) else value
        for key, value in GOOD[name].items()
    }


@pytest.mark.parametrize("name", ["moe_sort", "fused_moe"])
def test_topk_idx_eager_out_of_range(name):
    arguments = _concrete(name)
    for bad in (E, E + 91, -2, -(2**31)):
        arguments["topk_idx"] = jnp.zeros((T, K), jnp.int32).at[3, 1].set(bad)
        check(ValueError, ["topk_idx", number(bad), number(E), "-1"], function(name), **arguments)
    # Traced ids cannot be checked; they count as "no expert".
    traced = jax.jit(lambda topk_idx: function(name)(**(arguments | {"topk_idx": topk_idx})))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(traced(arguments["topk_idx"])))


@pytest.mark.parametrize("library", [np, jnp], ids=["numpy", "jax"])
@pytest.mark.parametrize("name", ["dispatch", "moe", "low_latency_dispatch"])
def test_topk_idx_constant_out_of_range_in_shard_map(name, library):
    ids = np.zeros((T, K), np.int32)
    ids[3, 1] = E + 91
    topk_idx = library.asarray(ids)  # Created outside, so that its values are known while the rest is traced.
    fragments = ["topk_idx", number(E + 91), number(E), "-1"]
    check(ValueError, fragments, trace, name, topk_idx=Traced(lambda: topk_idx))


def test_topk_idx_eager_shard_map_out_of_range():
    def per_rank(x, topk_idx):
        return jax_ep.dispatch(x, topk_idx, num_experts=E).tokens

    x, topk_idx = jnp.zeros((W * T, H), jnp.float32), jnp.zeros((W * T, K), jnp.int32)
    call = jax.shard_map(per_rank, mesh=mesh_of(), in_specs=P("expert"), out_specs=P("expert"))
    fragments = ["topk_idx", number(E + 91), number(E), "-1"]
    check(ValueError, fragments, call, x, topk_idx.at[W * T - 1, 0].set(E + 91))  # Only the last rank has it.


@pytest.mark.parametrize("name", HAS_IMPLEMENTATIONS)
def test_implementation_unknown_name(name):
    fragments = ["implementation", "cublas_magic", "expected one or more of", "xla"]
    check(ValueError, fragments, trace, name, implementation="cublas_magic")
    check(ValueError, fragments, trace, name, implementation=("xla", "cublas_magic"))
    check(
        ValueError, ["implementation", "nothing", "expected one or more of", "None|xla"], trace, name, implementation=()
    )


@pytest.mark.parametrize("name", ["dispatch", "grouped_gemm", "low_latency_combine"])
def test_implementation_wrong_type(name):
    check(TypeError, ["implementation", "int|3", "None|xla"], trace, name, implementation=3)


@pytest.fixture
def two_that_refuse(monkeypatch):
    """Register two implementations that support no call, each for its own reason."""
    reasons = {"wheeled": "needs eight wheels", "winged": "H must be a prime"}
    for name, reason in reasons.items():
        says = types.ModuleType(f"{name}.requirements")  # no other module of it may be loaded
        says.unsupported_reason = lambda *_, reason=reason: reason
        monkeypatch.setitem(sys.modules, says.__name__, says)
        monkeypatch.setitem(registry._PACKAGES, name, name)
    for operation, names in registry._IMPLEMENTATIONS.items():
        monkeypatch.setitem(registry._IMPLEMENTATIONS, operation, (*names, *reasons))


@pytest.mark.parametrize("name", HAS_IMPLEMENTATIONS)
def test_implementation_none_supports_call(name, two_that_refuse):
    fragments = ["wheeled: needs eight wheels", "winged: H must be a prime", "implementation=None|implementation"]
    check(NotImplementedError, fragments, trace, name, implementation=("wheeled", "winged"))
    check(NotImplementedError, ["wheeled: needs eight wheels"], trace, name, implementation="wheeled")


@pytest.mark.parametrize(
    ("name", "field", "mode"),
    [
        ("grouped_gemm_combine", "combine_mode", "scatter"),
        ("moe", "combine_mode", "scatter"),
        ("moe", "dispatch_mode", "fused"),
        ("dispatch_grouped_gemm", "dispatch_mode", "fused"),
    ],
)
def test_implementation_without_mode(name, field, mode):
    fragments = [name, f"xla: .*mode='{mode}'", "'serial'", "implementation=None"]
    schedule = jax_ep.Schedule(**{field: mode})
    check(NotImplementedError, fragments, trace, name, implementation="xla", schedule=schedule)
    schedule = jax_ep.Schedule(**{field: "serial"})
    assert jax.tree.leaves(trace(name, implementation="xla", schedule=schedule))


@pytest.mark.parametrize("name", HAS_IMPLEMENTATIONS)
def test_implementation_falls_back_to_next(name, two_that_refuse):
    assert jax.tree.leaves(trace(name, implementation=("wheeled", "winged", "xla")))


def test_sharded_moe_inside_shard_map():
    mesh = mesh_of()
    arrays = [GOOD["fused_moe"][name] for name in ("x", "topk_idx", "topk_weights", "w_gate_up", "w_down")]
    layer = jax_ep.sharding.sharded_moe(mesh, num_experts=E)
    inside = jax.shard_map(layer, mesh=mesh, in_specs=P(), out_specs=P())
    arrays = [f32(W, H), i32(W, K), f32(W, K), *arrays[3:]]
    assert jax.eval_shape(layer, *arrays).shape == (W, H)
    check(ValueError, ["^sharded_moe: called inside", "'expert'", "jax_ep.moe"], jax.eval_shape, inside, *arrays)
    with jax.set_mesh(harness.make_mesh((2, 2), ("expert", "data"))):
        check(ValueError, ["^sharded_moe: the mesh is", "'expert': 2", "mesh=None"], jax.eval_shape, layer, *arrays)


def test_explain_no_function():
    check(TypeError, ["^explain: function is an int, expected a function"], jax_ep.explain, 3, np.ones(3))


MANY = 2**30  # Times K = 2.
ROWS = {"x": f32(MANY, H), "topk_idx": i32(MANY, K), "topk_weights": f32(MANY, K)}


@pytest.mark.parametrize(
    ("name", "offending", "changes"),
    [
        *((name, MANY, ROWS) for name in ("dispatch_grouped_gemm", "moe", "fused_moe", "moe_sort")),
        ("dispatch", MANY, ROWS | {"capacity": 1024}),
        ("dispatch", MANY, {"alignment": MANY}),
        ("moe_sort", MANY, {"block_size": MANY}),
        ("low_latency_dispatch", MANY, {"max_tokens_per_rank": MANY}),
        ("grouped_gemm", 2**31, {"lhs": f32(2**31, H)}),
        ("masked_grouped_gemm", MANY, {"lhs": jax.ShapeDtypeStruct((L, MANY, H), jnp.float8_e4m3fn)}),
        ("masked_gated_activation", MANY, {"hidden": f32(L, MANY, 2 * H)}),
    ],
)
def test_rows_beyond_int32(name, offending, changes):
    """Rows are numbered before they are dropped, so this holds for any capacity."""
    fragments = [f"^{name}:", number(offending), r"2\*\*31", "fewer tokens|split|lower"]
    check(ValueError, fragments, trace, name, **changes)


IN_FLOAT32 = {"lhs": f32(L, MAX_T, H), "rhs": f32(L, H, H), "lhs_scales": None}
IN_FP8 = {"lhs": fp8(20, H), "rhs": fp8_weights(3, H, H), "lhs_scales": f32(20, 2)}
NO_GRADIENT = [
    ("low_latency_dispatch", "x", {"quantize": False}, "moe, or with dispatch"),
    ("low_latency_combine", "y", {}, "moe, or with dispatch"),
    ("low_latency_gemm_combine", "lhs_scales", {}, "moe, or with a layer"),
    ("low_latency_moe", "x", {}, "moe, or with"),
    ("masked_grouped_gemm", "lhs_scales", {}, "moe or grouped_gemm"),
    ("masked_grouped_gemm", "lhs", IN_FLOAT32, "moe or grouped_gemm"),
    ("masked_gated_activation", "hidden", {"quantize": False}, "moe"),
    ("grouped_gemm", "lhs_scales", IN_FP8, "arrays"),
]


@pytest.mark.parametrize(("name", "argument", "changes", "remedy"), NO_GRADIENT)
def test_operation_without_gradient(name, argument, changes, remedy):
    call, arrays = program(name, **changes)

    def loss(value, others):
        leaves = jax.tree.leaves(call(others | {argument: value}))
        return sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in leaves)

    fragments = [f"^{name} (with quantized weights )?has no gradient: train with {remedy}"]
    check(TypeError, fragments, jax.eval_shape, jax.grad(loss), arrays[argument], arrays)


def test_losses_no_tokens():
    assert float(jax_ep.load_balancing_loss(jnp.zeros((0, E)), jnp.zeros((0, K), jnp.int32))) == 0
    assert float(jax_ep.router_z_loss(jnp.zeros((0, E)))) == 0


LONG = {
    "axis_name": ("a" * 10_000, ValueError),
    "implementation": (list(range(10_000)), ValueError),
    "preferred_element_type": (10**5000, TypeError),
    "schedule": ("s" * 10_000, TypeError),
    "num_experts": (-(10**5000), ValueError),
    "rate": (10**5000, ValueError),
    "jitter_eps": (10**5000, ValueError),
}


LONG_IN = [(name, key) for name in GOOD for key in LONG if key in inspect.signature(function(name)).parameters]


@pytest.mark.parametrize(("name", "argument"), LONG_IN)
def test_misuse_long_values_are_cut(name, argument):
    value, error = LONG[argument]
    with pytest.raises(error, match=rf"^{name}: .*{argument}") as caught:
        trace(name, **{argument: value})
    assert len(str(caught.value)) < 600


LONG_FIELDS = [
    (lambda value: jax_ep.Schedule(wire_dtype=value), 10**5000, r"Schedule: wire_dtype=an integer of 16610 bits"),
    (lambda value: jax_ep.Schedule(wire_dtype=value), "\udcff", r"Schedule: wire_dtype='.udcff'"),
    (lambda value: jax_ep.sharding.MeshAxes(batch="data", fsdp=value), "a" * 10_000, "MeshAxes: fsdp='a"),
    (lambda value: jax_ep.init(mesh_of(), axis_name=value), "a" * 10_000, "init: the mesh has axes .*expected .'a"),
    (lambda value: jax_ep.init(mesh_of(), heap_bytes=value), "a" * 10_000, "init: heap_bytes='a.*, expected None"),
    (lambda value: jax_ep.Experts(alpha=value), 10**5000, "Experts: alpha=an integer of 16610 bits, expected"),
    (lambda value: jax_ep.Router(scale=value), -(10**5000), "Router: scale=an integer of 16610 bits, expected"),
]


@pytest.mark.parametrize(("call", "value", "text"), LONG_FIELDS, ids=range(len(LONG_FIELDS)))
def test_misuse_long_fields_are_cut(call, value, text):
    with pytest.raises((TypeError, ValueError), match=f"^{text}") as caught:
        call(value)
    assert len(str(caught.value)) < 600


def test_misuse_dtype_that_is_not_unicode():
    check(TypeError, ["^dequantize: dtype=.*udcff.* is not a dtype"], trace, "dequantize", dtype="\udcff")
