"""Mixture-of-Experts layer for Flax NNX. Imported on demand: `import jax_ep` alone needs no Flax.

The layer takes GLOBAL arrays, as Flax code has them, and opens the `jax.shard_map` regions itself. It works on
meshes with automatic and with explicit axes. Without any mesh it runs on one device through `jax_ep.fused_moe`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jax_ep import lora
from jax_ep.core import check, check_router
from jax_ep.core.activations import activate_tokens
from jax_ep.core.balance import Balance
from jax_ep.core.check import errors_begin_with
from jax_ep.core.expert_matrices import (
    ExpertWeights,
    LoraWeights,
    QuantizedWeights,
    base_of,
    is_stored_transposed,
    merge_columns,
)
from jax_ep.core.mesh_axes import check_axes, check_context, check_placed, rearrange, warn_of_no_mesh
from jax_ep.core.router import Router
from jax_ep.core.router import SharedExperts as SharedExperts
from jax_ep.formats.qarrays import own_weights
from jax_ep.ops import registry
from jax_ep.ops.balanced import check_balance
from jax_ep.ops.fused_moe import fused_moe
from jax_ep.quantization import quantize
from jax_ep.routing import MoEMetrics, Routed, RouterWeights, count_dropped, route, update_router_bias
from jax_ep.serving import LOW_LATENCY_TOKENS, routed_moe, serve, serving_weights
from jax_ep.sharding import (
    MeshAxes,
    check_blocks_per_rank,
    check_divisible,
    quantize_per_device,
    ranks_on,
    run_sharded,
    sharded_layer,
    specs_of_parts,
)
from jax_ep.types import Experts, Routing, Schedule, Topology

try:
    from flax import nnx
    from flax.nnx.nn.dtypes import promote_dtype
except ImportError as error:
    raise ImportError(f"jax_ep.flax needs Flax ({error}): pip install '.[flax]'") from error

Array = jax.Array
Mesh = jax.sharding.Mesh | jax.sharding.AbstractMesh
Make = Callable[[nnx.Initializer, tuple[int, ...], P, Any], nnx.Param]
# One fan per expert: the leading axis of [E, in, out] enumerates independent experts.
EXPERT_INIT = nnx.initializers.lecun_normal(batch_axis=(0,))
DENSE_INIT = nnx.initializers.lecun_normal()
ZEROS_INIT = nnx.initializers.zeros_init()
_ADAPTERS = ("w_gate_up_lora_a", "w_gate_up_lora_b", "w_down_lora_a", "w_down_lora_b")


class RouterBias(nnx.Variable):
    """DeepSeek-V3's selection bias: state that `update_router_bias` changes, not a parameter an optimizer sees."""


class ServingArray(nnx.Variable):
    """A part of the experts of a layer that serves only."""


