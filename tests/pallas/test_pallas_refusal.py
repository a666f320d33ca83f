"""What `pallas` refuses, with which reason, and when that is worth a word."""

import logging
import types

import jax
import jax.numpy as jnp
import pytest

import jax_ep
from jax_ep.ops import registry

NO_TRITON = registry.Entry("triton", load=lambda: pytest.fail("loaded"), refusal=lambda _: "not installed")
BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)


def request(dtype=BF16, operation="gemm", platform="gpu", **options):
    return registry.Request("grouped_gemm", dtype, 64, operation, platform=platform, **options)


@pytest.fixture
def hopper(monkeypatch):
    """GPUs of this compute capability, as far as refusals look; Triton is not installed."""

    def make(capability="9.0"):
        device = types.SimpleNamespace(compute_capability=capability)
        monkeypatch.setattr(jax, "local_devices", lambda: [device])
        monkeypatch.setitem(registry._REGISTRY, "triton", NO_TRITON)

    registry._say_once.cache_clear()
    yield make
    registry._say_once.cache_clear()


def test_order():
    assert registry.available() == ("triton", "pallas", "xla")
    assert registry.available("exchange") == ("triton", "xla")
    assert registry.available("gemm") == registry.available("gemm_weights") == registry.available()


@pytest.mark.parametrize(
    ("wanted", "options"),
    [
        ("pallas", {"product": (32768, 7168, 4096, 64)}),
        ("pallas", {"product": (32768, 7168, 4096, 64), "operation": "gemm_weights"}),
        ("triton", {"product": (32768, 7168, 4096, 256), "operation": "gemm_weights"}),
        ("triton", {"product": (32768, 7168, 4096, 256)}),  # few rows
        ("triton", {"product": (32764, 7168, 4096, 64)}),  # copies of rows
        ("triton", {"product": (32768, 7160, 4096, 64)}),  # copies of matrices
        ("triton", {"product": (32768, 7168, 4104, 64)}),
        ("triton", {"product": (32768, 7168, 4096, 64), "dtype": F32}),
        ("triton", {}),
    ],
    ids=str,
)
def test_fastest(wanted, options, hopper, caplog, monkeypatch):
    hopper()
    served = registry.Entry("triton", NO_TRITON.load, lambda _: None)
    monkeypatch.setitem(registry._REGISTRY, "triton", served)
    assert registry.choose(None, request(**options)) == wanted
    assert registry.choose(("triton", "pallas"), request(**options)) == "triton"
    hopper("8.0")
    monkeypatch.setitem(registry._REGISTRY, "triton", served)
    assert registry.choose(None, request(**options)) == "triton"
    assert not caplog.records  # nobody expected another one


def test_serves_products_on_hopper_without_triton(hopper, caplog):
    hopper()
    with caplog.at_level(logging.WARNING, "jax_ep"):
        assert registry.choose(None, request()) == "pallas"
        for operation in ("exchange", "activation", "low_latency", "masked_gemm", "masked_activation"):
            assert registry.choose(None, request(operation=operation)) == "xla"
        assert registry.choose(None, request(F32)) == "xla"
    assert [record.getMessage() for record in caplog.records] == ["implementation triton is not used: not installed"]


def test_other_gpus(hopper, caplog):
    hopper("10.0")
    with caplog.at_level(logging.WARNING, "jax_ep"):
        assert registry.choose(None, request()) == "xla"
    reason = "its kernels are for compute capability 9.0 (Hopper), that of these GPUs is 10.0"
    reason += "; `triton` or `xla` multiply there"
    assert f"implementation pallas is not used: {reason}" in [record.getMessage() for record in caplog.records]
    with pytest.raises(NotImplementedError, match=r"compute capability 9\.0"):
        registry.choose("pallas", request())


@pytest.mark.parametrize(
    ("reason", "options"),
    [
        ("made for .*'gemm'.*, not for 'exchange'", {"operation": "exchange"}),
        ("made for .*'bfloat16', 'float16'.*, not for float32", {"dtype": F32}),
        ("not for float8_e4m3fn", {"dtype": jnp.dtype(jnp.float8_e4m3fn)}),
        ("the platform is tpu", {"platform": "tpu"}),
    ],
)
def test_reasons(reason, options):
    with pytest.raises(NotImplementedError, match=f"pallas: .*{reason}"):
        registry.choose("pallas", request(**options))


def test_on_the_cpu_only_where_it_is_named_alone():
    assert registry.choose(None, request(platform="cpu")) == "xla"
    assert registry.choose(("pallas", "xla"), request(platform="cpu")) == "xla"
    assert registry.choose("pallas", request(platform="cpu")) == "pallas"
    assert registry.choose(["pallas"], request(platform="cpu")) == "pallas"


def test_interpreter_needs_threads(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    for devices in (1, 3):
        monkeypatch.setattr(jax, "local_device_count", lambda devices=devices: devices)
        with pytest.raises(
            NotImplementedError, match=rf"4 cores or CPU devices, here are {max(devices, 2)}.*XLA_FLAGS"
        ):
            registry.choose("pallas", request(platform="cpu"))
    monkeypatch.setattr(jax, "local_device_count", lambda: 4)
    assert registry.choose("pallas", request(platform="cpu")) == "pallas"


def test_layers_take_products_of_one_implementation_and_the_rest_of_another(monkeypatch):
    """As on GPUs without Triton: xla exchanges and activates, and products choose for themselves."""
    entry = registry._REGISTRY["pallas"]
    served = registry.Entry("pallas", entry.load, lambda _: None, entry.operations, entry.dtypes)
    monkeypatch.setitem(registry._REGISTRY, "pallas", served)
    monkeypatch.setitem(registry._REGISTRY, "triton", NO_TRITON)
    chosen = []
    choose = registry.choose

    def choose_and_tell(implementation, asked):
        chosen.append((asked.operation, choose(implementation, asked)))
        return chosen[-1][1]

    monkeypatch.setattr(registry, "choose", choose_and_tell)
    x, idx, weights = jnp.ones((4, 64), BF16), jnp.array([[0], [1], [1], [0]], jnp.int32), jnp.ones((4, 1), F32)
    w_gate_up, w_down = jnp.ones((2, 64, 64), BF16), jnp.ones((2, 32, 64), BF16)

    def layer(**options):
        chosen.clear()
        call = jax.jit(lambda *args: jax_ep.fused_moe(*args, **options))
        call.trace(x, idx, weights, w_gate_up, w_down)
        return set(chosen)

    assert layer() == {("exchange", "xla"), ("gemm", "pallas"), ("gemm_weights", "pallas"), ("activation", "xla")}
    assert layer(implementation="xla") == {
        ("exchange", "xla"),
        ("gemm", "xla"),
        ("gemm_weights", "xla"),
        ("activation", "xla"),
    }
    assert layer(implementation=("pallas", "xla")) == layer()
