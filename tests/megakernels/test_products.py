"""Products between exchanges take the fastest kernel there is."""

import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import BF16, F32, assert_close, reals

from jax_ep.megakernels import products
from jax_ep.pallas import gemm, requirements


def test_pallas_where_it_runs(rng, monkeypatch):
    monkeypatch.setattr(products, "by_pallas", lambda: True)
    called = []
    run = gemm.grouped_gemm
    monkeypatch.setattr(gemm, "grouped_gemm", lambda *args, **options: called.append(1) or run(*args, **options))
    lhs, rhs, sizes = reals(rng, 20, 64, dtype=BF16), reals(rng, 3, 64, 64, dtype=BF16), np.array([5, 0, 12], np.int32)
    out = products.grouped_gemm(*map(jnp.asarray, (lhs, rhs, sizes)), transpose_rhs=False, out_dtype=F32)
    assert called
    assert_close(np.asarray(out), oracle.grouped_gemm(lhs, rhs, sizes), "out")


@pytest.mark.parametrize(
    ("platform", "missing", "wanted"), [("gpu", None, True), ("gpu", "old", False), ("cpu", None, False)]
)
def test_by_pallas(platform, missing, wanted, monkeypatch):
    monkeypatch.setattr(products.jax, "default_backend", lambda: platform)
    monkeypatch.setattr(requirements, "missing", lambda: missing)
    assert products.by_pallas() is wanted
