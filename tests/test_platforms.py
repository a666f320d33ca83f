"""What is used on which GPUs, as README says, and what the refusals of the others say; with devices that are faked."""

from __future__ import annotations

import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_ep
from jax_ep.ops import registry
from jax_ep.ops.registry import Request
from jax_ep.types import Layout

pytest.importorskip("triton")
BF16, FP8 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float8_e4m3fn)
LAYOUT = Layout(2, 8, 256, 2, 1024)
PRODUCT = (1 << 13, 256, 256, 8)
OPERATIONS = {
    "exchange": {"dtype": BF16, "operation": "exchange", "layout": LAYOUT},
    "exchange in FP8": {"dtype": BF16, "operation": "exchange", "layout": LAYOUT, "wire_dtype": FP8},
    "large products": {"dtype": BF16, "operation": "gemm", "product": PRODUCT},
    "small products": {"dtype": BF16, "operation": "gemm", "product": (64, 256, 256, 8)},
    "products in FP8": {"dtype": FP8, "operation": "gemm"},
    "low latency": {"dtype": BF16, "operation": "low_latency", "layout": LAYOUT},
    "low latency in FP8": {"dtype": FP8, "operation": "low_latency", "layout": LAYOUT},
    "masked products": {"dtype": BF16, "operation": "masked_gemm"},
    "masked activation to FP8": {"dtype": BF16, "operation": "masked_activation", "wire_dtype": FP8},
}
HOPPER = dict.fromkeys(OPERATIONS, "triton") | {"large products": "pallas"}
PRODUCTS = ("large products", "small products", "products in FP8", "masked products")
WITHOUT_TMA = dict.fromkeys(OPERATIONS, "triton") | dict.fromkeys(PRODUCTS, "xla")
IN_FP8 = ("exchange in FP8", "low latency in FP8", "masked activation to FP8")
AMPERE = WITHOUT_TMA | dict.fromkeys(IN_FP8, "xla")
USED = {
    "7.5": dict.fromkeys(OPERATIONS, "xla"),
    "8.0": AMPERE,
    "8.6": AMPERE,
    "8.9": WITHOUT_TMA,
    "9.0": HOPPER,
    "10.0": HOPPER | {"large products": "triton"},
    "12.0": WITHOUT_TMA,
    "gfx942": dict.fromkeys(OPERATIONS, "xla"),
}


@pytest.fixture
def gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """GPUs of that compute capability, with peer access."""
    jax_ep.finalize()
    device = types.SimpleNamespace(platform="gpu", compute_capability=request.param, device_kind="a GPU")
    monkeypatch.setattr(jax, "local_devices", lambda *_, **__: [device])
    monkeypatch.setattr("jax_ep.heap.peer_access.missing", lambda: None)
    registry._say_once.cache_clear()
    return request.param


def request(name: str, **changes: Any) -> Request:
    return Request(**{"function": "moe", "hidden": 256, "platform": "gpu"} | OPERATIONS[name] | changes)


@pytest.mark.parametrize(("gpus", "used"), USED.items(), indirect=["gpus"], ids=USED)
def test_what_is_used(gpus: str, used: dict[str, str]) -> None:
    assert {name: registry.choose(None, request(name)) for name in OPERATIONS} == used


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
def test_refusals_name_the_capability_and_what_is_used(gpus: str, name: str, asked: str, needed: str) -> None:
    with pytest.raises(NotImplementedError) as caught:
        registry.choose(asked, request(name))
    message = str(caught.value)
    assert needed in message and gpus in message and "`xla`" in message


@pytest.mark.parametrize("gpus", ["8.0"], indirect=True)
def test_a_fused_mode_needs_tma(gpus: str) -> None:
    with pytest.raises(NotImplementedError, match=r"GPUs with TMA \(9.0 to 11.x\)"):
        registry.choose("triton", request("exchange", mode="scatter", columns=256))


@pytest.mark.parametrize("gpus", ["8.0"], indirect=True)
def test_products_without_tensor_cores_need_no_tma(gpus: str) -> None:
    """float32 is a loop over products of XLA in every implementation."""
    assert registry.choose("triton", request("large products", dtype=jnp.dtype(jnp.float32))) == "triton"


def test_other_platforms() -> None:
    for platform in ("tpu", "METAL"):
        assert registry.choose(None, request("exchange", platform=platform)) == "xla"
        with pytest.raises(NotImplementedError, match=f"the platform is {platform}, it needs NVIDIA GPUs"):
            registry.choose("triton", request("exchange", platform=platform))
