"""What `pallas` does not support, with which reason, and when it is logged."""

import logging
import types

import jax
import jax.numpy as jnp
import pytest

import facts_of
import jax_ep
from jax_ep.core.facts import ActivationFacts, LowLatencyFacts, MaskedGemmFacts
from jax_ep.megakernels import requirements as triton
from jax_ep.ops import registry
from jax_ep.pallas import requirements
from jax_ep.types import Experts, Options, Schedule

BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="this is about what CPU devices are given")


PRODUCT = (32768, 7168, 4096, 64)
EXCHANGE = facts_of.exchange(BF16, 64)
ACTIVATION = ActivationFacts(BF16, Experts(), 64, 64, 8)


def choose(asked=None, facts=None):
    names = (asked,) if isinstance(asked, str) else asked
    return registry.choose(Options("grouped_gemm", (), names), facts or facts_of.gemm(BF16)).implementation


@pytest.fixture
def hopper(monkeypatch):
    """Fake GPUs of this compute capability; without Triton unless it `serves`."""

    def make(capability="9.0", *, serves=False):
        device = types.SimpleNamespace(compute_capability=capability)
        monkeypatch.setattr(jax, "local_devices", lambda: [device])
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        monkeypatch.setattr(triton, "unsupported_reason", lambda *_: None if serves else "not installed")

    registry._warn_once.cache_clear()
    yield make
    registry._warn_once.cache_clear()


def test_pallas_support_order():
    assert registry.available() == ("triton", "pallas", "xla")
    assert registry.available("grouped_gemm") == registry.available()


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_pallas_support_preferred(dtype, hopper):
    """It runs GEMMs where Triton does not."""
    hopper(serves=True)
    assert choose(None, facts_of.gemm(dtype, *PRODUCT)) == "triton"
    hopper(serves=False)
    assert choose(None, facts_of.gemm(dtype, *PRODUCT)) == ("xla" if dtype == F32 else "pallas")


def test_pallas_support_hopper_without_triton(hopper, caplog):
    hopper()
    with caplog.at_level(logging.WARNING, "jax_ep"):
        assert choose() == "pallas"
        assert choose(None, EXCHANGE) == "xla"
        assert choose(None, LowLatencyFacts(BF16, 64, facts_of.LAYOUT)) == "xla"
        assert choose(None, MaskedGemmFacts(BF16, 64)) == "xla"
        assert choose(None, ACTIVATION) == choose(None, facts_of.gemm(F32)) == "xla"
    assert [record.getMessage() for record in caplog.records] == [
        "implementation triton is not used: not installed",
        "implementation pallas is not used: its GEMMs support bfloat16 and float16, not float32",
    ]


def test_pallas_support_other_gpus(hopper, caplog):
    hopper("10.0")
    with caplog.at_level(logging.WARNING, "jax_ep"):
        assert choose() == "xla"
    reason = "its kernels are for compute capability 9.0 (Hopper), these GPUs have 10.0"
    reason += "; use `triton` or `xla`"
    assert f"implementation pallas is not used: {reason}" in [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("reason", "facts"),
    [
        ("it has no low_latency", LowLatencyFacts(BF16, 64, facts_of.LAYOUT)),
        ("GEMMs support bfloat16 and float16, not float32", facts_of.gemm(F32)),
    ],
)
def test_pallas_support_reasons(reason, facts):
    with pytest.raises(NotImplementedError, match=f"pallas: .*{reason}"):
        choose("pallas", facts)


def test_pallas_support_fusion_as_xla():
    options = Options("moe", (), ("pallas",), schedule=Schedule(dispatch_mode="fused"))
    with pytest.raises(NotImplementedError, match="pallas: it has no fused kernels"):
        registry.choose(options, facts_of.exchange(BF16, 64, columns=64))


def test_pallas_support_xla_runs_other_parts(hopper):
    hopper(serves=False)
    parts = EXCHANGE, facts_of.exchange(F32), facts_of.exchange(BF16, is_foreign=True), ACTIVATION
    assert {choose("pallas", facts) for facts in parts} == {"xla"}
    assert choose(("pallas", "triton"), EXCHANGE) == "xla"


def test_pallas_support_no_fp8(hopper):
    """Neither by default nor by name, in operations and in layers."""
    hopper(serves=False)
    facts = facts_of.gemm(jnp.float8_e4m3fn, *PRODUCT)
    assert choose(None, facts) == "xla"
    reason = r"pallas: its GEMMs support bfloat16 and float16, not float8_e4m3fn\. Leave implementation=None"
    with pytest.raises(NotImplementedError, match=f"grouped_gemm: .*{reason}"):
        choose("pallas", facts)


@on_cpu
def test_pallas_support_no_fp8_recipe():
    x, w = jnp.ones((4, 128), BF16), jnp.ones((2, 128, 128), BF16)
    idx, experts = jnp.zeros((4, 1), jnp.int32), Experts("relu", gated=False)
    options = {"experts": experts, "recipe": "fp8", "implementation": "pallas"}
    with pytest.raises(NotImplementedError, match=r"fused_moe: .*pallas: its GEMMs support .*implementation=None"):
        jax_ep.fused_moe(x, idx, jnp.ones((4, 1), F32), w, w, **options)


@on_cpu
def test_pallas_support_cpu_only_when_named_alone():
    assert choose() == "xla"
    assert choose(("pallas", "xla")) == "xla"
    assert choose("pallas") == "pallas"
    assert choose(["pallas"]) == "pallas"


@on_cpu
def test_pallas_support_interpreter_needs_threads(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    for devices in (1, 3):
        monkeypatch.setattr(jax, "local_device_count", lambda devices=devices: devices)
        with pytest.raises(
            NotImplementedError, match=rf"4 cores or CPU devices, there are {max(devices, 2)}.*XLA_FLAGS"
        ):
            choose("pallas")
    monkeypatch.setattr(jax, "local_device_count", lambda: 4)
    assert choose("pallas") == "pallas"


@on_cpu
def test_pallas_support_mixed_implementations(monkeypatch):
    """On GPUs without Triton, xla communicates and activates, and GEMMs choose separately."""
    monkeypatch.setattr(requirements, "_missing_on_cpu", lambda: None)
    monkeypatch.setattr(Options, "alone", True)
    chosen = []
    choose = registry.choose

    def choose_and_tell(options, facts):
        part = choose(options, facts)
        chosen.append((part.operation, part.implementation))
        return part

    monkeypatch.setattr(registry, "choose", choose_and_tell)
    x, idx, weights = jnp.ones((4, 128), BF16), jnp.array([[0], [1], [1], [0]], jnp.int32), jnp.ones((4, 1), F32)
    w_gate_up, w_down = jnp.ones((2, 128, 256), BF16), jnp.ones((2, 128, 128), BF16)

    def layer(**options):
        chosen.clear()
        call = jax.grad(lambda *args: jnp.sum(jax_ep.fused_moe(*args, **options), dtype=F32), (0, 2, 3, 4))
        jax.jit(call).trace(x, idx, weights, w_gate_up, w_down)
        return set(chosen)

    wanted = {("exchange", "xla"), ("grouped_gemm", "pallas"), ("activation", "xla")}
    assert layer(implementation="pallas") == layer(implementation=("pallas", "xla")) == wanted
    assert layer(implementation="xla") == {("exchange", "xla"), ("grouped_gemm", "xla"), ("activation", "xla")}
