"""From meshes and globally sharded arrays to the per-shard functions: partition specs and a `shard_map` wrapper."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jax_ep.core import check, check_recipe
from jax_ep.core.dtypes import FP8
from jax_ep.core.expert_matrices import Fp8Weights, QuantizedExperts, with_one_axis_of_columns
from jax_ep.core.mesh_axes import axis_tuple, check_mesh, vary_alike
from jax_ep.core.named_scopes import errors_begin_with
from jax_ep.formats import check_quantized
from jax_ep.ops.moe import moe
from jax_ep.ops.sharded import run_sharded
from jax_ep.quantization import quantize_master_weights
from jax_ep.types import Array, AxisName, Experts


@dataclasses.dataclass(frozen=True)
class MoESpecs:
    """Partition specs of the global arrays of an expert layer.

    Attributes:
      tokens: `[N, H]` activations.
      routing: `[N, K]` expert ids and weights.
      w_gate_up: `[E, H, 2 * I]`; with a tensor axis `[E, H, 2, I]`.
      w_down: `[E, I, H]`.
      b_gate_up: `[E, 2 * I]`; with a tensor axis `[E, 2, I]`.
      b_down: `[E, H]`.
    """

    tokens: P
    routing: P
    w_gate_up: P
    w_down: P
    b_gate_up: P
    b_down: P

    @property
    def biases(self) -> dict[str, P]:
        """Those of both biases, as functions take them."""
        return {"b_gate_up": self.b_gate_up, "b_down": self.b_down}


def moe_specs(
    axis_name: AxisName = "expert",
    *,
    batch_axes: AxisName = (),
    tensor_axis: str | None = None,
    fsdp_axis: str | None = None,
) -> MoESpecs:
    """Specs for experts over `axis_name`, tokens over `batch_axes` and `axis_name`, and I over `tensor_axis`.

    Every EP group is the set of ranks that differ only in `axis_name`; parameters are replicated over `batch_axes`, but
    for H of the matrices over `fsdp_axis`.

    Args:
      axis_name: mesh axis, or tuple of axes, over which experts are spread.
      batch_axes: further axes over which only tokens are spread (data parallelism).
      tensor_axis: axis over which the expert intermediate size I is split, or None.
      fsdp_axis: one of `batch_axes` over which matrices are spread, too, along H, or None. They are brought together
        for their products, and their gradients are added up into the same parts.

    Returns:
      `MoESpecs`. With a tensor axis the gate and up columns must be split alike, so `w_gate_up` then has a separate
      axis for them: `[E, H, 2, I]`, or `[E, H, 1, I]` for experts without a gate.

    Raises:
      ValueError: an axis that is named twice, or an `fsdp_axis` that spreads no tokens.

    Example:
      >>> from jax_ep.sharding import moe_specs
      >>> moe_specs(batch_axes=("data",)).w_down
      P('expert',)

    Source: https://docs.jax.dev/en/latest/notebooks/Distributed_arrays_and_automatic_parallelization.html
    """
    expert, batch = axis_tuple(axis_name), axis_tuple(batch_axes)
    names = (*batch, *expert, *((tensor_axis,) if tensor_axis else ()))
    if len(set(names)) != len(names):
        raise ValueError(f"moe_specs: the axes {names} name one twice; give experts, batch and tensor different axes.")
    rows = P((*batch, *expert)) if names else P()
    if fsdp_axis is not None and fsdp_axis not in batch:
        raise ValueError(
            f"moe_specs: fsdp_axis={fsdp_axis!r} is not among batch_axes={batch}, expected one of them, since its ranks"
            " have tokens of their own; add it there."
        )
    if tensor_axis is None:
        matrices = (P(expert), P(expert)) if fsdp_axis is None else (P(expert, fsdp_axis), P(expert, None, fsdp_axis))
        return MoESpecs(rows, rows, *matrices, P(expert), P(expert))
    matrices = (P(expert, fsdp_axis, None, tensor_axis), P(expert, tensor_axis, fsdp_axis))
    return MoESpecs(rows, rows, *matrices, P(expert, None, tensor_axis), P(expert))


def sharded_moe(
    mesh: Mesh | None = None,
    *,
    num_experts: int,
    axis_name: AxisName = "expert",
    batch_axes: AxisName = (),
    tensor_axis: str | None = None,
    fsdp_axis: str | None = None,
    **moe_kwargs: Any,
) -> Callable[..., Array]:
    """`moe` for globally sharded arrays, in automatic and explicit sharding mode.

    Args:
      mesh: the devices; None: the mesh of `jax.set_mesh` at the time of the call.
      num_experts: E.
      axis_name, batch_axes, tensor_axis, fsdp_axis: see `moe_specs`.
      **moe_kwargs: further keywords of `moe`: experts, activation, capacity, balance, wire_dtype, recipe,
        schedule, implementation. With a tensor axis gates have an axis of their own, and are interleaved with nothing.

    Returns:
      `f(x [N, H], topk_idx [N, K], topk_weights [N, K], w_gate_up, w_down [E, I, H], *, b_gate_up=None, b_down=None,
      token_mask=None) -> [N, H]` with the shardings of `moe_specs`; matrices may be `Fp8Weights`, whose parts are split
      as their masters, between blocks of 128. Tokens where `token_mask [N]`, of bool, is False
      are ignored, and get zeros. Arrays on automatic axes are moved to these shardings where they differ. On explicit
      axes a different sharding is an error, because moving data there is the caller's decision
      (`jax.sharding.reshard`).

    Raises:
      ValueError: axes that the mesh lacks, N, E or I not divisible by the axes they are spread over, arrays of other
        shapes, an explicit sharding that differs; by the returned function.
      TypeError: arguments that are no arrays, or of other dtypes; likewise. `num_tokens`, or arrays, as options.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import AxisType
      >>> from jax_ep.sharding import sharded_moe
      >>> mesh = jax.make_mesh((2, 4), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)
      >>> f = jax.jit(sharded_moe(mesh, num_experts=8, batch_axes="data"))
      >>> x, idx = jnp.ones((16, 4)), jnp.arange(16, dtype=jnp.int32)[:, None] % 8
      >>> f(x, idx, jnp.ones((16, 1)), jnp.ones((8, 4, 6)), jnp.ones((8, 3, 4))).shape
      (16, 4)

    Source: https://docs.jax.dev/en/latest/notebooks/shard_map.html
    """
    if "num_tokens" in moe_kwargs:
        raise TypeError(
            f"{_FUNCTION}: num_tokens={moe_kwargs['num_tokens']!r} would count the tokens of each shard, expected none;"
            " pass token_mask to the returned function."
        )
    of_call = sorted({"b_gate_up", "b_down", "token_mask"} & moe_kwargs.keys())
    if of_call:
        raise TypeError(f"{_FUNCTION}: {of_call} are arrays, expected options; pass them to the returned function.")
    specs = moe_specs(axis_name, batch_axes=batch_axes, tensor_axis=tensor_axis, fsdp_axis=fsdp_axis)
    if isinstance(moe_kwargs.get("implementation"), list):
        moe_kwargs["implementation"] = tuple(moe_kwargs["implementation"])
    options = dict(moe_kwargs, num_experts=num_experts, axis_name=axis_name)
    options |= {"specs": specs, "tensor_axis": tensor_axis, "fsdp_axis": fsdp_axis}

    @errors_begin_with(_FUNCTION)
    @jax.named_scope("jax_ep.sharded_moe")
    def apply(
        x: Array,
        topk_idx: Array,
        topk_weights: Array,
        w_gate_up: Array | Fp8Weights | QuantizedExperts,
        w_down: Array | Fp8Weights | QuantizedExperts,
        *,
        b_gate_up: Array | None = None,
        b_down: Array | None = None,
        token_mask: Array | None = None,
    ) -> Array:
        the_mesh = _mesh(mesh, specs)
        arrays = dict(zip(_ARRAYS, (x, topk_idx, topk_weights, w_gate_up, w_down, b_gate_up, b_down), strict=True))
        masked_idx = _check_tokens(the_mesh, specs, x, topk_idx, topk_weights, token_mask, num_experts)
        if token_mask is not None:
            arrays["topk_idx"] = masked_idx
        num_shards = _num_shards(the_mesh, axis_tuple(axis_name))
        check.divisible_experts(_FUNCTION, num_experts, num_shards, axis_name)
        if isinstance(w_gate_up, QuantizedExperts):
            columns = _check_quantized(w_gate_up, w_down, num_experts, tensor_axis, fsdp_axis)
        elif isinstance(w_gate_up, Fp8Weights):
            columns = _check_fp8_weights(the_mesh, w_gate_up, w_down, num_experts, tensor_axis, fsdp_axis)
        else:
            columns = _check_matrices(the_mesh, w_gate_up, w_down, num_experts, tensor_axis)
        if tensor_axis is not None:
            _check_kinds(w_gate_up.shape, w_down.shape, moe_kwargs.get("experts"))
        check.bias(_FUNCTION, "b_gate_up", b_gate_up, (num_experts, *columns))
        check.bias(_FUNCTION, "b_down", b_down, (num_experts, x.shape[1]))
        if fsdp_axis is not None and x.shape[1] % the_mesh.shape[fsdp_axis]:
            raise ValueError(
                f"{_FUNCTION}: H={x.shape[1]} is no multiple of the {the_mesh.shape[fsdp_axis]} ranks of"
                f" fsdp_axis={fsdp_axis!r}, expected one; leave fsdp_axis out."
            )
        given = {name: value for name, value in arrays.items() if value is not None}
        in_specs = {name: _specs_of_parts(getattr(specs, _ARRAYS[name]), value) for name, value in given.items()}
        for name, argument in given.items():
            jax.tree.map(partial(_check_explicit, the_mesh, name), argument, in_specs[name])
        return run_sharded(_moe_per_shard, options, the_mesh, (in_specs,), specs.tokens)(given)

    return apply


def _moe_per_shard(
    arrays: dict[str, Any], *, specs: MoESpecs, tensor_axis: str | None, fsdp_axis: str | None, **options: Any
) -> Array:
    if fsdp_axis is not None:
        arrays = _whole_matrices(arrays, specs, fsdp_axis)
    run = partial(moe, **options)
    return run(**arrays) if tensor_axis is None else _on_tensor_axis(run, tensor_axis, **arrays)


def quantize_per_device(mesh: Mesh | AbstractMesh | None, spec: P, w: Array, *, num_leading: int = 0) -> Fp8Weights:
    """`quantize_master_weights` of matrices that lie on a mesh, by each device for itself.

    So no device needs memory for more than what it keeps, and the kernels of its GPU round.

    Args:
      mesh: where they lie; None: the mesh of the context.
      spec: of one layer, `moe_specs(...).w_gate_up` or `.w_down`.
      w: `[..., E, K, N]`, or `[..., E, K, 2, N]` with a tensor axis, float.
      num_leading: axes of w before those of a layer, such as that of stacked layers.

    Returns:
      `Fp8Weights` whose parts lie as w does.

    Raises:
      ValueError, TypeError: as `quantize_master_weights` does; devices hold no whole blocks of 128 by 128.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_ep.sharding import moe_specs, quantize_per_device
      >>> mesh = jax.make_mesh((jax.device_count(),), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> w = jnp.ones((jax.device_count(), 128, 256))
      >>> quantize_per_device(mesh, moe_specs().w_gate_up, w).values.shape[1:]
      (256, 128)
    """
    leading = (None,) * num_leading
    straight, turned = (P(*leading, *part) for part in (spec, _turned(spec, w.ndim - num_leading)))

    run = run_sharded(_numbers, {}, mesh, (straight,), (turned, straight, turned))
    return Fp8Weights(w, *run(lax.stop_gradient(w)))


def _numbers(w: Array) -> tuple[Array, Array, Array]:
    found = quantize_master_weights(w)
    return found.values, found.transposed, found.scales


def _turned(spec: P, rank: int) -> P:
    """Of values and scales, which have the axis of rows behind the others."""
    experts, rows, *columns = tuple(spec) + (None,) * (rank - len(spec))
    return P(experts, *columns, rows)


def _specs_of_parts(spec: P, argument: Any) -> Any:
    """The spec of an argument, or of each of its parts."""
    if isinstance(argument, QuantizedExperts):
        return jax.tree.map(lambda _: P(spec[0]), argument)
    if not isinstance(argument, Fp8Weights):
        return spec
    turned = _turned(spec, argument.master.ndim)
    return Fp8Weights(spec, turned, spec, turned)  # type: ignore[arg-type]


def _whole_matrices(arrays: dict[str, Any], specs: MoESpecs, axis: str) -> dict[str, Any]:
    """With H of the matrices brought together; transposed, that adds gradients up into the parts."""

    def whole(part: Array, spec: P) -> Array:
        gather = partial(lax.all_gather, axis_name=axis, axis=tuple(spec).index(axis), tiled=True)
        if part.dtype != FP8:
            return gather(part)
        # As bytes: XLA widens FP8 values for collectives of some platforms.
        return lax.bitcast_convert_type(gather(lax.bitcast_convert_type(part, jnp.uint8)), FP8)

    matrices = {name: arrays[name] for name in ("w_gate_up", "w_down")}
    return arrays | {
        name: jax.tree.map(whole, w, _specs_of_parts(getattr(specs, name), w)) for name, w in matrices.items()
    }


def _on_tensor_axis(
    run: partial[Array], axis: str, *, w_gate_up: Any, b_gate_up: Array | None = None, **arrays: Any
) -> Array:
    """Every rank of the tensor axis adds its share of I: the same tokens travel on each of them."""
    if isinstance(experts := run.keywords.get("experts"), Experts) and experts.interleaved:
        run = partial(run, experts=dataclasses.replace(experts, interleaved=False))
    if "b_down" in arrays:  # once in the sum
        arrays["b_down"] = arrays["b_down"] * (lax.axis_index(axis) == 0).astype(arrays["b_down"].dtype)
    if b_gate_up is not None:
        arrays["b_gate_up"] = b_gate_up.reshape(b_gate_up.shape[0], -1)
    arrays["w_gate_up"] = with_one_axis_of_columns(w_gate_up)
    return lax.psum(run(**vary_alike(arrays, over=(axis,))), axis)


_FUNCTION = "sharded_moe"
# Arrays, and which of `MoESpecs` each has.
_ARRAYS = {
    "x": "tokens",
    "topk_idx": "routing",
    "topk_weights": "routing",
    "w_gate_up": "w_gate_up",
    "w_down": "w_down",
    "b_gate_up": "b_gate_up",
    "b_down": "b_down",
}


def _mesh(mesh: Mesh | AbstractMesh | None, specs: MoESpecs) -> Mesh | AbstractMesh:
    """The given mesh, or the one of `jax.set_mesh`; it must have all axes of the specs."""
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    check_mesh(_FUNCTION, mesh, Mesh | AbstractMesh)
    if mesh.empty:
        raise ValueError(
            "sharded_moe: mesh=None and no mesh is set, expected one; pass mesh=, or call jax.set_mesh(mesh)."
        )
    missing = sorted(_names(specs.tokens, specs.w_gate_up) - set(mesh.axis_names))
    if missing:
        raise ValueError(
            f"sharded_moe: the mesh has axes {tuple(mesh.axis_names)}, but the axes {missing} are needed too; pass"
            " axis_name, batch_axes and tensor_axis of that mesh."
        )
    return mesh


def _names(*specs: P) -> set[str]:
    return {name for spec in specs for entry in spec if entry is not None for name in axis_tuple(entry)}


def _num_shards(mesh: Mesh | AbstractMesh, names: Iterable[str]) -> int:
    return math.prod(mesh.shape[name] for name in names)


def _check_tokens(
    mesh: Mesh | AbstractMesh,
    specs: MoESpecs,
    x: Any,
    topk_idx: Any,
    topk_weights: Any,
    token_mask: Any,
    num_experts: Any,
) -> Array:
    """The ids, -1 for tokens that do not count."""
    check.positive(_FUNCTION, "num_experts", num_experts)
    x = check.matrix(_FUNCTION, "x", x, "[N, H]")
    num_shards = _num_shards(mesh, _names(specs.tokens))
    if x.shape[0] % num_shards:
        raise ValueError(
            f"{_FUNCTION}: x has {x.shape[0]} tokens, expected a multiple of the {num_shards} shards of {specs.tokens};"
            " pad the batch (expert id -1 costs nothing)."
        )
    if token_mask is not None:
        check.token_mask(_FUNCTION, token_mask, (x.shape[0],), "[N]")
    topk_idx = check.expert_ids(_FUNCTION, topk_idx, x.shape[0], num_experts, token_mask=token_mask)
    check.router_weights(_FUNCTION, topk_weights, topk_idx.shape, x)
    return topk_idx


def _check_matrices(
    mesh: Mesh | AbstractMesh,
    w_gate_up: Any,
    w_down: Any,
    num_experts: int,
    tensor_axis: str | None,
) -> tuple[int, ...]:
    """The axes of columns of w_gate_up, after checks of both matrices."""
    rank, shape = 3, "[E, H, 2 * I]"
    if tensor_axis is not None:
        rank, shape = 4, "[E, H, 2, I], so that gate and up are split alike"
    w_gate_up = check.array(_FUNCTION, "w_gate_up", w_gate_up, rank, f"{shape}, for tensor_axis={tensor_axis!r}")
    w_down = check.array(_FUNCTION, "w_down", w_down, 3, "[E, I, H]")
    for name, value in (("w_gate_up", w_gate_up), ("w_down", w_down)):
        remedy = "pass the matrices of all experts"
        check.size(_FUNCTION, f"axis 0 of {name}", value.shape[0], num_experts, remedy)
    if tensor_axis is None:
        return w_gate_up.shape[2:]
    for name, columns in (("axis -1 of w_gate_up", w_gate_up.shape[-1]), ("axis 1 of w_down", w_down.shape[1])):
        if columns % mesh.shape[tensor_axis]:
            raise ValueError(
                f"{_FUNCTION}: {name}, I, is {columns}, expected a multiple of the {mesh.shape[tensor_axis]} ranks of"
                f" tensor_axis={tensor_axis!r}; pad I with zeros, which changes no result."
            )
    return w_gate_up.shape[2:]


def _check_kinds(w_gate_up: tuple[int, ...], w_down: tuple[int, ...], experts: Any) -> None:
    """Of `[E, H, kinds, I]`: a rank's share of the columns tells no more which of them are gates."""
    (*_, kinds, columns), intermediate = w_gate_up, w_down[1]
    if isinstance(experts, Experts) and callable(experts.activation):
        return  # a function of the caller's takes any columns
    known = (2 if experts.gated else 1,) if isinstance(experts, Experts) else (1, 2)
    if kinds not in known or columns != intermediate:
        expected = " or ".join(f"[E, H, {kind}, {intermediate}]" for kind in reversed(known))
        raise ValueError(
            f"{_FUNCTION}: w_gate_up has shape {w_gate_up} and w_down {w_down}, expected {expected}, of gates and what"
            " they multiply, or without gates; give the two kinds of columns an axis of their own before that of I."
        )


def _check_quantized(
    w_gate_up: QuantizedExperts,
    w_down: Any,
    num_experts: int,
    tensor_axis: str | None,
    fsdp_axis: str | None,
) -> tuple[int, ...]:
    """Likewise, of quantised ones."""
    if tensor_axis is not None or fsdp_axis is not None:
        raise ValueError(
            f"{_FUNCTION}: {tensor_axis=}, {fsdp_axis=} with {type(w_gate_up).__name__}, which only the experts'"
            " axis splits; leave both None, or pass matrices that are not quantised."
        )
    check_quantized.two_of_a_kind(_FUNCTION, w_gate_up, w_down)
    for name, w in (("w_gate_up", w_gate_up), ("w_down", w_down)):
        check_quantized.experts(_FUNCTION, name, w, num_experts)
    return w_gate_up.shape[1:2]


def _check_fp8_weights(
    mesh: Mesh | AbstractMesh,
    w_gate_up: Fp8Weights,
    w_down: Any,
    num_experts: int,
    tensor_axis: str | None,
    fsdp_axis: str | None,
) -> tuple[int, ...]:
    """Likewise, of those quantised for training, whose blocks no axis splits."""
    check_quantized.two_of_a_kind(_FUNCTION, w_gate_up, w_down)
    ranks = {"w_gate_up": 3 if tensor_axis is None else 4, "w_down": 3}
    for (name, rank), w in zip(ranks.items(), (w_gate_up, w_down), strict=True):
        check_recipe.fp8_weights(_FUNCTION, name, w, rank)
    columns = _check_matrices(mesh, w_gate_up.master, w_down.master, num_experts, tensor_axis)
    check_recipe.whole_blocks_per_rank(_FUNCTION, mesh.shape, w_down.shape, tensor_axis, fsdp_axis)
    return columns


def _check_explicit(mesh: Mesh | AbstractMesh, name: str, argument: Array, spec: P) -> None:
    """On explicit axes, the sharding in the type must be the one that the layer works on."""
    actual = jax.typeof(argument).sharding
    explicit = {axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit}
    if not explicit:
        return

    def entries(p: P) -> tuple[tuple[str, ...], ...]:
        padded = (*p, *(None,) * (argument.ndim - len(p)))
        return tuple(tuple(a for a in axis_tuple(e or ()) if a in explicit) for e in padded)

    if entries(actual.spec) != entries(spec):
        raise ValueError(
            f"sharded_moe: {name} is sharded as {actual.spec}, expected {spec}; move it with"
            f" jax.sharding.reshard({name},"
            f" {spec})."
        )
