"""Mesh axes around a per-shard function: queries, casts, and collectives in plain lax. `axis=()` means one rank."""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from types import UnionType
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ep.types import Array, AxisName, Topology
from jax_ep.values import axis_names, shown, type_name


def axis_tuple(axis_name: AxisName) -> tuple[str, ...]:
    """Return `axis_name` as a tuple of names; a `Topology` gives all its axes."""
    if isinstance(axis_name, Topology):
        return axis_name.axes
    names = axis_names("axis_name", axis_name, "'expert'")
    if len(set(names)) != len(names):
        raise ValueError(
            f"axis_name={shown(axis_name)} names an axis twice, expected distinct axes; remove the repeated one."
        )
    return names


def check_mesh(function: str, mesh: object, kinds: type | UnionType) -> None:
    """Check that `mesh` is a mesh of one of these kinds."""
    if not isinstance(mesh, kinds):
        raise TypeError(
            f"{function}: mesh is {type_name(mesh)}, expected a jax.sharding.Mesh; pass jax.make_mesh(...)."
        )


def mesh_in_use(function: str) -> jax.sharding.Mesh:
    """Return the mesh of `jax.set_mesh`, which may be empty."""
    try:
        return jax.sharding.get_mesh()
    except ValueError as error:
        raise ValueError(
            f"{function}: mesh=None while JAX traces a function, expected a mesh; pass mesh=, or call it outside of"
            " jax.jit, jax.grad and jax.vmap."
        ) from error


def check_axes(
    function: str, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh, axes: Iterable[str], remedy: str
) -> None:
    """Check that a mesh has these axes."""
    if missing := sorted(set(axes) - set(mesh.axis_names)):
        raise ValueError(
            f"{function}: the mesh has axes {tuple(mesh.axis_names)}, expected {shown(missing)} among them; {remedy}."
        )


def check_placed(function: str, name: str, array: Any, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> None:
    """Check that an array is not sharded over axes, or placed on devices, of another mesh."""
    entries = jax.typeof(array).sharding.spec
    where = [f"axis {axis!r}" for entry in entries for axis in axis_tuple(entry or ()) if axis not in mesh.shape]
    is_placed = isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer) and array.committed
    if is_placed and isinstance(mesh, jax.sharding.Mesh) and array.sharding.device_set != set(mesh.devices.flat):
        where.append(f"devices {sorted(device.id for device in array.sharding.device_set)}")
    if where:
        raise ValueError(
            f"{function}: {name} is on another mesh, on {' and '.join(where)}, expected the mesh of the layer,"
            f" {dict(mesh.shape)}; move it with jax.device_put({name}, jax.sharding.NamedSharding(mesh, spec))."
        )


def check_context(function: str, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh, axes: Iterable[str]) -> None:
    """Check that a function of global arrays, which opens a `shard_map` over `axes` of a mesh, can do so here."""
    around = jax.sharding.get_abstract_mesh()
    if manual := sorted(set(axes) & set(around.manual_axes)):
        raise ValueError(
            f"{function}: called inside jax.shard_map over {manual}, expected global arrays outside of it; pass the"
            " arrays of a rank to jax_ep.moe there."
        )
    if not around.empty and around.shape_tuple != mesh.shape_tuple:
        raise ValueError(
            f"{function}: the mesh is {dict(mesh.shape)}, expected that of jax.set_mesh, {dict(around.shape)}; pass one"
            " of them to both, or mesh=None."
        )
    # Inside a shard_map, some axes of the mesh around are manual.
    kinds = zip(around.axis_names, mesh.axis_types, around.axis_types, strict=True) if not around.empty else ()
    if other := [name for name, ours, theirs in kinds if theirs not in (ours, jax.sharding.AxisType.Manual)]:
        raise ValueError(
            f"{function}: the mesh has the axes {other} with axis_types={mesh.axis_types}, expected those of"
            f" jax.set_mesh, {around.axis_types}; pass one of them to both, or mesh=None."
        )
    spread = vmap_axes()
    if explicit := sorted(spread & set(mesh.explicit_axes)):
        raise ValueError(
            f"{function}: called inside jax.vmap over explicit mesh axes {explicit}, expected automatic ones: JAX"
            " cannot split the layer's shard_map over these; make the mesh with axis_types=AxisType.Auto and pass"
            " spmd_axis_name= to jax.vmap, or call jax_ep.moe in a jax.shard_map over these axes and those of the"
            " experts."
        )
    if shared := sorted(spread & set(axes)):
        raise ValueError(
            f"{function}: called inside jax.vmap with spmd_axis_name={shared}, which the layer needs for its experts"
            " and tokens, expected other axes; give the batch of vmap an axis that the layer does not name."
        )


