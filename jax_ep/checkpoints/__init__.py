"""Checkpoints in Hugging Face's format, read into sharded arrays and written back.

Parameters have the names and orientation of `jax_ep.flax.MoE`, but Flax is not needed here; see `Checkpoint`. `save`
needs the package safetensors, `download` and `push` need huggingface_hub; the extra `hf` installs both.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jax_ep.checkpoints import families, files, reading, transaction, writing
from jax_ep.checkpoints.files import CONFIG, INDEX
from jax_ep.checkpoints.hub import download, push
from jax_ep.checkpoints.shards import HostMemory, Part, check_outside_jit, make_array, shard_bytes, swapped, whole
from jax_ep.core import check
from jax_ep.core.expert_matrices import QuantizedWeights
from jax_ep.core.mesh_axes import axis_tuple, check_axes, check_mesh, mesh_in_use
from jax_ep.formats import Format
from jax_ep.sharding import MeshAxes
from jax_ep.types import Array, AxisName
from jax_ep.values import shown

__all__ = ["MAX_SHARD_BYTES", "Checkpoint", "Weights", "download", "push", "save"]

MAX_SHARD_BYTES = 5_000_000_000
_IN_FLOAT32 = ("router", "b_router", "router_bias")
_OVER_EXPERTS = ("w_gate_up", "w_down", "b_gate_up", "b_down")
_QUANTIZED = ("w_gate_up", "w_down")
Weights = dict[str, Any]
"""Arrays by parameter name of `jax_ep.flax.MoE`; quantized weights are `QuantizedWeights`."""


class Checkpoint:
    """A checkpoint folder in Hugging Face's format.

    Opening it reads and checks the config, the index and the headers of all files. Tensors are read on request. Files
    stay open until `close`, the end of a `with` block, or garbage collection; a later read opens them again.

    Args:
      folder: contains `config.json`, and `model.safetensors` or the files of `model.safetensors.index.json`.

    Attributes:
      config: the parsed `config.json`.
      names: the names of all tensors.

    Raises:
      FileNotFoundError: the folder, its config, its tensors or a file of the index does not exist.
      ValueError: a file is broken, or was replaced since. Methods also raise it for an unknown `model_type`, config
        values out of range, and tensors that are missing or whose shape does not match the config.

    Example:
      >>> import tempfile
      >>> import jax, jax.numpy as jnp
      >>> from jax_ep.checkpoints import Checkpoint, save
      >>> config = {"model_type": "mixtral", "hidden_size": 8, "intermediate_size": 4, "num_hidden_layers": 1}
      >>> config |= {"num_local_experts": 2, "num_experts_per_tok": 1}
      >>> weights = {"router": jnp.ones((8, 2)), "w_gate_up": jnp.ones((2, 8, 8)), "w_down": jnp.ones((2, 4, 8))}
      >>> folder = tempfile.mkdtemp()
      >>> save(folder, config, {0: weights})
      >>> checkpoint = Checkpoint(folder)
      >>> mesh = jax.make_mesh((2,), ("expert",), devices=jax.devices()[:2])
      >>> {name: w.shape for name, w in checkpoint.moe_weights(0, mesh=mesh).items()}
      {'router': (8, 2), 'w_gate_up': (2, 8, 8), 'w_down': (2, 4, 8)}
      >>> checkpoint.read("model.layers.0.block_sparse_moe.experts.1.w2.weight").shape  # [H, I]
      (8, 4)
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._files = transaction.open_complete("Checkpoint", folder)
        self.config: dict[str, Any] = self._files.config
        self.names: tuple[str, ...] = self._files.names

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the folder's path; unpickling opens the folder again."""
        return Checkpoint, (self._files.folder,)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files that were opened for reading."""
        self._files.close()

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Return the indices of the MoE layers."""
        return families.Model("Checkpoint.moe_layers", self.config).moe_layers

    def moe_options(self) -> dict[str, Any]:
        """Return keyword arguments of `jax_ep.flax.MoE` for this model, without mesh, axes, dtypes and `rngs`.

        Raises:
          ValueError: the `model_type` is unknown, or `config.json` lacks a value.
          NotImplementedError: the package does not support the model's router or activation.
        """
        return families.Model("Checkpoint.moe_options", self.config).moe_options()

    def read(
        self,
        name: str,
        *,
        sharding: jax.sharding.Sharding | None = None,
        dtype: DTypeLike | None = None,
        transpose: bool = False,
    ) -> Array:
        """Read one tensor; each process reads only the parts of its devices.

        Args:
          name: one of `names`; with a dtype, `weight` also stands for `weight_packed` and `qweight`.
          sharding: sharding of the result; None puts all of it on one device.
          dtype: dtype of the result, floating with 16 bits or more. None keeps the stored dtype, or its 32-bit version
            without `jax_enable_x64`. With a dtype, quantized values are multiplied by their scales.
          transpose: swap the last two axes, `[..., out, in]` to `[..., in, out]`; `sharding` applies to the result.

        Returns:
          `[...]` array of the stored shape, or with its last two axes swapped. Packed values with a dtype are
            unpacked, `[..., out, in]`.

        Raises:
          ValueError: there is no tensor of that name or nothing to transpose, the sharding has more axes, integers do
            not fit in 32 bits, or a finite number is beyond the dtype.
          TypeError: the dtype is not supported, or the sharding has a wrong type.
        """
        check_outside_jit("Checkpoint.read")
        check.flag("Checkpoint.read", "transpose", transpose)
        kind, remedy = jax.sharding.Sharding, "pass NamedSharding(mesh, spec), or SingleDeviceSharding(device)"
        check.instance("Checkpoint.read", "sharding", sharding, kind | None, "a jax.sharding.Sharding", remedy=remedy)
        source = self._files[name] if dtype is None else reading.decoded(self._files, name)
        if transpose and source.ndim < 2:
            raise ValueError(
                f"Checkpoint.read: {shown(name)} has shape {source.shape}, expected at least two axes with"
                " transpose=True; leave it out."
            )
        shape = swapped(source.shape) if transpose else source.shape
        to = source.dtype if dtype is None else check.result_dtype("Checkpoint.read", dtype, None, "dtype")
        _check_range(name, source, to)
        try:
            if isinstance(sharding, NamedSharding):
                sharding.check_compatible_aval(shape)
            if sharding is not None:
                sharding.devices_indices_map(shape)  # An abstract mesh has no devices.
            memory = HostMemory(shard_bytes(shape, to, sharding))
        except (ValueError, IndexError, NotImplementedError) as error:
            raise ValueError(
                f"Checkpoint.read: {shown(name)} has shape {shape}, expected axes that {sharding} divides over devices"
                f" ({error}); pass another sharding."
            ) from error
        parts = [Part(source, whole(source.shape))]
        with _in_range("Checkpoint.read", name):
            return make_array(shape, to, parts, transpose, memory=memory, sharding=sharding)

    def moe_weights(
        self,
        layer: int,
        *,
        mesh: Mesh | None = None,
        axis_name: AxisName = "expert",
        dtype: DTypeLike | None = None,
        quantized: bool = False,
    ) -> Weights:
        """Read the parameters of one MoE layer, with the names and the orientation `[in, out]` of `jax_ep.flax.MoE`.

        Args:
          layer: one of `moe_layers`.
          mesh: the devices; None uses the mesh of `jax.set_mesh`, or one device without a mesh.
          axis_name: mesh axis, or axes, over which experts are sharded; all other parameters are replicated. If the
            ranks do not divide the experts, zeros up to the next multiple follow them, as in `jax_ep.flax.MoE`.
          dtype: dtype of the result, floating with 16 bits or more. None keeps the stored dtype, with bfloat16 for
            quantized weights. The router and its biases are always float32.
          quantized: return expert weights as stored, as `jax_ep.QuantizedWeights`: FP8 weights with
            `activations="fp8"`, and MXFP4 and symmetric INT4 weights, which `jax_ep.quantization.with_layout` makes
            faster on GPUs.

        Returns:
          `router [H, E]`, `w_gate_up [E, H, 2I]`, `w_down [E, I, H]`, and if the model has them `b_router [E]`,
          `router_bias [E]`, `b_gate_up [E, 2I]`, `b_down [E, H]`, `shared_gate_up [H, 2 * I_shared]`,
          `shared_down [I_shared, H]`, `shared_gate [H, 1]`.

        Raises:
          ValueError: the layer is not MoE; tensors are missing, or have wrong shapes or several dtypes; a finite number
            is beyond the dtype; or with `quantized`, weights are stored neither in MXFP4, symmetric INT4 nor FP8 with
            blocks of 128, or in FP8 with an I or H that is not a multiple of 128.
          TypeError: the dtype is not supported.
          NotImplementedError: the model has weights that `jax_ep.flax.MoE` does not support.
        """
        function = "Checkpoint.moe_weights"
        check_outside_jit(function)
        check.flag(function, "quantized", quantized)
        model = families.Model(function, self.config)
        shapes, layers = model.shapes(), model.moe_layers
        if not isinstance(layer, int | np.integer) or isinstance(layer, bool) or layer not in layers:
            raise ValueError(
                f"{function}: layer={shown(layer)} is not an MoE layer, expected one of {layers}; pass one of them."
            )
        mesh, num_ranks = _mesh(function, mesh, axis_name)
        added = -shapes["w_down"][0] % num_ranks
        to = None if dtype is None else check.result_dtype(function, dtype, None, "dtype")
        form = reading.form_of(self._files, model.family, layer)
        reading.check_left_out(self._files, form, shapes)
        plans: dict[str, tuple[reading.Plan, ...]] = {}
        formats: dict[str, Format] = {}
        for name, shape in shapes.items():
            if quantized and name in _QUANTIZED:
                formats[name], plans[name] = reading.quantized_plans(self._files, name, form[name], shape)
            else:
                wanted = np.dtype(np.float32) if name in _IN_FLOAT32 else to
                plans[name] = (reading.plan(self._files, name, form[name], shape, wanted),)
        for name in set(plans).intersection(_OVER_EXPERTS):
            plans[name] = tuple(plan.with_more_rows(added) for plan in plans[name])
        experts = MeshAxes(axis_name).specs.w_down
        specs = {name: experts if name in _OVER_EXPERTS else PartitionSpec() for name in plans}
        shardings = {name: None if mesh is None else NamedSharding(mesh, spec) for name, spec in specs.items()}
        sizes = [shard_bytes(*plan[:2], shardings[name]) for name, some in plans.items() for plan in some]
        memory = HostMemory(max(sizes))
        weights: Weights = {}
        for name, some in plans.items():
            with _in_range(function, name):
                arrays = [make_array(*plan, memory=memory, sharding=shardings[name]) for plan in some]
            weights[name] = _stored(formats[name], *arrays) if name in formats else arrays[0]
        return weights


