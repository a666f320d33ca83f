"""Plans for reading a layer's parameters: checked lists of tensors and regions, not yet read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jax_ep.checkpoints.decoded import (
    AWQ,
    E2M1_PAIRS,
    FP8,
    INT4_PAIRS,
    PLAIN,
    SCALES,
    BlockFP8,
    FourBit,
    Grouped,
    PackedColumns,
    PackedRows,
    blocks,
    num_blocks,
)
from jax_ep.checkpoints.families import Family, Form, Stored, check_quantization, grouped_options
from jax_ep.checkpoints.files import StoredArray, TensorFiles
from jax_ep.checkpoints.shards import Part, Region, Transposed, swapped, whole
from jax_ep.formats import Format, int4, mxfp4
from jax_ep.values import shown

_PACKED = "_packed"
_PARTS = (_PACKED, "_scale", "_shape", "_zero_point", "_global_scale", "_g_idx")
_FACTOR = "_scale_2"
_GROUPED = ("qweight", "qzeros", "scales", "g_idx")
_AWQ = {"quant_method": ("awq",), "bits": (4,), "version": (None, "gemm", "GEMM"), "zero_point": (None, True)}
_GPTQ = {"quant_method": ("gptq",), "bits": (4, 8), "checkpoint_format": (None, "gptq", "gptq_v2")}
_ONES = {4: 0x11111111, 8: 0x01010101}  # One in each number of an int32.
_PART = re.compile(rf"(?<=weight)({'|'.join((*_PARTS, _FACTOR, SCALES))})$|(?<=\.)({'|'.join(_GROUPED)})$")
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
    num_zeros: int = 0

    def with_more_rows(self, number: int) -> Plan:
        """Return the plan of an array with this many rows of zeros behind all parts, along its first axis."""
        return self._replace(shape=(self.shape[0] + number, *self.shape[1:]), num_zeros=number)


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


def check_left_out(files: TensorFiles, form: Form, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that these parameters are all of the layer, and that no other bias is there, except zeros, as of GPTQ."""
    for parameter in sorted(form.keys() - shapes.keys()):
        if there := [name for name in form[parameter].names if name in files]:
            raise ValueError(
                f"Checkpoint: {shown(there[0])} is a tensor of {parameter}, expected none by config.json, which lacks"
                " shared experts; use the config.json of the checkpoint."
            )
    read = {name for parameter, shape in shapes.items() for name, _ in form[parameter].places(shape)}
    for name in sorted(read):
        bias = re.sub(r"\.weight$", ".bias", name)
        if bias not in read and bias in files and files[bias][whole(files[bias].shape)].any():
            raise NotImplementedError(
                f"Checkpoint: {shown(bias)} is not zero, expected no bias of {shown(name)} in this model_type, which"
                " the layer would leave out; read the tensors with Checkpoint.read, and compute the layer yourself."
            )


def weight_of(name: str) -> str:
    """Return the name under which `decoded` returns a tensor that may be a part of a quantized weight."""
    return _PART.sub(lambda part: "weight" if part[2] else "", name)


