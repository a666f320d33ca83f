"""What `pallas` does not support, with which reason, and when it is logged."""

import logging
import types

import jax
import jax.numpy as jnp
import pytest

import jax_ep
from jax_ep.megakernels import requirements as triton
from jax_ep.ops import registry
from jax_ep.pallas import requirements
from jax_ep.types import Layout, Options, Schedule

BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="this is about what CPU devices are given")


PRODUCT = (32768, 7168, 4096, 64)
EXCHANGE = (64, Layout(2, 8, 256, 2, 1024), False, None)


def choose(asked=None, operation="grouped_gemm", dtype=BF16, *facts):
    names = (asked,) if isinstance(asked, str) else asked
    return registry.choose(Options("grouped_gemm", (), names), operation, dtype, *facts)


@pytest.fixture
def hopper(monkeypatch):
    """Fake GPUs of this compute capability; without Triton unless it `serves`."""

    def make(capability="9.0", *, serves=False):
        device = types.SimpleNamespace(compute_capability=capability)
        monkeypatch.setattr(jax, "local_devices", lambda: [device])
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        monkeypatch.setattr(triton, "refusal", lambda *_: None if serves else "not installed")

    registry._say_once.cache_clear()
    yield make
    registry._say_once.cache_clear()


def test_pallas_support_order():
    assert registry.available() == ("triton", "pallas", "xla")
    assert registry.available("exchange") == ("triton", "xla", "pallas")
    assert registry.available("grouped_gemm") == registry.available()


@pytest.mark.parametrize(
    ("wanted", "product", "dtype"),
    [
        ("pallas", PRODUCT, BF16),
        ("triton", (32768, 7168, 4096, 256), BF16),  # Few rows.
        ("triton", (32764, 7168, 4096, 64), BF16),  # Copies of rows.
        ("triton", (32768, 7160, 4096, 64), BF16),  # Copies of weights.
        ("triton", (32768, 7168, 4104, 64), BF16),
        ("triton", PRODUCT, F32),
        ("triton", (), BF16),
    ],
    ids=str,
)
def test_pallas_support_preferred(wanted, product, dtype, hopper, caplog):
    hopper(serves=True)
    assert choose(None, "grouped_gemm", dtype, *product) == wanted
    assert choose(("triton", "pallas"), "grouped_gemm", dtype, *product) == "triton"
    hopper("8.0", serves=True)
    assert choose(None, "grouped_gemm", dtype, *product) == "triton"
    assert not caplog.records  # No other implementation was requested.


def test_pallas_support_hopper_without_triton(hopper, caplog):
    hopper()
    with caplog.at_level(logging.WARNING, "jax_ep"):
        assert choose() == "pallas"
        assert choose(None, "exchange", BF16, *EXCHANGE) == "xla"
        assert choose(None, "low_latency", BF16, *EXCHANGE[:3]) == "xla"
        assert choose(None, "masked", BF16, "grouped_gemm", 64) == "xla"
        assert choose(None, "activation") == choose(None, "grouped_gemm", F32) == "xla"
    assert [record.getMessage() for record in caplog.records] == ["implementation triton is not used: not installed"]


def test_pallas_support_other_gpus(hopper, caplog):
    hopper("10.0")
    with caplog.at_level(logging.WARNING, "jax_ep"):
        assert choose() == "xla"
    reason = "its kernels are for compute capability 9.0 (Hopper), that of these GPUs is 10.0"
    reason += "; `triton` or `xla` serve there"
    assert f"implementation pallas is not used: {reason}" in [record.getMessage() for record in caplog.records]
    with pytest.raises(NotImplementedError, match=r"compute capability 9\.0"):
        choose("pallas")


@pytest.mark.parametrize(
    ("reason", "request_"),
    [
        ("it has no low_latency", ("low_latency", BF16, *EXCHANGE[:3])),
        ("made for .*'float32'.*, not for float64", ("exchange", jnp.dtype(jnp.float64), *EXCHANGE)),
        ("made for .*'bfloat16', 'float16'.*, not for float32", ("grouped_gemm", F32)),
        ("not for float8_e5m2", ("grouped_gemm", jnp.dtype(jnp.float8_e5m2))),
    ],
)
def test_pallas_support_reasons(reason, request_):
    with pytest.raises(NotImplementedError, match=f"pallas: .*{reason}"):
        choose("pallas", *request_)


def test_pallas_support_fusion_as_xla():
    options = Options("moe", (), ("pallas",), schedule=Schedule(dispatch_mode="fused"))
    with pytest.raises(NotImplementedError, match="pallas: it fuses nothing"):
        registry.choose(options, "exchange", BF16, *EXCHANGE[:3], 64)


def test_pallas_support_exchange_when_named(hopper):
    hopper(serves=False)
    assert choose(None, "exchange", BF16, *EXCHANGE) == "xla"
    assert choose(("pallas", "xla"), "exchange", BF16, *EXCHANGE) == "pallas"
    assert choose("pallas", "exchange", F32, *EXCHANGE) == choose("pallas", "activation", F32) == "pallas"
    foreign = (*EXCHANGE[:2], True, None)
    assert choose("pallas", "exchange", BF16, *foreign) == "pallas"  # All handles have the same rows.


def test_pallas_support_other_platforms(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with pytest.raises(NotImplementedError, match="pallas: the platform is tpu"):
        choose("pallas")


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
            NotImplementedError, match=rf"4 cores or CPU devices, here are {max(devices, 2)}.*XLA_FLAGS"
        ):
            choose("pallas")
    monkeypatch.setattr(jax, "local_device_count", lambda: 4)
    assert choose("pallas") == "pallas"


@on_cpu
def test_pallas_support_mixed_implementations(monkeypatch):
    """On GPUs without Triton, xla communicates and activates, and GEMMs choose separately. Also with explicit names."""
    monkeypatch.setattr(requirements, "_missing_on_cpu", lambda: None)
    monkeypatch.setattr(requirements, "is_fastest", lambda options, operation, *_: operation == "grouped_gemm")
    monkeypatch.setattr(Options, "alone", True)
    chosen = []
    choose = registry.choose

    def choose_and_tell(options, operation, *request):
        chosen.append((operation, choose(options, operation, *request)))
        return chosen[-1][1]

    monkeypatch.setattr(registry, "choose", choose_and_tell)
    x, idx, weights = jnp.ones((4, 128), BF16), jnp.array([[0], [1], [1], [0]], jnp.int32), jnp.ones((4, 1), F32)
    w_gate_up, w_down = jnp.ones((2, 128, 256), BF16), jnp.ones((2, 128, 128), BF16)

    def layer(**options):
        chosen.clear()
        call = jax.grad(lambda *args: jnp.sum(jax_ep.fused_moe(*args, **options), dtype=F32), (0, 2, 3, 4))
        jax.jit(call).trace(x, idx, weights, w_gate_up, w_down)
        return set(chosen)

    assert layer() == {("exchange", "xla"), ("grouped_gemm", "pallas"), ("activation", "xla")}
    assert layer(implementation="xla") == {("exchange", "xla"), ("grouped_gemm", "xla"), ("activation", "xla")}
    assert layer(recipe="fp8") == layer()
    whole = {(operation, "pallas") for operation in ("exchange", "grouped_gemm", "activation")}
    assert layer(implementation="pallas") == layer(implementation=("pallas", "xla")) == whole
