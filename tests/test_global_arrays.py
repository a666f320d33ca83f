"""Helpers in pure JAX on global arrays, on automatic and explicit mesh axes: values, gradients, and shardings."""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_ep
from harness import make_mesh
from jax_ep import lora, update_router_bias
from jax_ep import quantization as q
from jax_ep.formats import FORMATS
from jax_ep.placement import move, plan
from jax_ep.routing import identity_experts, sparsemixer_router
from jax_ep.serving import serving_weights

T, E, K, H, SLOTS = 16, 16, 2, 256, 24
PLACEMENT = plan(np.arange(1, E + 1), num_slots=SLOTS, num_ranks=4)
NEXT = plan(np.arange(E, 0, -1), num_slots=SLOTS, num_ranks=4)
TOKENS, EXPERTS, LOGITS = ("T",), ("E",), ("T", "E")
KINDS = {
    "Auto": (AxisType.Auto, AxisType.Auto),
    "Explicit": (AxisType.Explicit, AxisType.Explicit),
    "mixed": (AxisType.Explicit, AxisType.Auto),
}
# Mesh axes of the tokens and of the experts.
LAYOUTS = {"tokens": {"T": ("data", "expert")}, "both": {"T": "data", "E": "expert"}, "replicated": {}}


class Case(NamedTuple):
    """A function, and for each argument its shape, kind and axes; gradients are taken of floats."""

    function: Callable[..., Any]
    arguments: tuple[tuple[tuple[int, ...], str, tuple[str, ...]], ...]
    has_gradient: bool = True


def of_logits(router, *more):
    return Case(router, (((T, E), "float", LOGITS), *more))


BIAS, MASK = ((E,), "float", EXPERTS), ((T,), "mask", TOKENS)
MATRICES = ((E, H, 128), "float", EXPERTS)
X, IDS, SIZES = ((T, H), "float", TOKENS), ((T, K), "ids", TOKENS), ((E,), "load", EXPERTS)
LAYER = MATRICES, ((E, 64, H), "float", EXPERTS)
OF_LAYER = X, IDS, ((T, K), "float", TOKENS), *LAYER
TRACED, COPIES = ((), "placement", ()), ((SLOTS, 3), "float", EXPERTS)
DEEPSEEK = jax_ep.Router("sigmoid", num_groups=4, topk_groups=2)


def balance(logits, mask=None):
    routing = jax_ep.topk_router(logits, K)
    return jax_ep.load_balancing_loss(routing.scores, routing.topk_idx, token_mask=mask)


def through(quantize, back, *arguments):
    """Quantize and dequantize: quantized values have no gradient, but must be reproduced."""
    return Case(lambda *a: (quantized := quantize(*a), back(quantized)), arguments, has_gradient=False)


def dequantize(w):
    return q.dequantize(w, jnp.float32)


def dispatch_and_combine(x, idx):
    """Dispatch and combine, which adds each token once per expert."""
    dispatched = jax_ep.dispatch(x, idx, num_experts=E, axis_name=())
    return jax_ep.combine(dispatched.tokens, dispatched.handle, axis_name=())


def in_blocks(x, idx):
    """Return the valid rows of a low-latency dispatch."""
    found = jax_ep.low_latency_dispatch(x, idx, num_experts=E, max_tokens_per_rank=T, axis_name=(), quantize=False)
    counts = jnp.arange(found.tokens.shape[1])[None] < found.group_sizes[:, None]
    return jnp.where(counts[..., None], found.tokens, 0)


