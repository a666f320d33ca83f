"""Valid calls of every public function, ways to damage them, and the check of error messages.

A message must contain the actual value, the expected value, and the remedy: all fragments of a case. Fragments are
separated by `; `: whole numbers, shapes as `(2, 3)`, and regular expressions. Arguments are traced and never run.
"""

import inspect
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import harness
import jax_ep
from jax_ep import quantization, routing
from jax_ep.ops import masked, moe_low_latency

# Per-shard sizes of the valid calls; nearly all different, so that a number in a message is unambiguous.
SIZES = T, K, E, W, H, INNER, N, MAX_T, L, R = 6, 2, 8, 4, 256, 24, 40, 9, 2, 48
FP8 = jnp.float8_e4m3fn


def array(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype)


def f32(*shape):
    return array(jnp.float32, *shape)


def i32(*shape):
    return array(jnp.int32, *shape)


def fp8(*shape):
    return array(FP8, *shape)


def fp8_weights(*shape):
    """`QuantizedWeights` of types for weights `[..., K, N]` and tokens in FP8."""
    *leading, depth, columns = shape
    scales = f32(*leading, -(-columns // 128), depth // 128)
    return jax_ep.QuantizedWeights(fp8(*leading, columns, depth), scales, "fp8", activations="fp8")


class Traced:
    """An argument that is created inside the traced function, such as a handle."""

    def __init__(self, make):
        self.make = make


def dispatch_handle(num_tokens=T, top_k=K, num_experts=E, **kwargs):
    def make():
        x, topk_idx = jnp.zeros((num_tokens, H), jnp.float32), jnp.zeros((num_tokens, top_k), jnp.int32)
        return jax_ep.dispatch(x, topk_idx, num_experts=num_experts, **kwargs).handle

    return Traced(make)


def low_latency_handle(**kwargs):
    def make():
        x, topk_idx = jnp.zeros((T, H), jnp.float32), jnp.zeros((T, K), jnp.int32)
        return jax_ep.low_latency_dispatch(x, topk_idx, num_experts=E, max_tokens_per_rank=MAX_T, **kwargs).handle

    return Traced(make)


TOKENS = {"x": f32(T, H), "topk_idx": i32(T, K)}
WEIGHTED = {"topk_idx": i32(T, K), "topk_weights": f32(T, K)}
ROUTED = TOKENS | {"topk_weights": f32(T, K), "num_experts": E}
GOOD = {
    "dispatch": ROUTED,
    "combine": {"y": f32(R, H), "handle": dispatch_handle()},
    "row_experts": {"handle": dispatch_handle(axis_name=())},
    "grouped_gemm": {"lhs": f32(20, H), "rhs": f32(3, H, N), "group_sizes": i32(3)},
    "dispatch_grouped_gemm": ROUTED | {"w": f32(L, H, N)},
    "grouped_gemm_combine": {"h": f32(R, INNER), "w": f32(L, INNER, H), "handle": dispatch_handle()},
    "moe": ROUTED | {"w_gate_up": f32(L, H, 2 * INNER), "w_down": f32(L, INNER, H)},
    "fused_moe": TOKENS | {"topk_weights": f32(T, K), "w_gate_up": f32(E, H, 2 * INNER), "w_down": f32(E, INNER, H)},
    "moe_sort": WEIGHTED | {"num_experts": E, "block_size": 16},
    "low_latency_dispatch": TOKENS | {"num_experts": E, "max_tokens_per_rank": MAX_T},
    "low_latency_combine": WEIGHTED | {"y": f32(L, W * MAX_T, H), "handle": low_latency_handle()},
    "low_latency_moe": ROUTED | {"w_gate_up": fp8_weights(L, H, 2 * H), "w_down": fp8_weights(L, H, H)},
    "masked_grouped_gemm": {"lhs": fp8(L, MAX_T, H), "rhs": fp8_weights(L, H, N), "group_sizes": i32(L)}
    | {"lhs_scales": f32(L, MAX_T, H // 128)},
    "low_latency_gemm_combine": WEIGHTED
    | {"lhs": fp8(L, W * MAX_T, 128), "rhs": fp8_weights(L, 128, H), "group_sizes": i32(L)}
    | {"lhs_scales": f32(L, W * MAX_T, 1), "handle": low_latency_handle()},
    "masked_gated_activation": {"hidden": f32(L, MAX_T, 2 * H), "group_sizes": i32(L)},
    "topk_router": {"logits": f32(T, 32), "k": 4},
    "sparsemixer_router": {"logits": f32(T, 32)},
    "identity_experts": {"routing": jax_ep.types.Routing(i32(T, K), f32(T, K), f32(T, 32)), "num_experts": E},
    "update_router_bias": {"bias": f32(E), "load": i32(E)},
    "load_balancing_loss": {"scores": f32(T, 32), "topk_idx": i32(T, K)},
    "router_z_loss": {"logits": f32(T, 32)},
    "quantize_fp8": {"x": f32(T, H)},
    "quantize": {"w": f32(L, H, N), "format": "fp8"},
    "dequantize": {"w": fp8_weights(L, H, N), "dtype": jnp.float32},
    "dequantize_fp8": {"values": fp8(T, H), "scales": f32(T, 2), "dtype": jnp.float32},
}
DISPATCH = ["dispatch", "dispatch_grouped_gemm"]
NEEDS_AXIS = [name for name in GOOD if "dispatch" in name or "combine" in name or name in ("moe", "low_latency_moe")]


def function(name):
    modules = (jax_ep, routing, masked, moe_low_latency, quantization)
    return next(getattr(module, name) for module in modules if hasattr(module, name))


def is_array(value):
    leaves = jax.tree.leaves(value)
    return bool(leaves) and all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)


def mesh_of(size=W, name="expert"):
    return harness.make_mesh((size,), (name,))


def program(name, *, inside=None, **changes):
    """Return the valid call with changes, inside shard_map if it belongs there or `inside` says so, and its arrays."""
    accepted = inspect.signature(function(name)).parameters
    arguments = GOOD[name] | {key: value for key, value in changes.items() if key in accepted}
    arrays = {key: value for key, value in arguments.items() if is_array(value)}

    def call(arrays):
        made = {key: value.make() for key, value in arguments.items() if isinstance(value, Traced)}
        result = function(name)(**(arguments | made | arrays))
        return jax.tree.map(lambda leaf: leaf[None], result)

    if name in NEEDS_AXIS if inside is None else inside:
        call = jax.shard_map(call, mesh=mesh_of(), in_specs=P(), out_specs=P("expert"))
    return call, arrays


def trace(name, **changes):
    """Trace the call with these changes."""
    return jax.eval_shape(*program(name, **changes))


def shape(*dims):
    """Match a shape, in brackets of either kind."""
    return r"[\(\[]" + r", ?".join(map(str, dims)) + r",?[\)\]]"


def number(value):
    """Match a number, but not as a part of another one or of a name such as `int32`."""
    return rf"(?<![\w.]){re.escape(str(value))}(?!\w|\.\d)"


CAST = r"\bcast|astype|convert|jnp\.int32\("
FLOATING = r"float(ing|32)|bfloat16"


def pattern(fragment):
    """Return the regular expression of a fragment."""
    if re.fullmatch(r"-?\d+(\.\d+)?", fragment):
        return number(fragment)
    return shape(*fragment.strip("(),").split(", ")) if re.fullmatch(r"\(\d+(, \d+)*\)", fragment) else fragment


def value(names, changes, fragments, error=ValueError):
    """Create one case for each of the functions `names` (one, or a list)."""
    for name in [names] if isinstance(names, str) else names:
        found = [pattern(fragment) for fragment in fragments.split("; ")]
        yield pytest.param(name, changes, error, found, id=f"{name}: {' '.join(changes)}: {fragments}")


def rank(names, argument, bad, *layout):
    """Create cases of an array with a wrong number of axes; `layout` names the expected ones, as `"T", "H"`."""
    axes = ", ?".join(rf"([1-9]\d*|{axis}|W \* M|N)" for axis in layout)
    return value(names, {argument: bad}, rf"\b{argument}\b; {shape(*bad.shape)}; \[{axes}\]")


def dtype(names, argument, bad, expected):
    return value(names, {argument: bad}, rf"\b{argument}\b; {bad.dtype.name}; {expected}; {CAST}", TypeError)


def size(names, argument, bad, offending, expected):
    """Create cases of an array with an axis that does not match another argument."""
    return value(names, {argument: bad}, rf"\b{argument}\b; {offending}; {expected}")


def positive(names, argument, **others):
    """Create cases of a static size that is zero, negative or not an integer."""
    for bad in (0, -16):
        fragments = rf"\b{argument}\b; {bad}; positive|at least|greater than|multiple"
        yield from value(names, {argument: bad, **others}, fragments)
    yield from value(names, {argument: 8.0, **others}, rf"\b{argument}\b; float|8\.0; \bint", TypeError)


def check(error, fragments, call, *args, **kwargs):
    """Call, expect the exception, and find every fragment in its message."""
    with pytest.raises(error) as caught:
        call(*args, **kwargs)
    message = str(caught.value)
    missing = [fragment for fragment in fragments if not re.search(fragment, message, re.IGNORECASE)]
    assert not missing, f"the message lacks {missing}:\n{message}"
