"""What `jax-ep tune` measures of products on one device: tiles, in bfloat16, in FP8, and of quantised matrices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep.core.dtypes import FP8
from jax_ep.core.fp8 import GROUP_SIZE
from jax_ep.ops import registry
from jax_ep.ops.masked import masked_grouped_gemm
from jax_ep.tools.benchmark import inputs
from jax_ep.tools.tune_chains import BF16, Sizes, few, make_chain, stored_as
from jax_ep.tools.tune_search import Case
from jax_ep.types import Array


class _Product(NamedTuple):
    """One of the layer with the experts of a rank: `[rows, depth]` times `[local, depth, columns]`.

    Attributes:
      mesh: of one device.
      x: the rows.
      y: rows of the result, or of its cotangent.
      w: the matrices.
      counts: rows of each expert, of all ranks.
    """

    mesh: jax.sharding.Mesh
    x: Array
    y: Array
    w: Array
    counts: Array

    @property
    def text(self) -> str:
        """For people."""
        return f"{self.x.shape[0]} rows x {self.w.shape[1]} x {self.w.shape[2]}, {self.w.shape[0]} groups"

    def facts(self, num_rows: int, dtype: Any) -> dict[str, Any]:
        """By which settings of the product and of the gradient of its matrices are looked up."""
        groups, depth, columns = self.w.shape
        sizes = {"num_rows": num_rows, "depth": depth, "columns": columns, "groups": groups}
        return sizes | {"dtype": jnp.dtype(dtype), "out_dtype": BF16}


def _products(sizes: Sizes) -> Iterator[_Product]:
    """Both."""
    mesh, local, rows = inputs.expert_mesh(1), sizes.experts // sizes.ranks, sizes.tokens * sizes.top_k
    model = inputs.Model(sizes.hidden, sizes.intermediate, local, 1)
    ids = inputs.routing(sizes.routing, rows, model, np.random.default_rng(0)) if local > 1 else np.zeros(rows, int)
    counts = jnp.asarray(np.bincount(ids.reshape(-1), minlength=local), jnp.int32)
    for depth, columns in ((sizes.hidden, 2 * sizes.intermediate), (sizes.intermediate, sizes.hidden)):
        x, y = (inputs.on_ranks(mesh, (rows, width), seed) for seed, width in enumerate((depth, columns)))
        yield _Product(mesh, x, y, inputs.on_ranks(mesh, (local, depth, columns), 2, depth**-0.5), counts)


def grouped_gemm(sizes: Sizes) -> Iterator[Case]:
    """Both products of the layer with the experts of a rank, and the gradient of the matrices."""
    run = registry.get("grouped_gemm", "triton")
    stored = {
        "num_stages": few(2, 3, 4, 5),
        "tma_store": (False, True),
        "store_parts": few(1, 2, 4),
        "programs": few(1, 2),
        "num_warps": few(4, 8),
        "group_m": few(4, 8, 16),
    }
    blocks = {"block_m": few(64, 128, 256), "block_n": few(64, 128, 256)}

    def product(zero: Array, x: Array, w: Array, counts: Array) -> Any:
        return run.grouped_gemm(x, w, counts + zero, transpose_rhs=False, out_dtype=BF16)

    def gradient(zero: Array, x: Array, y: Array, counts: Array) -> Any:
        return run.weight_gradient(x, y, counts + zero, out_dtype=BF16)

    for one in _products(sizes):
        facts = one.facts(one.x.shape[0], BF16)
        yield Case(
            operation="grouped_gemm",
            facts=facts,
            title=f"product of {one.text}",
            candidates=blocks | {"block_k": few(32, 64, 128)} | stored,
            make_chain=make_chain("grouped_gemm", one.mesh, product, (one.x, one.w, one.counts)),
        )
        yield Case(
            operation="weight_gradient",
            facts=facts,
            title=f"weight gradient of {one.text}",
            candidates=blocks | {"block_r": few(32, 64, 128)} | stored,
            make_chain=make_chain("weight_gradient", one.mesh, gradient, (one.x, one.y, one.counts)),
        )


def grouped_gemm_fp8(sizes: Sizes) -> Iterator[Case]:
    """The same of operands in FP8, where sizes have whole blocks."""
    if sizes.hidden % GROUP_SIZE or sizes.intermediate % GROUP_SIZE:
        return
    run, operands = registry.get("grouped_gemm", "triton"), registry.get("activation", "xla")
    tiles = {
        "block_m": few(64, 128),
        "block_n": few(64, 128),
        "num_stages": few(2, 3, 4, 5, 6),
        "programs": few(1, 2),
        "num_warps": few(4, 8),
        "group_m": few(4, 8, 16),
    }

    def product(zero: Array, x: Any, w: Any, counts: Array) -> Any:
        return run.grouped_gemm_fp8(x[0], w[0], counts + zero, x[1], w[1], out_dtype=BF16)

    def gradient(zero: Array, x: Any, y: Any, counts: Array) -> Any:
        return run.weight_gradient_fp8(x[0], y[0], counts + zero, x[1], y[1], out_dtype=BF16)

    for one in _products(sizes):
        x, w = jax.jit(operands.quantize_rows)(one.x, one.counts), jax.jit(operands.quantize_matrices)(one.w)
        yield Case(
            operation="grouped_gemm_fp8",
            facts=one.facts(one.x.shape[0], FP8),
            title=f"product in FP8 of {one.text}",
            candidates=tiles,
            make_chain=make_chain("grouped_gemm_fp8", one.mesh, product, (x, w, one.counts)),
        )
        x, y = (jax.jit(operands.quantize_columns)(rows, one.counts) for rows in (one.x, one.y))
        yield Case(
            operation="weight_gradient_fp8",
            facts=one.facts(x[0].shape[1], FP8),
            title=f"weight gradient in FP8 of {one.text}",
            candidates=tiles,
            make_chain=make_chain("weight_gradient_fp8", one.mesh, gradient, (x, y, one.counts)),
        )


def quantized_gemm(sizes: Sizes, expert_format: str) -> Iterator[Case]:
    """The first product with matrices in 8 or 4 bits."""
    run = registry.get("quantized_gemm", "triton")
    mesh, local = inputs.expert_mesh(1), sizes.experts // sizes.ranks
    rows, columns = sizes.tokens * sizes.top_k, 2 * sizes.intermediate
    x = inputs.on_ranks(mesh, (rows, sizes.hidden), 0)
    w = inputs.on_ranks(mesh, (local, sizes.hidden, columns), 1, sizes.hidden**-0.5)
    matrices = stored_as(expert_format, w)
    counts = jnp.full((local,), rows // local, jnp.int32)
    per_group = -(-rows // local)

    def product(zero: Array, x: Array, w: Any, counts: Array) -> Any:
        return run.grouped_gemm(x, w, counts + zero, None, out_dtype=BF16)

    facts: Mapping[str, Any] = {"rows_of_group": per_group, "depth": sizes.hidden, "columns": columns, "groups": local}
    yield Case(
        operation="quantized_gemm",
        facts={**facts, "dtype": BF16, "format": expert_format},
        title=f"product in {expert_format} of {rows} rows x {sizes.hidden} x {columns}, {local} groups",
        candidates={
            "block_m": few(16, 32, 64, 128),
            "block_n": few(64, 128, 256),
            "num_stages": few(2, 3, 4, 5),
            "programs": few(1, 2, 3),
            "num_warps": few(4, 8),
        },
        make_chain=make_chain("quantized_gemm", mesh, product, (x, matrices, counts), graphs=True),
    )


def masked_gemm(sizes: Sizes) -> Iterator[Case]:
    """The first product between a low-latency dispatch and its combine."""
    local = sizes.experts // sizes.ranks
    mesh = inputs.expert_mesh(1)
    expected = -(-sizes.ranks * sizes.tokens * sizes.top_k // sizes.experts)
    most = sizes.ranks * sizes.tokens
    counts = jnp.full((local,), min(expected, most), jnp.int32)

    def multiplied(zero: Array, rows: Array, w: Array, counts: Array) -> Any:
        options: dict[str, Any] = {"expected_rows": expected, "implementation": "triton"}
        return masked_grouped_gemm(rows, w, counts + zero, **options)

    rows = inputs.on_ranks(mesh, (local, most, sizes.hidden), 3)
    name, columns = "masked_grouped_gemm", 2 * sizes.intermediate
    w = inputs.on_ranks(mesh, (local, columns, sizes.hidden), 4, sizes.hidden**-0.5)
    product = {"num_rows": most, "depth": sizes.hidden, "columns": columns, "groups": local}
    tiles = {
        "block_m": few(16, 32, 64, 128),
        "block_n": few(64, 128),
        "num_stages": few(2, 3, 4, 5, 6),
        "programs": few(1, 2, 3),
        "num_warps": few(4, 8),
    }
    yield Case(
        operation=name,
        facts=product | {"expected_rows": expected, "dtype": BF16, "out_dtype": BF16},
        title=f"masked product of {sizes.title}",
        candidates=tiles,
        make_chain=make_chain(name, mesh, multiplied, (rows, w, counts), graphs=True),
    )
