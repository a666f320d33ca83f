"""The MoE blocks of published models, built from jax_ep's functions, against those of Hugging Face's transformers.

`data/golden_blocks.npz` has weights, outputs and gradients of a small block per family, made by
`data/make_golden_blocks.py`. Weights stay in their checkpoints' layouts here, so that gradients have them too.
"""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
from jax_ep.routing import identity_experts, sparsemixer_router

GOLDEN = np.load(Path(__file__).parent / "data" / "golden_blocks.npz")
CONFIGS = json.loads(str(GOLDEN["families"]))["families"]
TOLERANCE = 2e-6  # Of the largest value; both sides are float32.
State = dict[str, jax.Array]
Config = dict[str, Any]


def of_family(name, kind=""):
    """Return the arrays `<name>/<kind><key>` by their keys."""
    prefix = f"{name}/{kind}"
    return {key.removeprefix(prefix): GOLDEN[key] for key in GOLDEN.files if key.startswith(prefix)}


def normalized(logits, state, c):
    return jax_ep.topk_router(
        logits, c["num_experts_per_tok"], router=jax_ep.Router(renormalize=c.get("norm_topk_prob", True))
    )


def deepseek_v2(logits, state, c):
    groups = {"num_groups": c["n_group"], "topk_groups": c["topk_group"], "group_score": "max"}
    router = jax_ep.Router(renormalize=False, scale=c["routed_scaling_factor"], **groups)
    return jax_ep.topk_router(logits, c["num_experts_per_tok"], router=router)


def deepseek_v3(logits, state, c):
    return jax_ep.topk_router(
        logits,
        c["num_experts_per_tok"],
        router=jax_ep.Router(
            "sigmoid",
            renormalize=c["norm_topk_prob"],
            num_groups=c["n_group"],
            topk_groups=c["topk_group"],
            scale=c["routed_scaling_factor"],
        ),
        bias=state["gate.e_score_correction_bias"],
    )


def minimax_m2(logits, state, c):
    bias = state["e_score_correction_bias"]
    return jax_ep.topk_router(logits, c["num_experts_per_tok"], router=jax_ep.Router("sigmoid"), bias=bias)


def ernie(logits, state, c):
    return jax_ep.topk_router(logits, c["moe_k"], bias=state["gate.moe_statics.e_score_correction_bias"][0])


def llama4(logits, state, c):
    return jax_ep.topk_router(logits, c["num_experts_per_tok"], router=jax_ep.Router("sigmoid", renormalize=False))


def phimoe(logits, state, c):
    return sparsemixer_router(logits, jitter_eps=c["router_jitter_noise"])


def longcat(logits, state, c):
    bias, scale = state["router.e_score_correction_bias"], c["routed_scaling_factor"]
    return jax_ep.topk_router(logits, c["moe_topk"], bias=bias, router=jax_ep.Router(renormalize=False, scale=scale))


def plain_experts(state):
    """Return weights `[E, out, in]`, gate above up."""
    return {
        "w_gate_up": jnp.swapaxes(state["experts.gate_up_proj"], 1, 2),
        "w_down": jnp.swapaxes(state["experts.down_proj"], 1, 2),
    }


def gpt_oss_experts(state):
    """Return weights `[E, in, out]` and biases, gate and up alternating."""
    return {
        "w_gate_up": state["experts.gate_up_proj"],
        "w_down": state["experts.down_proj"],
        "biases": (state["experts.gate_up_proj_bias"], state["experts.down_proj_bias"]),
        "experts": jax_ep.Experts("silu", interleaved=True, alpha=1.702, clamp=7.0, up_offset=1.0),
    }


def llama4_experts(state):
    """Return weights `[E, in, out]`, gate before up."""
    return {
        "w_gate_up": state["experts.gate_up_proj"],
        "w_down": state["experts.down_proj"],
        "experts": jax_ep.Experts(weight_on="input"),
    }


