"""Quantize tokens to FP8, and expert weights to 8 and 4 bits; and back."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jax_ep import formats
from jax_ep.core import check, fp8
from jax_ep.core.autodiff import call_without_gradient, without_tangent
from jax_ep.core.check import operation
from jax_ep.core.check_fp8 import whole_groups_per_device
from jax_ep.core.expert_matrices import QArray, QuantizedWeights, as_transposed, has_kinds
from jax_ep.core.fp8 import GROUP_SIZE
from jax_ep.core.mesh_axes import is_one_device, on_automatic_axes, resized_spec, spec_of
from jax_ep.formats import check_quantized
from jax_ep.formats.base import PREPACKED_K, Format, Prepacked
from jax_ep.formats.qarrays import own_weights
from jax_ep.ops import plan, registry
from jax_ep.types import Array, Quantized
from jax_ep.values import type_name

# With `jax.jit`, here and below, an eager call compiles one program, and not one for each operation.
_fp8_rows = jax.jit(fp8.quantize_rows, static_argnames="group_size")
_rows_of_fp8 = jax.jit(fp8.dequantize_rows, static_argnames="dtype")


@operation
def quantize_fp8(x: Array, *, group_size: int = GROUP_SIZE) -> Quantized:
    """Quantize rows to FP8, with one scale per row and `group_size` columns.

    Args:
      x: `[..., H]` bfloat16, float16, float32 or float64, `H % group_size == 0`.
      group_size: columns that share a scale.

    Returns:
      `(values [..., H] float8_e4m3fn, scales [..., H // group_size] float32)` with `values * scale` within
      `max(|x| * 2**-4, scale * 2**-10)` of `x`, up to float32 rounding. An infinity or NaN makes its whole group
      NaN.

    Raises:
      ValueError: H is not a multiple of `group_size`.
      TypeError: x is not floating; by the gradient, because rounding is not differentiable.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_ep.quantization import quantize_fp8
      >>> values, scales = quantize_fp8(jnp.ones((2, 256)))
      >>> values.dtype.name, scales.shape
      ('float8_e4m3fn', (2, 2))
    """
    x = check.floating("quantize_fp8", "x", x, "[..., H]")
    group_size = check.integer("quantize_fp8", "group_size", group_size)
    check.fp8_columns("quantize_fp8", x.shape[-1], group_size)
    remedy = "quantize_fp8 has no gradient: dispatch and combine with Schedule(wire_dtype=float8_e4m3fn) have one."
    specs = P(*spec_of(x)), resized_spec(x, -1, x.shape[-1] // group_size)
    run = partial(on_automatic_axes, partial(_fp8_rows, group_size=group_size), specs)
    return call_without_gradient(remedy, run, x)


@operation
def dequantize_fp8(values: Array, scales: Array, dtype: DTypeLike) -> Array:
    """Return `values * scales` in `dtype`; the group size is `H // scales.shape[-1]`.

    Args:
      values: `[..., H]` float8_e4m3fn.
      scales: `[..., H // group_size]` float32.
      dtype: dtype of the result, floating with 16 bits or more.

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
    values, scales = check.quantized("dequantize_fp8", values, scales, "[..., H]")
    run = partial(_rows_of_fp8, dtype=check.result_dtype("dequantize_fp8", dtype, None, "dtype"))
    result: Array = on_automatic_axes(run, P(*spec_of(values)), values, scales)
    return result


_NO_GRADIENT = (
    "quantize has no gradient without for_training=True: train with the weights as they are, or pass"
    " jax.lax.stop_gradient(w)."
)


