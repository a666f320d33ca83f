"""MaxText: compute the routed experts of `RoutedMoE` with `jax_ep.moe`. Imported on demand; needs MaxText 0.2.5."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_ep.core import check
from jax_ep.core.balance import Balance
from jax_ep.core.mesh_axes import axis_tuple, vary_alike
from jax_ep.ops import registry
from jax_ep.ops.balanced import check_balance
from jax_ep.ops.moe import moe
from jax_ep.types import Activation, Array, Experts, Schedule

_USE = "jax_ep.integrations.maxtext.use"
_ARGUMENTS = (
    *("self", "inputs", "gate_logits", "pre_bias_logits", "w0_kernel", "w1_kernel", "wo_kernel"),
    *("w0_bias", "w1_bias", "wo_bias", "input_ids", "forced_routed_experts"),
)
# Arrays with one entry per token, and arrays with one entry per expert.
_TOKENS = ("inputs", "gate_logits", "pre_bias_logits", "input_ids", "forced_routed_experts")
_WEIGHTS = ("w0", "w1", "wo", "w0_bias", "w1_bias", "wo_bias")
# Options of MaxText that change what its layer computes or reports, and what to do instead.
_UNSUPPORTED = {
    "quantization": "leave it empty and pass recipe= to use() for FP8",
    "te_moe_block": "set it to false",
    "use_batch_split_schedule": "set it to false",
    "use_random_routing": "set it to false",
    "moe_quantize_combine_bwd_method": "leave it empty and pass schedule=Schedule(wire_dtype=...) to use()",
    "moe_log_max_load_ratio": "set it to false",
    "log_required_ragged_buffer_factor": "set it to false",
    "defer_small_all_reduces": "set it to false",
}
# Activations of jax.nn that `Experts` has under these names.
_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu": "gelu", "relu": "relu"}


def use(
    *,
    balance: Balance | None = None,
    recipe: str | None = None,
    schedule: Schedule | None = None,
    implementation: str | Sequence[str] | None = None,
) -> contextlib.ExitStack:
    """Replace the expert computation of MaxText's `RoutedMoE` with `jax_ep.moe`, for every model in this process.

    Call it before the first step is traced. MaxText keeps its gate, parameters, checkpoints and sharding rules, and its
    own `get_topk`, `load_balance_loss` and router bias updates. Both dropless paths are replaced: `sparse_matmul=true`,
    and `sparse_matmul=false` with `capacity_factor=-1`.

    Args:
      balance, recipe, schedule, implementation: see `jax_ep.moe`.

    Returns:
      A context manager. Leaving it restores MaxText's code. Without a `with` statement the replacement stays.

    Raises:
      ImportError: MaxText is missing, or its `RoutedMoE` has other methods than in version 0.2.5.
      ValueError, TypeError: an argument that `jax_ep.moe` does not take.
      NotImplementedError: raised by a layer for an unsupported value in MaxText's configuration, which it names.

    Example:
      >>> import jax_ep.integrations.maxtext
      >>> with jax_ep.integrations.maxtext.use():  # doctest: +SKIP
      ...     train_loop(config, recorder)

    Source: https://github.com/AI-Hypercomputer/maxtext/blob/main/src/maxtext/layers/moe.py
    """
    registry.options(_USE, (), implementation, schedule)
    check.recipe(_USE, recipe)
    check_balance(_USE, balance, (), None)
    library = _library()
    options = {"balance": balance, "recipe": recipe, "schedule": schedule, "implementation": implementation}
    layer = library.RoutedMoE
    methods = {"__init__": _check_after(layer.__init__), "__call__": _check_before(layer.__call__)}
    methods |= dict.fromkeys(("sparse_matmul", "dense_matmul"), _expert_method(library, options))
    undo = contextlib.ExitStack()
    for name, method in methods.items():
        undo.callback(setattr, layer, name, getattr(layer, name))
        setattr(layer, name, method)
    return undo


def _library() -> types.ModuleType:
    """Import MaxText's module of MoE layers, after checking the methods that this adapter replaces."""
    try:
        from maxtext.layers import moe as library
    except ImportError as error:
        raise ImportError(f"{_USE}: cannot import MaxText, expected version 0.2.5; install it ({error}).") from error
    for name in ("sparse_matmul", "dense_matmul"):
        parameters = tuple(inspect.signature(getattr(library.RoutedMoE, name)).parameters)
        if parameters != _ARGUMENTS:
            raise ImportError(
                f"{_USE}: RoutedMoE.{name} has the parameters {parameters}, expected {_ARGUMENTS}; install MaxText"
                " 0.2.5."
            )
    return library