def vmap_axes() -> frozenset[str]:
    """Return the mesh axes over which the surrounding `jax.vmap` splits its batch."""
    from jax._src import core  # JAX has no public name for them

    batch = core.get_axis_env()
    return frozenset(batch.spmd_axis_names | batch.explicit_mesh_axis_names)


@functools.cache
def warn_of_no_mesh() -> None:
    """Warn once per process that no mesh is set."""
    warnings.warn(
        f"MoE: no mesh is set, so the layer runs on one device of {jax.device_count()}; call jax.set_mesh(mesh), or"
        " pass mesh=, to spread experts and tokens. A mesh of one device keeps them on it without this warning.",
        stacklevel=4,
    )


def platform() -> str:
    """Return the platform on which the function being traced will run ("cpu", "gpu", ...).

    This is JAX's default backend, or "cpu" in a mesh of CPU devices, which programs with GPUs also have.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return "cpu" if device is not None and device.platform == "cpu" else jax.default_backend()


def is_one_device() -> bool:
    """Return whether the traced code runs on one device: inside `shard_map` over all axes, or with a single device."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jax.device_count() == 1
    return set(mesh.manual_axes) == set(mesh.axis_names) or mesh.size == 1


def automatic_axes() -> list[str]:
    """Return the axes of several devices that the surrounding `shard_map` leaves to XLA; empty outside `shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    others = set(mesh.axis_names) - set(mesh.manual_axes) if mesh.manual_axes else set()
    return [name for name in mesh.axis_names if name in others and mesh.shape[name] > 1]


def axis_size(axis_name: AxisName, *, function: str, of_vmap: bool = False) -> int:
    """Return the number of ranks on `axis_name`; `()` is one rank. With `of_vmap`, axes of `jax.vmap` count too.

    Raises:
      ValueError: the axis is not bound here; the message says how to bind it.
    """
    names = axis_tuple(axis_name)
    if not names:
        return 1
    bound = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    if of_vmap or set(names) <= set(bound):
        with contextlib.suppress(NameError):
            return int(lax.axis_size(names))
    where = f"the axes bound here are {bound}" if bound else "no mesh axis is bound here"
    raise ValueError(
        f"{function}: axis_name={shown(axis_name)}, but {where}; expected axes of the surrounding jax.shard_map. Call"
        f" it inside jax.shard_map over a mesh that has {' and '.join(map(shown, names))}, pass the axes of that mesh,"
        " or pass axis_name=() for one device."
    )


def spread_axes(axis_name: AxisName) -> tuple[str, ...]:
    """Return the bound axes of `axis_name` that have more than one rank, in order; they determine rank numbers."""
    return tuple(name for name in axis_tuple(axis_name) if lax.axis_size(name) > 1)


def varying_axes(x: Array) -> frozenset[str]:
    """Return the manual mesh axes over which `x` may differ; empty outside `shard_map` and under `check_vma=False`."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def vary_alike[Tree](tree: Tree, *, over: tuple[str, ...] = ()) -> Tree:
    """Cast all arrays of `tree` to vary over the same mesh axes: the union of theirs and `over`.

    A custom VJP must return cotangents that vary exactly as its inputs did. After this cast all inputs vary alike, and
    the transpose of the cast sums the cotangents of an input that was replicated over several ranks.
    """
    union = frozenset(over).union(*map(varying_axes, jax.tree.leaves(tree)))
    return jax.tree.map(functools.partial(_vary_over, union), tree)


