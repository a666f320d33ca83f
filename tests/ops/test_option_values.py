"""The frozen values that options are made of: wrong fields are refused by name, and equal values are one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
from jax_ep import Experts, Router, Schedule
from jax_ep.flax import SharedExperts
from jax_ep.sharding import MeshAxes
from mistakes import check

PROGRAMS = ("num_communicating_programs", "num_combining_programs")
# The largest value of a field of `Schedule`, and how an error says what is expected.
NUMBERS = dict.fromkeys(PROGRAMS, (1 << 16, "a number from 1 to 65536"))
NUMBERS |= {"rows_in_flight": (10, "a number from 1 to 10")}
NUMBERS |= {name: (most, "a power of two.*None") for name, most in (("num_warps", 16), ("tokens_per_block", 1024))}
WIRES = "fp8", jnp.int8, jnp.float8_e5m2, jnp.bfloat16, 8, jnp.zeros((), jnp.float8_e4m3fn)

SCHEDULES = [
    *(
        ({field: value}, ValueError, f"^{field}={value}, expected {expected}")
        for field, (most, expected) in NUMBERS.items()
        for value in (-1, 0, 2 * most, most + 1, *([3] if "power" in expected else []))
    ),
    *(
        ({field: value}, TypeError, f"^{field}={value!r} is a {type(value).__name__}, .* int.*None")
        for field in NUMBERS
        for value in (8.0, True, "8")
    ),
    *(
        ({field: value}, ValueError, f"^{field}={value!r}, expected one of .*'{known}', 'serial'.*None")
        for field, known in (("dispatch_mode", "fused"), ("combine_mode", "scatter"))
        for value in ("reduce", "", 2)
    ),
    *(
        ({field: "always"}, TypeError, f"^{field}='always' is a str, .*True, False, or None")
        for field in ("keep_tokens", "single_launch", "reproducible")
    ),
    *(({"wire_dtype": wire}, TypeError, "^wire_dtype=.*, expected float8_e4m3fn or None; pass") for wire in WIRES),
]
ROUTERS = [
    ({"score": "tanh"}, ValueError, "'tanh'.*'softmax', 'sigmoid', 'sparsemixer'"),
    ({"score": None}, ValueError, "None.*'softmax'"),
    ({"group_score": "mean"}, ValueError, "'mean'.*'top2_sum', 'max'"),
    ({"group_score": ["max"]}, ValueError, r"\['max'\].*'top2_sum', 'max'"),
    *(
        ({name: value}, TypeError, f"{name}(=.*)? is.*True or False")
        for name in ("renormalize", "logit_bias", "selection_bias")
        for value in (1, None, "yes", jnp.ones(8))
    ),
    *(
        ({name: value}, TypeError, f"{name}=.*expected an int")
        for name in ("num_groups", "topk_groups", "num_identity_experts")
        for value in (2.0, None, True, "2")
    ),
    *(({name: 0}, ValueError, f"{name}=0.*at least 1") for name in ("num_groups", "topk_groups")),
    ({"num_identity_experts": -1}, ValueError, "num_identity_experts=-1.*at least 0"),
    ({"group_score": "max"}, ValueError, "group_score='max' with num_groups=1.*leave group_score out"),
    ({"topk_groups": 2}, ValueError, "topk_groups=2 exceeds num_groups=1.*lower topk_groups"),
    *(({"scale": value}, TypeError, "scale.* is.*pass a float") for value in (None, "2", jnp.ones(()), [1.0], True)),
    *(
        ({"scale": value}, ValueError, "scale=.*finite float32 other than 0")
        for value in (0, -0.0, float("nan"), np.float32("inf"), 10**400, 1e39, 1e-45)
    ),
    *(
        ({"score": "sparsemixer"} | fields, ValueError, "with score='sparsemixer'.*leave them out")
        for fields in ({"scale": 2.0}, {"num_groups": 2}, {"selection_bias": True}, {"renormalize": False})
    ),
]
EXPERTS = [
    ({"activation": "swish"}, ValueError, "swish.*silu"),
    ({"activation": 3}, TypeError, r"\bint\b.*JAX function"),
    ({"gated": 1}, TypeError, "gated=1.*True or False"),
    ({"clamp": 0.0}, ValueError, r"clamp=0\.0.*positive"),
    ({"clamp": 1e-46}, ValueError, "clamp=1e-46.*positive"),
    ({"up_offset": 1e39}, ValueError, r"up_offset=1e\+39.*finite float32"),
    ({"clamp": "7"}, TypeError, "clamp.*number"),
    ({"alpha": float("nan")}, ValueError, "alpha=nan.*finite"),
    ({"up_offset": True}, TypeError, "up_offset.*number"),
    ({"weight_on": "both"}, ValueError, "both.*'output', 'input'"),
    ({"activation": "relu", "alpha": 2.0}, ValueError, "alpha.*silu"),
    ({"gated": False, "interleaved": True}, ValueError, "interleaved.*without a gate"),
    ({"gated": False, "up_offset": 1.0}, ValueError, "up_offset.*without a gate"),
    ({"activation": jax.nn.silu, "clamp": 1.0}, ValueError, "clamp.*custom activation"),
]
SHARED = [
    ({"num": 0}, ValueError, "^num=0, expected at least 1"),
    ({"num": 1.0}, TypeError, "^num=1.0 is a float, expected an int"),
    ({"num": True}, TypeError, "^num=True is a bool, expected an int"),
    ({"intermediate_size": -4}, ValueError, "^intermediate_size=-4, expected at least 1"),
    ({"intermediate_size": "8"}, TypeError, "^intermediate_size='8' is a str, expected an int"),
    ({"gate": 1}, TypeError, "^gate=1 is an int, expected True or False"),
]
AXES = [
    ({"expert": 3}, TypeError, "expert=3 is an int"),
    ({"expert": None}, TypeError, "expert=None is a NoneType"),
    ({"batch": ("data", 1)}, TypeError, "batch=.* is a tuple"),
    ({"tensor": ("tensor",)}, TypeError, "tensor=.* is a tuple, expected the name of a mesh axis"),
    ({"fsdp": 1}, TypeError, "fsdp=1 is an int"),
    ({"expert": ""}, ValueError, "expert='' has an empty name, expected names of mesh axes; pass"),
    ({"expert": ("node", "")}, ValueError, "expert=.* has an empty name"),
    ({"batch": ""}, ValueError, "batch='' has an empty name"),
    ({"tensor": ""}, ValueError, "tensor='', expected the name of a mesh axis, or None"),
    ({"fsdp": ""}, ValueError, "fsdp='', expected the name of a mesh axis, or None"),
    ({"expert": ("node", "node")}, ValueError, "names an axis twice"),
    ({"batch": "expert"}, ValueError, "name an axis twice"),
    ({"tensor": "expert"}, ValueError, "name an axis twice"),
    ({"expert": jax_ep.Topology("node", "local"), "batch": "node"}, ValueError, "name an axis twice"),
    ({"fsdp": "data"}, ValueError, r"fsdp='data' is not among batch=\(\)"),
    ({"fsdp": "expert"}, ValueError, "fsdp='expert' is not among batch"),
]
NODES = {"node": "node", "local": "expert"}
TOPOLOGIES = [
    ({"node": "node", "local": "node"}, ValueError, "name an axis twice"),
    (NODES | {"node": ()}, ValueError, "names no axis"),
    (NODES | {"node": ""}, ValueError, "^node='' has an empty name, expected"),
    (NODES | {"node": 1}, TypeError, "expected the name of a mesh axis"),
    (NODES | {"num_blocks": 0}, ValueError, "num_blocks=0, expected at least 1"),
    (NODES | {"node_capacity": 1.5}, TypeError, "node_capacity=1.5"),
]
TABLE = {
    jax_ep.Topology: TOPOLOGIES,
    Schedule: SCHEDULES,
    Router: ROUTERS,
    Experts: EXPERTS,
    SharedExperts: SHARED,
    MeshAxes: AXES,
}
WRONG = [
    pytest.param(kind, *case, id=f"{kind.__name__}: {case[0]}"[:60]) for kind, cases in TABLE.items() for case in cases
]


@pytest.mark.parametrize(("kind", "fields", "error", "text"), WRONG)
def test_value_with_a_wrong_field(kind, fields, error, text):
    start = f"^{kind.__name__}: "
    check(error, [start + text.removeprefix("^") if text.startswith("^") else f"{start}.*{text}"], kind, **fields)


@pytest.mark.parametrize("field", NUMBERS)
def test_schedule_numbers_in_range(field):
    for value in (1, NUMBERS[field][0]):
        assert getattr(Schedule(**{field: value}), field) == value


def test_schedule_modes_and_switches_are_kept():
    assert Schedule(dispatch_mode="fused") != Schedule(dispatch_mode="serial")
    assert Schedule(combine_mode="scatter") != Schedule(combine_mode="serial")
    for field in ("keep_tokens", "single_launch", "reproducible"):
        assert getattr(Schedule(**{field: False}), field) is False


def test_equal_routers_are_one_value():
    wide = Router("sigmoid", num_groups=np.int64(4), topk_groups=2, scale=np.float32(2.5), renormalize=np.True_)
    assert wide == Router("sigmoid", num_groups=4, topk_groups=2, scale=2.5)
    assert len({wide, Router("sigmoid", num_groups=4, topk_groups=2, scale=2.5), Router()}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        wide.scale = 1.0
    logits, before = jnp.ones((2, 8)), jax_ep.routing._choose._cache_size()
    for _ in range(2):
        jax_ep.topk_router(logits, 2, router=Router(scale=1.375))
    assert jax_ep.routing._choose._cache_size() == before + 1


def test_experts_equal_values_compile_once():
    traced = []

    @jax.jit
    def layer(x):
        traced.append(x)
        ids, weights = jnp.zeros((2, 1), jnp.int32), jnp.ones((2, 1))
        options = {"experts": Experts(clamp=2.0), "implementation": "xla"}
        return jax_ep.fused_moe(x, ids, weights, jnp.ones((1, 4, 6)), jnp.ones((1, 3, 4)), **options)

    layer(jnp.ones((2, 4))), layer(jnp.zeros((2, 4)))
    assert len(traced) == 1 and Experts(clamp=2.0) == Experts(clamp=2) and len({Experts(), Experts()}) == 1


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda wide: jax_ep.grouped_gemm(np.ones((2, 4)), np.ones((3, 4, 4)), wide), "grouped_gemm: group_sizes"),
        (lambda wide: jax_ep.load_balancing_loss(np.ones((3, 3)), wide[:, None]), "load_balancing_loss: topk_idx"),
        (lambda wide: jax_ep.update_router_bias(np.zeros(3, np.float32), wide), "update_router_bias: load"),
    ],
)
def test_integers_beyond_32_bits_do_not_wrap(function, message):
    if jax.config.jax_enable_x64:
        pytest.skip("JAX keeps them")
    for wide in (np.array([1, 0, 2**32 + 1]), np.array([1, 0, -(2**33)]), np.array([1, 0, 2**32 + 1], np.uint64)):
        with pytest.raises(ValueError, match=rf"^{message} contains {wide[2]}, expected numbers of u?int32, to which"):
            function(wide)
