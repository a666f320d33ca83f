"""From meshes and globally sharded arrays to the per-shard functions: partition specs and a `shard_map` wrapper."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from jax_ep import context
from jax_ep.core import check
from jax_ep.core.balance import WORK
from jax_ep.core.check import errors_begin_with
from jax_ep.core.expert_matrices import LoraWeights, QArray, QuantizedWeights, base_of, merge_columns
from jax_ep.core.fp8 import GROUP_SIZE
from jax_ep.core.mesh_axes import (
    as_bytes,
    axis_tuple,
    check_axes,
    check_context,
    check_mesh,
    check_placed,
    vary_alike,
    vmap_axes,
)
from jax_ep.formats import check_quantized
from jax_ep.formats.qarrays import own_weights
from jax_ep.ops import balanced
from jax_ep.ops.grouped_gemm import checked_lora
from jax_ep.ops.moe import moe
from jax_ep.quantization import quantize
from jax_ep.types import Array, AxisName, Biases, Experts, Topology
from jax_ep.values import axis_names, shown, type_name

__all__ = ["MeshAxes", "MoESpecs", "sharded_moe"]

type Tree = Any
"""A pytree of arrays, specs or results."""


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


@dataclasses.dataclass(frozen=True)
class MeshAxes:
    """Mesh axes of an expert layer. Frozen and hashable; values are checked at construction.

    The ranks that differ only in `expert` form one EP group. Parameters are replicated over `batch`, except that `fsdp`
    splits H of the expert weights.

    Attributes:
      expert: mesh axis, or tuple of axes, that splits the experts; or a `jax_ep.Topology`. It also splits the tokens.
      batch: further mesh axis, or axes, that split the tokens only (data parallelism).
      tensor: mesh axis that splits the intermediate size I of the experts, or None. Gate and up columns must be split
        alike, so they have a separate axis. `w_gate_up` is `[E, H, 2, I]`, or `[E, H, 1, I]` for experts without a
        gate, and `b_gate_up [E, 2, I]`.
      fsdp: one of `batch` that also splits H of the expert weights, or None. The weights are gathered for their GEMMs,
        and their gradients are added up into the same parts.

    Raises:
      ValueError: an axis that is named twice, an empty name, or an `fsdp` that splits no tokens.
      TypeError: a value that does not name axes.

    Example:
      >>> from jax_ep.sharding import MeshAxes
      >>> MeshAxes(batch="data").specs.w_down
      P('expert',)

    Source: https://docs.jax.dev/en/latest/notebooks/Distributed_arrays_and_automatic_parallelization.html
    """

    expert: AxisName = "expert"
    _: dataclasses.KW_ONLY
    batch: str | tuple[str, ...] = ()
    tensor: str | None = None
    fsdp: str | None = None

    @errors_begin_with("MeshAxes")
    def __post_init__(self) -> None:
        object.__setattr__(self, "batch", axis_names("MeshAxes: batch", self.batch, "'data'"))
        if not isinstance(self.expert, Topology):
            names = axis_names("MeshAxes: expert", self.expert, "'expert'")
            object.__setattr__(self, "expert", self.expert if isinstance(self.expert, str) else names)
        for field in ("tensor", "fsdp"):
            value = getattr(self, field)
            if not isinstance(value, str | None):
                raise TypeError(
                    f"MeshAxes: {field}={shown(value)} is {type_name(value)}, expected the name of a mesh axis, a str,"
                    " or None; pass one."
                )
            if value == "":
                raise ValueError(f"MeshAxes: {field}='', expected the name of a mesh axis, or None; pass one.")
        if len(set(names := self.all_axes)) != len(names):
            raise ValueError(
                f"MeshAxes: {names} name an axis twice, expected different axes; give expert, batch and tensor axes of"
                " their own."
            )
        if self.fsdp is not None and self.fsdp not in self.batch:
            raise ValueError(
                f"MeshAxes: fsdp={shown(self.fsdp)} is not among batch={self.batch}, expected one of them, since it"
                " splits the tokens, too; add it there."
            )

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """Mesh axes that split the experts, in the order of the ranks."""
        return axis_tuple(self.expert)

    @property
    def token_axes(self) -> tuple[str, ...]:
        """Mesh axes that split the tokens."""
        return (*self.batch, *self.expert_axes)

    @property
    def all_axes(self) -> tuple[str, ...]:
        """Mesh axes that split tokens or weights."""
        return (*self.token_axes, *(() if self.tensor is None else (self.tensor,)))

    @property
    def specs(self) -> MoESpecs:
        """Partition specs of the layer's arrays."""
        expert, tensor, fsdp = self.expert_axes, self.tensor, self.fsdp
        rows = P(self.token_axes) if self.token_axes or tensor else P()
        if tensor is None:
            matrices = (P(expert), P(expert)) if fsdp is None else (P(expert, fsdp), P(expert, None, fsdp))
            return MoESpecs(rows, rows, *matrices, P(expert), P(expert))
        matrices = (P(expert, fsdp, None, tensor), P(expert, tensor, fsdp))
        return MoESpecs(rows, rows, *matrices, P(expert, None, tensor), P(expert))


