"""What `pallas` refuses, with which reason, and when that is worth a word."""

import logging
import types

import jax
import jax.numpy as jnp
import pytest

import jax_ep
from jax_ep.megakernels import requirements as triton
from jax_ep.ops import registry
from jax_ep.pallas import requirements as pallas
from jax_ep.types import Layout, Options

BF16, F32, FP8 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32), jnp.dtype(jnp.float8_e4m3fn)
on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="about CPU devices")


def choose(*names, operation="grouped_gemm", dtype=BF16, facts=()):
    return registry.choose(Options("grouped_gemm", (), names or None), operation, dtype, *facts)


@pytest.fixture
def hopper(monkeypatch):
    """GPUs of this compute capability, as far as refusals look, and whether `triton` serves everything or nothing."""

    def make(capability="9.0", *, with_triton=False):
        device = types.SimpleNamespace(compute_capability=capability)
        monkeypatch.setattr(jax, "local_devices", lambda: [device])
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        monkeypatch.setattr(triton, "refusal", lambda *_: None if with_triton else "not installed")

    registry._say_once.cache_clear()
    yield make
    registry._say_once.cache_clear()


def test_order():
    assert registry.available() == ("triton", "pallas", "xla")
    assert registry.available("exchange") == ("triton", "xla")
    assert registry.available("grouped_gemm") == registry.available()


@pytest.mark.parametrize(
    ("wanted", "dtype", "product"),
    [
        ("pallas", BF16, (32768, 7168, 4096, 64)),
        ("triton", BF16, (32768, 7168, 4096, 256)),  # few rows
        ("triton", BF16, (32764, 7168, 4096, 64)),  # copies of rows
        ("triton", BF16, (32768, 7160, 4096, 64)),  # copies of matrices
        ("triton", BF16, (32768, 7168, 4104, 64)),
        ("triton", F32, (32768, 7168, 4096, 64)),
        ("triton", BF16, ()),
    ],
    ids=str,
)
def test_fastest(wanted, dtype, product, hopper, caplog):
    asked = {"dtype": dtype, "facts": product}
    hopper(with_triton=True)
    assert choose(**asked) == wanted
    assert choose("triton", "pallas", **asked) == "triton"
    hopper("8.0", with_triton=True)
    assert choose(**asked) == "triton"
    assert not caplog.records  # nobody expected another one


def test_serves_products_on_hopper_without_triton(hopper, caplog):
    hopper()
    layout = Layout(1, 8, 16, 2, 32)
    others = {"exchange": (64, layout, False, None), "activation": (), "low_latency": (64, layout, False)}
    others["masked"] = ("grouped_gemm", 64)
    with caplog.at_level(logging.WARNING, "jax_ep"):
        assert choose() == "pallas"
        assert {operation: choose(operation=operation, facts=facts) for operation, facts in others.items()} == (
            dict.fromkeys(others, "xla")
        )
        assert choose(dtype=F32) == "xla"
    assert [record.getMessage() for record in caplog.records] == ["implementation triton is not used: not installed"]


def test_other_gpus(hopper, caplog):
    hopper("10.0")
    with caplog.at_level(logging.WARNING, "jax_ep"):
        assert choose() == "xla"
    reason = "its kernels are for compute capability 9.0 (Hopper), that of these GPUs is 10.0"
    reason += "; `triton` or `xla` multiply there"
    assert f"implementation pallas is not used: {reason}" in [record.getMessage() for record in caplog.records]
    with pytest.raises(NotImplementedError, match=r"compute capability 9\.0"):
        choose("pallas")


@pytest.mark.parametrize(
    ("reason", "platform", "asked"),
    [
        ("it has no exchange", "gpu", {"operation": "exchange"}),
        ("made for .*'bfloat16', 'float16'.*, not for float32", "gpu", {"dtype": F32}),
        ("not for float8_e4m3fn", "gpu", {"dtype": FP8}),
        ("the platform is tpu", "tpu", {}),
    ],
)
def test_reasons(reason, platform, asked, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    with pytest.raises(NotImplementedError, match=f"pallas: .*{reason}"):
        choose("pallas", **asked)


@on_cpu
def test_on_the_cpu_only_where_it_is_named_alone():
    assert choose() == "xla"
    assert choose("pallas", "xla") == "xla"
    assert choose("pallas") == "pallas"


@on_cpu
def test_interpreter_needs_threads(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    for devices in (1, 3):
        monkeypatch.setattr(jax, "local_device_count", lambda devices=devices: devices)
        with pytest.raises(
            NotImplementedError, match=rf"4 cores or CPU devices, here are {max(devices, 2)}.*XLA_FLAGS"
        ):
            choose("pallas")
    monkeypatch.setattr(jax, "local_device_count", lambda: 4)
    assert choose("pallas") == "pallas"


def test_layers_take_products_of_one_implementation_and_the_rest_of_another(monkeypatch):
    """As on GPUs without Triton: xla exchanges and activates, and products choose for themselves."""
    monkeypatch.setattr(pallas, "refusal", lambda *_: None)
    monkeypatch.setattr(triton, "refusal", lambda *_: "not installed")
    chosen = []
    choose = registry.choose

    def choose_and_tell(options, operation, *facts):
        chosen.append((operation, choose(options, operation, *facts)))
        return chosen[-1][1]

    monkeypatch.setattr(registry, "choose", choose_and_tell)
    x, idx, weights = jnp.ones((4, 64), BF16), jnp.array([[0], [1], [1], [0]], jnp.int32), jnp.ones((4, 1), F32)
    w_gate_up, w_down = jnp.ones((2, 64, 64), BF16), jnp.ones((2, 32, 64), BF16)

    def layer(**options):
        chosen.clear()
        call = jax.jit(lambda *args: jax_ep.fused_moe(*args, **options))
        call.trace(x, idx, weights, w_gate_up, w_down)
        return set(chosen)

    assert layer() == {("exchange", "xla"), ("grouped_gemm", "pallas"), ("activation", "xla")}
    assert layer(implementation="xla") == {("exchange", "xla"), ("grouped_gemm", "xla"), ("activation", "xla")}
    assert layer(implementation=("pallas", "xla")) == layer()
