"""Checkpoints in the format of Hugging Face: read into sharded arrays, and written back.

Names of parameters and their orientation are those of `jax_ep.flax.MoE`, which is not needed here; see `Checkpoint`.
Reading and writing need the package safetensors, and `download` huggingface_hub: the extra `hf` brings both.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jax_ep.checkpoints import families, files, reading, transaction, writing
from jax_ep.checkpoints.files import CONFIG, INDEX, TensorFiles
from jax_ep.checkpoints.shards import HostMemory, Part, make_array, shard_bytes, swapped, whole
from jax_ep.core import check
from jax_ep.core.dtypes import FP8, TOKEN_DTYPES
from jax_ep.core.expert_matrices import QuantizedExperts
from jax_ep.core.mesh_axes import axis_tuple, check_mesh
from jax_ep.formats import mxfp4
from jax_ep.sharding import moe_specs
from jax_ep.types import Array, AxisName, Quantized

__all__ = ["MAX_SHARD_BYTES", "Checkpoint", "Weights", "download", "save"]

MAX_SHARD_BYTES = 5_000_000_000
_IN_FLOAT32 = ("router", "b_router", "router_bias")
_OVER_EXPERTS = ("w_gate_up", "w_down", "b_gate_up", "b_down")
_QUANTIZED = ("w_gate_up", "w_down")
Weights = dict[str, Any]
"""Arrays by the names of parameters of `jax_ep.flax.MoE`; of FP8 matrices pairs, of MXFP4 `QuantizedExperts`."""


class Checkpoint:
    """The tensors of a folder in Hugging Face's format.

    The config, the index and the headers of all files are read and checked at once; tensors when they are asked for.

    Args:
      folder: with `config.json`, and `model.safetensors` or the files that `model.safetensors.index.json` names.

    Attributes:
      config: the parsed `config.json`.
      names: the names of all tensors.

    Raises:
      FileNotFoundError: the folder, its config, its tensors or a file of the index does not exist.
      ValueError: a file is broken, or was replaced since. Later also: an unknown `model_type`, values of the config
        beyond their range, and tensors that are missing, or whose shape does not fit the config.
      ImportError: safetensors is not installed.

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
        function = "Checkpoint"
        path = files.folder_path(function, folder)
        transaction.check_ended(function, path)
        with files.open_file(function, path / CONFIG) as file:
            opened = os.fstat(file.fileno())
            self.config: dict[str, Any] = files.read_json(function, file)
            try:
                self._files = TensorFiles(function, path, self.config)
            finally:
                files.check_unchanged(function, path / CONFIG, opened)
        self.names: tuple[str, ...] = self._files.names
        self._folder = path

    def __reduce__(self) -> tuple[Any, ...]:
        """Open the folder again where the checkpoint is unpickled."""
        return Checkpoint, (self._folder,)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Which decoder layers are MoE."""
        return families.Model("Checkpoint.moe_layers", self.config).moe_layers

    def moe_options(self) -> dict[str, Any]:
        """Keyword arguments of `jax_ep.flax.MoE` for this model's layers; mesh, axes, dtypes and `rngs` are not in it.

        Raises:
          ValueError: an unknown `model_type`, or a value that `config.json` lacks.
          NotImplementedError: a router or an activation that the package does not have.
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
        """Any tensor, each device's part alone.

        Args:
          name: one of `names`.
          sharding: of the result; None: whole on one device.
          dtype: of the result, a floating dtype of 16 bits or more; None: as stored, in 32 bits where that is in 64 and
            JAX is not (`jax_enable_x64`). With a dtype, FP8 and MXFP4 are multiplied by their scales.
          transpose: swap the last two axes, `[..., out, in]` to `[..., in, out]`; the sharding is of the result.

        Returns:
          `[...]` array of the stored shape, or with its last two axes swapped; of MXFP4 with a dtype, that of its
          values.

        Raises:
          ValueError: no tensor of that name, nothing to transpose, a sharding of more axes, or integers that 32 bits do
            not hold.
          TypeError: another dtype, or a sharding of another type.
        """
        if not isinstance(sharding, jax.sharding.Sharding | None):
            raise TypeError(
                f"Checkpoint.read: sharding is a {type(sharding).__name__}, expected a jax.sharding.Sharding; pass"
                " NamedSharding(mesh, spec), or SingleDeviceSharding(device)."
            )
        source = self._files[name] if dtype is None else reading.decoded(self._files, name)
        if transpose and source.ndim < 2:
            raise ValueError(
                f"Checkpoint.read: {name!r} has shape {source.shape}, expected two axes or more for transpose=True;"
                " leave it out."
            )
        shape = swapped(source.shape) if transpose else source.shape
        if isinstance(sharding, NamedSharding) and len(sharding.spec) > len(shape):
            raise ValueError(
                f"Checkpoint.read: {name!r} has shape {shape}, expected at least the {len(sharding.spec)} axes of"
                f" {sharding.spec}; pass a spec of its axes."
            )
        to = source.dtype if dtype is None else _checked("Checkpoint.read", dtype)
        _check_range(name, source, to)
        memory = HostMemory(shard_bytes(shape, to, sharding)[0])
        parts = [Part(source, whole(source.shape))]
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
        """The parameters of one MoE layer, by the names and in the orientation `[in, out]` of `jax_ep.flax.MoE`.

        Args:
          layer: one of `moe_layers`.
          mesh: the devices; None: those of `jax.set_mesh`, or where there is no mesh one device.
          axis_name: mesh axis, or axes, over which experts are spread; everything else is on every device.
          dtype: of the result, a floating dtype of 16 bits or more; None: as stored, and bfloat16 for what is stored
            in FP8 or MXFP4. Router and biases of the router are float32 in any case.
          quantized: give the experts' matrices as stored: in FP8 as `jax_ep.quantization.quantize_fp8_weights` does,
            pairs of float8_e4m3fn `[E, N, K]` and float32 `[E, ceil(N / 128), K / 128]`; in MXFP4 as
            `jax_ep.QuantizedExperts`, which GPUs multiply faster once `jax_ep.quantization.prepack_experts` has them.

        Returns:
          `router [H, E]`, `w_gate_up [E, H, 2I]`, `w_down [E, I, H]`, and where the model has them `b_router [E]`,
          `router_bias [E]`, `b_gate_up [E, 2I]`, `b_down [E, H]`, `shared_gate_up [H, 2 * I_shared]`,
          `shared_down [I_shared, H]`, `shared_gate [H, 1]`.

        Raises:
          ValueError: a layer that is not MoE; tensors that are missing, of other shapes or of several dtypes; experts
            that do not divide over the axis; with `quantized`, matrices that are stored neither in MXFP4 nor in FP8 by
            blocks of 128, or in FP8 with an I or H that is not a multiple of 128.
          TypeError: another dtype.
          NotImplementedError: this model has weights that `jax_ep.flax.MoE` has not.
        """
        function = "Checkpoint.moe_weights"
        model = families.Model(function, self.config)
        shapes, layers = model.shapes(), model.moe_layers
        if not isinstance(layer, int | np.integer) or isinstance(layer, bool) or layer not in layers:
            raise ValueError(f"{function}: layer={layer!r} is not MoE, expected one of {layers}; pass one of them.")
        mesh = _mesh(function, mesh, axis_name, shapes["w_down"][0])
        to = None if dtype is None else _checked(function, dtype)
        form = reading.form_of(self._files, model.family, layer)
        plans: dict[str, tuple[reading.Plan, ...]] = {}
        for name, shape in shapes.items():
            if quantized and name in _QUANTIZED:
                plans[name] = reading.quantized_plans(self._files, name, form[name], shape)
            else:
                wanted = np.dtype(np.float32) if name in _IN_FLOAT32 else to
                plans[name] = (reading.plan(self._files, name, form[name], shape, wanted),)
        experts = moe_specs(axis_name).w_down
        specs = {name: experts if name in _OVER_EXPERTS else PartitionSpec() for name in plans}
        shardings = {name: None if mesh is None else NamedSharding(mesh, spec) for name, spec in specs.items()}
        sizes = [shard_bytes(*plan[:2], shardings[name]) for name, some in plans.items() for plan in some]
        memory = HostMemory(max(shard for shard, _ in sizes))
        weights: Weights = {}
        with _progress(f"layer {layer}", sum(read for _, read in sizes)) as advance:
            for name, some in plans.items():
                sharding = shardings[name]
                arrays = tuple(make_array(*plan, memory=memory, sharding=sharding, advance=advance) for plan in some)
                weights[name] = _together(arrays)
        return weights