@operation
def quantize(
    w: Array,
    format: str | None,
    *,
    block_size: int | None = None,
    activations: str | None = None,
    smooth: Array | None = None,
    for_training: bool = False,
) -> QuantizedWeights:
    """Quantize expert weights once, for all calls of layers and GEMMs that use them.

    All formats are symmetric. Each has one scale for

      "fp8": a block of 128 by 128, float8_e4m3fn as in DeepSeek-V3;
      "fp8_channel": a column, float8_e4m3fn;
      "int8": a column, integers up to 127;
      "int4": `block_size` elements of a column, integers up to 7;
      "mxfp4": 32 elements of a column, a power of two, and values of e2m1, as in gpt-oss;
      None: not quantized, only transposed, as the GEMMs of `low_latency_moe` read weights.

    Args:
      w: `[..., E, K, N]` bfloat16, float16, float32 or float64, as `moe` takes them. With `for_training` also
        `[..., E, K, 2, N]`, or with 1 in place of 2: w_gate_up as `MeshAxes` splits it over a tensor axis.
      format: one of these.
      block_size: elements of a column that share a scale, even; only for "int4". None: the format's, 128 in "int4".
      activations: the dtype in which tokens are multiplied. "int8", with that format: each token has one scale, and
        GEMMs are of integers. "fp8", with all other formats: as `quantize_fp8` does, so K must be a multiple of 128;
        with format "fp8", GEMMs are those of DeepSeek-V3. None: tokens keep their dtype.
      smooth: `[..., E, K]` positive floats. The rows of w are multiplied by it before quantization, and the columns of
        tokens divided by it, so that outlier columns cost the others fewer bits. Only with `activations="int8"`. None:
        1.
      for_training: keep w as the master, which gets the gradient, and the values in both layouts, for `moe` with
        `recipe="fp8"`. `moe` quantizes plain weights in each call; with several microbatches, quantize once per step.
        Only with format "fp8" and no other options; K and N are multiples of 128.

    Returns:
      `QuantizedWeights` of the shape of w. The error of an element is at most half the step of the format times the
      scale: see `quantize_fp8` for FP8; half a scale for integers; for "mxfp4" a quarter of the element or of the
      scale, whichever is more. In "mxfp4" an element next to the largest of its block that rounds down may lose a third
      of the result. An infinity or NaN makes all elements that share its scale NaN.

      With `for_training`, the gradient of w is that of the layer with w itself, bit for bit if the same implementation
      rounds: outside of `jax.shard_map` with several GPUs, that is XLA.

    Raises:
      ValueError: another format; options that do not go with it; K is not a multiple of the elements that share a
        scale, or explicit mesh axes split them.
      TypeError: w is not floating; also by the gradient without `for_training`.

    Example:
      >>> import jax, jax.numpy as jnp, jax_ep
      >>> from jax_ep.quantization import dequantize, quantize
      >>> w = quantize(jnp.full((4, 64, 6), 3.0), "mxfp4")
      >>> w.shape, w.values.shape, w.scales.shape, dequantize(w, jnp.float32)[0, 0, 0].item()
      ((4, 64, 6), (4, 6, 32), (4, 6, 2), 3.0)
      >>> x, idx, weights = jnp.ones((2, 128)), jnp.array([[0], [1]]), jnp.ones((2, 1))
      >>> def loss(w_gate_up, w_down):
      ...     pair = [quantize(w, "fp8", for_training=True) for w in (w_gate_up, w_down)]
      ...     return jax_ep.fused_moe(x, idx, weights, *pair, recipe="fp8").sum()
      >>> jax.grad(loss)(jnp.ones((2, 128, 256)), jnp.ones((2, 128, 128))).shape
      (2, 128, 256)

    Source: DeepSeek-V3 (arXiv:2412.19437, section 3.3); OCP Microscaling Formats 1.0, section 6.3; SmoothQuant
    (arXiv:2211.10438, section 4).
    """
    w = check.floating("quantize", "w", w, "[..., K, N]")
    for_training = check.flag("quantize", "for_training", for_training)
    options = {"block_size": block_size, "activations": activations, "smooth": smooth}
    given = [name for name, value in options.items() if value is not None]
    if (given and (format is None or for_training)) or (for_training and format != "fp8"):
        others = ["for_training=True"] * for_training + given
        raise ValueError(
            f"quantize: {format=} with {', '.join(others)}, expected format='fp8' for training, and no other options;"
            " leave them out."
        )
    if format is None:
        return as_transposed(w)
    if for_training:
        return _quantize_for_training("quantize", w)
    wanted = check_quantized.format_named("quantize", format)
    block = check_quantized.block_size("quantize", wanted, block_size)
    check_quantized.depth("quantize", "axis -2 of w, K,", wanted, w.shape[-2], block)
    for axis, size in ((-2, block), (-1, wanted.block_n)):
        if size > 1:
            whole_groups_per_device("quantize", w, axis, w.shape[axis], size)
    smooth = check_quantized.activations("quantize", wanted, activations, smooth, w.shape[:-1])
    if not jnp.issubdtype(wanted.scale_dtype, jnp.floating):  # No cotangent would reach the rule of the call below.
        w = without_tangent(_NO_GRADIENT, w)

    def run(w: Array, smooth: Array | None) -> QuantizedWeights:
        if smooth is not None:
            w = on_automatic_axes(lambda w, s: w.astype(jnp.float32) * s[..., None], P(*spec_of(w)), w, smooth)
        values, scales = _stored(wanted, w, block)
        return QuantizedWeights(values, scales, wanted.name, smooth=smooth, activations=activations)

    return call_without_gradient(_NO_GRADIENT, run, w, smooth)


