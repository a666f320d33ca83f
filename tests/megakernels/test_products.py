"""Products between exchanges take the fastest kernel there is."""

import pytest

from jax_ep.megakernels import exchange_gemm, grouped_gemm
from jax_ep.pallas import grouped_gemm as pallas_gemm
from jax_ep.pallas import requirements


@pytest.mark.parametrize(
    ("rows", "platform", "lacking", "wanted"),
    [
        (2048, "gpu", None, "pallas"),
        (1024, "gpu", None, "triton"),
        (2048, "gpu", "another GPU", "triton"),
        (2048, "cpu", None, "triton"),
    ],
)
def test_the_fastest_kernel(rows, platform, lacking, wanted, monkeypatch):
    monkeypatch.setattr(exchange_gemm.jax, "default_backend", lambda: platform)
    monkeypatch.setattr(requirements, "missing", lambda: lacking)
    modules = {"pallas": pallas_gemm, "triton": grouped_gemm}
    assert exchange_gemm.fastest_products(rows, 64, 64, 8) is modules[wanted]
