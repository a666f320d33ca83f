"""The first GEMM that stores activated rows, and layers that run it without gradients but not with them."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import harness
import jax_ep
import oracle
from cases import BF16, F16, F32, Shape, assert_close, assert_same_bits, probabilities, reals
from jax_ep.core.expert_matrices import SplitWeights
from jax_ep.megakernels import requirements
from layers import Layer
from oracle_experts import GPT_OSS, LLAMA_4, expert_rows

IMPLEMENTATIONS = ("triton",)
in_gluon = harness.in_gluon("grouped_gemm")
pytestmark = pytest.mark.usefixtures("implementation")  # the kernels run in its interpreter

EXPERTS = (
    *(jax_ep.Experts(), jax_ep.Experts(alpha=1.702, clamp=1.5, up_offset=1.0), jax_ep.Experts("gelu")),
    *(jax_ep.Experts("gelu_exact"), jax_ep.Experts("relu", clamp=1.0), jax_ep.Experts("relu_squared")),
)
SIZES = [[100, 0, 37, 200, 1], [0, 513, 3]]
if jax.default_backend() == "gpu":  # More tiles than programs.
    SIZES.append([4096, 17, 0, 900, 128, 64, 2000, 1])


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("experts", EXPERTS, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("home", [0, 2])
@pytest.mark.slow_interpreted(unless={"experts": [EXPERTS[1]], "dtype": [BF16], "home": [0]})
def test_gemm_activation_rows(sizes, experts, dtype, home, rng):
    """Rows of NaN past the groups do not matter, nor do their weights; 104 columns are not a whole tile."""
    used, inner = sum(sizes), 104
    lhs = reals(rng, used + 70, 200, dtype=dtype)
    rhs = (reals(rng, len(sizes), 200, 2 * inner) / np.sqrt(200) * 3).astype(dtype)
    weights = probabilities(rng, 1, used + 70)[0] * used
    hidden = oracle.grouped_gemm(lhs, rhs, np.array(sizes))
    want, _ = expert_rows(experts, hidden, weights, np.zeros((used + 70, inner)))
    lhs[used:], weights[used:] = np.nan, np.nan
    from jax_ep.megakernels.grouped_gemm import gemm_activation

    operand = SplitWeights(rhs[:home], rhs[home:]) if home else rhs
    got = np.asarray(gemm_activation(lhs, operand, np.array(sizes, np.int32), weights, experts=experts))
    assert got.dtype == dtype and got.shape == (used + 70, inner)
    assert_close(got[:used], want[:used], "rows")
    assert not got[used:].any()


SHAPE = Shape(num_tokens=14, top_k=2, num_experts=4, hidden=64, intermediate=64)
PLAIN = jax_ep.Experts()
ARGUMENTS = ("x", "weights", "w_gate_up", "w_down")


def arrays_of(rng, num_ranks=1, gated=True):
    """Return expert ids, and all differentiable arrays, by rank."""
    layer = Layer(rng, "uniform", num_ranks, SHAPE, BF16, gated=gated)
    x, topk_idx, *others = layer.args
    return topk_idx, (x, *others)


def moe(experts=PLAIN, keep=None, biases=None):
    """Return a function of `(topk_idx, x, weights, w_gate_up, w_down)`."""
    schedule = jax_ep.Schedule(keep_tokens=keep, dispatch_mode="serial")
    options = {"num_experts": SHAPE.num_experts, "implementation": "triton", "schedule": schedule, "biases": biases}
    return lambda topk_idx, x, *others: jax_ep.moe(x, topk_idx, *others, experts=experts, **options)


def is_activated(call, *arguments):
    return "gemm_activation" in str(jax.make_jaxpr(call)(*arguments))


@pytest.mark.slow
def test_gemm_activation_selection(expert_mesh, rng):
    """It is not used for gradients, nor for unsupported shapes."""
    mesh = expert_mesh(1)
    topk_idx, arrays = arrays_of(rng)
    assert is_activated(harness.per_rank(moe(), mesh), topk_idx, *arrays)
    b_down = jnp.ones((SHAPE.num_experts, SHAPE.hidden), BF16)
    assert is_activated(harness.per_rank(moe(biases=(None, b_down)), mesh), topk_idx, *arrays)

    def loss(topk_idx, *arrays):
        return jnp.sum(harness.per_rank(moe(), mesh)(topk_idx, *arrays).astype(F32))

    assert not is_activated(jax.value_and_grad(loss, 1), topk_idx, *arrays)
    b_gate_up = jnp.ones((SHAPE.num_experts, 2 * SHAPE.intermediate), BF16)
    assert not is_activated(harness.per_rank(moe(biases=(b_gate_up, None)), mesh), topk_idx, *arrays)
    for experts in (GPT_OSS, LLAMA_4):
        assert not is_activated(harness.per_rank(moe(experts), mesh), topk_idx, *arrays), experts
    topk_idx, arrays = arrays_of(rng, gated=False)
    for experts in (jax_ep.Experts("relu", gated=False), jax_ep.Experts(jnp.tanh, gated=False)):
        assert not is_activated(harness.per_rank(moe(experts), mesh), topk_idx, *arrays), experts


def test_gemm_activation_supported():
    taken = (*EXPERTS, dataclasses.replace(GPT_OSS, interleaved=False))
    assert all(requirements.activates(experts) for experts in taken)
    refused = (GPT_OSS, LLAMA_4, jax_ep.Experts(gated=False), jax_ep.Experts(jnp.tanh))
    assert not any(requirements.activates(experts) for experts in refused)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.slow
def test_gemm_activation_matches_training(num_ranks, expert_mesh, rng):
    """Hidden rows are rounded only in training; with a bias of the second GEMM."""
    topk_idx, arrays = arrays_of(rng, num_ranks)
    b_down = reals(rng, SHAPE.num_experts // num_ranks, SHAPE.hidden, dtype=BF16)
    layer = harness.per_rank(moe(biases=(None, b_down)), expert_mesh(num_ranks))
    trained = jax.jit(lambda *arrays: jax.vjp(functools.partial(layer, topk_idx), *arrays)[0])
    assert_close(np.asarray(jax.jit(layer)(topk_idx, *arrays)), np.asarray(trained(*arrays)))


@pytest.mark.parametrize("argnums", [(0,), (1, 3), (2,)], ids=str)
@pytest.mark.slow
def test_gemm_activation_partial_gradients(argnums, expert_mesh, rng):
    """Gradients of some arguments have the same bits as among those of all."""
    topk_idx, arrays = arrays_of(rng)
    layer = harness.per_rank(moe(), expert_mesh(1))

    def gradients(argnums):
        def loss(*arrays):
            return jnp.sum(layer(topk_idx, *arrays).astype(F32) ** 2)

        return jax.jit(jax.grad(loss, argnums))(*arrays)

    wanted = gradients((0, 1, 2, 3))
    for number, got in zip(argnums, gradients(argnums), strict=True):
        assert_same_bits(np.asarray(got), np.asarray(wanted[number]), ARGUMENTS[number])


@pytest.mark.parametrize("keep", [None, True])
@pytest.mark.parametrize("argnums", [(0, 1, 2, 3), (0,)], ids=str)
@pytest.mark.slow
def test_gemm_activation_residuals(keep, argnums, expert_mesh, rng, monkeypatch):
    """Without a policy, and with one that saves hidden rows by name: as in a layer that never activates rows."""
    topk_idx, arrays = arrays_of(rng, 2)
    nothing, these = jax.checkpoint_policies.nothing_saveable, jax.checkpoint_policies.save_only_these_names
    policies = None, nothing, these("jax_ep.hidden"), these("jax_ep.tokens"), these("jax_ep.output")

    def kept(policy):
        call = moe(keep=keep) if policy is None else jax.checkpoint(moe(keep=keep), policy=policy)
        layer = harness.per_rank(call, expert_mesh(2))

        def pulled(*arrays):
            def of(*some):
                given = dict(zip(argnums, some, strict=True))
                return layer(topk_idx, *(given.get(i, a) for i, a in enumerate(arrays)))

            return jax.vjp(of, *(arrays[i] for i in argnums))[1]

        leaves = jax.tree.leaves(jax.eval_shape(pulled, *arrays))
        return collections.Counter((leaf.shape, leaf.dtype) for leaf in leaves)

    found = [kept(policy) for policy in policies]
    hidden = found[2] - found[1]
    assert [shape[-1] for shape, dtype in hidden if dtype == BF16] == [2 * SHAPE.intermediate]
    monkeypatch.setattr(requirements, "activates", lambda *_: False)
    assert found == [kept(policy) for policy in policies]
