"""FP8 wgmma whose result is a value: consumers issue in alternation, and wait for the result later.

Tensor cores add FP8 products in few bits, so each step's sum is scaled and added in float32 registers. If warpgroups
issue wgmma as soon as they can, they drift into multiplying at the same time and adding at the same time, and the
tensor cores idle. So consumers alternate (ping-pong): one issues, then the other, and each adds while the other's wgmma
runs. The ping-pong barrier also keeps the assembler from starting a wgmma while the previous one is added, for which
there are too few registers.

Pallas clears an accumulator before use, which costs an instruction for two elements in each step. Here the first
instruction of a wgmma overwrites its sums, so nothing is cleared.

Call `finish` in straight-line code: if a wgmma is in flight at the end of a loop iteration or a branch, the assembler
serializes all of them.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import mma_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from jax_ep.pallas.launch import LINE_BYTES, WARPGROUP, Ref, Scratch, int32, swizzling
from jax_ep.pallas.tiling import ALIGNMENT, CHUNK, CONSUMERS, FP8_STEP
from jax_ep.types import Array

_INSTRUCTION_BYTES = 32  # of K per instruction
_FLOAT32 = jnp.dtype(jnp.float32)
_THREADS = 128  # of a warpgroup
_TYPES = {"f8E4M3FN": "e4m3", "f8E5M2": "e5m2"}
_IN_FLIGHT = plgpu.Layout.TILED(
    plgpu.Tiling(((CHUNK, 8), (16, 8), (8, 8), (2,), (1,))), warp_dims=(-8,), lane_dims=(-4, -3), vector_dim=-1
)
"""Register layout of `Layout.WGMMA` with one element per value, so that no two elements have to be packed."""

type Sums = tuple[Array, ...]
"""Float32 sums of a consumer, in parts of its columns."""


def ping_pong_barriers() -> Scratch:
    """Declare the ping-pong barriers: each one opens when its consumer may issue a wgmma."""
    return plgpu.Barrier(num_arrivals=1, num_barriers=CONSUMERS)


def open_ping_pong(ping_pong: Ref) -> None:
    """Let the first consumer begin; all consumers call this."""

    @pl.when(lax.axis_index(WARPGROUP) == int32(CONSUMERS - 1))
    def _last() -> None:
        plgpu.barrier_arrive(ping_pong.at[0])


def zeros(columns: int) -> Array:
    """Return zero sums in the register layout of wgmma."""
    return plgpu.layout_cast(jnp.zeros((CHUNK, columns), jnp.float32), plgpu.Layout.WGMMA)


def begin(ping_pong: Ref, lhs: Ref, rhs: Ref, *, interpret: bool) -> Array:
    """Issue `lhs [64, 128] @ rhs [N, 128].T`, both FP8 in swizzled shared memory; pass the result to `finish`.

    All consumers must make the same number of calls.
    """
    consumer = lax.axis_index(WARPGROUP)
    # Wait at the ping-pong barrier, issue, then let the other consumer issue.
    plgpu.barrier_wait(ping_pong.at[consumer])
    product = _begin(lhs, rhs, interpret)
    plgpu.barrier_arrive(ping_pong.at[lax.rem(consumer + int32(1), int32(CONSUMERS))])
    return product


def finish(product: Array, *, interpret: bool) -> Array:
    """Wait for a wgmma and return its float32 sums."""
    if interpret:
        return product
    result = plgpu.ShapeDtypeStruct(product.shape, _FLOAT32, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(_IN_FLIGHT,), return_type=result)
    def wait(_: object, sums: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        values = [llvm.extractelement(x, _first()) for x in sums.registers.flat]
        code = "wgmma.wait_group.sync.aligned 0;"
        return _assembly(code, product.shape, values, through=True).to_layout(mgpu.WGMMA_LAYOUT)

    return wait(product)


def _begin(lhs: Ref, rhs: Ref, interpret: bool) -> Array:
    shape = (CHUNK, rhs.shape[0])
    if interpret:
        return pl.run_scoped(lambda sums: _multiply(sums, lhs, rhs), plgpu.ACC(shape))
    operand = plgpu.RefType(swizzling(lhs.dtype))
    result = plgpu.ShapeDtypeStruct(shape, _FLOAT32, layout=_IN_FLIGHT)

    @plgpu.inline_mgpu(arg_types=(operand, operand), return_type=result)
    def issue(_: object, left: ir.Value, right: ir.Value) -> mgpu.FragmentedArray:
        swizzle = mgpu.dialect.SwizzlingMode.k128ByteSwizzle
        operands = [mma_utils.encode_descriptor(x, 0, ALIGNMENT * LINE_BYTES, swizzle) for x in (left, right)]
        types = ".".join(_TYPES[str(ir.MemRefType(x.type).element_type)] for x in (left, right))
        return _assembly(_instructions(shape[1], types), shape, operands)

    return issue(lhs, rhs)


def _multiply(sums: Ref, lhs: Ref, rhs: Ref) -> Array:
    plgpu.wgmma(sums, lhs, rhs.transpose((1, 0)))
    return sums[...]


def _instructions(columns: int, types: str) -> str:
    """Return the assembly of a wgmma: its first operands are the sums, the next ones descriptors of lhs and rhs."""
    number = columns // 2  # sums of a thread
    sums = ", ".join(f"${i}" for i in range(number))
    code = [".reg .pred never, always;", "setp.ne.b32 never, 0, 0;", "setp.eq.b32 always, 0, 0;"]
    code += [".reg .b64 left, right;", "wgmma.fence.sync.aligned;"]
    for k in range(0, FP8_STEP, _INSTRUCTION_BYTES):
        code += [f"add.s64 left, ${number}, {k >> 4};", f"add.s64 right, ${number + 1}, {k >> 4};"]
        # The first instruction overwrites the sums, later ones add to them.
        multiply = f"wgmma.mma_async.sync.aligned.m{CHUNK}n{columns}k{_INSTRUCTION_BYTES}.f32.{types}"
        code.append(f"{multiply} {{{sums}}}, left, right, {'always' if k else 'never'}, 1, 1;")
    return "\n".join(["{", *code, "wgmma.commit_group.sync.aligned;", "}"])


def _assembly(code: str, shape: tuple[int, ...], operands: list[ir.Value], through: bool = False) -> Any:
    """Return an array made by assembly from operands; with `through`, from one register per element, in place."""
    number, float32 = shape[0] * shape[1] // _THREADS, ir.F32Type.get()
    constraints = [str(i) for i in range(number)] if through else ["l"] * len(operands)
    results = llvm.inline_asm(
        llvm.StructType.get_literal([float32] * number),
        operands,
        code,
        ",".join(["=f"] * number + constraints),
        asm_dialect=0,
        has_side_effects=True,
    )
    vector, layout = ir.VectorType.get((1,), float32), _IN_FLIGHT.to_mgpu()
    elements = [llvm.extractvalue(float32, results, [i]) for i in range(number)]
    registers = [llvm.insertelement(llvm.mlir_undef(vector), element, _first()) for element in elements]
    in_shape = np.array(registers, dtype=object).reshape(layout.registers_shape(shape))
    return mgpu.FragmentedArray(_registers=in_shape, _layout=layout, _is_signed=None)


def _first() -> ir.Value:
    return mgpu.c(0, ir.IntegerType.get_signless(32))
