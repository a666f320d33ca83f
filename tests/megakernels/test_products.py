"""Products between exchanges take the fastest kernel there is."""

import jax
import jax.numpy as jnp
import pytest

from jax_ep.megakernels import exchange_gemm, grouped_gemm
from jax_ep.pallas import grouped_gemm as pallas_gemm
from jax_ep.pallas import requirements


@pytest.mark.parametrize("transpose", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize(
    ("rows", "platform", "lacking", "wanted"),
    [
        (2048, "gpu", None, "pallas"),
        (1024, "gpu", None, "triton"),
        (2048, "gpu", "another GPU", "triton"),
        (2048, "cpu", None, "triton"),
    ],
)
def test_the_fastest_kernel(rows, platform, lacking, wanted, transpose, monkeypatch):
    monkeypatch.setattr(exchange_gemm.jax, "default_backend", lambda: platform)
    monkeypatch.setattr(requirements, "missing", lambda: lacking)
    for module, name in ((pallas_gemm, "pallas"), (grouped_gemm, "triton")):
        monkeypatch.setattr(module, "grouped_gemm", lambda *_, name=name, **options: (name, options))
        monkeypatch.setattr(module, "weight_gradient", lambda *_, name=name, **options: (name, options))
    arguments = jax.ShapeDtypeStruct((rows, 64), jnp.bfloat16), jax.ShapeDtypeStruct((8, 64, 64), jnp.bfloat16), None
    chosen, options = exchange_gemm.multiply(*arguments, transpose_rhs=transpose, out_dtype=jnp.bfloat16)
    assert chosen == wanted
    assert options == {"transpose_rhs": transpose, "out_dtype": jnp.bfloat16}
    left, sizes = arguments[0], jax.ShapeDtypeStruct((8,), jnp.int32)
    found = exchange_gemm.multiply_for_gradient(left, left, sizes, out_dtype=jnp.float32)
    assert found == (wanted, {"out_dtype": jnp.float32})