def _stored(form: Format, values: Array, scales: Array) -> QuantizedWeights:
    """Return expert weights as stored in a format."""
    return QuantizedWeights(values, scales, form.name, activations="fp8" if form.is_fp8_operand else None)


def _mesh(function: str, mesh: Mesh | None, axis_name: AxisName) -> tuple[Mesh | None, int]:
    """Return the given mesh, or that of `jax.set_mesh`, or None, after checking its axes, and the ranks along them."""
    with check.errors_begin_with(function):
        axes = axis_tuple(axis_name)
    if mesh is None:
        mesh = mesh_in_use(function)
        if mesh.empty:
            return None, 1
    check_mesh(function, mesh, Mesh)
    check_axes(function, mesh, axes, "pass the axis_name of that mesh")
    return mesh, math.prod(mesh.shape[name] for name in axes)


def _check_range(name: str, source: Any, to: np.dtype) -> None:
    """Check that 64-bit integers fit if JAX is in 32-bit mode."""
    kept = jax.dtypes.canonicalize_dtype(to)
    if to.kind not in "iu" or kept == to or not math.prod(source.shape):
        return
    values = source[whole(source.shape)]
    least, most = np.min(values), np.max(values)
    if least < np.iinfo(kept).min or most > np.iinfo(kept).max:
        raise ValueError(
            f"Checkpoint.read: {shown(name)} has {to} from {least} to {most}, expected values that fit in {kept};"
            " call jax.config.update('jax_enable_x64', True) first."
        )