CASES = {
    "fused_moe": Case(lambda *layer: jax_ep.fused_moe(*layer), OF_LAYER),
    "moe": Case(lambda *layer: jax_ep.moe(*layer, num_experts=E, axis_name=()), OF_LAYER),
    "grouped_gemm": Case(lambda x, w: jax_ep.grouped_gemm(x, w, jnp.ones(E, jnp.int32)), (X, MATRICES)),
    "dispatch and combine": Case(dispatch_and_combine, (X, IDS)),
    "low_latency_dispatch": Case(in_blocks, (X, IDS), has_gradient=False),
    "topk_router": of_logits(lambda logits: jax_ep.topk_router(logits, K)),
    "topk_router bias": of_logits(lambda logits, bias: jax_ep.topk_router(logits, K, bias=bias), BIAS),
    "topk_router groups": of_logits(
        lambda logits, bias: jax_ep.topk_router(logits, K, bias=bias, router=DEEPSEEK), BIAS
    ),
    "topk_router max": of_logits(
        lambda logits: jax_ep.topk_router(
            logits, 1, router=jax_ep.Router(renormalize=False, num_groups=8, topk_groups=3, group_score="max")
        )
    ),
    "topk_router mask": of_logits(lambda logits, mask: jax_ep.topk_router(logits, E, token_mask=mask), MASK),
    "topk_router bfloat16": of_logits(
        lambda logits: jax_ep.topk_router(logits.astype(jnp.bfloat16), K, router=DEEPSEEK)
    ),
    "sparsemixer_router": of_logits(sparsemixer_router),
    "sparsemixer_router key": of_logits(
        lambda logits, key: sparsemixer_router(logits, key=jax.random.wrap_key_data(key), jitter_eps=0.4),
        ((2,), "key", ("",)),
    ),
    "identity_experts": of_logits(lambda logits: identity_experts(jax_ep.topk_router(logits, K), 12)),
    "load_balancing_loss": of_logits(balance),
    "load_balancing_loss mask": of_logits(balance, MASK),
    "router_z_loss": of_logits(jax_ep.router_z_loss),
    "router_z_loss mask": of_logits(lambda logits, mask: jax_ep.router_z_loss(logits, token_mask=mask), MASK),
    "update_router_bias": Case(update_router_bias, (BIAS, SIZES)),
    "Placement.remap": Case(lambda idx: PLACEMENT.remap(idx, axis_name=()), (IDS,)),
    "Placement.remap traced": Case(lambda idx, placement: placement.remap(idx, axis_name=()), (IDS, TRACED)),
    "Placement.expand": Case(
        lambda w, b: PLACEMENT.expand({"w": w, "b": b}, axis_name=()), (((E, 3), "float", EXPERTS), BIAS)
    ),
    "Placement.expand traced": Case(
        lambda w, placement: placement.expand(w, axis_name=()), (((E, 3), "float", EXPERTS), TRACED)
    ),
    "Placement.sum_copies": Case(
        lambda w, n: PLACEMENT.sum_copies((w, n), axis_name=()), (COPIES, ((SLOTS,), "load", EXPERTS))
    ),
    "move": Case(lambda w: move(w, PLACEMENT, NEXT, axis_name=()), (COPIES,)),
    "moe_sort": Case(lambda idx: jax_ep.moe_sort(idx, num_experts=E, block_size=16), (IDS,), has_gradient=False),
    "quantize_fp8": through(q.quantize_fp8, lambda pair: q.dequantize_fp8(*pair, jnp.float32), X),
    "quantize_fp8 within blocks": through(
        q.quantize_fp8, lambda pair: q.dequantize_fp8(*pair, jnp.float32), ((T, H), "float", ("", "E"))
    ),
    "quantize for training": Case(lambda w: q.quantize(w, "fp8", for_training=True).master, (MATRICES,)),
    "serving_weights": through(
        lambda *w: serving_weights(*w, "fp8", activations="fp8"), lambda w: w.w_down.values, *LAYER
    ),
    "serving_weights padded": Case(
        lambda *w: jax.tree.map(
            lambda part: part.astype(jnp.float32), serving_weights(*w[:2], "int4", biases=(w[2], None))
        ),
        (((2, H, 128), "float", ("", "", "E")), ((2, 64, H), "float", ("", "E")), ((2, 128), "float", ("", "E"))),
        has_gradient=False,
    ),
    "lora.merge": Case(
        lambda w, a, b: lora.merge(lora.LoraWeights(w, a, b, 2.0)),
        (MATRICES, ((E, H, 4), "float", ("", "E")), ((E, 4, 128), "float", ("T",))),
    ),
    "smooth": through(
        lambda w, smooth: q.quantize(w, "int8", activations="int8", smooth=1 + jnp.abs(smooth)),
        dequantize,
        MATRICES,
        ((E, H), "float", ("T", "E")),
    ),
    **{f"quantize {name}": through(lambda w, name=name: q.quantize(w, name), dequantize, MATRICES) for name in FORMATS},
    **{
        f"with_layout {name}": through(
            lambda w, name=name: q.with_layout(q.quantize(w, name), "prepacked"),
            lambda w: q.with_layout(w, "transposed"),
            MATRICES,
        )
        for name in FORMATS
        if FORMATS[name].prepacked
    },
}