def sharded_moe(
    mesh: Mesh | None = None, *, num_experts: int, axes: MeshAxes | None = None, **moe_kwargs: Any
) -> Callable[..., Array]:
    """Return `moe` for globally sharded arrays, in automatic and explicit sharding mode.

    Args:
      mesh: the devices; None: the mesh of `jax.set_mesh` at the time of the call.
      num_experts: E.
      axes: the mesh axes that split experts, tokens and weights, see `MeshAxes`; None: `MeshAxes()`.
      **moe_kwargs: further keywords of `moe`: experts, capacity, balance, recipe, preferred_element_type, schedule,
        implementation. With a tensor axis gate and up columns have a separate axis, and
        `Experts.interleaved` is ignored.

    Returns:
      `f(x [N, H], topk_idx [N, K], topk_weights [N, K], w_gate_up, w_down [E, I, H], *, biases=None,
      token_mask=None) -> [N, H]` with the shardings of `MeshAxes.specs`. Weights may be a `qwix.QArray`, or
      `QuantizedWeights`; with a master, their parts are split like the master, between blocks of 128. They may be
      `LoraWeights`, whose adapters are split as their base is, but never along r. Tokens where `token_mask [N]`, of
      bool, is False are ignored, and their rows are zero. Arrays on automatic axes are moved to these shardings. On
      explicit axes a different sharding is an error, because moving data there is the caller's decision
      (`jax.sharding.reshard`).

    Raises:
      ValueError: by the returned function: axes that the mesh lacks; N, E or I that the axes do not divide; arrays of
        other shapes; a different sharding on explicit axes.
      TypeError: a keyword that `moe` lacks, or that is an array; by the returned function: arguments that are not
        arrays, or of other dtypes.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import AxisType
      >>> from jax_ep.sharding import MeshAxes, sharded_moe
      >>> mesh = jax.make_mesh((2, 4), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)
      >>> f = jax.jit(sharded_moe(mesh, num_experts=8, axes=MeshAxes(batch="data")))
      >>> x, idx = jnp.ones((16, 4)), jnp.arange(16, dtype=jnp.int32)[:, None] % 8
      >>> f(x, idx, jnp.ones((16, 1)), jnp.ones((8, 4, 6)), jnp.ones((8, 3, 4))).shape
      (16, 4)

    Source: https://docs.jax.dev/en/latest/notebooks/shard_map.html
    """
    return sharded_layer(mesh, num_experts, axes, moe_kwargs)


