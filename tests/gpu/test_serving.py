"""The example generates the same text with the low-latency kernels as with the training kernels."""

import jax
import numpy as np
import pytest

NEW = 16 if jax.default_backend() == "gpu" else 2
PROMPTS = [b"import sys", b"def f(x):", b"a"]


@pytest.mark.parametrize(
    ("experts", "dtype", "most"),
    [("same", "float32", 1e-5), ("same", "bfloat16", 0.05), ("fp8", "bfloat16", 0.2)],
    ids=["float32", "bfloat16", "fp8"],
)
@pytest.mark.slow
def test_low_latency_decoding(one_process, experts, dtype, most):
    """XLA computes float32 GEMMs, the kernels all others; `most` is relative to the spread of the logits."""
    pytest.importorskip("flax")
    from flax import nnx

    from lm.devices import make_mesh
    from lm.generation import Generator, compare
    from lm.model import LanguageModel, ModelConfig

    ranks = min(4, jax.device_count()) if jax.default_backend() == "gpu" else 2
    config = ModelConfig(hidden=128, layers=2, heads=2, intermediate=128, shared_experts=1, dtype=dtype)
    mesh = make_mesh(max_devices=ranks, num_experts=8, expert_parallel=ranks)
    model = LanguageModel(config, mesh=mesh, rngs=nnx.Rngs(6))
    model.head.kernel[...] = model.head.kernel[...] * 40  # Far from uniform, so that the argmax is stable.
    found = compare(Generator(model, mesh), Generator(model, mesh, experts=experts), PROMPTS, max_new=NEW)
    assert np.isfinite(found.logit_scale) and found.logit_scale > 1
    assert found.logit_error / found.logit_scale < most
    assert found.same_bytes == 1 if dtype == "float32" else found.same_bytes > 0.75
