"""The implementation chosen per GPU, as in docs/features.md, and the reasons against others; with fake devices."""

import logging
import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import facts_of
import harness
import jax_ep
from facts_of import LAYOUT
from jax_ep.core.facts import ActivationFacts, LowLatencyFacts, MaskedActivationFacts, MaskedGemmFacts
from jax_ep.megakernels import requirements
from jax_ep.ops import registry
from jax_ep.types import Experts, Options, Schedule

pytest.importorskip("triton")
BF16, FP8 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float8_e4m3fn)
PRODUCT = (1 << 14, 256, 256, 8)
OPERATIONS = {
    "exchange": facts_of.exchange(BF16),
    "exchange in FP8": facts_of.exchange(BF16),
    "large products": facts_of.gemm(BF16, *PRODUCT),
    "small products": facts_of.gemm(BF16),
    "products in FP8": facts_of.gemm(FP8),
    "activation": ActivationFacts(BF16, Experts(), 64, 64, 8),
    "low latency": LowLatencyFacts(BF16, 256, LAYOUT),
    "low latency in FP8": LowLatencyFacts(FP8, 256, LAYOUT),
    "masked products": MaskedGemmFacts(BF16, 256),
    "masked activation to FP8": MaskedActivationFacts(BF16, quantize=True),
}
HOPPER = dict.fromkeys(OPERATIONS, "triton")
PRODUCTS = ("large products", "small products", "products in FP8", "masked products")
WITHOUT_TMA = dict.fromkeys(OPERATIONS, "triton") | dict.fromkeys(PRODUCTS, "xla")
IN_FP8 = ("exchange in FP8", "low latency in FP8", "masked activation to FP8")
AMPERE = WITHOUT_TMA | dict.fromkeys(IN_FP8, "xla")
NONE = dict.fromkeys(OPERATIONS, "xla")
USED = {"7.5": NONE, "8.0": AMPERE, "8.6": AMPERE, "8.9": WITHOUT_TMA, "9.0": HOPPER}
USED |= {"10.0": HOPPER, "12.0": WITHOUT_TMA, "gfx942": NONE, "10.0 without Triton": NONE}
USED |= {"9.0 without Triton": NONE | {"large products": "pallas", "small products": "pallas"}}


@pytest.fixture
def gpus(request, monkeypatch):
    """Fake GPUs of that compute capability, with peer access; Triton is installed unless the name says otherwise."""
    jax_ep.finalize()
    capability, _, without = request.param.partition(" without ")
    if without:
        monkeypatch.setattr(requirements, "unsupported_reason", lambda *_: "not installed")
    device = types.SimpleNamespace(platform="gpu", compute_capability=capability, device_kind="a GPU")
    monkeypatch.setattr(jax, "local_devices", lambda *_, **__: [device])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr("jax_ep.heap.peer_access.unsupported_reason", lambda: None)
    registry._warn_once.cache_clear()
    yield request.param
    registry._warn_once.cache_clear()


def choose(asked, name, **options):
    wire_dtype = FP8 if name == "exchange in FP8" else None
    made = Options("moe", ("expert",), None if asked is None else (asked,), wire_dtype, **options)
    return registry.choose(made, OPERATIONS[name]).implementation


@pytest.mark.parametrize(("gpus", "used"), USED.items(), indirect=["gpus"], ids=USED)
def test_platforms_chosen_implementation(gpus, used):
    assert {name: choose(None, name) for name in OPERATIONS} == used


@pytest.mark.parametrize("gpus", ["9.0 without Triton"], indirect=True)
def test_platforms_pallas_named(gpus):
    """`xla` runs the parts next to the GEMMs of `pallas`."""
    used = {name: choose("pallas", name) for name in ("exchange", "activation", "small products", "large products")}
    assert used == {"exchange": "xla", "activation": "xla", "small products": "pallas", "large products": "pallas"}
    foreign = facts_of.exchange(BF16, is_foreign=True)
    assert registry.choose(Options("moe", (), ("pallas", "triton")), foreign).implementation == "xla"
    only = "its GEMMs support bfloat16 and float16, not float8_e4m3fn"
    for name, reason in {"low latency": "it has no low_latency", "products in FP8": only}.items():
        with pytest.raises(NotImplementedError, match=rf"^moe: .*pallas: {reason}\. Leave implementation=None"):
            choose("pallas", name)


WARNINGS = {
    "9.0 without Triton": "its GEMMs support bfloat16 and float16, not float8_e4m3fn",
    "10.0 without Triton": "its kernels are for compute capability 9.0 (Hopper), these GPUs have 10.0; use `triton` or"
    " `xla`",
}


@pytest.mark.parametrize(("gpus", "reason"), WARNINGS.items(), indirect=["gpus"], ids=WARNINGS)
def test_platforms_warnings(gpus, reason, caplog):
    """Once each; not of parts that `pallas` leaves to others everywhere."""
    with caplog.at_level(logging.WARNING, "jax_ep"):
        for name in (*OPERATIONS, *OPERATIONS):
            choose(None, name)
    missing, other = (record.getMessage() for record in caplog.records)
    assert missing == "implementation triton is not used: not installed"
    assert other == f"implementation pallas is not used: {reason}"