def _check_after(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def run(layer: Any, *args: Any, **kwargs: Any) -> None:
        init(layer, *args, **kwargs)
        _check(layer)

    return run


def _check_before(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def run(layer: Any, *args: Any, **kwargs: Any) -> Any:
        _check(layer)
        return call(layer, *args, **kwargs)

    return run


def _check(layer: Any) -> None:
    """Raise for a configuration that `jax_ep.moe` does not support."""
    config = layer.config
    for name, remedy in _UNSUPPORTED.items():
        if getattr(config, name, None):
            _raise_unsupported(name, getattr(config, name), remedy)
    if layer.quant is not None:
        _raise_unsupported("quant", type(layer.quant).__name__, _UNSUPPORTED["quantization"])
    if config.attention in ("vllm_rpa", "vllm_batched_rpa"):
        _raise_unsupported("attention", config.attention, "use another attention, or serve without use()")
    if config.num_moe_token_chunks > 1:
        _raise_unsupported("num_moe_token_chunks", config.num_moe_token_chunks, "set it to 1")
    if config.decoder_block.value == "llama4" and layer.num_experts_per_tok != 1:
        _raise_unsupported("num_experts_per_tok", layer.num_experts_per_tok, "set it to 1 for llama4 blocks")
    dropping = ("ragged_buffer_factor", "eval_ragged_buffer_factor") if config.sparse_matmul else ("capacity_factor",)
    for name in dropping:
        if getattr(config, name, -1) > 0:
            _raise_unsupported(name, getattr(config, name), "set it to -1: no token is dropped")
    if not config.sparse_matmul and config.matmul_precision != "default":
        _raise_unsupported("matmul_precision", config.matmul_precision, "set it to 'default', or sparse_matmul to true")
    for axis, name in (("stage", "ici_pipeline_parallelism"), ("diloco", "ici_diloco_parallelism")):
        if layer.mesh.shape.get(axis, 1) > 1:
            _raise_unsupported(name, layer.mesh.shape[axis], f"leave the mesh axis {axis!r} at 1")


def _raise_unsupported(name: str, value: object, remedy: str) -> None:
    raise NotImplementedError(f"{_USE}: {name}={value!r} of MaxText's configuration is not supported; {remedy}.")


class _Layout(NamedTuple):
    """Partition specs and mesh axes of one call, from MaxText's logical axis rules; axes of size 1 are left out."""

    tokens: P  # spec of the batch and sequence axes of `[B, S, ...]`
    token_axes: tuple[str, ...]  # mesh axes in `tokens`
    expert_axes: tuple[str, ...]  # mesh axes of the experts
    tensor_axes: tuple[str, ...]  # mesh axes of the intermediate size

    @property
    def replicated_axes(self) -> tuple[str, ...]:
        """Expert axes whose ranks hold the same tokens, as in decoding of one sequence."""
        return tuple(axis for axis in self.expert_axes if axis not in self.token_axes)

    @property
    def specs(self) -> dict[str, P]:
        """Return the spec of each array of `_experts_of_shard`."""
        experts, tensor = self.expert_axes or None, self.tensor_axes or None
        w_up, b_up = P(experts, None, tensor), P(experts, tensor)
        weights = (w_up, w_up, P(experts, tensor), b_up, b_up, P(experts))
        return dict.fromkeys(_TOKENS, self.tokens) | dict(zip(_WEIGHTS, weights, strict=True))


def _layout(layer: Any, inputs: Array) -> _Layout:
    from maxtext.utils.sharding import remove_incompatible_mesh_axes_from_partition_spec

    batch = "activation_batch" if inputs.shape[0] > 1 else "decode_batch_moe"
    tokens = layer._logical_to_mesh_axes((batch, "activation_norm_length"))
    if layer.get_expert_parallelism_size() == 1:
        tokens = remove_incompatible_mesh_axes_from_partition_spec(
            tokens, inputs.shape, layer.mesh, dims=(0,), allow_remove_axes=True
        )
    experts, _, columns = layer._logical_to_mesh_axes(("exp", None, "mlp_no_fsdp"))
    token_axes = tuple(axis for entry in tokens for axis in axis_tuple(entry or ()))
    tensor_axes = axis_tuple(columns or ())
    for axis in set(tensor_axes) & set(token_axes):
        _raise_unsupported(f"ici_{axis}_parallelism", layer.mesh.shape[axis], "set it to 1: it also splits the tokens")
    sizes = {"batch size": inputs.shape[0], "sequence length": inputs.shape[1], "num_experts": layer.num_experts}
    for (name, size), entry in zip(sizes.items(), (*tokens, experts), strict=True):
        ranks = math.prod(layer.mesh.shape[axis] for axis in axis_tuple(entry or ()))
        check.multiple("RoutedMoE", name, size, ranks, f"the ranks of {entry!r}", "change one of them")
    return _Layout(tokens, token_axes, axis_tuple(experts or ()), tensor_axes)


def _expert_method(library: types.ModuleType, options: dict[str, Any]) -> Callable[..., Any]:
    """Return the method that replaces `sparse_matmul` and `dense_matmul`, with their arguments and results."""

    def run(
        self: Any,
        inputs: Array,
        gate_logits: Array,
        pre_bias_logits: Array | None,
        w0_kernel: Array,
        w1_kernel: Array,
        wo_kernel: Array,
        w0_bias: Array | None,
        w1_bias: Array | None,
        wo_bias: Array | None,
        input_ids: Array | None = None,
        forced_routed_experts: Array | None = None,
    ) -> tuple[Array, Array | None, Array | None]:
        layout = _layout(self, inputs)
        tokens = (inputs, gate_logits, pre_bias_logits, input_ids, forced_routed_experts)
        weights = (w0_kernel, w1_kernel, wo_kernel, w0_bias, w1_bias, wo_bias)
        given = dict(zip((*_TOKENS, *_WEIGHTS), (*tokens, *weights), strict=True))
        specs = {name: layout.specs[name] for name, array in given.items() if array is not None}
        arrays = {name: self._maybe_shard_with_pspec(given[name], spec) for name, spec in specs.items()}
        out_specs = (P(*layout.tokens, layout.tensor_axes or None), layout.tokens, P())

        @functools.partial(jax.shard_map, mesh=self.mesh, in_specs=(specs,), out_specs=out_specs)
        def routed_experts(arrays: dict[str, Array]) -> tuple[Array, Array, Array | None]:
            return _experts_of_shard(library, self, options, layout, arrays)

        output, topk_idx, bias_updates = routed_experts(arrays)
        loss = _balance_loss(library, self, topk_idx, arrays["gate_logits"], arrays.get("pre_bias_logits"))
        return output, loss, bias_updates

    return run


def _experts_of_shard(
    library: types.ModuleType, layer: Any, options: dict[str, Any], layout: _Layout, arrays: dict[str, Array]
) -> tuple[Array, Array, Array | None]:
    """Return output `[b, s, M]`, expert ids `[b, s, K]` and the router bias update for the tokens of one device."""
    forced = arrays.get("forced_routed_experts")
    topk_weights, topk_idx = layer.get_topk(
        arrays["gate_logits"], arrays.get("pre_bias_logits"), None, arrays.get("input_ids"), forced
    )
    x = arrays["inputs"]
    if layer.config.decoder_block.value == "llama4":
        x = (x * jax.nn.sigmoid(topk_weights.astype(jnp.float32))).astype(x.dtype)
        topk_weights = jnp.ones_like(topk_weights)
    idx = jnp.where(library.valid_expert_mask(topk_idx, layer.num_experts), topk_idx, -1)
    if layout.replicated_axes:  # One rank sends the tokens that all of them hold.
        idx = jnp.where(lax.axis_index(layout.replicated_axes) == 0, idx, -1)
    w0, w1, wo = (arrays[name].astype(x.dtype) for name in ("w0", "w1", "wo"))
    rows: dict[str, Any] = {
        "x": x.reshape(-1, x.shape[-1]),
        "topk_idx": idx.reshape(-1, idx.shape[-1]).astype(jnp.int32),
        "topk_weights": topk_weights.reshape(-1, idx.shape[-1]),
        "w_gate_up": jnp.concatenate([w0, w1], axis=-1),
        "w_down": wo,
    }
    if "wo_bias" in arrays:
        b_gate_up = jnp.concatenate([arrays["w0_bias"], arrays["w1_bias"]], axis=-1)
        # Every tensor rank adds its share of the output, but only the first one adds the bias.
        first = lax.axis_index(layout.tensor_axes) == 0 if layout.tensor_axes else True
        rows["biases"] = (b_gate_up, jnp.where(first, arrays["wo_bias"], 0))
    y = moe(
        **vary_alike(rows, over=layout.tensor_axes),
        num_experts=layer.num_experts,
        experts=_experts(layer),
        axis_name=layout.expert_axes,
        **options,
    )
    if layout.replicated_axes:
        y = lax.psum(y, layout.replicated_axes)
    if layout.tensor_axes:
        y = lax.psum_scatter(y, layout.tensor_axes, scatter_dimension=1, tiled=True)
    return y.reshape(*x.shape[:2], -1), topk_idx, _bias_updates(library, layer, layout, topk_idx)


def _experts(layer: Any) -> Experts:
    """Return the activation of MaxText's experts: by name if `Experts` supports it, else MaxText's function."""
    block, limit = layer.config.decoder_block.value, layer.config.mlp_activations_limit
    name = layer.config.mlp_activations[0]
    if block == "gpt_oss" and name == "sigmoid" and limit > 0:
        return Experts("silu", alpha=1.702, clamp=limit, up_offset=1.0)
    if block != "gpt_oss" and name in _ACTIVATIONS:
        clamp = limit if block in ("deepseek", "deepseek4") and limit > 0 else None
        return Experts(_ACTIVATIONS[name], clamp=clamp)
    return Experts(lambda hidden: layer.apply_ffn_activation(*jnp.split(hidden, 2, axis=-1)).astype(hidden.dtype))


def _bias_updates(library: types.ModuleType, layer: Any, layout: _Layout, topk_idx: Array) -> Array | None:
    """Return MaxText's update of the router bias, or with gradient accumulation the expert counts for it."""
    if not layer.should_update_load_balance():
        return None
    config = layer.config
    counts = library.calculate_expert_counts(topk_idx, layer.num_experts, axis_names=layout.token_axes or None)
    if getattr(config, "gradient_accumulation_steps", 1) > 1:
        return counts
    return library.load_balance_updates_from_counts(counts, layer.num_experts, config.routed_bias_update_rate)


def _balance_loss(
    library: types.ModuleType, layer: Any, topk_idx: Array, gate_logits: Array, pre_bias_logits: Array | None
) -> Array | None:
    """Return MaxText's load balancing loss of whole sequences, averaged over the global batch."""
    config = layer.config
    if config.load_balance_loss_weight <= 0 or layer.is_hash_routing:
        return None
    scores = gate_logits if pre_bias_logits is None else pre_bias_logits
    if not config.sparse_matmul:
        if config.model_call_mode == "inference":
            return None
        scores = scores if library.uses_megatron_seq_aux_loss(config) else gate_logits
    if library.uses_megatron_seq_aux_loss(config):
        return layer.megatron_seq_aux_loss(scores)
    return layer.load_balance_loss(topk_idx, jax.nn.softmax(scores.astype(jnp.float32), axis=-1).astype(layer.dtype))
