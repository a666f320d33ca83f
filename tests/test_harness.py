"""The harness of the tests."""

import numpy as np
import pytest

import harness
import jax_ep
from cases import F32, reals


def refused(implementation, reason):
    """Return an error like those of `registry.choose`."""
    text = f"moe: no implementation of ('{implementation}',) supports this call: {implementation}: {reason}. Leave it."
    return NotImplementedError(text)


def test_refusals_skip_listed_reasons_of_the_tested_implementation(monkeypatch):
    monkeypatch.setattr(harness, "tested", "triton")

    def raised_by(error):
        with pytest.raises((NotImplementedError, pytest.skip.Exception)) as found, harness.refusals_skip():
            raise error
        return found.type

    listed, other = harness.REFUSALS["triton"][0], "it does not like this call"
    assert raised_by(refused("triton", listed)) is pytest.skip.Exception
    assert raised_by(refused("triton", other)) is NotImplementedError
    assert raised_by(refused("xla", listed)) is NotImplementedError
    assert raised_by(NotImplementedError(listed)) is NotImplementedError


def test_refusals_fail_tests_of_no_implementation(rng):
    """Such as tests of the choice: a listed reason does not skip them."""
    x, sizes = reals(rng, 4, 8, dtype=F32), np.array([2, 2], np.int32)
    with pytest.raises(NotImplementedError, match="its GEMMs support bfloat16"), harness.refusals_skip():
        jax_ep.grouped_gemm(x, reals(rng, 2, 8, 8, dtype=F32), sizes, implementation="pallas")