def sharded_layer(
    mesh: Mesh | None, num_experts: int, axes: MeshAxes | None, moe_kwargs: dict[str, Any], *, with_work: bool = False
) -> Callable[..., Any]:
    """Return `sharded_moe`; the layer `with_work` also returns the `WORK` of each rank, `[ranks]` int32 each."""
    axes = check.value_of(_FUNCTION, "axes", axes, MeshAxes, "jax_ep.sharding.MeshAxes") or MeshAxes()
    _check_options(moe_kwargs)
    if isinstance(moe_kwargs.get("implementation"), list):
        moe_kwargs["implementation"] = tuple(moe_kwargs["implementation"])
    num_experts = check.integer(_FUNCTION, "num_experts", num_experts)
    options = dict(moe_kwargs, num_experts=num_experts, axes=axes)
    tokens = axes.specs.tokens
    function, out_specs = (_moe_and_work, (tokens, P(axes.token_axes))) if with_work else (_moe_per_shard, tokens)

    @errors_begin_with(_FUNCTION)
    @jax.named_scope("jax_ep.sharded_moe")
    def apply(
        x: Array,
        topk_idx: Array,
        topk_weights: Array,
        w_gate_up: Array | QuantizedWeights | QArray | LoraWeights,
        w_down: Array | QuantizedWeights | QArray | LoraWeights,
        *,
        biases: Biases | None = None,
        token_mask: Array | None = None,
    ) -> Any:
        the_mesh, pair = _mesh(mesh, axes), check.biases(_FUNCTION, biases)
        if isinstance(base_of(w_gate_up), QArray):
            _check_serving_axes(axes)
        w_gate_up, w_down = own_weights(_FUNCTION, "w_gate_up", w_gate_up), own_weights(_FUNCTION, "w_down", w_down)
        arrays = dict(zip(_ARRAYS, (x, topk_idx, topk_weights, w_gate_up, w_down, *pair), strict=True))
        masked_idx = _check_tokens(the_mesh, axes, num_experts, x, topk_idx, topk_weights, token_mask)
        if token_mask is not None:
            arrays["topk_idx"] = masked_idx
        _check_weights(the_mesh, axes, num_experts, moe_kwargs.get("experts"), arrays)
        given = {name: value for name, value in arrays.items() if value is not None}
        in_specs = {name: specs_of_parts(getattr(axes.specs, _ARRAYS[name]), value) for name, value in given.items()}
        for name, argument in given.items():
            for part in jax.tree.leaves(argument):
                check_placed(_FUNCTION, name, part, the_mesh)
            jax.tree.map(partial(_check_explicit, the_mesh, name), argument, in_specs[name])
        return run_sharded(function, options, the_mesh, (in_specs,), out_specs)(given)

    return apply


def _check_options(moe_kwargs: dict[str, Any]) -> None:
    """Check that these are static keywords of `moe`."""
    arrays = sorted({"biases", "token_mask"} & moe_kwargs.keys())
    if arrays:
        raise TypeError(f"{_FUNCTION}: {arrays} are arrays, expected options; pass them to the returned function.")
    keywords = inspect.signature(moe).parameters.keys() - {*_ARRAYS, "biases", "num_experts", "axis_name"}
    if unknown := sorted(moe_kwargs.keys() - keywords):
        raise TypeError(
            f"{_FUNCTION}: unknown keywords {unknown}, expected axes= or some of {sorted(keywords)}; mesh axes are"
            " fields of jax_ep.sharding.MeshAxes."
        )


def _check_weights(
    mesh: Mesh | AbstractMesh, axes: MeshAxes, num_experts: int, experts: Any, arrays: dict[str, Any]
) -> None:
    """Check weights and biases against the mesh and each other."""
    num_shards = ranks_on(mesh, axes.expert_axes)
    check.divisible_experts(_FUNCTION, num_experts, num_shards, axes.expert)
    w_gate_up, w_down, hidden = arrays["w_gate_up"], arrays["w_down"], arrays["x"].shape[1]
    columns = _columns_of(mesh, axes, num_experts, base_of(w_gate_up), base_of(w_down))
    split = {"axis -1 of w_gate_up, I,": w_gate_up.shape[-1], "axis 1 of w_down, I,": w_down.shape[1]}
    check_divisible(_FUNCTION, mesh, axes, hidden, split)
    for name, w in (("w_gate_up", w_gate_up), ("w_down", w_down)):
        if isinstance(w, LoraWeights):
            checked_lora(_FUNCTION, name, w, w.base, arrays["x"].dtype)
    if axes.tensor is not None:
        _check_kinds(w_gate_up.shape, w_down.shape, experts)
    check.bias(_FUNCTION, "b_gate_up", arrays["b_gate_up"], (num_experts, *columns))
    check.bias(_FUNCTION, "b_down", arrays["b_down"], (num_experts, hidden))


def check_divisible(
    function: str, mesh: Mesh | AbstractMesh, axes: MeshAxes, hidden: int, intermediate: Mapping[str, int]
) -> None:
    """Check that the tensor axis divides I, which has these names, and the fsdp axis H."""
    if axes.tensor is not None:
        reason, remedy = f"the ranks of the tensor axis {axes.tensor!r}", "pad I with zeros, which changes no result"
        for name, size in intermediate.items():
            check.multiple(function, name, size, mesh.shape[axes.tensor], reason, remedy)
    if axes.fsdp is not None:
        reason = f"the ranks of the fsdp axis {axes.fsdp!r}"
        check.multiple(function, "H", hidden, mesh.shape[axes.fsdp], reason, "leave fsdp out")