@partial(jax.jit, static_argnums=(0, 2))
def _stored(wanted: Format, w: Array, block: int) -> Quantized:
    return wanted.quantize(w, block)


@partial(jax.jit, static_argnames=("dtype", "kinds"))
def _rows(w: QuantizedWeights, dtype: DTypeLike, kinds: bool) -> Array:
    rows = formats.dequantize(w, dtype)
    return jnp.moveaxis(rows, -1, -3) if kinds else jnp.swapaxes(rows, -1, -2)


@partial(jax.jit, static_argnums=(0, 1))
def _relaid(prepacked: Prepacked, layout: str, values: Array, scales: Array) -> Quantized:
    return (prepacked.pack if layout == "prepacked" else prepacked.unpack)(values, scales)


def _quantize_for_training(function: str, w: Array) -> QuantizedWeights:
    matrices = jnp.moveaxis(w, -2, -3) if has_kinds(w.shape) else w
    for axis in (-2, -1):
        size, reason = matrices.shape[axis], f"as blocks of {GROUP_SIZE} by {GROUP_SIZE} share an FP8 scale"
        check.multiple(function, f"axis {axis} of w", size, GROUP_SIZE, reason, "pad with zeros")
        whole_groups_per_device(function, matrices, axis, size, GROUP_SIZE)
    values, values_kn, scales = _quantize_masters(jax.lax.stop_gradient(matrices))
    if has_kinds(w.shape):
        values_kn = jnp.moveaxis(values_kn, -3, -2)
    return QuantizedWeights(values, scales, "fp8", master=w, values_kn=values_kn)


def _quantize_masters(w: Array) -> tuple[Array, Array, Array]:
    if not is_one_device():  # kernels know no arrays that are spread over devices
        return registry.ACTIVATION.by("xla").quantize_masters(w)
    options = registry.options("quantize")
    part = plan.fp8_operands(options, w.dtype, w.shape, w.shape[-2])
    run = registry.ACTIVATION.by(part.implementation).quantize_masters
    found = run(w.reshape(math.prod(w.shape[:-2]), *w.shape[-2:]))
    values, values_kn, scales = (a.reshape(*w.shape[:-2], *a.shape[1:]) for a in found)
    return values, values_kn, scales


@operation
def dequantize(w: QuantizedWeights | QArray, dtype: DTypeLike) -> Array:
    """Return the weights that `QuantizedWeights` stand for.

    Args:
      w: the result of `quantize` or `with_layout`, or from a checkpoint; or a `qwix.QArray`.
      dtype: dtype of the result, floating with 16 bits or more.

    Returns:
      `[..., E, K, N]` array of `dtype`, multiplied in float32 and divided by `smooth`.

    Raises:
      ValueError: parts that do not fit together.
      TypeError: not `QuantizedWeights`, or parts of other dtypes.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_ep.quantization import dequantize, quantize
      >>> dequantize(quantize(jnp.ones((2, 128, 3)), "int8"), jnp.bfloat16).shape
      (2, 128, 3)
    """
    function = "dequantize"
    w = _checked(function, w)
    dtype = check.result_dtype(function, dtype, None, "dtype")
    *leading, columns, depth = spec_of(w.values)
    kinds = w.master is not None and has_kinds(w.shape)
    spec = P(*leading[:-1], depth, leading[-1], columns) if kinds else P(*leading, depth, columns)
    result: Array = on_automatic_axes(partial(_rows, dtype=dtype, kinds=kinds), spec, w)
    return result


