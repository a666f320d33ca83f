"""Plans for reading a layer's parameters: checked lists of tensors and regions, not yet read."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jax_ep.checkpoints.decoded import FP8, MXFP4, MXFP4_BYTES, SCALES, BlockFP8, blocks, num_blocks
from jax_ep.checkpoints.families import Family, Form, Stored, check_quantization
from jax_ep.checkpoints.files import TensorFiles
from jax_ep.checkpoints.shards import Part, Region, swapped
from jax_ep.core.fp8 import GROUP_SIZE
from jax_ep.core.json_files import shown

_MXFP4_SCALES = (np.dtype(np.uint8), np.dtype(ml_dtypes.float8_e8m0fnu))


class Plan(NamedTuple):
    """The arguments of `shards.make_array` for one array."""

    shape: tuple[int, ...]
    dtype: np.dtype
    parts: list[Part]
    transposed: bool = False


def form_of(files: TensorFiles, family: Family, layer: int) -> Form:
    """Return the form that these files use for the tensors of a layer."""
    prefix = family.prefix.format(layer=layer)
    forms = [{name: stored.with_prefix(prefix) for name, stored in form.items()} for form in family.forms]
    present = {name: form for form in forms if (name := form["w_down"].names[0].format(expert=0)) in files}
    if len(present) > 1:
        raise ValueError(
            f"Checkpoint: layer {layer} has {' and '.join(map(repr, present))}, expected its experts once; remove"
            " those of another checkpoint."
        )
    return next(iter(present.values()), forms[0])  # Without any, an error names the first missing tensor.


def decoded(files: TensorFiles, name: str) -> Any:
    """Return a tensor as floats; quantized values are multiplied by their scales when they are read."""
    values = files[name]
    if values.dtype.itemsize > 1:
        return values
    if values.dtype == FP8 and name + SCALES in files:
        check_quantization("Checkpoint", files.config)
        scales = files[name + SCALES]
        if scales.shape != num_blocks(values.shape) or not jnp.issubdtype(scales.dtype, np.floating):
            raise ValueError(
                f"Checkpoint: {shown(name + SCALES)} has shape {scales.shape} and dtype {scales.dtype}, expected"
                f" {num_blocks(values.shape)} and a float dtype, one scale per block of 128 by 128 of {values.shape};"
                " convert checkpoints with other scales."
            )
        return BlockFP8(values, scales)
    of_mxfp4 = name.removesuffix("_blocks") + "_scales"
    if values.dtype != np.uint8 or of_mxfp4 not in files:
        raise ValueError(
            f"Checkpoint: {shown(name)} is stored as {values.dtype}, without scales of FP8 by blocks of 128 by 128 or"
            " of MXFP4, expected one of these, or 16 bits and more; convert checkpoints in other quantized formats, or"
            " read the tensor as it is stored, without dtype."
        )
    scales = files[of_mxfp4]
    if values.shape != (*scales.shape, MXFP4_BYTES) or scales.ndim < 2 or scales.dtype not in _MXFP4_SCALES:
        raise ValueError(
            f"Checkpoint: {shown(name)} has shape {values.shape} and {scales.dtype} scales {scales.shape}, expected"
            f" {(*scales.shape, MXFP4_BYTES)} and two axes or more of uint8 or float8_e8m0fnu scales; download the"
            " checkpoint again."
        )
    return MXFP4(values, scales)


def plan(files: TensorFiles, parameter: str, stored: Stored, shape: tuple[int, ...], dtype: np.dtype | None) -> Plan:
    """Plan the reading of a parameter in `dtype`; None keeps the dtype of its tensors."""
    parts = []
    found: dict[np.dtype, str] = {}
    for name, region in stored.places(swapped(shape) if stored.transposed else shape):
        source = decoded(files, name)
        expected = stored.shape(region)
        if source.shape != expected:
            raise ValueError(
                f"Checkpoint: {shown(name)} has shape {source.shape}, expected {expected} for {parameter} {shape};"
                " config.json and tensors do not match: download both again."
            )
        if not jnp.issubdtype(source.dtype, np.floating):
            raise ValueError(
                f"Checkpoint: {shown(name)} is stored as {source.dtype}, expected floats for {parameter}; convert"
                " checkpoints in other quantized formats."
            )
        found.setdefault(source.dtype, name)
        parts.append(Part(source[0] if stored.leading_one else source, region))
    if dtype is None and len(found) > 1:
        kinds = " and ".join(f"{name!r} in {kind}" for kind, name in found.items())
        raise ValueError(f"Checkpoint: {parameter} is stored as {kinds}, expected one dtype; pass dtype.")
    return Plan(shape, next(iter(found)) if dtype is None else dtype, parts, stored.transposed)


def quantized_plans(files: TensorFiles, parameter: str, stored: Stored, shape: tuple[int, ...]) -> tuple[Plan, Plan]:
    """Plan the reading of stored FP8 or MXFP4 values `[E, N, K]`, or `[E, N, K / 2]` packed, and their scales."""
    plan(files, parameter, stored, shape, None)  # Checks the shapes.
    values, scales = [], []
    as_stored = swapped(shape)
    for name, region in stored.places(as_stored):
        source = decoded(files, name)
        if isinstance(source, MXFP4) and stored.transposed:
            values.append(Part(source.blocks.with_last_axes_merged(), _columns(region, 2)))
            scales.append(Part(source.scales.view(np.uint8), _columns(region, 2 * MXFP4_BYTES)))
            continue
        if not isinstance(source, BlockFP8) or not stored.transposed:
            raise ValueError(
                f"Checkpoint: {shown(name)} is not stored in FP8 by blocks of 128 by 128, nor in MXFP4, expected one"
                " of them for quantized=True; leave it out, and quantize with jax_ep.serving.serving_weights."
            )
        if region[-2].start % GROUP_SIZE or as_stored[-1] % GROUP_SIZE:
            raise ValueError(
                f"Checkpoint: {parameter} has shape {shape}, expected I and H that are multiples of 128 for"
                " quantized=True, so that no scale block spans gate and up; leave it out, and quantize with"
                " jax_ep.serving.serving_weights."
            )
        values.append(Part(source.values, region))
        scales.append(Part(source.scales, (region[0], *(blocks(part) for part in region[-2:]))))
    if values[0].source.dtype != FP8:
        *leading, depth = as_stored
        byte = np.dtype(np.uint8)
        return Plan((*leading, depth // 2), byte, values), Plan((*leading, depth // (2 * MXFP4_BYTES)), byte, scales)
    return Plan(as_stored, FP8, values), Plan(num_blocks(as_stored), np.dtype(np.float32), scales)


def _columns(region: Region, per: int) -> Region:
    """Convert a region to packed columns, `per` columns of the region in each."""
    last = region[-1]
    return (*region[:-1], slice(last.start // per, last.stop // per))