@contextlib.contextmanager
def _in_range(function: str, name: str) -> Iterator[None]:
    """Name the tensor that has a number beyond the dtype of the result."""
    try:
        yield
    except OverflowError as error:
        raise ValueError(
            f"{function}: {shown(name)} has {error}, expected numbers that stay finite; pass a dtype with a larger"
            " range, such as bfloat16 in place of float16, or float32 in place of bfloat16."
        ) from None


def save(
    folder: str | os.PathLike[str],
    config: Mapping[str, Any],
    layers: Mapping[int, Mapping[str, Array | QuantizedWeights]],
    others: Mapping[str, Array] | None = None,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
) -> None:
    """Write a checkpoint with the names and the orientation of the model's family.

    The save is atomic: files are written to a folder inside `folder` and moved into place when all are complete. A
    reader finds the old checkpoint, the new one, or an error. A failed save leaves the old checkpoint, or the new one
    if only its last sync to disk failed. Arrays are copied to the host one shard at a time, and stay there until their
    file is written. If several processes have the same arrays, call it in one of them.

    Args:
      folder: created if it does not exist.
      config: the content of `config.json`; its `model_type` selects the names.
      layers: for each MoE layer of `config` its parameters, as from `Checkpoint.moe_weights`: `router [H, E]`,
        `w_gate_up [E, H, 2I]`, `w_down [E, I, H]` and so on, in floats of 16 bits or more. Expert weights may be
        `QuantizedWeights` in FP8.
      others: all other tensors, by their names in the checkpoint, written unchanged.
      max_shard_bytes: size limit of a file; a larger tensor gets its own file.
      overwrite: replace an existing checkpoint. Files that it does not name stay.

    Raises:
      FileExistsError: the folder has a checkpoint and `overwrite` is False, a file of that name exists that the
        checkpoint does not name, or another save is writing to the folder.
      OSError: the folder is not writable or is full.
      ValueError: the `model_type` is unknown; layers, parameters or shapes do not match `config`; a name in `others`
        belongs to a layer; FP8 is used without `quantization_config`, or the reverse; or parts of an array are in other
        processes.
      TypeError: a value is not an array.
      NotImplementedError: the model has weights that `jax_ep.flax.MoE` does not support.
      ImportError: safetensors is not installed.

    Example:
      >>> import tempfile
      >>> import jax.numpy as jnp
      >>> from jax_ep.checkpoints import Checkpoint, save
      >>> config = {"model_type": "olmoe", "hidden_size": 8, "intermediate_size": 4, "num_hidden_layers": 1}
      >>> config |= {"num_experts": 2, "num_experts_per_tok": 1}
      >>> weights = {"router": jnp.ones((8, 2)), "w_gate_up": jnp.ones((2, 8, 8)), "w_down": jnp.ones((2, 4, 8))}
      >>> folder = tempfile.mkdtemp()
      >>> save(folder, config, {0: weights}, {"model.norm.weight": jnp.ones(8)})
      >>> len(Checkpoint(folder).names)
      8

    Source: the file format, https://huggingface.co/docs/safetensors.
    """
    function = "save"
    if isinstance(max_shard_bytes, bool) or not isinstance(max_shard_bytes, int | np.integer) or max_shard_bytes < 1:
        raise ValueError(f"{function}: max_shard_bytes={shown(max_shard_bytes)}, expected a positive int; pass one.")
    check.flag(function, "overwrite", overwrite)  # "no" and "false" are true.
    safetensors = files.optional(function, "safetensors")
    numpy_files = files.optional(function, "safetensors.numpy")
    path = files.folder_path(function, folder)
    config = writing.normalize_config(function, config)
    tensors = writing.tensors_of(function, config, layers, {} if others is None else others)
    shards = writing.files_of(tensors, max_shard_bytes)
    texts = {CONFIG: config} | ({INDEX: writing.index_of(shards)} if len(shards) > 1 else {})
    try:
        path.mkdir(parents=True, exist_ok=True)
        with transaction.replacing(function, path, [*shards, *texts], overwrite=overwrite) as new:
            for file, text in texts.items():
                (new / file).write_text(json.dumps(text, indent=2) + "\n", encoding="utf-8")
            for file, some in shards.items():
                numpy_files.save_file(writing.on_host(some), new / file, metadata={"format": "pt"})
    except (OSError, safetensors.SafetensorError) as error:
        if str(error).startswith(f"{function}:"):
            raise
        kind = type(error) if isinstance(error, OSError) else OSError
        raise kind(
            f"{function}: cannot write the checkpoint to {path} ({error}), expected a folder to write to, with enough"
            " space; free space, change its permissions, or pass another folder."
        ) from error
