"""The race detector of Mosaic's interpreter."""

import functools

import jax
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu


@pytest.fixture
def races(monkeypatch, capfd):
    """Run kernels with the race detector; return its findings.

    The detector treats the two views of the result memory as one buffer of both consumers, so they must not share any.
    The order of one consumer's accesses is covered anyway: both views wait for all stores before them.
    """
    if jax.default_backend() != "cpu":
        yield lambda: 0
        return
    checked = functools.partial(plgpu.InterpretGPUParams, detect_races=True)
    monkeypatch.setattr(plgpu, "InterpretGPUParams", checked)
    monkeypatch.setattr(plgpu, "RefUnion", lambda *views: views)
    jax.clear_caches()
    yield lambda: capfd.readouterr().out.count("RACE DETECTED")
    jax.clear_caches()
