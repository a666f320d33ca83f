"""What `pallas` does not support on CPU devices, and next to other implementations; GPUs: ops/test_platforms.py."""

import jax
import jax.numpy as jnp
import pytest

import facts_of
import jax_ep
from jax_ep.ops import registry
from jax_ep.pallas import requirements
from jax_ep.types import Experts, Options, Schedule

BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="this is about what CPU devices are given")


def choose(asked=None):
    names = (asked,) if isinstance(asked, str) else asked
    return registry.choose(Options("grouped_gemm", (), names), facts_of.gemm(BF16)).implementation


def test_pallas_support_order():
    assert registry.available() == ("triton", "pallas", "xla")
    assert registry.available("grouped_gemm") == registry.available()


def test_pallas_support_fusion_as_xla():
    options = Options("moe", (), ("pallas",), schedule=Schedule(dispatch_mode="fused"))
    with pytest.raises(NotImplementedError, match="pallas: it has no fused kernels"):
        registry.choose(options, facts_of.exchange(BF16, 64, columns=64))


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