def longcat_experts(state):
    """Only the first of the two tensors has weights for identity experts, which are unused."""
    matrices = plain_experts(state)
    return matrices | {"w_gate_up": matrices["w_gate_up"][: len(matrices["w_down"])]}


@dataclasses.dataclass(frozen=True)
class Family:
    """The router, the arguments of `fused_moe`, and the positions of the weights in the state."""

    route: Callable[[jax.Array, State, Config], jax_ep.types.Routing] = normalized
    experts: Callable[[State], dict[str, Any]] = plain_experts
    router: str = "gate.weight"
    shared: str = ""


FAMILIES = dict.fromkeys(("mixtral", "qwen3_moe", "qwen3_moe_unnormalised", "olmoe"), Family())
FAMILIES |= {
    "qwen2_moe": Family(shared="shared_expert"),
    "deepseek_v2": Family(deepseek_v2, shared="shared_experts"),
    **dict.fromkeys(("deepseek_v3", "glm4_moe"), Family(deepseek_v3, shared="shared_experts")),
    "minimax_m2": Family(minimax_m2),
    "ernie4_5_moe": Family(ernie, shared="shared_experts"),
    "gpt_oss": Family(normalized, gpt_oss_experts, router="router.weight"),
    "llama4": Family(llama4, llama4_experts, router="router.weight", shared="shared_expert"),
    "phimoe": Family(phimoe, router="router.weight"),
    "longcat_flash": Family(longcat, longcat_experts, router="router.classifier.weight"),
}


def routing_of(name, state, x):
    family = FAMILIES[name]
    logits = x @ state[family.router].T
    if "router.bias" in state:
        logits = logits + state["router.bias"][None]
    return family.route(logits, state, CONFIGS[name])


def shared_experts(state, prefix, x):
    gate, up, down = (state[f"{prefix}.{part}_proj.weight"].T for part in ("gate", "up", "down"))
    y = (jax.nn.silu(x @ gate) * (x @ up)) @ down
    return jax.nn.sigmoid(x @ state[f"{prefix}_gate.weight"].T) * y if f"{prefix}_gate.weight" in state else y


def block(name, implementation, state, x):
    """Apply the whole MoE block to `[T, H]`."""
    family, routing, rest = FAMILIES[name], routing_of(name, state, x), []
    if "zero_expert_num" in CONFIGS[name]:
        routing, weight = identity_experts(routing, CONFIGS[name]["n_routed_experts"])
        rest.append(weight[:, None] * x)
    if family.shared:
        rest.append(shared_experts(state, family.shared, x))
    experts = family.experts(state)
    y = jax_ep.fused_moe(x, routing.topk_idx, routing.topk_weights, **experts, implementation=implementation)
    return functools.reduce(jnp.add, rest, y)


def assert_near(got, want, what):
    assert got.dtype == want.dtype and got.shape == want.shape, what
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE * np.abs(want).max(), err_msg=what)


# Covered by mixtral and qwen3_moe_unnormalised, and the last two by deepseek_v3.
REPEATED = {"qwen3_moe", "olmoe", "glm4_moe", "minimax_m2"}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.slow(unless={"name": set(FAMILIES) - REPEATED})
def test_outputs_and_gradients(implementation, name):
    arrays, state, gradients = of_family(name), of_family(name, "state/"), of_family(name, "grad/")

    @jax.jit
    def both_ways(state, x, dy):
        y, pull = jax.vjp(functools.partial(block, name, implementation), state, x)
        return y, *pull(dy)

    y, d_state, dx = both_ways(state, arrays["x"], arrays["dy"])
    assert_near(y, arrays["y"], "y")
    assert_near(dx, arrays["dx"], "dx")
    for key, gradient in gradients.items():
        assert_near(d_state.pop(key), gradient, key)
    for key, gradient in d_state.items():  # Buffers, and parameters without gradients: biases of the selection.
        assert "correction_bias" in key
        np.testing.assert_array_equal(gradient, np.zeros_like(gradient), err_msg=key)