MANY_GROUPS = {"num_rows": 1 << 14, "groups": 2000}
PORTABLE = {"float32": facts_of.gemm(jnp.float32), "too many groups": facts_of.gemm(BF16, **MANY_GROUPS)}


@pytest.mark.parametrize("gpus", ["9.0"], indirect=True)
@pytest.mark.parametrize("asked", [None, "triton", "xla"])
@pytest.mark.parametrize("name", PORTABLE)
def test_platforms_reproducible_gemms_are_not_xlas(gpus, asked, name):
    """On GPUs XLA's GEMMs run neither if they are asked for nor in the place of a kernel that does not exist."""
    asked_of = Options("moe", ("expert",), asked and (asked,), None, Schedule(reproducible=True))
    with pytest.raises(NotImplementedError, match="XLA chooses the algorithm"):
        registry.choose(asked_of, PORTABLE[name])
    assert registry.choose(asked_of, facts_of.gemm(BF16, num_rows=0)).implementation == "xla"


@pytest.mark.parametrize(
    ("gpus", "name", "asked", "needed"),
    [
        ("7.5", "exchange", "triton", "8.0 or more"),
        ("8.0", "exchange in FP8", "triton", "FP8 on the wire needs GPUs of compute capability 8.9 or more"),
        ("8.0", "low latency in FP8", "triton", "8.9 or more"),
        ("12.0", "products in FP8", "triton", "9.0 to 11.x"),
        ("8.0", "large products", "triton", "grouped GEMM in bfloat16 needs GPUs of compute capability 9.0 to 11.x"),
        ("12.0", "small products", "triton", "9.0 to 11.x"),
        ("8.0", "masked products", "triton", "9.0 to 11.x"),
        ("8.0", "masked activation to FP8", "triton", "8.9 or more"),
        ("10.0", "large products", "pallas", "9.0"),
        ("gfx942", "exchange", "triton", "NVIDIA GPUs"),
    ],
    indirect=["gpus"],
)
def test_platforms_unsupported_capability_reason(gpus, name, asked, needed):
    with pytest.raises(NotImplementedError) as caught:
        choose(asked, name)
    message = str(caught.value)
    assert needed in message and gpus in message and "`xla`" in message


@pytest.mark.parametrize("gpus", ["8.0"], indirect=True)
def test_platforms_fused_mode_needs_tma(gpus):
    made = Options("moe", ("expert",), ("triton",), schedule=Schedule(combine_mode="scatter"))
    with pytest.raises(NotImplementedError, match=r"GPUs with TMA \(9.0 to 11.x\)"):
        registry.choose(made, facts_of.exchange(BF16, columns=256))


@pytest.mark.parametrize("gpus", ["8.0"], indirect=True)
def test_platforms_float32_gemm_needs_no_tma(gpus):
    """float32 is a loop over products of XLA, also where `triton` is named alone."""
    made = Options("moe", (), ("triton",))
    part = registry.choose(made, facts_of.gemm(jnp.float32, *PRODUCT))
    assert part.implementation == "xla" and "precision of float32" in part.reason


@pytest.mark.parametrize("gpus", ["9.0"], indirect=True)
def test_platforms_without_peer_access(gpus, monkeypatch):
    """Only what sends tokens needs peer access, and init() in several processes."""
    sends = {name for name in OPERATIONS if name.startswith(("exchange", "low latency"))}
    reasons = {"unsupported_reason": "GPU 0 cannot write", "unsupported_processes_reason": "each process"}
    for what, reason in reasons.items():
        with monkeypatch.context() as changed:
            changed.setattr(f"jax_ep.heap.peer_access.{what}", lambda reason=reason: reason)
            changed.setattr(jax, "process_count", lambda what=what: 1 + (what != "unsupported_reason"))
            assert {name: choose(None, name) for name in OPERATIONS} == HOPPER | dict.fromkeys(sends, "xla")
            with pytest.raises(NotImplementedError):
                choose("triton", "exchange")


@pytest.mark.parametrize("platform", ["tpu", "METAL"])
def test_platforms_other(platform, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    assert choose(None, "exchange") == "xla"
    with pytest.raises(NotImplementedError, match=f"it needs NVIDIA GPUs, and the platform is {platform}"):
        choose("triton", "exchange")
    with pytest.raises(NotImplementedError, match=f"pallas: the platform is {platform}"):
        choose("pallas", "small products")


def test_platforms_interpreter_needs_manual_axes(two_ranks):
    if jax.default_backend() != "cpu":
        pytest.skip("the interpreter stands for GPUs on the CPU")
    used = []

    def per_rank(x):
        with pytest.raises(NotImplementedError, match=r"every mesh axis is manual, but \['data'\] are not"):
            choose("triton", "exchange")
        used.append(choose(None, "exchange"))
        return x

    options = {"in_specs": P("expert"), "out_specs": P("expert"), "axis_names": {"expert"}}
    mesh = harness.make_mesh((2, 2), ("data", "expert"))
    jax.eval_shape(jax.jit(jax.shard_map(per_rank, mesh=mesh, **options)), jnp.ones(2))
    assert used == ["xla"]