def decoded(files: TensorFiles, name: str) -> Any:
    """Return a tensor as floats; quantized values are multiplied by their scales when they are read."""
    forms = [name, name + _PACKED, re.sub(r"\.weight$", ".qweight", name)]
    there = [form for form in dict.fromkeys(forms) if form in files]
    if len(there) > 1:
        raise ValueError(
            f"Checkpoint: the files have {' and '.join(map(shown, there))}, expected the tensor once; remove that of"
            " another checkpoint, or read it as it is stored, without dtype."
        )
    name = there[0] if there else name
    if name.endswith(".qweight"):
        return _grouped(files, name.removesuffix("qweight"))
    values = files[name]
    if name.endswith(_PACKED) and (values.dtype.kind in "iu" or name.removesuffix(_PACKED) + "_scale" in files):
        return _packed(files, name)
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
    smoothed = f"{name.removesuffix('weight')}pre_quant_scale"
    if smoothed in files:
        raise ValueError(
            f"Checkpoint: {shown(smoothed)} multiplies the tokens of {shown(name)}, expected weights alone; export them"
            " without AWQ, or read both as they are stored, without dtype."
        )
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
    values, zeros = found[_PACKED], found.get("_zero_point")
    scales = found.get("_scale", values)  # Without scales, the parts do not fit.
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
    fits = size and size % 2 == 0 and size * groups == depth and _fit(found, expected)
    if not fits or (is_int and tuple(found["_shape"][whole((2,))]) != (rows, depth)):
        raise ValueError(
            f"Checkpoint: {shown(base)} is stored as {_stored(found)}, expected INT4 of compressed-tensors (packed"
            " int32, scale, shape, and zero_point or not) or NVFP4 (packed uint8, FP8 scale per 16, global_scale), with"
            " shapes that fit together; convert checkpoints in other formats, or download this one again."
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
    form, points = (int4.FORMAT, None) if zeros is None else (None, PackedRows(zeros, 4))
    return FourBit(INT4_PAIRS, values.view(np.uint8), scales, (1, size), form, points)


def _grouped(files: TensorFiles, base: str) -> Transposed:
    """Return a tensor of AutoAWQ or GPTQ, in int32 packed along `out` or `in`."""
    declared = grouped_options("Checkpoint", files.config)
    is_awq, bits = declared["quant_method"] == "awq", declared["bits"]
    if not declared["group_size"] or any(
        declared[key] not in values for key, values in (_AWQ if is_awq else _GPTQ).items()
    ):
        raise ValueError(
            f"Checkpoint: {shown(base)} has a qweight, and quantization_config has {shown(declared)}, expected 'awq'"
            " (4 bits with zero_point, version 'gemm') or 'gptq' (4 or 8 bits, checkpoint_format 'gptq' or 'gptq_v2')"
            " with a group_size; convert checkpoints in other formats."
        )
    found, size, order = _grouped_parts(files, base, declared)
    weight, scales = found["qweight"], found["scales"]
    if is_awq:
        codes, zeros = PackedColumns(weight, bits, AWQ), PackedColumns(found["qzeros"], bits, AWQ)
        return Transposed(Grouped(codes, zeros, scales, size))
    offset = 0 if declared["checkpoint_format"] == "gptq_v2" else _ONES[bits]  # The first version stores them minus 1.
    zeros = PackedColumns(found["qzeros"], bits, PLAIN, offset)
    matrix = Grouped(PackedRows(weight, bits), zeros, scales, size, order)
    is_symmetric = (zeros[whole(zeros.shape)] == 1 << bits - 1).all()
    if declared["sym"] and not is_symmetric:
        raise ValueError(
            f"Checkpoint: {shown(base)} has qzeros that are not the middle, and quantization_config has sym=True and"
            f" checkpoint_format={declared['checkpoint_format']!r}, expected zero points of {1 << bits - 1}; write"
            " checkpoint_format 'gptq_v2' if they are stored as they are, or download the checkpoint again."
        )
    if bits == 8 or size % 2 or order is not None or not is_symmetric:
        return Transposed(matrix)
    return Transposed(matrix, int4.FORMAT, (1, size), Transposed(PackedRows(weight, 8)), Transposed(scales))


def _grouped_parts(
    files: TensorFiles, base: str, declared: dict[str, Any]
) -> tuple[dict[str, StoredArray], int, np.ndarray | None]:
    """Return the parts of a tensor of AutoAWQ or GPTQ, its group size, and the groups of its rows unless in order."""
    found = {part: files[base + part] for part in _GROUPED if base + part in files}
    weight, per, size = found["qweight"], 32 // declared["bits"], declared["group_size"]
    rows, columns = weight.shape if weight.ndim == 2 else (0, 0)
    depth, width = (rows, columns * per) if declared["quant_method"] == "awq" else (rows * per, columns)
    size = depth if size == -1 else size
    groups = -(-depth // size) if size else 0
    expected: dict[str, Any] = {"qweight": ((np.int32,), (rows, columns)), "scales": (_FLOATS, (groups, width))}
    expected["qzeros"] = (np.int32,), (groups, width // per)
    if declared["desc_act"] or "g_idx" in found:
        expected["g_idx"] = (np.int32,), (depth,)
    fits = rows * columns and width % per == 0 and _fit(found, expected)
    order = found["g_idx"][whole((depth,))] if fits and "g_idx" in found else None
    if not fits or (order is not None and not 0 <= order.min() <= order.max() < groups):
        raise ValueError(
            f"Checkpoint: {shown(base)} is stored as {_stored(found)}, expected qweight, qzeros and scales of groups of"
            f" {size}, and with desc_act a g_idx with numbers of groups, with shapes that fit together; download the"
            " checkpoint again."
        )
    if order is not None and (not order.any() or np.array_equal(order, np.arange(depth) // size)):
        order = None
    return found, size, order


def _fit(found: dict[str, StoredArray], expected: dict[str, Any]) -> bool:
    """Return whether the parts of a tensor are those expected, with one of the dtypes and the shape of each."""
    parts = ((found[part], *expected[part]) for part in expected if part in found)
    return found.keys() == expected.keys() and all(x.dtype in dtypes and x.shape == shape for x, dtypes, shape in parts)


def _stored(found: dict[str, StoredArray]) -> str:
    return ", ".join(f"{part.removeprefix('_')} {array.dtype}{list(array.shape)}" for part, array in found.items())


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