def _moe_per_shard(arrays: dict[str, Any], *, axes: MeshAxes, **options: Any) -> Array:
    if axes.fsdp is not None:
        arrays = _whole_matrices(arrays, axes.specs, axes.fsdp)
    run = partial(_moe, axis_name=axes.expert, **options)
    return run(**arrays) if axes.tensor is None else _on_tensor_axis(run, axes.tensor, **arrays)


def _moe_and_work(arrays: dict[str, Any], *, axes: MeshAxes, **options: Any) -> tuple[Array, dict[str, Array]]:
    with balanced.recording() as found:
        y = _moe_per_shard(arrays, axes=axes, **options)
    work = found[0] if found else dict.fromkeys(WORK, jnp.zeros((), jnp.int32))  # without tokens
    if axes.tensor is not None:  # all ranks of this axis count the same
        work = {name: lax.pmax(count, axes.tensor) for name, count in work.items()}
    return y, {name: count[None] for name, count in work.items()}


def _moe(*, b_gate_up: Array | None = None, b_down: Array | None = None, **arguments: Any) -> Array:
    return moe(biases=(b_gate_up, b_down), **arguments)


def quantize_per_device(mesh: Mesh | AbstractMesh | None, spec: P, w: Array, *, num_leading: int) -> QuantizedWeights:
    """`quantize(w, "fp8", for_training=True)` of weights on a mesh, computed by each device for its part.

    No device needs memory for more than its part, and the kernels of its GPU round.

    Args:
      mesh: where they lie; None: the mesh of the context.
      spec: of one layer, `MeshAxes(...).specs.w_gate_up` or `.w_down`.
      w: `[..., E, K, N]`, or `[..., E, K, 2, N]` with a tensor axis, float.
      num_leading: axes of w before those of a layer, such as that of stacked layers.

    Returns:
      `QuantizedWeights` whose parts are sharded as w is.
    """
    leading = (None,) * num_leading
    specs = _specs_of_master(P(*leading, *spec), P(*leading, *_transposed(spec, w.ndim - num_leading)))
    run = run_sharded(_quantize_values, {}, mesh, (P(*leading, *spec),), dataclasses.replace(specs, master=None))
    return dataclasses.replace(run(lax.stop_gradient(w)), master=w)


def _quantize_values(w: Array) -> QuantizedWeights:
    return dataclasses.replace(quantize(w, "fp8", for_training=True), master=None)


def _specs_of_master(spec: Any, transposed: Any) -> QuantizedWeights:
    return QuantizedWeights(transposed, transposed, "fp8", master=spec, values_kn=spec)


def _transposed(spec: P, rank: int) -> P:
    """Return the spec of values and scales, whose last axis is K."""
    experts, rows, *columns = tuple(spec) + (None,) * (rank - len(spec))
    return P(experts, *columns, rows)


def specs_of_parts(spec: P, argument: Any) -> Any:
    """Return the spec of an argument, or of each of its parts."""
    if isinstance(argument, LoraWeights):
        experts, depth, *columns = tuple(spec) + (None,) * (2 - len(spec))
        has = argument.a is not None
        a, b = (P(experts, depth), P(experts, None, *columns)) if has else (None, None)
        return dataclasses.replace(argument, base=specs_of_parts(spec, argument.base), a=a, b=b)
    if not isinstance(argument, QuantizedWeights):
        return spec
    if argument.master is None:
        return jax.tree.map(lambda _: P(spec[0]), argument)
    return _specs_of_master(spec, _transposed(spec, argument.master.ndim))


def _whole_matrices(arrays: dict[str, Any], specs: MoESpecs, axis: str) -> dict[str, Any]:
    """Gather H of the weights; the transpose adds gradients up into the parts."""

    def whole(part: Array, spec: P) -> Array:
        if axis not in spec:
            return part
        return as_bytes(partial(lax.all_gather, axis_name=axis, axis=tuple(spec).index(axis), tiled=True), part)

    matrices = {name: arrays[name] for name in ("w_gate_up", "w_down")}
    return arrays | {
        name: jax.tree.map(whole, w, specs_of_parts(getattr(specs, name), w)) for name, w in matrices.items()
    }