@operation
def with_layout(w: QuantizedWeights | QArray, layout: str) -> QuantizedWeights:
    """Store 4-bit weights in another layout: "prepacked" for GPUs, or "transposed", as `quantize` returns them.

    With 16-bit tokens, decoding takes longer than reading 4-bit weights. In the prepacked layout one uint32 holds what
    one thread multiplies, with each bit where a shift and a mask leave it in place, and scales that are read together
    are adjacent. Every layer takes both layouts, with the same results up to the order of sums.

    Args:
      w: the result of `quantize` with format "int4" or "mxfp4", or from a checkpoint; `K % 32 == 0`; `activations` are
        None.
      layout: "prepacked" or "transposed".

    Returns:
      `QuantizedWeights` of the same weights, in as many bytes (if K is not a multiple of 128, with up to three more
      exponents per column). In the prepacked layout, elements whose scale is NaN keep only their signs; otherwise
      "transposed" is the inverse of "prepacked", bit for bit. The arrays keep their leading axes, so experts may be
      sharded.

    Raises:
      ValueError: another format or layout; K is not a multiple of 32; activations are not None; explicit mesh axes
        split K where devices hold no whole blocks, of 128 in "mxfp4" and 32 in "int4".
      TypeError: not `QuantizedWeights`, or parts of other dtypes.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_ep.quantization import dequantize, quantize, with_layout
      >>> w = with_layout(quantize(jnp.full((4, 64, 6), 3.0), "mxfp4"), "prepacked")
      >>> w.shape, w.values.shape, w.scales.shape, dequantize(w, jnp.float32)[0, 0, 0].item()
      ((4, 64, 6), (4, 6, 8), (4, 1, 6), 3.0)
      >>> with_layout(w, "transposed").values.shape
      (4, 6, 32)
    """
    function = "with_layout"
    w = _checked(function, w)
    check.choice(function, "layout", layout, ("prepacked", "transposed"))
    if w.layout == layout:
        return w
    prepacked = None if w.format is None else formats.format_of(w).prepacked
    if prepacked is None:
        names = " or ".join(repr(name) for name, found in formats.FORMATS.items() if found.prepacked)
        raise ValueError(
            f"{function}: w is in format {w.format!r}, expected {names}, because kernels read other formats as they"
            " are; pass w itself to the layer."
        )
    if layout == "transposed":
        values, scales = _relaid(prepacked, layout, w.values, cast(Array, w.scales))
        return dataclasses.replace(w, values=values, scales=scales, layout=layout)
    if w.activations is not None:
        raise ValueError(
            f"{function}: w has activations={w.activations!r}, expected None, as the prepacked layout is for 16-bit"
            " tokens; pass w itself to the layer, or dataclasses.replace(w, activations=None) here."
        )
    remedy = "pad with zeros before quantizing, or pass w itself to the layer"
    check.multiple(function, "K", w.shape[-2], PREPACKED_K, "the elements of four packed uint32", remedy)
    stored = jnp.asarray(w.values)
    whole_groups_per_device(function, stored, -1, w.shape[-2], prepacked.step, prepacks=True)
    values, scales = _relaid(prepacked, layout, w.values, cast(Array, w.scales))
    return dataclasses.replace(w, values=values, scales=scales, layout=layout)


def _checked(function: str, w: QuantizedWeights | QArray) -> QuantizedWeights:
    w = own_weights(function, "w", w)
    if not isinstance(w, QuantizedWeights):
        raise TypeError(f"{function}: w is {type_name(w)}, expected QuantizedWeights; pass the result of quantize.")
    return check_quantized.weights(function, "w", w, rank=None)
