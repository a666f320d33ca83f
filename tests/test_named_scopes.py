"""Profiles and lowered programs name the operations of the package, including backward passes."""

import re

import jax
import jax.numpy as jnp
import pytest

from harness import make_mesh
from jax_ep import serving, sharding
from mistakes import GOOD, NEEDS_AXIS, E, H, K, T, f32, i32, mesh_of, program

EXCHANGES = ("dispatch", "combine", "dispatch_grouped_gemm", "grouped_gemm_combine", "moe")
ROUTING = ("topk_router", "sparsemixer_router", "load_balancing_loss", "router_z_loss")
ARRAYS = ("grouped_gemm", "fused_moe", "moe_sort", "identity_experts", "dequantize_fp8", "dequantize")
DIFFERENTIABLE = (*EXCHANGES, *ARRAYS, *ROUTING)
LAUNCHED = (*NEEDS_AXIS, "fused_moe", "moe_sort", "masked_grouped_gemm", "masked_gated_activation")
MATRICES = f32(E, H, 2 * H), f32(E, H, H)


def names_in(fn, *args):
    """Return the names of the operations in the lowered program."""
    return set(re.findall(r'loc\("([^"]+)"', jax.jit(fn).lower(*args).as_text(debug_info=True)))


def in_scope(names, scope):
    """Return those with `scope` as a whole word."""
    return [name for name in names if re.search(rf"(?<![\w.]){re.escape(scope)}(?![\w.])", name)]


@pytest.mark.parametrize("name", GOOD)
def test_operations_have_names(name):
    call, arrays = program(name)
    assert in_scope(names_in(call, arrays), f"jax_ep.{name}")


def is_float(leaf):
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def backward(name, **changes):
    """Return a program of the backward pass alone, and its arguments: residuals, and gradients of the results."""
    call, arrays = program(name, **changes)
    leaves, tree = jax.tree.flatten(arrays)
    inputs = [leaf for leaf in leaves if is_float(leaf)]

    def outputs(inputs, leaves):
        given = iter(inputs)
        whole = jax.tree.unflatten(tree, [next(given) if is_float(leaf) else leaf for leaf in leaves])
        return [leaf for leaf in jax.tree.leaves(call(whole)) if is_float(leaf)]

    pull = jax.eval_shape(lambda inputs, leaves: jax.vjp(lambda x: outputs(x, leaves), inputs)[1], inputs, leaves)
    return lambda pull, d: pull(d), pull, jax.eval_shape(outputs, inputs, leaves)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_backward_passes_have_names(name):
    """Covers operations from transposition, and the backward functions of custom VJPs."""
    found = in_scope(names_in(*backward(name)), f"jax_ep.{name}")
    assert found
    if name in EXCHANGES:
        assert any("all_to_all" in scope or "all_gather" in scope for scope in found)


@pytest.fixture
def with_kernels(kept_context):
    """Four ranks on which kernels are launched; their programs are compiled, but never run."""
    kept_context(mesh_of())


def launches(fn, *args):
    """Return the profile name of each launch of a compiled program; inlined JAX functions take their callers' names."""
    text = jax.jit(fn).lower(*args).compile().as_text()
    lines = [line for line in text.splitlines() if 'custom_call_target="xla_ffi_python_cpu_callback"' in line]
    return [re.search(r'op_name="([^"]*)"', line)[1] for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("name", LAUNCHED)
def test_every_launch_has_the_name_of_its_operation(with_kernels, name):
    found = launches(*program(name, implementation=("triton", "xla")))
    assert in_scope(set(found), f"jax_ep.{name}")
    assert all("jax_ep." in scope for scope in found)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXCHANGES)
def test_every_launch_of_a_backward_pass_has_the_name_of_its_operation(with_kernels, name):
    found = launches(*backward(name, implementation=("triton", "xla")))
    assert found
    assert set(in_scope(set(found), f"jax_ep.{name}")) == set(found)


def test_layers_of_global_arrays_have_names():
    mesh = make_mesh((4,), ("expert",))
    layer = sharding.sharded_moe(mesh, num_experts=E)
    found = names_in(layer, f32(4 * T, H), i32(4 * T, K), f32(4 * T, K), *MATRICES)
    assert in_scope(found, "jax_ep.sharded_moe") and in_scope(found, "jax_ep.moe")
    assert in_scope(names_in(lambda *w: serving.serving_weights(*w, "fp8"), *MATRICES), "jax_ep.serving_weights")


@pytest.mark.filterwarnings("ignore:MoE. no mesh is set")
def test_the_flax_layer_has_a_name():
    nnx = pytest.importorskip("flax.nnx")
    from jax_ep.flax import MoE

    moe = MoE(H, 24, E, K, rngs=nnx.Rngs(0))
    text = nnx.jit(lambda moe, x: moe(x)).lower(moe, jnp.ones((T, H))).as_text(debug_info=True)
    names = set(re.findall(r'loc\("([^"]+)"', text))
    assert in_scope(names, "jax_ep.flax.MoE") and in_scope(names, "jax_ep.topk_router")
    assert in_scope(names, "jax_ep.routed_moe") and in_scope(names, "jax_ep.load_balancing_loss")
