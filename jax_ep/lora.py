"""LoRA adapters for expert weights: low-rank terms that are trained while the weights are frozen."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_ep.core import check
from jax_ep.core.check import errors_begin_with, names_arrays_apart
from jax_ep.core.dtypes import accumulation_dtype
from jax_ep.core.expert_matrices import LoraWeights as LoraWeights
from jax_ep.core.expert_matrices import QArray, QuantizedWeights, has_kinds
from jax_ep.core.mesh_axes import on_automatic_axes, spec_of
from jax_ep.formats import check_quantized
from jax_ep.formats.qarrays import own_weights
from jax_ep.quantization import dequantize
from jax_ep.types import Array
from jax_ep.values import shown, type_name

__all__ = ["LoraWeights", "init", "merge"]


@errors_begin_with("lora.init")
def init(
    key: Array, w: Array | QuantizedWeights | QArray, rank: int, *, scale: float = 1.0, dtype: DTypeLike | None = None
) -> LoraWeights:
    """Give each expert an adapter that changes nothing yet: `a` is random and `b` zero.

    Args:
      key: of `jax.random`.
      w: `[..., E, K, N]` weights, or `QuantizedWeights` without a master, or a `qwix.QArray`; or `[..., E, K, 2, N]`,
        see `MeshAxes`.
      rank: r, the columns of `a`; a multiple of 8 suits GPUs.
      scale: factor of the adapters, such as alpha / r; finite and not 0.
      dtype: of the adapters: that of the tokens. None: that of w, or bfloat16 for `QuantizedWeights`.

    Returns:
      `LoraWeights` with `a [..., E, K, r]`, uniform with variance 2 / K, and `b [..., E, r, N]`, which explicit mesh
      axes split as they split w.

    Raises:
      ValueError: w has fewer than three axes or a master, a rank is below 1, or a scale is 0 or not finite.
      TypeError: no array, or a dtype that tokens do not have.

    Example:
      >>> import jax, jax.numpy as jnp, jax_ep
      >>> from jax_ep import lora
      >>> w = lora.init(jax.random.key(0), jnp.ones((2, 4, 6)), rank=2)
      >>> w.a.shape, w.b.shape, jax_ep.grouped_gemm(jnp.ones((1, 4)), w, jnp.array([1, 0]))[0, 0].item()
      ((2, 4, 2), (2, 2, 6), 4.0)

    Source: LoRA (arXiv:2106.09685, section 4.1).
    """
    key = check.random_key("lora.init", "key", key)
    rank, factor = check.integer("lora.init", "rank", rank), check.finite("lora.init", "scale", scale)
    if factor == 0:
        raise ValueError(
            f"lora.init: scale={shown(scale)}, expected a float32 other than 0, with which adapters change nothing and"
            " get no gradient; pass 1.0 for no factor."
        )
    w = own_weights("lora.init", "w", w)
    if isinstance(w, QuantizedWeights):
        w = check_quantized.weights("lora.init", "w", w, rank=None)
        own, shape, stored = jnp.dtype(jnp.bfloat16), w.shape, w.values
        if w.master is not None:
            raise ValueError("lora.init: w has a master, expected frozen weights; quantize without for_training.")
    else:
        w = check.floating("lora.init", "w", w, "[..., E, K, N]")
        own, shape, stored = w.dtype, w.shape, w
    kinds = shape[-2:-1] if has_kinds(shape) else ()
    *leading, depth = shape[: -1 - len(kinds)]
    dtype = check.result_dtype("lora.init", dtype, own, "dtype")

    def adapters(key: Array, _: Array) -> tuple[Array, Array]:
        # As `jax.nn.initializers.he_uniform`, which takes no symbolic sizes.
        bound = jnp.sqrt(3 * jnp.asarray(2 / max(depth, 1), dtype))
        a = jax.random.uniform(key, (*leading, depth, rank), dtype, -1) * bound
        return a, jnp.zeros((*leading, rank, *kinds, shape[-1]), dtype)

    spec = list(spec_of(stored))
    if isinstance(w, QuantizedWeights):
        spec[-2:] = spec[:-3:-1]
    before, (of_k, *of_n) = spec[: len(leading)], spec[len(leading) :]
    specs = jax.P(*before, of_k, None), jax.P(*before, None, *of_n)
    # A program, which runs on the devices of the weights.
    a, b = jax.jit(partial(on_automatic_axes, adapters, specs), keep_unused=True)(key, stored)
    return LoraWeights(w, a, b, factor)


@errors_begin_with("lora.merge")
@names_arrays_apart
def merge(w: LoraWeights) -> Array:
    """Add the adapters to the weights, for inference: all layers take the result.

    Args:
      w: `LoraWeights` of an array or of `QuantizedWeights`.

    Returns:
      `[..., E, K, N]`: `base + scale * a @ b`, computed in float32 or wider, in the dtype of the base, or in that of
      the adapters if the base is quantized, and on the explicit mesh axes of the base. `jax_ep.quantize` quantizes it
      again.

    Raises:
      ValueError: parts that do not fit together.
      TypeError: not `LoraWeights`, or parts that are no arrays.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_ep import lora
      >>> w = lora.LoraWeights(jnp.ones((2, 4, 6)), jnp.ones((2, 4, 3)), jnp.ones((2, 3, 6)), scale=2.0)
      >>> lora.merge(w)[0, 0, 0].item()
      7.0
    """
    if not isinstance(w, LoraWeights):
        raise TypeError(f"lora.merge: w is {type_name(w)}, expected LoraWeights; pass the result of lora.init.")
    base, a, b, scale = _checked_parts("lora.merge", w)
    if a is None or b is None:
        return base
    wide = accumulation_dtype(base.dtype)
    product = "...kr,...rn->...kn" if b.ndim == a.ndim else "...kr,...rcn->...kcn"

    def merged(base: Array, a: Array, b: Array) -> Array:
        delta = jnp.einsum(product, a.astype(wide), b.astype(wide), precision="highest")
        return (base.astype(wide) + scale * delta).astype(base.dtype)

    result: Array = on_automatic_axes(merged, jax.P(*spec_of(base)), base, a, b)
    return result


def _checked_parts(function: str, w: LoraWeights) -> tuple[Array, Array | None, Array | None, float]:
    """Return base, a, b and scale, after checks that they fit together."""
    if (w.a is None) != (w.b is None):
        raise ValueError(f"{function}: w has one of a and b, expected both or none; make them with jax_ep.lora.init.")
    a = None if w.a is None else check.floating(function, "w.a", w.a, "[..., E, K, r]")
    base = own_weights(function, "w.base", w.base)
    if isinstance(base, QuantizedWeights):
        base = dequantize(base, jnp.float32 if a is None else a.dtype)
    base, scale = check.floating(function, "w.base", base, "[..., E, K, N]"), check.finite(function, "w.scale", w.scale)
    if a is None:
        return base, None, None, scale
    before, columns = base.shape[: a.ndim - 1], base.shape[a.ndim - 1 :] or base.shape[-1:]
    remedy = "make them with jax_ep.lora.init"
    a = check.floating(function, "w.a", a, f"[{', '.join(map(str, before))}, r >= 1]", remedy=remedy)
    shape = ", ".join(map(str, (*before[:-1], a.shape[-1], *columns)))
    return base, a, check.floating(function, "w.b", w.b, f"[{shape}]", remedy=remedy), scale
