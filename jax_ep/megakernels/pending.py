"""Launches whose code a thread still compiles: traced as what they will be, and waited for where a program is lowered.

A traced call knows shapes alone. So tracing goes on, to the next kernels, and where XLA needs the code of the first all
of them are under way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax

from jax_ep import ffi
from jax_ep.core.autodiff import deferred, shaped
from jax_ep.core.kernel import Blocks, Config
from jax_ep.megakernels.compile import ALIGNMENT, Compilation, Copies
from jax_ep.types import Array


def launch(
    code: Compilation,
    operands: Sequence[Array],
    results: Sequence[jax.ShapeDtypeStruct],
    blocks: Sequence[Blocks | None],
    config: Config,
    written: dict[int, int],
) -> tuple[Array, ...]:
    """`ffi.launch_kernel` of what `compile_kernel` has begun to compile.

    `blocks` are of the descriptor of each operand and each result, None for those that the kernel takes by address.
    """
    shapes = tuple(map(shaped, results))
    number, aliases = config.num_programs, tuple(written.items())
    return tuple(
        _launch_p.bind(*operands, code=code, results=shapes, blocks=tuple(blocks), written=aliases, num_programs=number)
    )


def _launch_compiled(
    *operands: Array,
    code: Compilation,
    results: tuple[jax.ShapeDtypeStruct, ...],
    blocks: tuple[Blocks | None, ...],
    written: tuple[tuple[int, int], ...],
    num_programs: int,
) -> tuple[Array, ...]:
    compiled = code.result()
    copies = iter(compiled.copies)
    return ffi.launch_kernel(
        compiled.name,
        compiled.code,
        operands,
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results],
        num_programs=num_programs,
        num_threads=compiled.num_threads,
        shared_bytes=compiled.shared_bytes,
        alignment=ALIGNMENT,
        parameters=[_parameter(described, copies) for described in blocks],
        written=dict(written),
    )


def _parameter(blocks: Blocks | None, copies: Iterator[Copies]) -> tuple[int, ...]:
    if blocks is None:
        return ffi.by_address()
    element_type, element_bytes, swizzle, box = next(copies)
    return ffi.by_descriptor(element_type, element_bytes, swizzle, blocks.shape, blocks.strides, box)


_launch_p = deferred("jax_ep_launch", _launch_compiled)