def _together(arrays: tuple[Array, ...]) -> Any:
    """A parameter of one array, or of quantised values and their scales."""
    if len(arrays) == 1:
        return arrays[0]
    values, scales = arrays
    return arrays if values.dtype == FP8 else QuantizedExperts(values, scales, mxfp4.FORMAT.name)


def _mesh(function: str, mesh: Mesh | None, axis_name: AxisName, num_experts: int) -> Mesh | None:
    """The given mesh or that of `jax.set_mesh`, with these axes, over which the experts divide; or None."""
    if mesh is None:
        mesh = jax.sharding.get_mesh()
        if mesh.empty:
            return None
    check_mesh(function, mesh, Mesh)
    missing = [name for name in axis_tuple(axis_name) if name not in mesh.axis_names]
    if missing:
        raise ValueError(
            f"{function}: the mesh has axes {tuple(mesh.axis_names)}, expected {missing} among them; pass the"
            " axis_name of that mesh."
        )
    num_ranks = math.prod(mesh.shape[name] for name in axis_tuple(axis_name))
    check.divisible_experts(function, num_experts, num_ranks, axis_name)
    return mesh


def _check_range(name: str, source: Any, to: np.dtype) -> None:
    """Integers of 64 bits must fit where JAX has 32."""
    kept = jax.dtypes.canonicalize_dtype(to)
    if to.kind not in "iu" or kept == to or not source.size:
        return
    least, most = np.min(source), np.max(source)
    if least < np.iinfo(kept).min or most > np.iinfo(kept).max:
        raise ValueError(
            f"Checkpoint.read: {name!r} has {to} from {least} to {most}, expected what {kept} holds; call"
            " jax.config.update('jax_enable_x64', True) before."
        )


