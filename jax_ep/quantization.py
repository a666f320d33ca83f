"""FP8 rows and matrices, and expert matrices in 8 and 4 bits: quantising and back."""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_ep import formats
from jax_ep.core import check, check_recipe, fp8
from jax_ep.core.autodiff import call_without_gradient
from jax_ep.core.check_fp8 import matrices as check_matrices
from jax_ep.core.check_fp8 import quantized_matrices, whole_blocks_per_device, whole_groups_per_device
from jax_ep.core.expert_matrices import Fp8Weights, QuantizedExperts
from jax_ep.core.fp8 import GROUP_SIZE
from jax_ep.core.mesh_axes import is_one_device
from jax_ep.core.named_scopes import operation
from jax_ep.formats import check_quantized
from jax_ep.formats.base import PREPACKED_K, Format
from jax_ep.ops import plan, registry
from jax_ep.types import Array, Quantized, type_name


@operation
def quantize_fp8(x: Array, *, group_size: int = GROUP_SIZE) -> Quantized:
    """Quantises rows to FP8, one scale per row and `group_size` columns.

    Args:
      x: `[..., H]` bfloat16, float16, float32 or float64, `H % group_size == 0`.
      group_size: columns that share a scale.

    Returns:
      `(values [..., H] float8_e4m3fn, scales [..., H // group_size] float32)` with `values * scale` within
      `max(|x| * 2**-4, scale * 2**-10)` of `x`, up to float32 rounding. An infinity or NaN spoils its whole group.

    Raises:
      ValueError: H is not a multiple of `group_size`.
      TypeError: x is not floating; also by the gradient, which would not be that of quantisation.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_ep.quantization import quantize_fp8
      >>> values, scales = quantize_fp8(jnp.ones((2, 256)))
      >>> values.dtype.name, scales.shape
      ('float8_e4m3fn', (2, 2))
    """
    x = check.floating("quantize_fp8", "x", check.rows("quantize_fp8", "x", x, "[..., H]"))
    check.fp8_columns("quantize_fp8", x.shape[-1], group_size)
    remedy = "quantize_fp8 has no gradient: dispatch and combine with Schedule(wire_dtype=float8_e4m3fn) have one."
    return call_without_gradient(remedy, partial(fp8.quantize_rows, group_size=group_size), x)


@operation
def dequantize_fp8(values: Array, scales: Array, dtype: DTypeLike) -> Array:
    """`values * scales` in `dtype`; the group size is `H // scales.shape[-1]`.

    Args:
      values: `[..., H]` float8_e4m3fn.
      scales: `[..., H // group_size]` float32.
      dtype: dtype of the result.

    Returns:
      `[..., H]` array of `dtype`, multiplied in float32.

    Raises:
      ValueError: shapes that do not fit together.
      TypeError: other dtypes.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_ep.quantization import dequantize_fp8, quantize_fp8
      >>> float(dequantize_fp8(*quantize_fp8(jnp.ones((2, 128))), jnp.float32)[0, 0])
      1.0
    """
    values = check.rows("dequantize_fp8", "values", values, "[..., H]")
    values, scales = check.quantized("dequantize_fp8", values, scales, values.ndim)
    dtype = check.dtype("dequantize_fp8", "dtype", dtype, "one of the result, as jnp.bfloat16")
    return fp8.dequantize_rows(values, scales, dtype)


@operation
def quantize_fp8_weights(w: Array) -> Quantized:
    """Quantises expert matrices to FP8 for `masked_grouped_gemm`: transposed, one scale per block of 128 by 128.

    Args:
      w: `[..., K, N]` bfloat16, float16, float32 or float64, as `moe` takes them; `K % 128 == 0`.

    Returns:
      `(values [..., N, K] float8_e4m3fn, scales [..., ceil(N / 128), K / 128] float32)`, with the error of
      `quantize_fp8`. An infinity or NaN spoils its whole block.

    Raises:
      ValueError: K is not a multiple of 128; on explicit mesh axes, devices hold no whole blocks.
      TypeError: w is not floating; also by the gradient, which would not be that of quantisation.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_ep.quantization import quantize_fp8_weights
      >>> values, scales = quantize_fp8_weights(jnp.ones((4, 256, 384)))
      >>> values.shape, scales.shape
      ((4, 384, 256), (4, 3, 2))

    Source: blocks as in DeepSeek-V3 (arXiv:2412.19437, section 3.3).
    """
    function = "quantize_fp8_weights"
    w = check_matrices(function, "w", w)
    whole_blocks_per_device(function, "w", w)
    remedy = "quantize_fp8_weights has no gradient: train with the weights as they are."
    return call_without_gradient(remedy, fp8.quantize_matrices, w)