def _on_tensor_axis(
    run: partial[Array], axis: str, *, w_gate_up: Any, b_gate_up: Array | None = None, **arrays: Any
) -> Array:
    """Sum the shares of I over the ranks of the tensor axis, which all dispatch the same tokens."""
    if isinstance(experts := run.keywords.get("experts"), Experts) and experts.interleaved:
        run = partial(run, experts=dataclasses.replace(experts, interleaved=False))
    if "b_down" in arrays:  # once in the sum
        arrays["b_down"] = arrays["b_down"] * (lax.axis_index(axis) == 0).astype(arrays["b_down"].dtype)
    if b_gate_up is not None:
        arrays["b_gate_up"] = b_gate_up.reshape(b_gate_up.shape[0], -1)
    arrays["w_gate_up"] = merge_columns(w_gate_up)
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


def _mesh(mesh: Mesh | AbstractMesh | None, axes: MeshAxes) -> Mesh | AbstractMesh:
    """Return the given mesh, or the one of `jax.set_mesh`; it must have all axes."""
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    check_mesh(_FUNCTION, mesh, Mesh | AbstractMesh)
    if mesh.empty:
        raise ValueError(
            "sharded_moe: mesh=None and no mesh is set, expected one; pass mesh=, or call jax.set_mesh(mesh)."
        )
    names = axes.all_axes
    check_axes(_FUNCTION, mesh, names, "pass axes=MeshAxes(...) with axes of that mesh")
    check_context(_FUNCTION, mesh, names)
    return mesh


def ranks_on(mesh: Mesh | AbstractMesh, names: Iterable[str]) -> int:
    """Return the number of devices along mesh axes."""
    return math.prod(mesh.shape[name] for name in names)


def _check_tokens(
    mesh: Mesh | AbstractMesh, axes: MeshAxes, num_experts: int, x: Any, topk_idx: Any, weights: Any, token_mask: Any
) -> Array:
    """Check the tokens and their routing; return the ids, -1 for masked tokens."""
    x = check.floating(_FUNCTION, "x", x, "[N, H]")
    num_shards, remedy = ranks_on(mesh, axes.token_axes), "pad the batch (expert id -1 costs nothing)"
    check.multiple(_FUNCTION, "axis 0 of x", x.shape[0], num_shards, f"the shards of {axes.specs.tokens}", remedy)
    if token_mask is not None:
        check.token_mask(_FUNCTION, token_mask, (x.shape[0],))
    topk_idx = check.expert_ids(_FUNCTION, topk_idx, x.shape[0], num_experts, token_mask=token_mask)
    check.router_weights(_FUNCTION, weights, topk_idx.shape, x.dtype)
    return topk_idx


def _check_matrices(w_gate_up: Any, w_down: Any, num_experts: int, tensor_axis: str | None) -> tuple[int, ...]:
    """Check both weights; return the axes of columns of w_gate_up."""
    # A tensor axis splits gate and up alike.
    shape, remedy = "[E, H, 2 * I]" if tensor_axis is None else "[E, H, 2 or 1, I]", "pass the weights of all experts"
    w_gate_up = check.array(_FUNCTION, "w_gate_up", w_gate_up, shape, remedy=remedy, E=num_experts)
    w_down = check.array(_FUNCTION, "w_down", w_down, "[E, I, H]", remedy=remedy, E=num_experts)
    return w_gate_up.shape[2:]


def _check_kinds(w_gate_up: tuple[int, ...], w_down: tuple[int, ...], experts: Any) -> None:
    """Check that w_gate_up is `[E, H, kinds, I]`, so that each rank gets matching gate and up columns."""
    (*_, kinds, columns), intermediate = w_gate_up, w_down[1]
    experts = check.value_of(_FUNCTION, "experts", experts, Experts, "jax_ep.Experts") or Experts()
    if callable(experts.activation):
        return  # It takes any columns.
    expected = 2 if experts.gated else 1
    if kinds != expected or columns != intermediate:
        raise ValueError(
            f"{_FUNCTION}: w_gate_up has shape {w_gate_up} and w_down {w_down}, expected [E, H, {expected},"
            f" {intermediate}] with {experts.gated=}; give gate and up columns a separate axis before that of I."
        )


