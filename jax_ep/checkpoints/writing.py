"""Plans for writing a checkpoint: its tensors, their files, and their transfer to the host."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep.checkpoints import families, files
from jax_ep.checkpoints.decoded import FP8, SCALES, blocks, num_blocks
from jax_ep.checkpoints.families import Stored
from jax_ep.checkpoints.files import SINGLE
from jax_ep.checkpoints.shards import HostCopy, Region, swapped, whole
from jax_ep.core import check, json_files
from jax_ep.core.expert_matrices import QuantizedWeights
from jax_ep.core.fp8 import GROUP_SIZE
from jax_ep.formats import fp8
from jax_ep.types import Array
from jax_ep.values import shown, type_name

_MAX_NAME = 1000  # Characters; readers limit the size of headers.


class Tensor(NamedTuple):
    """A tensor to write: a region of an array, optionally with its last two axes swapped."""

    name: str
    array: Array | np.ndarray
    region: Region
    shape: tuple[int, ...]
    transposed: bool = False

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.array.dtype.itemsize


def tensors_of(
    function: str,
    config: Mapping[str, Any],
    layers: Mapping[int, Mapping[str, Array | QuantizedWeights]],
    others: Mapping[str, Array],
) -> list[Tensor]:
    """Return all tensors of a checkpoint, checked: those of the layers, in order, then the others."""
    model = families.Model(function, config)
    family, shapes, expected = model.family, model.shapes(), model.moe_layers
    _check_dict(function, "layers", layers, "{number: parameters}")
    _check_dict(function, "others", others, "{name: array}")
    if set(layers) != set(expected) or not all(type(layer) is int or isinstance(layer, np.integer) for layer in layers):
        raise ValueError(
            f"{function}: layers has {sorted(layers, key=repr)}, expected the MoE layers of the config,"
            f" {list(expected)}; pass each of them."
        )
    tensors: list[Tensor] = []
    names: set[str] = set()  # Of layers, in any form: a reader could not tell which one holds.
    for layer in expected:
        _check_dict(function, f"layers[{layer}]", layers[layer], "{name: array}")
        if set(layers[layer]) != set(shapes):
            raise ValueError(
                f"{function}: layer {layer} has {sorted(layers[layer], key=repr)}, expected {sorted(shapes)}, the"
                " parameters of this config's layers; pass these."
            )
        for name, shape in shapes.items():
            form, *unwritten = [form[name].with_prefix(family.prefix.format(layer=layer)) for form in family.forms]
            tensors += _of_parameter(function, f"{name} of layer {layer}", layers[layer][name], form, shape)
            names.update(place for stored in unwritten for place, _ in stored.places(shape))
    names.update(tensor.name for tensor in tensors)
    tensors += [_other(function, name, array, names) for name, array in others.items()]
    _check_quantization(function, config, tensors)
    return tensors


def _other(function: str, name: Any, array: Any, taken: set[str]) -> Tensor:
    """Return a tensor of `others`, whose name none of the layers has."""
    if name in taken:
        raise ValueError(f"{function}: others has {shown(name)}, which belongs to a layer of layers; remove it.")
    if not isinstance(name, str) or not name.isprintable() or name == "__metadata__" or len(name) > _MAX_NAME:
        raise ValueError(
            f"{function}: others has {shown(name)}, expected a str of at most {_MAX_NAME} printable characters"
            " other than '__metadata__'; rename it."
        )
    _check_array(function, f"others[{shown(name)}]", array, np.shape(array))
    return Tensor(name, array, whole(array.shape), array.shape)


def _check_dict(function: str, what: str, value: Any, expected: str) -> None:
    if not isinstance(value, Mapping):
        raise TypeError(f"{function}: {what} is {type_name(value)}, expected a dict; pass {expected}.")


def _of_parameter(function: str, what: str, value: Any, stored: Stored, shape: tuple[int, ...]) -> Iterator[Tensor]:
    """Return the tensors of one parameter."""
    if isinstance(value, QuantizedWeights):
        yield from _of_fp8(function, what, value, stored, shape)
        return
    _check_array(function, what, value, shape)
    if value.dtype.itemsize < 2 or not jnp.issubdtype(value.dtype, np.floating):
        raise TypeError(
            f"{function}: {what} has dtype {value.dtype}, expected floats of 16 bits or more, or QuantizedWeights; cast"
            " it with astype."
        )
    for name, region in stored.places(swapped(shape) if stored.transposed else shape):
        ours = swapped(region) if stored.transposed else region
        yield Tensor(name, value, ours, stored.shape(region), stored.transposed)


def _of_fp8(
    function: str, what: str, value: QuantizedWeights, stored: Stored, shape: tuple[int, ...]
) -> Iterator[Tensor]:
    """Return the tensors of FP8 weights, which are stored unchanged."""
    if value.format != fp8.FORMAT.name or value.master is not None:
        raise TypeError(
            f"{function}: {what} is QuantizedWeights in format {value.format!r}, expected an array, or format 'fp8'"
            " without a master; pass the result of jax_ep.quantization.dequantize."
        )
    as_stored = swapped(shape)
    whole_blocks = not any(size % GROUP_SIZE for size in (shape[-2], shape[-1] // len(stored.names)))
    if len(shape) != 3 or not stored.transposed or not whole_blocks:
        raise ValueError(
            f"{function}: {what} is QuantizedWeights, expected an array {shape}; FP8 weights are for w_gate_up and"
            " w_down whose H and I are multiples of 128, in families with tensors [out, in]."
        )
    values, scales = value.values, cast(Array, value.scales)
    _check_array(function, f"{what}, values,", values, as_stored)
    _check_array(function, f"{what}, scales,", scales, num_blocks(as_stored))
    if values.dtype != FP8 or scales.dtype != np.float32:
        raise TypeError(
            f"{function}: {what} has values of {values.dtype} and scales of {scales.dtype}, expected float8_e4m3fn and"
            " float32; make it with jax_ep.quantization.quantize."
        )
    for name, region in stored.places(as_stored):
        yield Tensor(name, values, region, stored.shape(region))
        of_scales = (region[0], *(blocks(part) for part in region[-2:]))
        yield Tensor(name + SCALES, scales, of_scales, stored.shape(of_scales))


def _check_array(function: str, what: str, array: Any, shape: tuple[int, ...]) -> None:
    """Check that a value is an array of this shape with all its values in this process."""
    if not isinstance(array, jax.Array | np.ndarray) or isinstance(array, jax.core.Tracer | np.ma.MaskedArray):
        raise TypeError(
            f"{function}: {what} is {type_name(array)}, expected a JAX or NumPy array {shape}; for a Flax"
            " variable pass variable.get_value(), and call it outside of jax.jit."
        )
    if array.dtype not in files.DTYPES.values():
        names = ", ".join(np.dtype(dtype).name for dtype in files.DTYPES.values())
        raise TypeError(f"{function}: {what} has dtype {array.dtype}, expected one of {names}; cast it with astype.")
    if array.shape != shape:
        # A Flax layer has more experts if its ranks do not divide them.
        has_more = array.ndim > 0 and array.shape[1:] == shape[1:] and array.shape[0] > shape[0]
        remedy = f"pass its first {shape[0]} rows, w[:{shape[0]}]" if has_more else "reshape it"
        raise ValueError(f"{function}: {what} has shape {array.shape}, expected {shape} for this config; {remedy}.")
    check.not_deleted(function, what, array)
    if isinstance(array, jax.Array) and not (array.is_fully_addressable or array.is_fully_replicated):
        raise ValueError(
            f"{function}: other processes have parts of {what}, expected all of it on devices of this one; gather it"
            " with jax.experimental.multihost_utils.process_allgather(x, tiled=True)."
        )


def _check_quantization(function: str, config: Mapping[str, Any], tensors: list[Tensor]) -> None:
    """Check that the config declares FP8 if and only if the tensors use it, because readers rely on the config."""
    quantized = any(tensor.array.dtype == FP8 for tensor in tensors)
    if quantized and not config.get("quantization_config"):
        raise ValueError(
            f"{function}: there are tensors in FP8, but config has no quantization_config, expected both; add that of"
            " the checkpoint."
        )
    if not quantized and config.get("quantization_config"):
        raise ValueError(
            f"{function}: config has a quantization_config, but no tensor is in FP8, expected both or none; remove"
            " quantization_config."
        )


def normalize_config(function: str, config: Any) -> dict[str, Any]:
    """Return the config as it will be read from its file."""
    if not isinstance(config, Mapping):
        raise TypeError(f"{function}: config is {type_name(config)}, expected a dict; pass that of config.json.")
    try:
        return json_files.parse(json.dumps(dict(config), indent=2, allow_nan=False).encode(), files.MAX_JSON_BYTES)
    except (TypeError, ValueError, RecursionError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(
            f"{function}: config cannot be written as JSON ({error}), expected dicts, lists, str, finite numbers, bool"
            " and None; convert its values."
        ) from error


def index_of(shards: Mapping[str, list[Tensor]]) -> dict[str, Any]:
    """Return the index of these files."""
    size = sum(tensor.num_bytes for tensors in shards.values() for tensor in tensors)
    file_of = {tensor.name: file for file, tensors in shards.items() for tensor in tensors}
    return {"metadata": {"total_size": size}, "weight_map": file_of}


def files_of(tensors: list[Tensor], max_shard_bytes: int) -> dict[str, list[Tensor]]:
    """Distribute tensors to files, in order."""
    shards: list[list[Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.num_bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.num_bytes
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": some for i, some in enumerate(shards, 1)}


def on_host(tensors: list[Tensor]) -> dict[str, np.ndarray]:
    """Copy the tensors of one file to the host."""
    result = {}
    copy = None
    for tensor in tensors:
        if copy is None or copy.array is not tensor.array:
            copy = HostCopy(tensor.array)
        values = copy.region(tensor.region)
        values = values.swapaxes(-1, -2) if tensor.transposed else values
        result[tensor.name] = np.ascontiguousarray(values).reshape(tensor.shape)
    return result