@operation
def dequantize_fp8_weights(values: Array, scales: Array, dtype: DTypeLike) -> Array:
    """`values * scales` in `dtype`, each scale for a block of 128 by 128.

    Args:
      values: `[..., N, K]` float8_e4m3fn.
      scales: `[..., ceil(N / 128), K / 128]` float32.
      dtype: dtype of the result.

    Returns:
      `[..., N, K]` array of `dtype`, multiplied in float32.

    Raises:
      ValueError, TypeError: as `dequantize_fp8` does.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_ep.quantization import dequantize_fp8_weights, quantize_fp8_weights
      >>> float(dequantize_fp8_weights(*quantize_fp8_weights(jnp.ones((128, 2))), jnp.float32)[0, 0])
      1.0
    """
    values, scales = quantized_matrices("dequantize_fp8_weights", values, scales)
    dtype = check.dtype("dequantize_fp8_weights", "dtype", dtype, "one of the result, as jnp.bfloat16")
    return fp8.dequantize_matrices(values, scales, dtype)


@operation
def quantize_master_weights(w: Array) -> Fp8Weights:
    """Expert matrices in FP8 for all products of a training step, with their master, which gets the gradient.

    `moe` quantises matrices in each call. Those of several microbatches are the same: quantise them once per step, and
    pass what this returns in their place. The gradient of w is that of the layer with w itself, bit for bit where the
    same implementation rounds: outside of `jax.shard_map`, and with several GPUs, that is XLA.

    Args:
      w: `[..., E, K, N]` bfloat16, float16, float32 or float64, as `moe` takes them, such as those of all layers,
        stacked; K and N are multiples of 128. Or `[..., E, K, 2, N]`, or with 1 in place of 2: w_gate_up as `MeshAxes`
        splits it over a tensor axis.

    Returns:
      `Fp8Weights`: w, and two bytes for each of its elements. An infinity or NaN makes its block of 128 by 128 NaN.

    Raises:
      ValueError: sizes that are no multiples of 128; on explicit mesh axes, devices hold no whole blocks.
      TypeError: w is not floating.

    Example:
      >>> import jax, jax.numpy as jnp, jax_ep
      >>> from jax_ep.quantization import quantize_master_weights
      >>> x, idx, weights = jnp.ones((2, 128)), jnp.array([[0], [1]]), jnp.ones((2, 1))
      >>> def loss(w_gate_up, w_down):
      ...     matrices = quantize_master_weights(w_gate_up), quantize_master_weights(w_down)
      ...     return jax_ep.fused_moe(x, idx, weights, *matrices, recipe="fp8").sum()
      >>> gradient = jax.grad(loss)(jnp.ones((2, 128, 256)), jnp.ones((2, 128, 128)))
      >>> gradient.shape, gradient.dtype.name
      ((2, 128, 256), 'float32')

    Source: blocks and master weights as in DeepSeek-V3 (arXiv:2412.19437, section 3.3).
    """
    function = "quantize_master_weights"
    w = matrices = check_matrices(function, "w", w, whole=False)
    if has_kinds := w.ndim > 3 and w.shape[-2] in (1, 2):
        matrices = jnp.moveaxis(w, -2, -3)
    check_recipe.whole_matrices(function, "w", matrices)
    whole_blocks_per_device(function, "w", matrices)
    values, transposed, scales = _quantize_masters(jax.lax.stop_gradient(matrices))
    if has_kinds:
        transposed = jnp.moveaxis(transposed, -3, -2)
    return Fp8Weights(w, values, transposed, scales)


def _quantize_masters(w: Array) -> tuple[Array, Array, Array]:
    if not is_one_device():  # kernels know no arrays that are spread over devices
        values, scales = fp8.quantize_matrices(w)
        return values, jnp.swapaxes(values, -1, -2), scales
    options = registry.options("quantize_master_weights")
    part = plan.fp8_operands(options, w.dtype, w.shape, w.shape[-2])
    run = registry.get("activation", part.implementation).quantize_masters
    found = run(w.reshape(math.prod(w.shape[:-2]), *w.shape[-2:]))
    values, transposed, scales = (a.reshape(*w.shape[:-2], *a.shape[1:]) for a in found)
    return values, transposed, scales