def _columns_of(
    mesh: Mesh | AbstractMesh, axes: MeshAxes, num_experts: int, w_gate_up: Any, w_down: Any
) -> tuple[int, ...]:
    """Check both weights, whose scale blocks no axis may split; return the axes of columns of w_gate_up."""
    check_quantized.two_of_a_kind(_FUNCTION, w_gate_up, w_down)
    if not isinstance(w_gate_up, QuantizedWeights):
        return _check_matrices(w_gate_up, w_down, num_experts, axes.tensor)
    if w_gate_up.master is None:
        _check_serving_axes(axes)
    ranks = {"w_gate_up": 3 if axes.tensor is None else 4, "w_down": 3}
    for (name, rank), w in zip(ranks.items(), (w_gate_up, w_down), strict=True):
        check_quantized.weights(_FUNCTION, name, w, num_experts, rank=rank)
    if w_gate_up.master is not None:
        check_blocks_per_rank(_FUNCTION, mesh, axes, w_down.shape)
        return _check_matrices(w_gate_up.master, w_down.master, num_experts, axes.tensor)
    return w_gate_up.shape[2:]


def _check_serving_axes(axes: MeshAxes) -> None:
    """Check that no axis but that of the experts splits quantized weights for inference."""
    if axes.tensor is not None or axes.fsdp is not None:
        raise ValueError(
            f"{_FUNCTION}: tensor={axes.tensor!r}, fsdp={axes.fsdp!r} of MeshAxes with quantized weights for inference,"
            " expected neither, since only the expert axis splits quantized weights; leave both None, or pass weights"
            " that are not quantized."
        )


def _check_explicit(mesh: Mesh | AbstractMesh, name: str, argument: Array, spec: P) -> None:
    """Check that the sharding on explicit axes is the one that the layer works on."""
    actual = jax.typeof(argument).sharding
    explicit = set(mesh.explicit_axes)
    if not explicit:
        return

    def entries(p: P) -> tuple[tuple[str, ...], ...]:
        padded = (*p, *(None,) * (argument.ndim - len(p)))
        return tuple(tuple(a for a in axis_tuple(e or ()) if a in explicit) for e in padded)

    if entries(actual.spec) != entries(spec):
        raise ValueError(
            f"sharded_moe: {name} is sharded as {actual.spec}, expected {spec}; move it with"
            f" jax.sharding.reshard({name}, {spec}) under jax.set_mesh(mesh)."
        )


def check_blocks_per_rank(function: str, mesh: Mesh | AbstractMesh, axes: MeshAxes, w_down: tuple[int, ...]) -> None:
    """Check that a tensor axis splits I, and an fsdp axis H, of `[..., I, H]` at scale block boundaries."""
    for name, size, axis in (("H", w_down[-1], axes.fsdp), ("I", w_down[-2], axes.tensor)):
        if axis is not None and size % (GROUP_SIZE * (ranks := mesh.shape[axis])):
            raise ValueError(
                f"{function}: {name}={size} of QuantizedWeights over the {ranks} ranks of {axis!r}, expected a"
                f" multiple of {GROUP_SIZE} per rank, as blocks of {GROUP_SIZE} by {GROUP_SIZE} share a scale; pass"
                " plain arrays, or shard over fewer ranks."
            )


def run_sharded(
    function: Callable[..., Tree],
    options: Mapping[str, object],
    mesh: Mesh | AbstractMesh | None,
    in_specs: Tree,
    out_specs: Tree,
) -> Callable[..., Tree]:
    """`jax.shard_map` of `function` with static `options`, as one program that eager callers compile once.

    A function of the caller's in the options may read what changes between calls, so then each call traces anew.
    """
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    leaves, tree = jax.tree.flatten((in_specs, out_specs))
    key = function, tuple(options.items()), mesh, tuple(leaves), tree, bool(vmap_axes()), context.generation()
    activation = getattr(options.get("experts"), "activation", None)
    if callable(activation) or not _is_hashable(key):
        return _program.__wrapped__(*key)
    return _program(*key)


@functools.lru_cache(maxsize=256)
def _program(
    function: Callable[..., Tree],
    options: tuple[tuple[str, object], ...],
    mesh: Mesh | AbstractMesh,
    leaves: tuple[P, ...],
    tree: Tree,
    in_vmap: bool,
    generation: int,
) -> Callable[..., Tree]:
    in_specs, out_specs = jax.tree.unflatten(tree, leaves)
    run = partial(function, **dict(options))
    # With spmd_axis_name, JAX takes constants in here and values of the batch for different varying axes.
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=not in_vmap))


def _is_hashable(key: object) -> bool:
    try:
        hash(key)
    except TypeError:
        return False
    return True
