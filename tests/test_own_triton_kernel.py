"""`examples/own_triton_kernel.py`: its kernels run in Triton's interpreter, and become code for GPUs."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import own_triton_kernel as example
from jax_ep.core import jax_triton
from jax_ep.core.kernel import Config, Kernel
from jax_ep.megakernels.launch import launch

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="the example itself runs on GPUs")

learned_swish = pytest.importorskip("own_kernels.learned_swish")


@pytest.fixture
def interpreted(two_ranks: Mesh, monkeypatch: pytest.MonkeyPatch) -> Mesh:
    """Two ranks on which the example's kernels run in Triton's interpreter, by the interface of `triton_call`."""

    def call(name: str, arrays: Any, results: Any, num_programs: int, **constants: int) -> Any:
        return launch(Kernel(getattr(learned_swish, name)), arrays, results, Config(num_programs), constants)

    monkeypatch.setattr(example, "call_kernel", call)
    monkeypatch.setattr(example, "varying", lambda x: x)  # `launch` types results itself
    return two_ranks


def test_kernels(interpreted: Mesh, rng: np.random.Generator) -> None:
    """Against NumPy in float64, at widths that no block divides, with padding rows that hold NaN."""
    rows, inner, local = 23, 150, 3
    hidden, d_out = rng.standard_normal((rows, 2 * inner)), rng.standard_normal((rows, inner))
    slopes, weights = rng.uniform(0.5, 2, local), rng.standard_normal(rows)
    experts = rng.integers(-1, local, rows)
    experts[:2] = -1, 0
    is_padding = experts < 0
    hidden[is_padding], d_out[is_padding] = np.nan, np.nan
    single = [jnp.asarray(a, jnp.float32) for a in (hidden, slopes, weights)]
    out, vjp = jax.vjp(lambda *args: example.activate(*args, jnp.asarray(experts, jnp.int32)), *single)
    got = [np.asarray(a, np.float64) for a in (out, *vjp(jnp.asarray(d_out, jnp.float32)))]

    exact = [np.nan_to_num(np.asarray(a, np.float64)) for a in (*single, jnp.asarray(d_out, jnp.float32))]
    hidden, slopes, weights, d_out = exact
    gate, up, slope = hidden[:, :inner], hidden[:, inner:], np.where(is_padding, 0, slopes[experts])[:, None]
    share, weight = 1 / (1 + np.exp(-slope * gate)), weights[:, None]
    by_slope = gate**2 * share * (1 - share)
    d_gate = d_out * weight * up * (share + slope * gate * share * (1 - share))
    d_slopes = np.zeros(local)
    np.add.at(d_slopes, experts[~is_padding], np.sum(d_out * weight * up * by_slope, axis=1)[~is_padding])
    want = [
        weight * gate * share * up,
        np.concatenate([d_gate, d_out * weight * gate * share], axis=1),
        d_slopes,
        np.sum(d_out * gate * share * up, axis=1),
    ]
    for a, b in zip(got, want, strict=True):
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b)
    assert not got[0][is_padding].any() and not got[1][is_padding].any()


@pytest.mark.slow
def test_layer(interpreted: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole layer and its gradients against plain JAX, and that it learns."""
    monkeypatch.setattr(example, "TOKENS", 48)
    arguments = example.make_inputs(jax.random.key(0))
    layer = example.on_all_devices(interpreted)
    assert example.compare(layer, arguments) < 1e-4
    losses = example.train(layer, arguments, 3)
    assert losses[2] < losses[1] < losses[0]


def test_code_for_gpus(two_ranks: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    package = jax_triton.load()
    monkeypatch.setattr(package, "triton_call", functools.partial(package.triton_call, compute_capability=90))

    def per_rank(*arguments: Any) -> Any:
        *arrays, experts, d_out = arguments
        out, vjp = jax.vjp(lambda *args: example.activate(*args, experts), *arrays)
        return out, *vjp(d_out)

    shapes = [((2 * 64, 2 * 96), jnp.bfloat16), ((8,), jnp.float32), ((2 * 64,), jnp.float32), ((2 * 64,), jnp.int32)]
    arrays = [jax.ShapeDtypeStruct(*shape) for shape in (*shapes, ((2 * 64, 96), jnp.bfloat16))]
    specs = {"in_specs": jax.P("expert"), "out_specs": jax.P("expert")}
    run = jax.jit(jax.shard_map(per_rank, mesh=two_ranks, **specs))
    text = run.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@triton_kernel_call_ffi") == 2


@pytest.mark.parametrize(
    ("platform", "words"),
    [
        ("cpu", "runs on GPUs, but JAX's devices here are on platform cpu"),
        ("gpu", "not installed: jax-triton; pip install"),
    ],
)
def test_what_is_missing(platform: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=words):
        example.main()