class MoE(nnx.Module):
    """Router, experts sharded over a mesh axis, and optional shared experts: `y, metrics = moe(x)`.

    Args:
      hidden_size: H.
      intermediate_size: I of one expert.
      num_experts: E. If the ranks that share the experts do not divide it, the parameters of experts have rows for
        more, up to the next multiple. These rows are zero, and no token chooses them.
      num_experts_per_tok: K.
      router: how the router chooses, see `jax_ep.Router`; None: `Router()`. A module or function that takes tokens
        `[N, H]` and returns a `jax_ep.types.Routing` of the E experts replaces the router.
      experts: what an expert computes, see `jax_ep.Experts`; None: `Experts()`.
      use_bias: both GEMMs of the experts have biases.
      shared_experts: experts that every token passes, see `SharedExperts`; None: none.
      capacity: rows that each rank computes at most for all its experts; None never drops.
      balance: compute about the same number of rows on every rank and drop nothing, see `jax_ep.Balance`; None: experts
        stay on their ranks. Small batches of serving weights do not need it.
      recipe: how the experts compute, see `jax_ep.moe`: "fp8"; None: in `dtype`.
      dtype: dtype of the computation; the router always computes in float32.
      param_dtype: dtype of the parameters, which the forward pass casts to `dtype`. With `recipe="fp8"` and no fsdp
        axis, the expert weights are quantized from it directly.
      preferred_element_type: dtype of the result and of the sums of experts, see `jax_ep.moe`; None: `dtype` for sums,
        and that of the tokens for the result.
      mesh: mesh of the layer; None: the mesh of `jax.set_mesh` at each call.
      axes: mesh axes that split experts, tokens and weights, see `jax_ep.sharding.MeshAxes`; None: `MeshAxes()`, which
        names only "expert". Devices along other axes repeat the same work. A `jax_ep.Topology` as `expert` has no
        `node_capacity`.
      schedule: how kernels share the GPU, see `jax_ep.Schedule`; None: the package chooses.
      implementation: see `jax_ep.moe`.
      kernel_init: initializer of the expert weights `[E, in, out]`.
      rngs: `nnx.Rngs` with a `params` stream.

    Raises:
      ValueError, TypeError: values that do not fit together, or of other types.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> from jax_ep.flax import MoE
      >>> with jax.set_mesh(jax.make_mesh((jax.device_count(),), ("expert",))):
      ...     moe = MoE(64, 32, num_experts=16, num_experts_per_tok=2, rngs=nnx.Rngs(0))
      ...     y, metrics = nnx.jit(lambda moe, x: moe(x))(moe, jnp.ones((4, 8, 64), jnp.bfloat16))
      >>> y.shape, y.dtype.name, int(metrics.load.sum())
      ((4, 8, 64), 'bfloat16', 64)

    Source: the layer of Mixtral (arXiv:2401.04088), with the shared experts of DeepSeekMoE (arXiv:2401.06066).
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        num_experts_per_tok: int,
        *,
        router: Router | Callable[[Array], Routing] | None = None,
        experts: Experts | None = None,
        use_bias: bool = False,
        shared_experts: SharedExperts | None = None,
        capacity: int | None = None,
        balance: Balance | None = None,
        recipe: str | None = None,
        dtype: Any = jnp.bfloat16,
        param_dtype: Any = jnp.float32,
        preferred_element_type: Any = None,
        mesh: jax.sharding.Mesh | None = None,
        axes: MeshAxes | None = None,
        schedule: Schedule | None = None,
        implementation: str | Sequence[str] | None = None,
        kernel_init: nnx.Initializer = EXPERT_INIT,
        rngs: nnx.Rngs,
    ) -> None:
        self.router_options, self.router_fn = check_router.router_or_callable(router)
        self.axes = check.value_of("MoE", "axes", axes, MeshAxes, "jax_ep.sharding.MeshAxes") or MeshAxes()
        self.experts, self.recipe = check.layer_experts("MoE", experts, self.axes.tensor), check.recipe("MoE", recipe)
        # Checks come first: a container of arrays in a static field ends in an error of Flax.
        self.mesh = check.value_of("MoE", "mesh", mesh, jax.sharding.Mesh, "jax.sharding.Mesh")
        self._check_topology()
        check_balance("MoE", balance, self.axes.expert, capacity)
        self.balance, self.capacity = balance, None if capacity is None else check.integer("MoE", "capacity", capacity)
        intermediate_size = check.integer("MoE", "intermediate_size", intermediate_size)
        self.hidden_size = check.integer("MoE", "hidden_size", hidden_size)
        self.num_experts = check.integer("MoE", "num_experts", num_experts)
        self.num_experts_per_tok = check.integer("MoE", "num_experts_per_tok", num_experts_per_tok)
        check.result_dtype("MoE", dtype, None, "dtype")
        check.result_dtype("MoE", preferred_element_type, dtype)
        self.dtype, self.preferred_element_type = dtype, preferred_element_type
        self.serving_arrays, self.serving_tree = nnx.List[ServingArray]([]), None
        self.lora_scale: float | None = None
        options = registry.options("MoE", (), implementation, schedule)
        self.schedule, self.implementation = schedule, options.implementation
        self._check_router(shared_experts, param_dtype)
        self.num_stored_experts = self.num_experts
        if (active := self._set_mesh()) is not None:
            self.num_stored_experts += -self.num_experts % ranks_on(active, self.axes.expert_axes)
            check_divisible("MoE", active, self.axes, self.hidden_size, {"intermediate_size, I,": intermediate_size})
        make = self._maker(rngs)
        self._make_router(make)
        self._make_experts(make, kernel_init, intermediate_size, param_dtype, use_bias)
        self._make_shared_experts(make, shared_experts, intermediate_size, param_dtype)

    def _check_topology(self) -> None:
        if isinstance(self.axes.expert, Topology) and self.axes.expert.node_capacity is not None:
            raise ValueError(
                f"MoE: node_capacity={self.axes.expert.node_capacity} of the Topology, expected None: the layer's"
                " metrics count only what `capacity` drops; leave node_capacity out, or call jax_ep.moe."
            )

    def _check_router(self, shared_experts: Any, param_dtype: Any) -> None:
        all_experts = self.num_experts + self.router_options.num_identity_experts
        self.router_options.check_sizes("MoE", "num_experts_per_tok", self.num_experts_per_tok, all_experts)
        check.value_of("MoE", "shared_experts", shared_experts, SharedExperts, "jax_ep.flax.SharedExperts")
        check.result_dtype("MoE", param_dtype, None, "param_dtype")

    def _maker(self, rngs: nnx.Rngs, kind: type[nnx.Param] = nnx.Param) -> Make:
        """Return a function that makes parameters of one kind and places them by their partition specs.

        Without a mesh they keep their specs as metadata, so that a later jit can place them.
        """
        check.instance("MoE", "rngs", rngs, nnx.Rngs, "an nnx.Rngs")
        if not {"params", "default"} & set(rngs):
            raise ValueError(
                f"MoE: rngs has the streams {sorted(rngs)}, expected 'params' or a default one; pass nnx.Rngs(seed), or"
                " nnx.Rngs(params=seed)."
            )

        def make(init: nnx.Initializer, shape: tuple[int, ...], spec: P, dtype: Any) -> nnx.Param:
            return kind(init(rngs.params(), shape, dtype), **self._placement(spec))

        return make

    def _placement(self, spec: P) -> dict[str, Any]:
        """Return the keywords that place a variable by its spec, on the mesh if there is one."""
        mesh = {} if self.mesh is None else {"mesh": self.mesh}
        return {"out_sharding": tuple(spec), "eager_sharding": self._set_mesh() is not None, **mesh}

    def _make_router(self, make: Make) -> None:
        """Make the router's parameters: float32, since it decides by small differences of its logits.

        A parameter that a layer does not have is None, which keeps it out of checkpoints and optimizers.
        """
        options, columns = self.router_options, self.num_experts + self.router_options.num_identity_experts
        shape = (self.hidden_size, columns)
        self.router = make(DENSE_INIT, shape, P(None, None), jnp.float32) if self.router_fn is None else None
        self.b_router = make(ZEROS_INIT, shape[1:], P(None), jnp.float32) if options.logit_bias else None
        bias, placement = jnp.zeros(columns, jnp.float32), self._placement(P(None))
        self.router_bias = RouterBias(bias, **placement) if options.selection_bias else None

    def _make_experts(
        self, make: Make, kernel_init: nnx.Initializer, intermediate_size: int, dtype: Any, use_bias: bool
    ) -> None:
        check.flag("MoE", "use_bias", use_bias)
        kind = "a function such as nnx.initializers.lecun_normal()"
        check.instance("MoE", "kernel_init", kernel_init, Callable, kind)

        def weights_init(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
            matrices = (self.num_experts, shape[1], math.prod(shape[2:]))
            remedy = "return an array of the shape that it is given"
            value = kernel_init(key, matrices, dtype)
            value = check.floating("MoE", "the result of kernel_init", value, str(list(matrices)), remedy=remedy)
            value = value.reshape(self.num_experts, *shape[1:])
            added = shape[0] - self.num_experts
            return jnp.pad(value, [(0, added), *[(0, 0)] * (len(shape) - 1)]) if added else value

        specs, experts, hidden = self.axes.specs, self.num_stored_experts, self.hidden_size
        columns: tuple[int, ...] = (self._columns(intermediate_size),)
        if self.axes.tensor is not None:
            columns = (2 if self.experts.gated else 1, intermediate_size)
        gate_up = make(weights_init, (experts, hidden, *columns), specs.w_gate_up, dtype)
        self.w_gate_up: nnx.Param | None = gate_up
        self.w_down: nnx.Param | None = make(weights_init, (experts, intermediate_size, hidden), specs.w_down, dtype)
        self.b_gate_up = make(ZEROS_INIT, (experts, *columns), specs.b_gate_up, dtype) if use_bias else None
        self.b_down = make(ZEROS_INIT, (experts, hidden), specs.b_down, dtype) if use_bias else None

    def _make_shared_experts(
        self, make: Make, shared_experts: SharedExperts | None, intermediate_size: int, dtype: Any
    ) -> None:
        width = shared_experts.num * (shared_experts.intermediate_size or intermediate_size) if shared_experts else 0

        def dense(inputs: int, outputs: int) -> nnx.Param | None:
            return make(DENSE_INIT, (inputs, outputs), P(None, None), dtype) if width and outputs else None

        self.shared_gate_up = dense(self.hidden_size, self._columns(width))
        self.shared_down = dense(width, self.hidden_size)
        self.shared_gate = dense(self.hidden_size, int(shared_experts is not None and shared_experts.gate))

    @errors_begin_with("MoE")
    @jax.named_scope("jax_ep.flax.MoE")
    def __call__(
        self,
        x: Array,
        weights: ExpertWeights | None = None,
        *,
        token_mask: Array | None = None,
        topk_idx: Array | None = None,
    ) -> tuple[Array, MoEMetrics]:
        """Apply the layer to global arrays.

        Args:
          x: `[..., H]` tokens of any floating dtype, which the layer casts to `dtype`.
          weights: replace the expert weights. The result of `serving_weights` is for inference: if a device has at most
            `jax_ep.serving.LOW_LATENCY_TOKENS` tokens, `jax_ep.low_latency_moe` runs with it, or without a mesh and
            with quantized weights `jax_ep.serving.routed_moe`; with more, the layer uses its own weights. The result of
            `training_weights` changes neither the output nor a gradient; `recipe="fp8"` then quantizes no weights.
          token_mask: `[...]` bool. Tokens where it is False are padding: they go to no routed expert and count in no
            metric, so they cost nothing and take no place in `capacity`. Shared experts pass them.
          topk_idx: `[..., K]` int32, the experts of an earlier pass, its `metrics.topk_idx`: this pass sends the tokens
            to these, with the weights that its own router gives them.

        Returns:
          The output, with the shape and, by default, the dtype of x, and the `MoEMetrics` of the call.

        Raises:
          ValueError: shapes, or a mesh without the axes of the layer.
          TypeError: unsupported dtypes or kinds of arguments.
        """
        remedy = "pass tokens whose last axis is the hidden_size of the layer"
        x = check.floating("MoE", "x", x, "[..., hidden_size]", remedy=remedy, hidden_size=self.hidden_size)
        remedy = "pass the result of serving_weights(...) or training_weights()"
        check.instance("MoE", "weights", weights, ExpertWeights | None, "ExpertWeights or None", remedy=remedy)
        if weights is not None:
            pair = {name: own_weights("MoE", name, getattr(weights, name)) for name in ("w_gate_up", "w_down")}
            weights = weights._replace(**pair)
        shapes = (getattr(self.router, "shape", ())[:-2], getattr(self.w_down, "shape", ())[:-3])
        if stacked := next(filter(None, shapes), ()):
            raise ValueError(
                f"MoE: the parameters have leading axes {list(stacked)}, expected those of one layer; call layers that"
                " nnx.vmap has stacked inside nnx.scan or nnx.vmap."
            )
        if token_mask is not None:
            check.token_mask("MoE", token_mask, x.shape[:-1])
        if topk_idx is not None:
            shape = (*x.shape[:-1], self.num_experts_per_tok)
            num_experts = self.num_experts + self.router_options.num_identity_experts
            topk_idx = check.replayed_ids("MoE", topk_idx, shape, num_experts, self.router_fn is not None)
        mesh = self._active_mesh()
        if mesh is None and jax.device_count() > 1:
            warn_of_no_mesh()
        for name, array in {"x": x, "token_mask": token_mask, "topk_idx": topk_idx}.items():
            if mesh is not None and array is not None:
                check_placed("MoE", name, array, mesh)
        if weights is None and (served := self._served()) is not None:
            weights = self._adapted(served)
        tokens = x.astype(self.dtype)
        y, metrics = self._through_experts(tokens, token_mask, topk_idx, mesh, weights)
        if self.shared_gate_up is not None and self.shared_down is not None:
            y = y + self._shared(tokens, self.shared_gate_up, self.shared_down).astype(y.dtype)
        return y.astype(self.preferred_element_type or x.dtype), metrics

    @errors_begin_with("MoE")
    def update_bias(self, load: Array, *, rate: float = 1e-3) -> None:
        """Move the `RouterBias` by one step of `update_router_bias`; call it once per training step.

        Args:
          load: `[E]`, or `[layers, E]` for stacked layers: `metrics.load` of the step.
          rate: how far each bias moves.

        Raises:
          ValueError: the router has no selection bias.

        Source: auxiliary-loss-free load balancing (arXiv:2408.15664).
        """
        if self.router_bias is None:
            raise ValueError(
                "MoE: update_bias without a RouterBias, expected one; construct the layer with router="
                "jax_ep.Router(..., selection_bias=True)."
            )
        self.router_bias[...] = update_router_bias(self.router_bias[...], load, rate=rate)

    def _columns(self, intermediate_size: int) -> int:
        return 2 * intermediate_size if self.experts.gated else intermediate_size

    def _shared(self, tokens: Array, w_gate_up: nnx.Param, w_down: nnx.Param) -> Array:
        """Return the output of the shared experts, whose gate and up columns are in halves even if `interleaved`."""
        experts = self.experts
        if not callable(experts.activation):
            experts = dataclasses.replace(experts, interleaved=False)

        def dense(x: Array, w: nnx.Param) -> Array:  # as nnx.Linear does it, so that qwix can quantize these weights
            x, kernel = promote_dtype((x, w[...]), dtype=self.dtype)
            return jax.lax.dot_general(x, kernel, (((x.ndim - 1,), (0,)), ((), ())))

        rows = activate_tokens(experts, dense(tokens, w_gate_up), w_down.shape[0]).astype(self.dtype)
        y = dense(rows, w_down)
        if self.shared_gate is not None:
            y = y * jax.nn.sigmoid(dense(tokens, self.shared_gate))
        return y

    def _active_mesh(self) -> Mesh | None:
        """Return the checked mesh of this call, which divides the experts, or None if no mesh is set."""
        if (mesh := self._set_mesh()) is not None:
            num_ranks = ranks_on(mesh, self.axes.expert_axes)
            remedy = "construct the layer with this mesh, or while it is set, so that it adds experts"
            check.divisible_experts("MoE", self.num_stored_experts, num_ranks, self.axes.expert, remedy)
        return mesh

    def _set_mesh(self) -> Mesh | None:
        """Return the mesh that has the axes of the layer, or None if no mesh is set."""
        mesh = self.mesh if self.mesh is not None else jax.sharding.get_abstract_mesh()
        if mesh.empty:
            if self.capacity is not None:
                raise ValueError(
                    f"MoE: capacity={self.capacity} limits the rows per rank, expected a mesh, but there is none; pass"
                    " mesh=, call jax.set_mesh, or leave capacity out."
                )
            return None
        check_axes("MoE", mesh, self.axes.all_axes, "pass axes=jax_ep.sharding.MeshAxes(...) with axes of that mesh")
        check_context("MoE", mesh, self.axes.all_axes)
        return mesh

    @errors_begin_with("MoE")
    def add_lora(self, rank: int, *, scale: float = 1.0, rngs: nnx.Rngs) -> None:
        """Give the experts new adapters and freeze their weights, also those of a layer made by `to_serving`, and of
        layers stacked by `nnx.vmap`.

        The adapters, see `jax_ep.lora.init`, are `nnx.LoRAParam`s in float32 under the names that qwix gives them, such
        as `w_down_lora_a`. Freeze the router with `nnx.grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))`. New
        adapters replace those of an earlier call.

        Args:
          rank: r of the adapters `[E, K, r]` and `[E, r, N]`.
          scale: factor of the adapters, such as alpha / r.
          rngs: `nnx.Rngs` with a `params` stream.

        Raises:
          ValueError, TypeError: those of `jax_ep.lora.init`.

        Example:
          >>> from flax import nnx
          >>> from jax_ep.flax import MoE
          >>> moe = MoE(64, 32, num_experts=16, num_experts_per_tok=2, rngs=nnx.Rngs(0))
          >>> moe.add_lora(rank=8, scale=2.0, rngs=nnx.Rngs(1))
          >>> moe.w_down_lora_a.shape, moe.w_down_lora_b.shape
          ((16, 32, 8), (16, 8, 64))

        Source: LoRA (arXiv:2106.09685).
        """
        make = self._maker(rngs, nnx.LoRAParam)
        weights, specs = self._served() or self._parameters(), self._expert_axes().specs
        for name in ("w_gate_up", "w_down"):
            found = lora.init(rngs.params(), getattr(weights, name), rank, scale=scale, dtype=jnp.float32)
            where, layers = specs_of_parts(getattr(specs, name), found), (None,) * (found.a.ndim - 3)
            a_spec, b_spec = P(*layers, *where.a), P(*layers, *where.b)
            setattr(self, f"{name}_lora_a", make(lambda *_, a=found.a: a, found.a.shape, a_spec, found.a.dtype))
            setattr(self, f"{name}_lora_b", make(ZEROS_INIT, found.b.shape, b_spec, found.b.dtype))
            self.lora_scale = found.scale

    def _expert_axes(self) -> MeshAxes:
        """Return the axes that split the weights: those for serving are whole on the others."""
        return dataclasses.replace(self.axes, tensor=None, fsdp=None) if self.w_gate_up is None else self.axes

    def _adapted(self, weights: ExpertWeights) -> ExpertWeights:
        """Return weights with the adapters of the layer, if it has any."""
        if self.lora_scale is None:
            return weights
        adapted: dict[str, Any] = {}
        for name in ("w_gate_up", "w_down"):
            a, b = (getattr(self, f"{name}_lora_{part}").astype(self.dtype) for part in ("a", "b"))
            adapted[name] = LoraWeights(getattr(weights, name), a, b, self.lora_scale)
        return weights._replace(**adapted)

    def training_weights(self) -> ExpertWeights:
        """Quantize the expert weights once, for all microbatches of a step: `moe(x, moe.training_weights())`.

        For layers with `recipe="fp8"`, also stacked by `nnx.vmap`. Call it inside or outside of the differentiated
        function: gradients are those of the parameters of the layer that is called, in their dtype, with the same bits
        as without. Call it again after each update of the parameters.

        Returns:
          `ExpertWeights` of `QuantizedWeights` with a master, for `__call__`.

        Raises:
          ValueError: the layer has no `recipe`, or a device's shard of the weights has no whole blocks of 128 by 128.
        """
        if self.recipe is None:
            raise ValueError(
                "training_weights: recipe is None, expected recipe='fp8'; construct the layer with that, or call it"
                " without weights."
            )
        (w_gate_up, w_down, *_), specs, mesh = self._matrices(), self.axes.specs, self._active_mesh()
        if mesh is None:
            gate_up, down = (quantize(w, "fp8", for_training=True) for w in (w_gate_up, w_down))
            return ExpertWeights(gate_up, down)
        check_blocks_per_rank("training_weights", mesh, self.axes, w_down.shape)
        run = partial(quantize_per_device, self.mesh, num_leading=w_down.ndim - 3)
        return ExpertWeights(run(specs.w_gate_up, w_gate_up), run(specs.w_down, w_down))

    def serving_weights(self, format: str | None, *, activations: str | None = None) -> ExpertWeights:
        """Prepare the expert weights for inference: `moe(x, moe.serving_weights("mxfp4"))`; also stacked by `nnx.vmap`.

        They include the adapters of `add_lora`, also of a layer made by `to_serving`.

        Args:
          format: see `jax_ep.serving.serving_weights`; None: in `dtype`.
          activations: see `jax_ep.serving.serving_weights`.

        Returns:
          `ExpertWeights` for `__call__`.

        Raises:
          ValueError: the layer has a `capacity`, or the format does not support its sizes.
        """
        if self.capacity is not None:
            raise ValueError(
                f"serving_weights: capacity={self.capacity}, expected None, since serving drops nothing; set"
                " moe.capacity = None first."
            )
        # Quantization begins at the parameters: a rounding to `dtype` before it would add to its error.
        served = None if self.lora_scale is None else self._served()
        w_gate_up, w_down, b_gate_up, b_down = self._adapted(served or self._parameters())
        if self.lora_scale is not None:
            w_gate_up, w_down = lora.merge(w_gate_up), lora.merge(w_down)
        w_gate_up, w_down = self._whole(w_gate_up, 2), self._whole(w_down)
        if format is None:
            w_gate_up, w_down = w_gate_up.astype(self.dtype), w_down.astype(self.dtype)
        biases = None if b_gate_up is None else self._whole(b_gate_up, 2), b_down
        return serving_weights(w_gate_up, w_down, format, activations=activations, experts=self.experts, biases=biases)

    def to_serving(self, format: str | None, *, activations: str | None = None) -> MoE:
        """Return a copy of this layer that holds its expert weights only in this form, so it cannot train.

        All other parameters are those of this layer.

        Args:
          format: see `serving_weights`.
          activations: see `serving_weights`.

        Returns:
          The layer. It uses these weights for batches of any size.

        Raises:
          ValueError: see `serving_weights`.

        Example:
          >>> from flax import nnx
          >>> from jax_ep.flax import MoE
          >>> moe = MoE(64, 32, num_experts=16, num_experts_per_tok=2, rngs=nnx.Rngs(0))
          >>> server = moe.to_serving("int8")
          >>> server.w_down is None, sorted({str(array.dtype) for array in server.serving_arrays})
          (True, ['float32', 'int8'])
        """
        arrays, tree = jax.tree.flatten(self.serving_weights(format, activations=activations))
        layer = nnx.merge(*nnx.split(self))
        layer.w_gate_up = layer.w_down = layer.b_gate_up = layer.b_down = layer.lora_scale = None
        for name in _ADAPTERS if self.lora_scale is not None else ():
            delattr(layer, name)
        layers = (None,) * (arrays[0].ndim - 3)
        where: dict[str, Any] = {"out_sharding": (*layers, self.axes.specs.w_down[0]), "eager_sharding": False}
        where |= {} if self.mesh is None else {"mesh": self.mesh}
        layer.serving_arrays, layer.serving_tree = nnx.List([ServingArray(a, **where) for a in arrays]), tree
        return layer

    def _served(self) -> ExpertWeights | None:
        """Return the expert weights of a layer made by `to_serving`, or None for other layers."""
        if self.serving_tree is None:
            return None
        return jax.tree.unflatten(self.serving_tree, [array[...] for array in self.serving_arrays])

    def _whole(self, w: Array, num_columns: int = 1) -> Array:
        """Gather `w` over tensor and fsdp axes, and merge the two axes of columns that a tensor axis needs."""
        axes, spec = self._expert_axes(), list(jax.typeof(w).sharding.spec)
        kept = [None if entry in (axes.tensor, axes.fsdp) else entry for entry in spec]
        if kept != spec:
            w = jax.sharding.reshard(w, P(*kept))
        return merge_columns(w) if num_columns == 2 and axes.tensor is not None else w

    def _parameters(self) -> ExpertWeights:
        """Return the expert weights, and biases in `dtype`."""
        if self.w_gate_up is None or self.w_down is None:
            raise ValueError("MoE: this layer is for serving only; use the layer that it was made from.")
        biases = (None if bias is None else bias.astype(self.dtype) for bias in (self.b_gate_up, self.b_down))
        return ExpertWeights(self.w_gate_up[...], self.w_down[...], *biases)

    def _matrices(self) -> ExpertWeights:
        """Return the expert weights for the GEMMs: in `dtype`, or unrounded if `recipe="fp8"` quantizes them."""
        found = self._parameters()
        if self.recipe is None or self.axes.fsdp is not None:  # fewer bytes to gather
            found = jax.tree.map(lambda w: w.astype(self.dtype), found)
        return found

    def _weights(self, weights: ExpertWeights | None) -> ExpertWeights:
        """Return weights and biases as `moe` takes them: the parameters, or those of a layer made by `to_serving`."""
        if self.w_gate_up is None and weights is not None and not _has_masters(weights):
            return weights
        found = self._matrices()
        if weights is not None and _has_masters(weights):  # the parameters are the masters, so they get the gradient
            w_gate_up = dataclasses.replace(weights.w_gate_up, master=found.w_gate_up)
            found = found._replace(w_gate_up=w_gate_up, w_down=dataclasses.replace(weights.w_down, master=found.w_down))
        return self._adapted(found)

    def _router(self, tokens: Array) -> RouterWeights | Routing:
        if self.router_fn is not None:
            return check.routing("MoE", "router", self.router_fn(tokens), tokens.shape[0], self.num_experts)
        biases = (None if value is None else value[...] for value in (self.b_router, self.router_bias))
        return RouterWeights(cast(nnx.Param, self.router)[...], *biases)

    def _through_experts(
        self,
        x: Array,
        token_mask: Array | None,
        topk_idx: Array | None,
        mesh: Mesh | None,
        weights: ExpertWeights | None,
    ) -> tuple[Array, MoEMetrics]:
        """Return the sums of the routed experts, and the metrics; without a mesh on one device."""
        specs, num_tokens = self.axes.specs, math.prod(x.shape[:-1])
        padding = 0 if mesh is None else -num_tokens % ranks_on(mesh, self.axes.token_axes)
        # Few tokens, as in decoding, may not divide among the devices: then all of them route all tokens.
        token_spec = P(None, None) if padding else specs.tokens

        def reshape(array: Any, shape: tuple[int, ...], spec: P) -> Any:
            return None if array is None else rearrange(lambda v: v.reshape(shape), mesh, spec)(array)

        def pad(array: Array, fill: int, spec: P) -> Array:
            if not padding:
                return array
            run = partial(jnp.pad, pad_width=[(0, padding), (0, 0)], constant_values=fill)
            return rearrange(run, mesh, spec)(array)

        tokens = reshape(x, (-1, self.hidden_size), token_spec)
        mask = reshape(token_mask, (-1,), P(*token_spec[:1]))
        topk_idx = reshape(topk_idx, (-1, self.num_experts_per_tok), token_spec)
        routed = self._route(tokens, mask, topk_idx, mesh, token_spec)
        ids = pad(routed.topk_idx, -1, specs.routing)
        arrays = pad(tokens, 0, specs.tokens), ids, pad(routed.topk_weights, 0, specs.routing)
        logits = self._logits(tokens, mask) if mesh is None and topk_idx is None else None
        y, work = self._run_experts(arrays, mesh, weights, logits, mask)
        y = rearrange(lambda v: v[:num_tokens], mesh, token_spec)(y) if padding else y
        spec = jax.typeof(x).sharding.spec
        y = reshape(routed.with_identity(y, tokens), x.shape, spec)
        chosen = reshape(routed.chosen, (*x.shape[:-1], routed.chosen.shape[-1]), P(*spec[:-1], None))
        return y, routed.metrics(chosen, self._dropped(ids, mesh, specs.routing), work)

    def _route(
        self, tokens: Array, mask: Array | None, replayed: Array | None, mesh: Mesh | None, token_spec: P
    ) -> Routed:
        """Route tokens with this spec; the mean scores and loads are those over its axes."""
        router = self._router(tokens)
        options: dict[str, Any] = {"options": self.router_options, "top_k": self.num_experts_per_tok}
        if mesh is None:
            return route(tokens, mask, replayed, router, axes=(), **options)
        options["axes"] = self.axes.token_axes if any(token_spec) else ()
        mask_spec, everywhere = P(*token_spec[:1]), P()
        router_spec = everywhere if self.router_fn is None else token_spec
        specs: Any = (token_spec, token_spec, token_spec, mask_spec, everywhere, everywhere, everywhere)
        in_specs = token_spec, mask_spec, token_spec, router_spec
        return run_sharded(route, options, self.mesh, in_specs, Routed(*specs))(tokens, mask, replayed, router)

    def _logits(self, tokens: Array, mask: Array | None) -> Array | None:
        """Return the logits by which a launch may choose the experts that `route` chooses; None: there are none.

        With a selection bias, its scores may round differently, and so decide otherwise between nearly equal ones.
        """
        options, number = self.router_options, tokens.shape[0]
        apart = self.router_fn is not None or options.selection_bias or options.num_identity_experts > 0
        apart = apart or self.num_stored_experts != self.num_experts  # one logit per expert of the launch
        # Many tokens gain nothing, and their gradient would route twice.
        few = isinstance(number, int) and number <= LOW_LATENCY_TOKENS
        if apart or self.recipe is not None or not few:
            return None
        return cast(RouterWeights, self._router(tokens)).logits(tokens, mask)

    def _on_one_device(
        self,
        arrays: tuple[Array, Array, Array],
        logits: Array | None,
        mask: Array | None,
        weights: ExpertWeights,
        options: dict[str, Any],
    ) -> Array:
        """Compute the experts without a mesh, as the routing says, or from the same logits."""
        w_gate_up, w_down, *biases = weights
        options |= {"biases": tuple(biases)}
        if logits is None:
            return fused_moe(*arrays, w_gate_up, w_down, **options)
        options |= {"router": self.router_options, "token_mask": mask}
        return routed_moe(arrays[0], logits, self.num_experts_per_tok, w_gate_up, w_down, **options)[0]

    def _run_experts(
        self,
        arrays: tuple[Array, Array, Array],
        mesh: Mesh | None,
        weights: ExpertWeights | None,
        logits: Array | None,
        mask: Array | None,
    ) -> tuple[Array, dict[str, Array]]:
        """Compute the experts of `(tokens, topk_idx, topk_weights)`, for few tokens by the low-latency layer.

        Return also what balancing did on each rank, if it did anything.
        """
        specs, devices = self.axes.specs, 1 if mesh is None else ranks_on(mesh, self.axes.token_axes)
        options = {name: getattr(self, name) for name in ("experts", "preferred_element_type", "implementation")}
        # `low_latency_moe` takes no adapters.
        adapted, most = weights is not None and isinstance(weights.w_gate_up, LoraWeights), LOW_LATENCY_TOKENS * devices
        if weights is not None and not (adapted or _has_masters(weights)) and arrays[0].shape[0] <= most:
            if self.schedule is not None:
                options["schedule"] = dataclasses.replace(
                    self.schedule, wire_dtype=None, dispatch_mode=None, combine_mode=None
                )
            if mesh is None and not is_stored_transposed(weights.w_gate_up):
                return self._on_one_device(arrays, logits, mask, weights, options), {}
            options["num_experts"] = self.num_stored_experts
            if mesh is None:
                return serve(*arrays, weights, axis_name=(), **options), {}
            options["axis_name"] = self.axes.expert
            in_specs = specs.tokens, specs.routing, specs.routing, P(self.axes.expert_axes)
            return run_sharded(serve, options, self.mesh, in_specs, specs.tokens)(*arrays, weights), {}
        w_gate_up, w_down, b_gate_up, b_down = self._weights(weights)
        w, schedule = base_of(w_gate_up), self.schedule
        if isinstance(w, QuantizedWeights) and w.master is None and w.format is not None:
            # These determine themselves how their GEMMs run.
            schedule = dataclasses.replace(schedule or Schedule(), dispatch_mode=None, combine_mode=None)
        elif self.recipe is not None:
            options["recipe"] = self.recipe
        options["schedule"] = schedule
        if mesh is None:
            if self.w_gate_up is not None and self.axes.tensor is not None:
                w_gate_up, b_gate_up = merge_columns(w_gate_up), None if b_gate_up is None else merge_columns(b_gate_up)
            weights = ExpertWeights(w_gate_up, w_down, b_gate_up, b_down)
            return self._on_one_device(arrays, logits, mask, weights, options), {}
        options |= {"capacity": self.capacity, "balance": self.balance}
        with_work = self.balance is not None and ranks_on(mesh, self.axes.expert_axes) > 1
        run = sharded_layer(self.mesh, self.num_stored_experts, self._expert_axes(), options, with_work=with_work)
        found = run(*arrays, w_gate_up, w_down, biases=(b_gate_up, b_down))
        return found if with_work else (found, {})

    def _dropped(self, topk_idx: Array, mesh: Mesh | None, spec: P) -> Array:
        """Count the assignments past `capacity` from the routing: `sharded_moe` returns only the tokens."""
        if self.capacity is None or mesh is None:
            return jnp.zeros((), jnp.int32)
        of_ranks = {"axes": self.axes.expert_axes, "batch_axes": self.axes.batch, "capacity": self.capacity}
        of_ranks |= {"num_experts": self.num_stored_experts, "num_ranks": ranks_on(mesh, self.axes.expert_axes)}
        return run_sharded(count_dropped, of_ranks, self.mesh, (spec,), P())(topk_idx)


def _has_masters(weights: ExpertWeights | None) -> bool:
    """Return whether these weights are the result of `training_weights`."""
    return weights is not None and isinstance(w := weights.w_gate_up, QuantizedWeights) and w.master is not None
