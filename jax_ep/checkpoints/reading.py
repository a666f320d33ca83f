"""Plans for reading a layer's parameters: checked lists of tensors and regions, not yet read."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jax_ep.checkpoints.decoded import E2M1_PAIRS, FP8, INT4_PAIRS, SCALES, BlockFP8, FourBit, blocks, num_blocks
from jax_ep.checkpoints.families import Family, Form, Stored, check_quantization
from jax_ep.checkpoints.files import StoredArray, TensorFiles
from jax_ep.checkpoints.shards import Part, Region, swapped, whole
from jax_ep.core.json_files import shown
from jax_ep.formats import Format, int4, mxfp4

_PACKED = "_packed"
_PARTS = (_PACKED, "_scale", "_shape", "_zero_point", "_global_scale", "_g_idx")
_FACTOR = "_scale_2"
_FLOATS = tuple(map(np.dtype, (np.float32, np.float16, ml_dtypes.bfloat16)))
_NVFP4_BLOCK = 16
_MXFP4_BYTES = mxfp4.BLOCK // 2  # of numbers that share a scale
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
    return next(iter(present.values()), forms[0])  # Without any, tensors are packed, or an error names one.


def decoded(files: TensorFiles, name: str) -> Any:
    """Return a tensor as floats; quantized values are multiplied by their scales when they are read."""
    if name not in files and name + _PACKED in files:
        name += _PACKED
    if name.endswith(_PACKED) and name.removesuffix(_PACKED) + "_scale" in files:
        return _packed(files, name)
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
    if values.dtype == np.uint8 and name + _FACTOR in files:
        return _modelopt(files, name, values)
    of_mxfp4 = name.removesuffix("_blocks") + "_scales"
    if values.dtype != np.uint8 or of_mxfp4 not in files:
        raise ValueError(
            f"Checkpoint: {shown(name)} is stored as {values.dtype}, without scales of FP8 by blocks of 128 by 128, of"
            " MXFP4, or of INT4 or NVFP4, expected one of these, or 16 bits and more; convert checkpoints in"
            " other quantized formats, or read the tensor as it is stored, without dtype."
        )
    scales = files[of_mxfp4]
    if values.shape != (*scales.shape, _MXFP4_BYTES) or scales.ndim < 2 or scales.dtype not in _MXFP4_SCALES:
        raise ValueError(
            f"Checkpoint: {shown(name)} has shape {values.shape} and {scales.dtype} scales {scales.shape}, expected"
            f" {(*scales.shape, _MXFP4_BYTES)} and two axes or more of uint8 or float8_e8m0fnu scales; download the"
            " checkpoint again."
        )
    exponents = scales.view(np.uint8)
    return FourBit(E2M1_PAIRS, values.with_last_axes_merged(), exponents, (1, mxfp4.BLOCK), mxfp4.FORMAT)


def _modelopt(files: TensorFiles, name: str, values: StoredArray) -> FourBit:
    """Return a tensor in NVFP4 as ModelOpt stores it."""
    check_quantization("Checkpoint", files.config)
    scales, factor = files[f"{name}_scale"], files[name + _FACTOR]
    stored = [(part.dtype, part.shape) for part in (values, scales)]
    rows, blocks = scales.shape if scales.ndim == 2 else (0, 0)
    if stored != [(np.uint8, (rows, blocks * _NVFP4_BLOCK // 2)), (FP8, (rows, blocks))] or (
        factor.dtype != np.float32 or factor.shape not in ((), (1,))
    ):
        raise ValueError(
            f"Checkpoint: {shown(name)} is stored as {values.dtype}{list(values.shape)}, scale"
            f" {scales.dtype}{list(scales.shape)}, scale_2 {factor.dtype}{list(factor.shape)}, expected NVFP4: uint8,"
            " an FP8 scale per 16 numbers of a row, and one float32; convert other formats, or download it again."
        )
    return FourBit(
        E2M1_PAIRS, values, scales, (1, _NVFP4_BLOCK), None, factor=float(factor[whole(factor.shape)].item())
    )


def _packed(files: TensorFiles, name: str) -> FourBit:
    """Return a tensor of compressed-tensors: INT4 in int32, or NVFP4 in uint8. The config must describe it too."""
    base = name.removesuffix(_PACKED)
    found = {part: files[base + part] for part in _PARTS if base + part in files}
    values, scales, zeros = found[_PACKED], found["_scale"], found.get("_zero_point")
    is_int = values.dtype == np.int32
    (rows, words), (_, groups) = (part.shape if part.ndim == 2 else (0, 0) for part in (values, scales))
    depth = words * (8 if is_int else 2)
    size = depth // groups if groups else 0
    expected: dict[str, Any] = {_PACKED: ((np.int32,), (rows, words)), "_scale": (_FLOATS, (rows, groups))}
    expected["_shape"] = (np.int32, np.int64), (2,)
    if zeros is not None:
        expected["_zero_point"] = (np.int32,), (-(-rows // 8), groups)
    if not is_int:
        expected = {_PACKED: ((np.uint8,), (rows, words)), "_scale": ((FP8,), (rows, depth // _NVFP4_BLOCK))}
        expected["_global_scale"] = (np.float32,), (1,)
    fits = found.keys() == expected.keys() and size and size % 2 == 0 and size * groups == depth
    fits = fits and all(x.dtype in expected[part][0] and x.shape == expected[part][1] for part, x in found.items())
    if not fits or (is_int and tuple(found["_shape"][whole((2,))]) != (rows, depth)):
        stored = ", ".join(f"{part[1:]} {array.dtype}{list(array.shape)}" for part, array in found.items())
        raise ValueError(
            f"Checkpoint: {shown(base)} is stored as {stored}, expected INT4 of compressed-tensors (packed int32,"
            " scale, shape, and zero_point or not) or NVFP4 (packed uint8, FP8 scale per 16, global_scale), with shapes"
            " that fit together; convert checkpoints in other formats, or download this one again."
        )
    kind = {"num_bits": 4, "type": "int" if is_int else "float", "symmetric": zeros is None}
    sizes = (size, None, -1) if groups == 1 else (size,)
    declared = check_quantization("Checkpoint", files.config)
    if not any(kind.items() <= group.items() and group.get("group_size") in sizes for group in declared):
        raise ValueError(
            f"Checkpoint: {shown(base)} is stored as {kind} with group_size {size}, expected it among the config_groups"
            f" in config.json, {shown(declared)}; download both again."
        )
    if not is_int:
        (divisor,) = found["_global_scale"][whole((1,))]
        return FourBit(E2M1_PAIRS, values, scales, (1, size), None, divisor=float(divisor))
    return FourBit(INT4_PAIRS, values.view(np.uint8), scales, (1, size), int4.FORMAT if zeros is None else None, zeros)


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


def quantized_plans(
    files: TensorFiles, parameter: str, stored: Stored, shape: tuple[int, ...]
) -> tuple[Format, tuple[Plan, Plan]]:
    """Return the format of a parameter, and plans for its stored values `[E, N, K]`, or packed, and their scales."""
    plan(files, parameter, stored, shape, None)  # Checks the shapes.
    values, scales = [], []
    found: dict[tuple[Format, tuple[int, int]], str] = {}
    as_stored = swapped(shape)
    for name, region in stored.places(as_stored):
        source = decoded(files, name)
        form = getattr(source, "format", None)
        if form is None or not stored.transposed:
            raise ValueError(
                f"Checkpoint: {shown(name)} is not stored in FP8 by blocks of 128 by 128, in symmetric INT4, nor in"
                " MXFP4, expected one of them for quantized=True; leave it out, and quantize with"
                " jax_ep.serving.serving_weights."
            )
        if region[-2].start % source.block[0] or as_stored[-1] % source.block[1]:
            raise ValueError(
                f"Checkpoint: {parameter} has shape {shape}, expected I and H that are multiples of"
                f" {source.block[1]} for quantized=True, so that no scale block spans gate and up; leave it out, and"
                " quantize with jax_ep.serving.serving_weights."
            )
        found.setdefault((form, source.block), name)
        values.append(Part(source.values, _blocks(region, (1, 8 // form.bits))))
        scales.append(Part(source.scales, _blocks(region, source.block)))
    if len(found) > 1:
        kinds = " and ".join(f"{name!r} in {form.name!r} {block}" for (form, block), name in found.items())
        raise ValueError(f"Checkpoint: {parameter} is stored as {kinds}, expected one format; leave quantized out.")
    ((form, block),) = found
    shapes = (tuple(part.stop for part in _blocks(whole(as_stored), size)) for size in ((1, 8 // form.bits), block))
    return form, (Plan(next(shapes), form.dtype, values), Plan(next(shapes), form.scale_dtype, scales))


def _blocks(region: Region, size: tuple[int, int]) -> Region:
    """Return the region of blocks of rows and columns that contains a region."""
    return (*region[:-2], *(blocks(part, per) for part, per in zip(region[-2:], size, strict=True)))