@operation
def quantize_experts(
    w: Array,
    format: str,
    *,
    block_size: int | None = None,
    activations: str | None = None,
    smooth: Array | None = None,
) -> QuantizedExperts:
    """Expert matrices in 8 or 4 bits, for products with tokens that keep their dtype.

    All formats are symmetric. Each has one scale for

      "fp8": a block of 128 by 128, float8_e4m3fn as in DeepSeek-V3;
      "fp8_channel": a column, float8_e4m3fn;
      "int8": a column, integers up to 127;
      "int4": `block_size` elements of a column, integers up to 7;
      "mxfp4": 32 elements of a column, a power of two, and values of e2m1, as gpt-oss has them.

    Args:
      w: `[..., E, K, N]` bfloat16, float16, float32 or float64, as `moe` takes them.
      format: one of these.
      block_size: elements of a column that share a scale, even; "int4" takes it. None: the format's, 128 in "int4".
      activations: tokens are quantised too where they are multiplied. "int8", with that format: each by its largest
        element, and products are of integers. "fp8", with all other formats: as `quantize_fp8` does, for which K is a
        multiple of 128; with "fp8", products are those of DeepSeek-V3. None: tokens keep their dtype.
      smooth: `[..., E, K]` positive floats, by which the rows of w are multiplied before they are quantised, and by
        which the columns of tokens are divided before they are, so that columns with large elements cost other elements
        fewer bits; only with `activations="int8"`. None: 1.

    Returns:
      `QuantizedExperts`, transposed: it stands for matrices `[..., E, N, K]`. Half the step of a format times the scale
      bounds the error of an element: in FP8 see `quantize_fp8`; in integers half a scale; in "mxfp4" a quarter of the
      element or of the scale, whichever is more, but for what is next to the largest of its group and rounds down, a
      third of what it becomes. An infinity or NaN makes all elements that share its scale NaN.

    Raises:
      ValueError: another format; K is no multiple of the elements that share a scale, or explicit mesh axes split it
        between these.
      TypeError: w is not floating; also by the gradient, which would not be that of quantisation.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_ep.quantization import dequantize_experts, quantize_experts
      >>> w = quantize_experts(jnp.full((4, 64, 6), 3.0), "mxfp4")
      >>> w.values.shape, w.scales.shape, dequantize_experts(w, jnp.float32)[0, 0, 0].item()
      ((4, 6, 32), (4, 6, 2), 3.0)

    Source: DeepSeek-V3 (arXiv:2412.19437, section 3.3); OCP Microscaling Formats 1.0, section 6.3; SmoothQuant
    (arXiv:2211.10438, section 4).
    """
    function = "quantize_experts"
    w = check_matrices(function, "w", w, whole=False)
    wanted = check_quantized.format_named(function, format)
    block = check_quantized.block_size(function, wanted, block_size)
    check_quantized.depth(function, "axis -2 of w, K,", wanted, w.shape[-2], block)
    for axis, size in ((-2, block), (-1, wanted.block_n)):
        if size > 1:
            whole_groups_per_device(function, "w", w, axis, w.shape[axis], size)
    smooth = check_quantized.activations(function, wanted, activations, smooth, w.shape[:-1])
    remedy = "quantize_experts has no gradient: train with the weights as they are."
    quantize = partial(_quantize_experts, wanted, block, activations)
    return call_without_gradient(remedy, quantize, w, smooth)


def _quantize_experts(
    wanted: Format, block_size: int, activations: str | None, w: Array, smooth: Array | None
) -> QuantizedExperts:
    if smooth is not None:
        w = w.astype(jnp.float32) * smooth[..., None]
    return QuantizedExperts(*wanted.quantize(w, block_size), wanted.name, smooth, activations)


@operation
def dequantize_experts(w: QuantizedExperts, dtype: DTypeLike) -> Array:
    """The matrices for which they stand.

    Args:
      w: of `quantize_experts`.
      dtype: dtype of the result.

    Returns:
      `[..., E, N, K]` array of `dtype`, multiplied in float32: transposed, as they are kept, and divided by `smooth`.

    Raises:
      ValueError: parts that do not belong together.
      TypeError: no `QuantizedExperts`, or parts of other dtypes.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_ep.quantization import dequantize_experts, quantize_experts
      >>> dequantize_experts(quantize_experts(jnp.ones((2, 128, 3)), "int8"), jnp.bfloat16).shape
      (2, 3, 128)
    """
    function = "dequantize_experts"
    w = _whole_experts(function, w)
    dtype = check.dtype(function, "dtype", dtype, "one of the result, as jnp.bfloat16")
    if w.smooth is None:
        return formats.dequantize(w, dtype)
    wide = formats.dequantize(w, jnp.float32)
    return (wide / w.smooth[..., None, :]).astype(dtype)


