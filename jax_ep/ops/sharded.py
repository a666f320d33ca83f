"""Programs over `jax.shard_map` that eager callers compile once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from jax_ep import context

type Tree = Any
"""A pytree of arrays, specs or results."""


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
    key = function, tuple(options.items()), mesh, tuple(leaves), tree, context.generation()
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
    generation: int,
) -> Callable[..., Tree]:
    in_specs, out_specs = jax.tree.unflatten(tree, leaves)
    return jax.jit(jax.shard_map(partial(function, **dict(options)), mesh=mesh, in_specs=in_specs, out_specs=out_specs))


def _is_hashable(key: object) -> bool:
    try:
        hash(key)
    except TypeError:
        return False
    return True
