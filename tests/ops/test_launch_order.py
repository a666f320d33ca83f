"""Order of independent launches in a program, by a data dependence that XLA cannot remove."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
from cases import BF16, F32, Shape
from harness import per_rank
from jax_ep.core.mesh_axes import known_after
from jax_ep.ops.exchange import later
from jax_ep.placement import with_copies
from jax_ep.types import Handle, Layout
from layers import Layer


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("first", [0.0, -0.0, 1.5, np.inf, np.nan])
def test_known_after_keeps_values(dtype, first):
    x, earlier = jnp.array([3, -1, 0], jnp.int32), jnp.full((2, 2), first, dtype)
    np.testing.assert_array_equal(jax.jit(known_after)(x, earlier), x)


def test_known_after_one_rank():
    layout = Layout(num_ranks=2, num_experts=4, num_tokens=3, top_k=1, capacity=6, axis=("expert",))
    arrays = {
        name: jnp.zeros(4, jnp.int32)
        for name in ("row_to_assignment", "assignment_to_row", "group_sizes", "topk_idx", "group")
    }
    handle = Handle(**arrays, num_invalid=jnp.zeros((), jnp.int32), num_dropped=jnp.zeros((), jnp.int32), layout=layout)
    earlier = jnp.ones((2, 2))
    assert later(dataclasses.replace(handle, group=None), earlier).row_to_assignment is handle.row_to_assignment
    alone = dataclasses.replace(handle, layout=dataclasses.replace(layout, num_ranks=1))
    assert later(alone, earlier) is alone
    changed = later(handle, earlier)
    assert changed.row_to_assignment is not handle.row_to_assignment and changed.group_sizes is not handle.group_sizes
    assert changed.group is handle.group, "another group would be another table, and a check between the launches"


IMPLEMENTATIONS = ("triton",)
SHAPE = Shape(num_tokens=6, top_k=3, num_experts=8, hidden=16, intermediate=8)
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = .*?[ )]([a-z][\w\-]*)\((.*)$")


def _computations(text):
    """Return the instructions of each computation of an HLO module: name to (opcode, the rest of the line)."""
    found, here = {}, None
    for line in text.splitlines():
        if (start := re.match(r"^(?:ENTRY )?%([\w.\-]+) \(.*\{$", line)) is not None:
            here = found[start[1]] = {}
        elif here is not None and (part := _INSTRUCTION.match(line)) is not None:
            here[part[1]] = part[2], part[3]
    return found


def unordered_launches(text):
    """Return pairs of launches on the heap, or loops of them, between which no data dependence exists."""
    computations = _computations(text)
    pairs, num_launches = [], 0

    def launches(name):
        """Return whether a computation launches, after a look at the order in it."""
        nonlocal num_launches
        instructions, reached, own = computations[name], {}, []
        for key, (opcode, rest) in instructions.items():  # operands come first
            used = [used for used in re.findall(r"%([\w.\-]+)", rest.split(", metadata=")[0]) if used in instructions]
            reached[key] = set(used).union(*(reached[one] for one in used))
            called = re.findall(r"(?:body|to_apply|branch_computations|condition)=\{?%([\w.\-]+)", rest)
            is_launch = opcode == "custom-call" and "jax_ep_interpret" in key and _uses_heap(instructions, used)
            num_launches += is_launch
            if is_launch or sum(launches(one) for one in called if opcode in ("while", "call", "conditional")):
                pairs.extend((other, key) for other in own if other not in reached[key])
                own.append(key)
        return bool(own)

    entry = re.search(r"^ENTRY %([\w.\-]+)", text, re.MULTILINE)
    launches(entry[1])
    return pairs, num_launches


def _uses_heap(instructions, used):
    """Return whether a launch has a pointer table of more than its device number."""
    return any(re.search(r"table_id = \d{1,9} ", instructions[one][1]) for one in used if one.startswith("ffi_call"))


def _parts(balance, x, topk_idx, topk_weights, *weights):
    options = {"implementation": "triton"}
    d = jax_ep.dispatch(x, topk_idx, topk_weights, num_experts=SHAPE.num_experts, balance=balance, **options)
    w_gate_up, w_down = with_copies(weights, d.handle)
    hidden = jnp.tanh(jax_ep.grouped_gemm(d.tokens, w_gate_up, d.group_sizes, **options))
    hidden = hidden[:, : w_down.shape[1]]
    rows = jax_ep.grouped_gemm(hidden, w_down, d.group_sizes, **options)
    return jax_ep.combine(rows * d.weights[:, None].astype(rows.dtype), d.handle, **options)


def _moe(mode, balance, x, topk_idx, topk_weights, *weights):
    options = {"balance": balance, "implementation": "triton"}
    options["schedule"] = jax_ep.Schedule(dispatch_mode=mode, combine_mode="scatter" if mode == "fused" else mode)
    return jax_ep.moe(x, topk_idx, topk_weights, *weights, num_experts=SHAPE.num_experts, **options)


@pytest.mark.parametrize("spare", [1, 4])
@pytest.mark.parametrize(
    "layer", [_parts, partial(_moe, "fused"), partial(_moe, "serial")], ids=["parts", "fused", "serial"]
)
@pytest.mark.slow(unless={"layer": [_parts], "spare": [1]})
def test_launches_of_balanced_layers_depend_on_each_other(layer, spare, implementation, expert_mesh, rng):
    """Two layers, forward and backward; with 1 spare expert, `moe` has later passes."""
    if jax.default_backend() != "cpu":
        pytest.skip("it finds the launches of the interpreter in the program")
    balance, arrays = jax_ep.Balance(1.0, spare), Layer(rng, "uniform", 2, SHAPE, BF16).args

    def loss(x, topk_weights, w_gate_up, w_down, topk_idx):
        for _ in range(2):
            # As a router does, choose experts by the tokens.
            topk_idx = (topk_idx + (x[:, :1] > 0).astype(jnp.int32)) % SHAPE.num_experts
            x = layer(balance, x, topk_idx, topk_weights, w_gate_up, w_down)
        return jnp.sum(x**2)

    def gradients(x, topk_idx, *others):
        return jax.grad(loss, argnums=(0, 1, 2, 3))(x, *others, topk_idx)

    text = jax.jit(per_rank(gradients, expert_mesh(2))).lower(*arrays).compile().as_text()
    pairs, num_launches = unordered_launches(text)
    assert num_launches >= 16 and not pairs, (num_launches, pairs)
