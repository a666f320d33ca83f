"""Profiles and lowered programs name the operations of the package, backward passes included."""

from __future__ import annotations

import inspect
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
from harness import make_mesh
from jax_ep import serving, sharding
from mistakes import GOOD, E, H, K, T, f32, i32, program

EXCHANGES = ("dispatch", "combine", "dispatch_grouped_gemm", "grouped_gemm_combine", "moe", "low_latency_combine")
ROUTING = ("topk_router", "sparsemixer_router", "load_balancing_loss", "router_z_loss")
DIFFERENTIABLE = (*EXCHANGES, "grouped_gemm", "fused_moe", *ROUTING)
MATRICES = f32(E, H, 2 * H), f32(E, H, H)


def names_in(fn: Any, *args: Any) -> set[str]:
    """What the operations of the lowered program are called."""
    return set(re.findall(r'loc\("([^"]+)"', jax.jit(fn).lower(*args).as_text(debug_info=True)))


def in_scope(names: set[str], scope: str) -> list[str]:
    """Those with `scope`, and no longer word that contains it."""
    return [name for name in names if re.search(rf"(?<![\w.]){re.escape(scope)}(?![\w.])", name)]


@pytest.mark.parametrize("name", GOOD)
def test_operations_have_names(name: str) -> None:
    call, arrays = program(name)
    assert in_scope(names_in(call, arrays), f"jax_ep.{name}")


def test_no_operation_is_missing() -> None:
    public = {name for name in jax_ep.__all__ if inspect.isfunction(getattr(jax_ep, name))}
    assert public - {"init", "finalize"} <= set(GOOD)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_backward_passes_have_names(name: str) -> None:
    """A program of the backward pass alone: what transposition emits, and the backward functions of custom VJPs."""
    call, arrays = program(name)
    inputs = {key: value for key, value in arrays.items() if jnp.issubdtype(value.dtype, jnp.floating)}

    def outputs(inputs: Any, arrays: Any) -> Any:
        return [leaf for leaf in jax.tree.leaves(call(arrays | inputs)) if jnp.issubdtype(leaf.dtype, jnp.floating)]

    pull = jax.eval_shape(lambda inputs, arrays: jax.vjp(lambda x: outputs(x, arrays), inputs)[1], inputs, arrays)
    found = in_scope(names_in(lambda pull, d: pull(d), pull, jax.eval_shape(outputs, inputs, arrays)), f"jax_ep.{name}")
    assert found
    if name in EXCHANGES:
        assert any("all_to_all" in scope or "all_gather" in scope for scope in found)


def test_layers_of_global_arrays_have_names() -> None:
    mesh = make_mesh((4,), ("expert",))
    layer = sharding.sharded_moe(mesh, num_experts=E)
    found = names_in(layer, f32(4 * T, H), i32(4 * T, K), f32(4 * T, K), *MATRICES)
    assert in_scope(found, "jax_ep.sharded_moe") and in_scope(found, "jax_ep.moe")
    assert in_scope(names_in(serving.serving_weights, *MATRICES), "jax_ep.serving_weights")


def test_the_flax_layer_has_a_name() -> None:
    nnx = pytest.importorskip("flax.nnx")
    from jax_ep.flax import MoE

    moe = MoE(H, 24, E, K, rngs=nnx.Rngs(0))
    text = nnx.jit(lambda moe, x: moe(x)).lower(moe, jnp.ones((T, H))).as_text(debug_info=True)
    names = set(re.findall(r'loc\("([^"]+)"', text))
    assert in_scope(names, "jax_ep.flax.MoE") and in_scope(names, "jax_ep.topk_router")
    assert in_scope(names, "jax_ep.fused_moe") and in_scope(names, "jax_ep.load_balancing_loss")


def test_signatures_and_docstrings_are_those_of_the_functions() -> None:
    assert list(inspect.signature(jax_ep.combine).parameters)[:2] == ["y", "handle"]
    assert jax_ep.combine.__name__ == "combine" and "unweighted" in (jax_ep.combine.__doc__ or "")
    assert jax_ep.moe_sort(np.zeros((3, 1), np.int32), num_experts=2, block_size=2).num_rows == 4
