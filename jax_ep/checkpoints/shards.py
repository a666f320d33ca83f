"""Transfers between tensors on the host and shards of global arrays, one shard at a time."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jax_ep.checkpoints.files import StoredArray
from jax_ep.formats import Format
from jax_ep.types import Array

_COPIED_AT_ONCE = 1 << 15
"""Elements: small next to a shard, and a transposed copy fits in the cache."""
_ALIGNMENT = 64
"""Bytes: CPU devices use a NumPy array with this alignment without a copy."""

Region = tuple[slice, ...]


class Part(NamedTuple):
    """A tensor, as a NumPy array or one of `decoded`, and the region of the whole array that it holds.

    It may lack leading axes, along which the region then has size one.
    """

    source: Any
    region: Region


@dataclasses.dataclass(frozen=True)
class Transposed:
    """A matrix `[N, K]` whose transpose is stored, and is copied by its own rows."""

    source: Any  # the transpose, as a `Part` has it
    format: Format | None = None  # the format of `QuantizedWeights` that has the bits of `values`, or None
    block: tuple[int, int] = (1, 1)  # rows and columns of the matrix that share a scale
    values: Transposed | None = None  # the packed values of the matrix
    scales: Transposed | None = None  # the scales of the matrix
    ndim = 2

    @property
    def shape(self) -> tuple[int, ...]:
        return swapped(self.source.shape)

    @property
    def dtype(self) -> np.dtype:
        return self.source.dtype


def whole(shape: Iterable[int]) -> Region:
    """Return the region of a whole array of this shape."""
    return tuple(slice(0, size) for size in shape)


def swapped[Axis](of_axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """Swap the last two axes of a shape or a region."""
    return (*of_axes[:-2], of_axes[-1], of_axes[-2])


def _overlap(one: Region, other: Region) -> Region | None:
    """Return the intersection of two regions, or None."""
    common = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True))
    return None if any(part.start >= part.stop for part in common) else common


def _relative(region: Region, origin: Region) -> Region:
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(region, origin, strict=True))


class HostMemory:
    """Reusable host memory for one shard at a time, for devices with their own memory.

    JAX may release copied arrays late, so a new array for each shard would add up.
    """

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes

    @functools.cached_property
    def _memory(self) -> np.ndarray:
        return _aligned(self._num_bytes)

    def array(self, shape: tuple[int, ...], dtype: np.dtype, devices: list[jax.Device]) -> np.ndarray:
        """Return an array for a shard of these devices; reuses the previous memory unless devices alias it."""
        num_bytes = math.prod(shape) * dtype.itemsize
        shared = any(_has_host_memory(device) for device in devices)
        memory = _aligned(num_bytes) if shared else self._memory[:num_bytes]
        return memory.view(dtype).reshape(shape)


def _aligned(num_bytes: int) -> np.ndarray:
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + num_bytes]


def _has_host_memory(device: jax.Device) -> bool:
    """Return whether arrays on the device may alias NumPy arrays."""
    return device.platform == "cpu"


def check_outside_jit(function: str) -> None:
    """Check that arrays made here have values."""
    if isinstance(jax.device_put(np.zeros((), np.uint8)), jax.core.Tracer):
        raise ValueError(
            f"{function}: called while jax.jit traces a function, expected a call outside of it, since tensors become"
            " constants of a program; read them first, and pass them as arguments."
        )


def make_array(
    shape: tuple[int, ...],
    dtype: np.dtype,
    parts: list[Part],
    transposed: bool = False,
    num_zeros: int = 0,
    *,
    memory: HostMemory,
    sharding: jax.sharding.Sharding | None = None,
) -> Array:
    """Assemble a global array in `dtype` from its parts; without a sharding, on JAX's default device.

    Unlike `jax.make_array_from_callback`, it does not hold the shards of all devices on the host at once. With
    `transposed`, parts are regions of the result with its last two axes swapped. The last `num_zeros` along the first
    axis belong to no part, and are zero. `memory` has at least `shard_bytes`.
    """

    def read(into: np.ndarray, region: Region) -> None:
        if transposed:
            into, region = into.swapaxes(-1, -2), swapped(region)
        for part in parts:
            common = _overlap(part.region, region)
            if common is not None:
                place: Any = (*_relative(common, region), ...)  # Without the ellipsis a scalar would not give a view.
                lacking = len(shape) - part.source.ndim
                target = np.squeeze(into[place], tuple(range(lacking)))
                _copy(target, part.source, _relative(common, part.region)[lacking:])

    dtype = jax.dtypes.canonicalize_dtype(dtype)
    shard_shape = shape if sharding is None else sharding.shard_shape(shape)
    on_device: dict[jax.Device, Array] = {}
    for region, devices in _local_regions(shape, sharding).items():
        buffer = memory.array(shard_shape, dtype, devices)
        if num_zeros and region[0].stop > shape[0] - num_zeros:
            buffer[...] = 0
        read(buffer, region)
        for device in devices:
            place = sharding and SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
            put = jax.device_put(buffer, place)
            on_device[device] = put.block_until_ready()
    if sharding is None:
        return put
    arrays = [on_device[device] for device in sharding.addressable_devices_indices_map(shape)]
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays, dtype=dtype)


def _local_regions(shape: tuple[int, ...], sharding: jax.sharding.Sharding | None) -> dict[Region, list[jax.Device]]:
    """Return the regions of an array on this process's devices, and the devices of each region."""
    if sharding is None:
        return {whole(shape): list(jax.device_put(np.zeros((), np.uint8)).devices())}
    regions: dict[Region, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        regions.setdefault(_bounded(index or (), shape), []).append(device)
    return regions


def shard_bytes(shape: tuple[int, ...], dtype: np.dtype, sharding: jax.sharding.Sharding | None) -> int:
    """Return the bytes of one shard."""
    return math.prod(shape if sharding is None else sharding.shard_shape(shape)) * dtype.itemsize


def _bounded(index: Region, shape: tuple[int, ...]) -> Region:
    """Return slices with explicit ends."""
    return tuple(slice(*part.indices(size)[:2]) for part, size in zip(index, shape, strict=True))


def _copy(target: np.ndarray, source: Any, region: Region) -> None:
    """Copy `source[region]` to `target`, some rows at a time."""
    if target.ndim > 2:
        for i, row in enumerate(range(region[0].start, region[0].stop)):
            _copy(target[i], source[row], region[1:])
    elif isinstance(source, Transposed):
        _copy(target.T, source.source, swapped(region))
    elif isinstance(source, StoredArray) and source.dtype == target.dtype and target.flags.c_contiguous:
        source.read_into(target, region)
    elif target.ndim == 0:
        target[...] = _converted(source[region], target.dtype)
    else:
        rows, *columns = region
        step = max(1, _COPIED_AT_ONCE // max(1, math.prod(target.shape[1:])))
        for first in range(0, target.shape[0], step):
            last = min(first + step, target.shape[0])
            piece = source[(slice(rows.start + first, rows.start + last), *columns)]
            target[first:last] = _converted(piece, target.dtype)  # Convert in memory order, then transpose.


def _converted(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Convert values; a finite number that becomes infinite is an OverflowError."""
    with np.errstate(over="ignore"):  # not raised for all dtypes
        converted = values.astype(dtype, copy=False)
    narrows = dtype == np.float16 or dtype.itemsize < values.dtype.itemsize  # Among others, both have one range.
    if narrows and (infinite := np.isinf(converted)).any() and np.isfinite(values[infinite]).any():
        raise OverflowError(f"a number beyond the range of {dtype}")
    return converted


class HostCopy:
    """Regions of an array as NumPy arrays. Whole shards are copied to the host, and stay until others are needed."""

    def __init__(self, array: Array | np.ndarray) -> None:
        self.array = array
        self._held: dict[Region, np.ndarray] = {}

    def region(self, region: Region) -> np.ndarray:
        """Return a region of the array. All of it must be on devices of this process."""
        if not isinstance(self.array, jax.Array):
            return np.asarray(self.array)[region]
        shards = {_bounded(shard.index, self.array.shape): shard for shard in self.array.addressable_shards}
        needed = {place: common for place in shards if (common := _overlap(place, region)) is not None}
        self._held = {
            place: self._held[place] if place in self._held else _to_host(shards[place].data) for place in needed
        }
        if len(needed) == 1:
            ((place, common),) = needed.items()
            return self._held[place][_relative(common, place)]
        result = np.empty([part.stop - part.start for part in region], self.array.dtype)
        for place, common in needed.items():
            result[_relative(common, region)] = self._held[place][_relative(common, place)]
        return result


def _to_host(shard: Array) -> np.ndarray:
    """Copy a shard to the host without keeping a copy in the `jax.Array`, which caches its own conversion."""
    alias = jax.make_array_from_single_device_arrays(shard.shape, shard.sharding, [shard])
    return np.asarray(alias)
