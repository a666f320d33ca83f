"""PyTorch's own grouped products (CUTLASS), on the arrays of JAX: in bfloat16, and in FP8 with one scale per row."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

BF16, FP8 = "PyTorch _grouped_mm", "PyTorch _scaled_grouped_mm, FP8, a scale per row"
_LARGEST = 448.0


def is_here() -> bool:
    """Whether PyTorch is installed; it comes with none of the extras."""
    return jax.default_backend() == "gpu" and importlib.util.find_spec("torch") is not None


@dataclasses.dataclass(frozen=True)
class OnStream:
    """A tensor that PyTorch's stream is to make; one leaf for JAX, which waits for it by its method."""

    tensor: Any

    def block_until_ready(self) -> OnStream:
        import torch

        torch.cuda.synchronize()
        return self

    def array(self) -> Array:
        """As an array of JAX, when it is there."""
        return jnp.from_dlpack(self.block_until_ready().tensor)


def products(lhs: Array, rhs: Array) -> dict[str, Callable[[Array, Array, Array], OnStream]]:
    """Functions of operands as `jax_ep.grouped_gemm` takes them, of which only the sizes may differ from `lhs, rhs`.

    Matrices lie with the contraction last, which is faster there, and operands in FP8 are quantised before.
    """
    import torch

    rows = torch.from_dlpack(lhs)
    matrices = torch.from_dlpack(jnp.swapaxes(rhs, 1, 2).copy())
    row_scales, scales = (x.float().abs().amax(-1) / _LARGEST for x in (rows, matrices))
    fp8_rows = (rows.float() / row_scales[..., None]).to(torch.float8_e4m3fn)
    fp8_matrices = torch.stack(
        [(m.float() / s[..., None]).to(torch.float8_e4m3fn) for m, s in zip(matrices, scales, strict=True)]
    )
    ends: dict[int, Any] = {}

    def ends_of(sizes: Array) -> Any:
        key = id(sizes)
        if key not in ends:
            ends[key] = torch.from_dlpack(jnp.cumsum(sizes, dtype=jnp.int32)), sizes
        return ends[key][0]

    def in_bf16(_: Array, __: Array, sizes: Array) -> OnStream:
        return OnStream(torch._grouped_mm(rows, matrices.transpose(-2, -1), offs=ends_of(sizes)))

    def in_fp8(_: Array, __: Array, sizes: Array) -> OnStream:
        operands = fp8_rows, fp8_matrices.transpose(-2, -1), row_scales, scales
        keywords = {"offs": ends_of(sizes), "out_dtype": torch.bfloat16, "use_fast_accum": True}
        return OnStream(torch._scaled_grouped_mm(*operands, **keywords))

    return {BF16: in_bf16, FP8: in_fp8}