def _checked(function: str, dtype: DTypeLike) -> np.dtype:
    """A dtype that weights may be converted to."""
    names = ", ".join(one.name for one in TOKEN_DTYPES)
    result = check.dtype(function, "dtype", dtype, f"None or one of {names}")
    if result not in TOKEN_DTYPES:
        raise TypeError(f"{function}: dtype={result}, expected None or one of {names}; pass one of them.")
    return result


@contextlib.contextmanager
def _progress(what: str, num_bytes: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, where rich is installed; yields what to tell of bytes that have been read."""
    if importlib.util.find_spec("rich") is None or not sys.stderr.isatty():
        yield lambda num_bytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=num_bytes)
        yield lambda num_bytes: progress.advance(task, num_bytes)


def save(
    folder: str | os.PathLike[str],
    config: Mapping[str, Any],
    layers: Mapping[int, Mapping[str, Array | Quantized]],
    others: Mapping[str, Array] | None = None,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
) -> None:
    """Write a checkpoint, with the names and the orientation of the model's family.

    Files are written to a folder inside of `folder` and moved to their places when all are complete: a reader finds the
    old checkpoint, the new one, or an error. Where this fails, the old checkpoint stays. Arrays come to the host one
    shard at a time, and stay there until their file is written. Where several processes have the same arrays, call it
    on one of them.

    Args:
      folder: made where it does not exist.
      config: what becomes `config.json`; its `model_type` decides on names.
      layers: for each MoE layer of `config` its parameters, as `Checkpoint.moe_weights` gives them: `router [H, E]`,
        `w_gate_up [E, H, 2I]`, `w_down [E, I, H]` and so on, in any dtype. The experts' matrices may be pairs of FP8.
      others: every other tensor, by its name in the checkpoint; these are written as they are.
      max_shard_bytes: of one file; a larger tensor has a file of its own.
      overwrite: replace a checkpoint that is there. Files that it does not name stay.

    Raises:
      FileExistsError: the folder has a checkpoint, and `overwrite` is False; a file that the checkpoint there does not
        name is in the way; or another save writes to the folder.
      OSError: the folder cannot be written to, or is full.
      ValueError: an unknown `model_type`; layers, parameters or shapes that are not those of `config`; a name in
        `others` that a layer has; FP8 without `quantization_config`, or the reverse; arrays of which other processes
        have parts.
      TypeError: what is no array.
      NotImplementedError: this model has weights that `jax_ep.flax.MoE` has not.
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
    if isinstance(max_shard_bytes, bool) or not isinstance(max_shard_bytes, int) or max_shard_bytes < 1:
        raise ValueError(f"{function}: max_shard_bytes={max_shard_bytes!r}, expected a positive int; pass one.")
    safetensors = files.optional(function, "safetensors")
    numpy_files = files.optional(function, "safetensors.numpy")
    path = files.folder_path(function, folder)
    config = writing.checked_config(function, config)
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


_DOWNLOADED = ("config.json", "generation_config.json", "model*.safetensors", "model*.safetensors.index.json")
_TOKENIZER = ("tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt", "chat_template*", "*.tiktoken")


def download(repo_id: str, *, revision: str | None = None, folder: str | os.PathLike[str] | None = None) -> Path:
    """Downloads config, tokenizer and safetensors files of a model from the Hugging Face hub.

    Args:
      repo_id: owner and name.
      revision: branch, tag or commit; None: the main branch.
      folder: where to; None: the cache of huggingface_hub.

    Returns:
      The folder, for `Checkpoint`, whose tensors `[...]` are then read from there.

    Raises:
      ImportError: huggingface_hub is not installed.

    Example:
      >>> from jax_ep.checkpoints import Checkpoint, download
      >>> checkpoint = Checkpoint(download("allenai/OLMoE-1B-7B-0924"))  # doctest: +SKIP
      >>> checkpoint.config["model_type"]  # doctest: +SKIP
      'olmoe'

    Source: https://huggingface.co/docs/huggingface_hub/guides/download.
    """
    hub = files.optional("download", "huggingface_hub")
    # Other formats of the same weights are in folders of their own.
    patterns = {"allow_patterns": [*_DOWNLOADED, *_TOKENIZER], "ignore_patterns": ["*/*"]}
    return Path(hub.snapshot_download(repo_id, revision=revision, local_dir=folder, **patterns))