def vary_as[Tree](x: Array, tree: Tree) -> Tree:
    """Cast all arrays of `tree` to vary over the mesh axes of `x`; kernel results lose this information."""
    return jax.tree.map(functools.partial(_vary_over, varying_axes(x)), tree)


def _vary_over(axes: frozenset[str], x: Array) -> Array:
    return lax.pcast(x, tuple(sorted(axes - varying_axes(x))), to="varying")


def on_automatic_axes(function: Callable[..., Any], out_specs: Any, *arguments: Any) -> Any:
    """Run `function(*arguments)` with explicit mesh axes made automatic; results get `out_specs`.

    For functions of global arrays: scatters, gathers and `top_k` have no sharding rule for explicit axes. In a
    `shard_map` over other axes, JAX has no gradient of that, so arguments are replicated over the explicit axes there.

    Args:
      function: maps positional pytrees of arrays to a pytree of arrays, without closing over arrays.
      out_specs: a spec for each result, on explicit axes only, such as parts of `spec_of` an argument.
      *arguments: pytrees of arrays.
    """
    mesh = _mesh_around(jax.tree.leaves(arguments))
    if not mesh.explicit_axes:
        return function(*arguments)
    is_spec = lambda spec: isinstance(spec, jax.sharding.PartitionSpec)  # noqa: E731
    if mesh.manual_axes:
        return jax.tree.map(_reshard, out_specs, function(*_reshard(_NOWHERE, arguments)), is_leaf=is_spec)
    shardings = jax.tree.map(lambda spec: jax.sharding.NamedSharding(mesh, spec), out_specs, is_leaf=is_spec)
    return jax.sharding.auto_axes(function, axes=mesh.explicit_axes, out_sharding=shardings)(*arguments)


_NOWHERE = jax.sharding.PartitionSpec()


def _reshard[Tree](spec: jax.sharding.PartitionSpec, tree: Tree) -> Tree:
    """Split all arrays of a tree over explicit mesh axes by one spec; `P()` replicates them."""

    def one(x: Any) -> Any:
        is_split = isinstance(x, jax.Array) and any((*spec, *spec_of(x)))
        return jax.sharding.reshard(x, spec) if is_split else x

    return jax.tree.map(one, tree)


def _mesh_around(arrays: list[Array]) -> jax.sharding.AbstractMesh:
    """Return the mesh of the context, or else the mesh of one of the arrays; it may be empty."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        return mesh
    meshes = (jax.typeof(array).sharding.mesh for array in arrays)
    return next((found for found in meshes if not found.empty), mesh)


def takes_global_arrays[**Arguments, Result](
    *, keeps_rows: bool = False
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Decorate a single-device operation so that its arrays may be sharded over explicit mesh axes.

    Explicit axes become automatic inside the operation, or in a `shard_map` over other axes the arrays are replicated
    over them. Results are not sharded over explicit axes. With `keeps_rows`, axis 0 of the result is sharded like axis
    0 of the first argument.
    """

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        first_name = next(iter(inspect.signature(function).parameters))

        @functools.wraps(function)
        def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            leaves, tree = jax.tree.flatten((args, kwargs))
            arrays = {place: leaf for place, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)}
            if not _mesh_around(list(arrays.values())).explicit_axes:
                return function(*args, **kwargs)

            def inside(arrays: dict[int, Array]) -> Result:
                args, kwargs = jax.tree.unflatten(tree, [arrays.get(place, x) for place, x in enumerate(leaves)])
                return function(*args, **kwargs)

            first = args[0] if args else kwargs.get(first_name)
            rows = spec_of(first)[:1] if keeps_rows and isinstance(first, jax.Array) else ()
            return cast(Result, on_automatic_axes(inside, jax.sharding.PartitionSpec(*rows), arrays))

        return run

    return decorate


