"""Launches of kernels, and what all kernels share: types of references, and layouts of shared memory and registers.

On the CPU, Mosaic's interpreter runs kernels with the same barriers and copies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jax_ep.core.mesh_axes import vary_alike, vary_as
from jax_ep.pallas.tiling import ALIGNMENT

PROGRAM = "program"
WARPGROUP = "warpgroup"
_LINE_BYTES = 128

Ref = Any
Scalar = Any  # int32, static or traced
Scratch = Any  # declares memory or barriers of a program
int32 = np.int32  # of all scalars in a kernel, so that x64 mode does not make them int64
_CORES = 132  # multiprocessors of H100 and H200, for lowering where there is no GPU
_INTERPRETED_PROGRAMS = 2


def is_interpreted() -> bool:
    """Whether Mosaic's interpreter runs the kernels, as it does on CPUs."""
    return jax.default_backend() == "cpu"


def num_programs(num_tasks: int, interpret: bool) -> int:
    """Return the number of persistent programs: one per multiprocessor, at most one per task."""
    if interpret:
        return _INTERPRETED_PROGRAMS
    on_gpu = jax.default_backend() == "gpu"
    cores = jax.local_devices()[0].core_count if on_gpu else _CORES
    return min(num_tasks, cores)


def launch(
    name: str,
    body: Callable[..., None],
    operands: tuple[Any, ...],
    result: Any,
    scratch: dict[str, Scratch],
    programs: int,
    interpret: bool,
    *,
    warpgroups: int = 1,
) -> Any:
    """Run a kernel; its results vary over the mesh axes over which operands do."""
    operands = vary_alike(operands)
    kernel = plgpu.kernel(
        body,
        out_type=result,
        scratch_types=scratch,
        grid=(programs,),
        grid_names=(PROGRAM,),
        num_threads=warpgroups,
        thread_name=WARPGROUP,
        kernel_name=name,
        interpret=plgpu.InterpretGPUParams() if interpret else False,
        # Nothing is reduced across warps. These semantics refuse copies of blocks that may begin within one.
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup, reduction_scratch_bytes=0
        ),
    )
    return vary_as(jax.tree.leaves(operands)[0], kernel(*operands))


def in_array_of(arrays: tuple[Ref, ...], group: Any, act: Callable[[Ref, Any], None]) -> None:
    """Call `act(array, index)` for the array, of one or of two, that has a group of weights."""
    first, *others = arrays
    if not others:
        act(first, group)
        return
    home = int32(first.shape[0])
    pl.when(group < home)(lambda: act(first, group))
    pl.when(group >= home)(lambda: act(others[0], group - home))


def line(dtype: DTypeLike) -> int:
    """Return how many elements a 128-byte line of shared memory holds."""
    return _LINE_BYTES // jnp.dtype(dtype).itemsize


def swizzled(shape: tuple[int, ...], dtype: DTypeLike) -> Scratch:
    """Declare shared memory in the layout that the tensor cores read without bank conflicts."""
    transforms = plgpu.TilingTransform((ALIGNMENT, line(dtype))), plgpu.SwizzleTransform(_LINE_BYTES)  # type: ignore[abstract]
    return plgpu.SMEM(shape, dtype, transforms=transforms)