@operation
def prepack_experts(w: QuantizedExperts) -> QuantizedExperts:
    """Puts 4-bit weights into the order in which the kernels of `triton` need fewest instructions per element.

    With tokens in 16 bits these instructions take longer than reading the weights. In this order one uint32 is what one
    thread multiplies, with each bit where a shift and a mask leave it in place, and scales that are read together are
    neighbors. Every layer takes both orders, with the same results up to the order of sums.

    Args:
      w: of `quantize_experts` in format "int4" or "mxfp4", or of a checkpoint; `K % 32 == 0`; `activations` are None.

    Returns:
      `QuantizedExperts` with values `[..., E, N, K / 8]` uint32, which stand for the same weights in as many bytes (if
      K is no multiple of 128, with up to three more exponents per column). Elements whose scale is NaN keep only their
      signs. The arrays have the leading axes of w, so that experts may be sharded. `unprepack_experts` is the inverse.

    Raises:
      ValueError: another format; K is no multiple of 32; activations are not None; w is prepacked already; explicit
        mesh axes split K where devices hold no whole blocks, of 128 in "mxfp4" and 32 in "int4".
      TypeError: no `QuantizedExperts`, or parts of other dtypes.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_ep.quantization import dequantize_experts, prepack_experts, quantize_experts
      >>> w = prepack_experts(quantize_experts(jnp.full((4, 64, 6), 3.0), "mxfp4"))
      >>> w.shape, w.values.shape, w.scales.shape, dequantize_experts(w, jnp.float32)[0, 0, 0].item()
      ((4, 6, 64), (4, 6, 8), (4, 1, 6), 3.0)
    """
    function = "prepack_experts"
    w = _whole_experts(function, w)
    if w.is_prepacked:
        raise ValueError(f"{function}: w is prepacked already, expected what quantize_experts returned; pass that.")
    layout = formats.format_of(w).prepacked
    if layout is None:
        names = " or ".join(repr(name) for name, found in formats.FORMATS.items() if found.prepacked)
        raise ValueError(
            f"{function}: w is in {w.format!r}, expected {names}, as kernels read 8 bits as they are; pass w itself to"
            " the layer."
        )
    if w.activations is not None:
        raise ValueError(
            f"{function}: w has activations={w.activations!r}, expected None, as the order is for tokens in 16 bits;"
            " pass w itself to the layer, or dataclasses.replace(w, activations=None) here."
        )
    if w.shape[-1] % PREPACKED_K:
        raise ValueError(
            f"{function}: K is {w.shape[-1]}, expected a multiple of {PREPACKED_K}, the elements of four packed uint32;"
            " pad with zeros before quantizing, or pass w itself to the layer."
        )
    whole_groups_per_device(function, "w", jnp.asarray(w.values), -1, w.shape[-1], layout.step)
    values, scales = layout.pack(w.values, w.scales)
    return dataclasses.replace(w, values=values, scales=scales)


@operation
def unprepack_experts(w: QuantizedExperts) -> QuantizedExperts:
    """The inverse of `prepack_experts`, bit for bit.

    Args:
      w: of `prepack_experts`, values `[..., E, N, K / 8]` uint32.

    Returns:
      What `quantize_experts` returned, values `[..., E, N, K / 2]` uint8, where its scales are no NaN.

    Raises:
      ValueError: w is not prepacked, or its parts do not belong together.
      TypeError: no `QuantizedExperts`, or parts of other dtypes.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_ep.quantization import prepack_experts, quantize_experts, unprepack_experts
      >>> w = quantize_experts(jnp.ones((2, 128, 3)), "int4")
      >>> bool((unprepack_experts(prepack_experts(w)).values == w.values).all())
      True
    """
    function = "unprepack_experts"
    w = _whole_experts(function, w)
    layout = formats.format_of(w).prepacked
    if layout is None or not w.is_prepacked:
        raise ValueError(f"{function}: w is not prepacked, expected what prepack_experts returned; pass that.")
    values, scales = layout.unpack(w.values, w.scales)
    return dataclasses.replace(w, values=values, scales=scales)


def _whole_experts(function: str, w: QuantizedExperts) -> QuantizedExperts:
    if not isinstance(w, QuantizedExperts):
        raise TypeError(f"{function}: w is {type_name(w)}, expected QuantizedExperts; see quantize_experts.")
    return check_quantized.experts(function, "w", w)