def make(shape, kind, rng):
    if kind == "placement":
        return PLACEMENT
    values = {
        "float": lambda: rng.normal(size=shape).astype(np.float32),
        "mask": lambda: rng.random(shape) < 0.8,
        "load": lambda: rng.integers(0, 9, shape, dtype=np.int32),
        "key": lambda: rng.integers(0, 9, shape, dtype=np.uint32),
        "ids": lambda: np.argsort(rng.random((shape[0], E)))[:, : shape[1]].astype(np.int32),
    }
    return values[kind]()


def with_gradient(case):
    """Return results, and the gradient of a sum of all floats in them."""
    wrt = tuple(i for i, (_, kind, _) in enumerate(case.arguments) if kind == "float")
    if not (case.has_gradient and wrt):
        return case.function

    def loss(*arguments):
        results = case.function(*arguments)
        floats = [leaf for leaf in jax.tree.leaves(results) if jnp.issubdtype(leaf.dtype, jnp.floating)]
        return sum((jnp.sum(jnp.sin(leaf.astype(jnp.float32))) for leaf in floats), jnp.zeros(())), results

    return jax.grad(loss, argnums=wrt, has_aux=True)


def place(case, host, mesh, axes):
    """Put the arguments on the mesh, split over these mesh axes."""
    return [
        value
        if kind == "placement"
        else jax.device_put(value, jax.NamedSharding(mesh, P(*(axes.get(axis) for axis in of))))
        for value, (_, kind, of) in zip(host, case.arguments, strict=True)
    ]


def check(got, want, where=""):
    def close(a, b):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5, err_msg=where)

    jax.tree.map(close, got, want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_helper_on_global_arrays(name, kind, rng):
    """Results match one device: jitted; on explicit axes also eager, without `jax.set_mesh`, and in every layout."""
    case, mesh = CASES[name], make_mesh((2, 4), ("data", "expert"), KINDS[kind])
    host = [make(shape, kind_of, rng) for shape, kind_of, _ in case.arguments]
    want = jax.device_get(jax.jit(with_gradient(case))(*host))
    for layout, axes in LAYOUTS.items() if kind == "Explicit" else [("both", LAYOUTS["both"])]:
        placed = place(case, host, mesh, axes)
        calls = {"jit": (jax.jit(with_gradient(case)), True)}
        if (layout, kind) == ("both", "Explicit"):
            calls["eager"] = case.function, True
            calls["eager, no mesh set"] = case.function, False
        for call, (function, is_set) in calls.items():
            with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
                got = jax.device_get(function(*placed))
            wanted = want if function is not case.function or with_gradient(case) is case.function else want[1]
            check(got, wanted, f"{layout}, {call}")


@pytest.mark.parametrize("name", CASES)
def test_helper_in_a_shard_map_over_another_axis(name, rng):
    """Arrays that are split over an explicit axis, in a `shard_map` over the other axis of the mesh."""
    case, mesh = CASES[name], make_mesh((2, 4), ("data", "expert"), (AxisType.Auto, AxisType.Explicit))
    host = [make(shape, kind_of, rng) for shape, kind_of, _ in case.arguments]
    want = jax.device_get(jax.jit(with_gradient(case))(*host))
    placed = place(case, host, mesh, LAYOUTS["both"] | {"T": None})
    inside = jax.shard_map(case.function, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"data"}, check_vma=False)
    with jax.set_mesh(mesh):
        got = jax.device_get(jax.jit(with_gradient(case._replace(function=inside)))(*placed))
    check(got, want)
