"""Passes over the rows in use of expert-major arrays: with a dropless capacity most rows are not."""

from __future__ import annotations

import jax

from jax_ep.core.kernel import Config, Kernel
from jax_ep.core.layout import power_of_two
from jax_ep.core.mesh_axes import vary_alike
from jax_ep.megakernels.grid import num_programs, thread_registers
from jax_ep.megakernels.kernels import rows as rows_kernels
from jax_ep.megakernels.kernels.gemm_structs import RowPass
from jax_ep.megakernels.launch import launch
from jax_ep.types import Array

_GATHER = Kernel(rows_kernels.gather_rows)
_PROGRAMS = 8
"""Of four warps, on a multiprocessor: it takes many bytes in flight to keep the memory busy."""
BLOCK_ELEMENTS = 2048
"""Of a block that is computed with: two 16-byte words of 16-bit elements for a thread."""
_BLOCK_BYTES = 8192
"""Of a block: four 16-byte words for a thread."""


@jax.jit  # one compilation for eager callers
def gather_rows(x: Array, index: Array, group_sizes: Array) -> Array:
    """`x[index]` for the rows of the groups; what lies past them holds anything.

    Args:
      x: `[S, H]`, rows of whole 16-byte words.
      index: `[R]` int32; -1: a row of zeros.
      group_sizes: `[L]` int32; their sum says which rows are in use.

    Returns:
      `[R, H]`.
    """
    sizes = row_pass((index.shape[0], x.shape[1]), group_sizes, 1024, _BLOCK_BYTES // x.dtype.itemsize)
    result = jax.ShapeDtypeStruct((sizes.num_rows, sizes.width), x.dtype)
    operands = vary_alike((x, index, group_sizes))
    return launch(_GATHER, operands, (result,), pass_config(num_blocks(sizes)), {"S": sizes})[0]


def row_pass(shape: tuple[int, ...], group_sizes: Array, most_columns: int, elements: int) -> RowPass:
    """Sizes of a pass over rows, of this shape, in blocks of `elements` elements and up to `most_columns` columns."""
    num_rows, columns = shape
    block, groups = min(most_columns, power_of_two(columns)), group_sizes.shape[0]
    return RowPass(num_rows, columns, groups, max(16, power_of_two(groups)), max(1, elements // block), block)


def num_blocks(sizes: RowPass) -> int:
    """How many blocks a pass has if all rows are in use."""
    return -(-sizes.num_rows // sizes.block_rows) * -(-sizes.width // sizes.block_columns)


def pass_config(num_tasks: int, programs: int = _PROGRAMS) -> Config:
    """For a kernel that reads and writes each element once, with so many programs on a multiprocessor."""
    return Config(num_programs(num_tasks, programs), num_warps=4, max_registers=thread_registers(programs, 4))