def spec_of(x: Array) -> tuple[Any, ...]:
    """Return the explicit mesh axes that shard each axis of an array, or None, from its type."""
    spec = tuple(jax.typeof(x).sharding.spec)
    return spec + (None,) * (x.ndim - len(spec))


def resized_spec(x: Array, axis: int, size: int) -> jax.sharding.PartitionSpec:
    """Return `spec_of(x)` for another size of an axis, which is not sharded if its mesh axes do not divide that."""
    spec, axis = list(spec_of(x)), axis % x.ndim
    mesh = jax.typeof(x).sharding.mesh
    if size % math.prod(mesh.shape[name] for name in axis_tuple(spec[axis] or ())):
        spec[axis] = None
    return jax.sharding.PartitionSpec(*spec)


def rearrange(
    function: Callable[[Array], Array],
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None,
    spec: jax.sharding.PartitionSpec,
) -> Callable[[Array], Array]:
    """Wrap a reshaping `function` for automatic and explicit mesh axes, or none.

    With explicit axes the output sharding must be named, because a merged or padded axis has no obvious one. With
    automatic axes the compiler chooses it.
    """
    if mesh is None or not mesh.explicit_axes:
        return function
    explicit = set(mesh.explicit_axes)  # types name only these
    kept = (tuple(name for name in axis_tuple(entry or ()) if name in explicit) or None for entry in spec)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*kept))
    return jax.sharding.auto_axes(function, axes=mesh.explicit_axes, out_sharding=sharding)


def numbers_in_processes(devices: Iterable[jax.Device]) -> dict[jax.Device, int]:
    """Return the position of each device among the devices of its process."""
    counts = collections.Counter[int]()
    found = {}
    for device in devices:
        found[device] = counts[device.process_index]
        counts[device.process_index] += 1
    return found


Axis = tuple[str, ...]


def rank_on(axis: Axis) -> Array | int:
    """Return this rank's position on the axis."""
    return lax.axis_index(axis) if axis else 0


def all_gather(x: Array, axis: Axis) -> Array:
    """Gather `[...]` of each rank into `[W, ...]`."""
    return as_bytes(lambda x: lax.all_gather(x, axis), x) if axis else x[None]


def exchange(parts: Array, axis: Axis) -> Array:
    """Send `parts[i]` of `[W, ...]` to rank i; return `[W, ...]` with one part from each rank."""
    return as_bytes(lambda x: lax.all_to_all(x, axis, 0, 0), parts) if axis else parts


def as_bytes(send: Callable[[Array], Array], x: Array) -> Array:
    """Send FP8 as bytes, which every platform supports; XLA widens FP8 values for collectives of some."""
    if x.dtype.itemsize > 1:
        return send(x)
    return lax.bitcast_convert_type(send(lax.bitcast_convert_type(x, jnp.uint8)), x.dtype)


def permute(x: Array, axis: Axis, pairs: Sequence[tuple[int, int]]) -> Array:
    """`lax.ppermute` for axes in any order: JAX takes them in the order of the mesh only."""
    ordered = tuple(name for name in jax.sharding.get_abstract_mesh().axis_names if name in axis)
    ranks = np.arange(lax.axis_size(axis)).reshape([lax.axis_size(name) for name in axis])
    places = np.argsort(ranks.transpose([axis.index(name) for name in ordered]).ravel())
    return lax.ppermute(x, ordered, [(int(places[source]), int(places[target])) for source, target in pairs])


def known_after(x: Array, earlier: Array) -> Array:
    """Return `x` with a data dependence on `earlier`, to order kernel launches.

    An optimization barrier does not work: XLA removes it before it schedules.
    """
    if not earlier.size:
        return x
    first = earlier[(0,) * earlier.ndim]
    other = first != first if jnp.issubdtype(earlier.dtype, jnp.floating) else first == 1
    return x + (other & (first == 0)).astype(x.dtype)  # Always adds 0, but XLA cannot know.


def sum_in_order(parts: Array | Sequence[Array]) -> Array:
    """Sum over the first axis, or over several arrays, in index order, so that the result is deterministic."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
