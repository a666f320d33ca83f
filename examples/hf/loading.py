"""Decoders from and to checkpoints in Hugging Face's format."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from hf.config import DecoderConfig
from hf.model import Decoder
from jax_ep import checkpoints
from jax_ep.checkpoints.reading import weight_of

# Flax's names for what the checkpoints call `weight`.
_WEIGHTS = ("kernel", "scale", "embedding")


def load(
    checkpoint: checkpoints.Checkpoint,
    *,
    mesh: jax.sharding.Mesh | None = None,
    dtype: Any = jnp.bfloat16,
    param_dtype: Any = jnp.bfloat16,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> Decoder:
    """Load the decoder of a checkpoint: experts sharded over the axis "expert", everything else replicated.

    The decoder is created without weights and filled tensor by tensor, so memory never holds a second copy of them.

    Args:
      checkpoint: a checkpoint of one of `hf.config.FAMILIES`.
      mesh: (data, expert) mesh, or None for one device.
      dtype: dtype of the computation.
      param_dtype: dtype of the parameters; routers stay in float32.
      advance: called with the number of filled parameters and the total.

    Raises:
      ValueError: the family is not supported, or tensors are missing, unexpected or have wrong shapes.
    """
    config, moe_layers = DecoderConfig.from_json(checkpoint.config), checkpoint.moe_layers
    options, dtypes = checkpoint.moe_options(), {"dtype": dtype, "param_dtype": param_dtype}
    graph, state = nnx.split(
        nnx.eval_shape(lambda: Decoder(config, options, moe_layers, mesh=mesh, rngs=nnx.Rngs(0), **dtypes))
    )
    everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    flat = dict(nnx.to_flat_state(state))
    _check_names(checkpoint, {_tensor(path) for path in flat}, tied=config.tied)
    experts: dict[tuple[Any, ...], jax.Array] = {}
    for done, (path, variable) in enumerate(flat.items()):
        layer = _moe_layer(path, moe_layers)
        if layer is None:
            name, transpose = _tensor(path), path[-1] == "kernel"
            value = checkpoint.read(name, sharding=everywhere, dtype=variable.dtype, transpose=transpose)
        else:
            if path not in experts:  # The first parameter of this layer.
                weights = checkpoint.moe_weights(layer, mesh=mesh, dtype=param_dtype)
                experts = {(*path[:-1], name): weight for name, weight in weights.items()}
            value = experts.pop(path)
        if (value.shape, value.dtype) != (variable.shape, variable.dtype):
            raise ValueError(
                f"{'.'.join(map(str, path))} is {value.dtype}{list(value.shape)} in the checkpoint, but config.json"
                f" makes it {variable.dtype}{list(variable.shape)}: the two do not match"
            )
        flat[path] = variable.replace(value)
        advance(done + 1, len(flat))
    return nnx.merge(graph, nnx.from_flat_state(flat))


def save(folder: Path, decoder: Decoder, config: dict[str, Any], *, dtype: Any) -> None:
    """Save a decoder with its original config.json, so that `load` can read it; `dtype` applies to floats."""
    layers: dict[int, dict[str, jax.Array]] = {index: {} for index in decoder.moe_layers}
    others: dict[str, jax.Array] = {}
    for path, variable in nnx.to_flat_state(nnx.state(decoder)):
        value = variable[...].astype(dtype)
        layer = _moe_layer(path, decoder.moe_layers)
        if layer is None:
            others[_tensor(path)] = value.T if path[-1] == "kernel" else value
        else:
            layers[layer][path[-1]] = value
    written = {"torch_dtype" if "torch_dtype" in config else "dtype": jnp.dtype(dtype).name}
    kept = {name: value for name, value in config.items() if name != "quantization_config"}
    checkpoints.save(folder, kept | written, layers, others)


def _tensor(path: tuple[Any, ...]) -> str:
    """Return the checkpoint's name of a parameter outside of the MoE layers."""
    return ".".join(map(str, (*path[:-1], "weight" if path[-1] in _WEIGHTS else path[-1])))


def _moe_layer(path: tuple[Any, ...], moe_layers: tuple[int, ...]) -> int | None:
    """Return the MoE layer of a parameter, or None."""
    is_moe = path[:2] == ("model", "layers") and path[2] in moe_layers and path[3] == "mlp"
    return path[2] if is_moe else None


def _check_names(checkpoint: checkpoints.Checkpoint, expected: set[str], *, tied: bool) -> None:
    """Check that every tensor of the checkpoint is used, for example biases that config.json does not mention."""
    of_experts = re.compile(rf"model\.layers\.({'|'.join(map(str, checkpoint.moe_layers))})\.(mlp|block_sparse_moe)\.")
    expected = expected | ({"lm_head.weight"} if tied else set())
    unread = [name for name in checkpoint.names if weight_of(name) not in expected and not of_experts.match(name)]
    if unread:
        raise ValueError(
            f"the checkpoint has {len(unread)} tensors that its config.json does not describe, such as {unread[0]}"
        )
