"""What belongs together of the values that kernels take, so that each function takes few of them.

Static sizes are frozen dataclasses. A kernel takes one as a single `tl.constexpr` parameter, and reads it as `S.H`.
They have fields only: Triton's cache tells kernels apart by what a value prints, and would not see a property change.

Values of run time are NamedTuples: of pointers that a launch passes, or of what functions of a kernel hand each other.

Launches make these values, and so do the interpreter's workers: this module imports neither JAX nor Triton.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple


@dataclasses.dataclass(frozen=True)
class Heap:
    """Where things lie in the heap of each device, and which launch this is.

    Attributes:
      W: ranks of the group.
      D: devices of the heap.
      DATA: byte offset of the data area.
      FLAGS: byte offset of the block flags.
      MAX_BLOCKS: flags of a device and parity.
      LAUNCH: the operation and a hash, the same on all ranks that launch the same (protocol.py).
      TRACE: what the kernel does is recorded (trace.py).
    """

    W: int
    D: int
    DATA: int
    FLAGS: int
    MAX_BLOCKS: int
    LAUNCH: int
    TRACE: bool = False


class Peers(NamedTuple):
    """What each kernel that uses the heap takes of its launch.

    Attributes:
      group_ptr: `[W + 1]` int32: numbers of the group's devices, and this rank.
      table_ptr: `[D + 6]` int64: see table.py.
    """

    group_ptr: Any
    table_ptr: Any


class Launch(NamedTuple):
    """An open launch, as this rank sees it.

    Attributes:
      group_ptr, table_ptr: those of `Peers`.
      control: the control words of this device.
      rank: this rank.
      device: the number of its device.
    """

    group_ptr: Any
    table_ptr: Any
    control: Any
    rank: Any
    device: Any


class Peer(NamedTuple):
    """A rank of the group, and the number of its device."""

    rank: Any
    device: Any


class Rows(NamedTuple):
    """Rows as they travel: values, and where these are FP8 their scales; else `scales_ptr` is not used."""

    values_ptr: Any
    scales_ptr: Any


class Sums(NamedTuple):
    """Where the sums of tokens go, `[T, H]`, and scratch memory for the lists of what they are made of."""

    out_ptr: Any
    lists_ptr: Any


class PlanScratch(NamedTuple):
    """Scratch memory of the plan.

    Attributes:
      positions_ptr: `[W, N]` local expert of a slot, and its position among those of the expert in its block.
      counts_ptr: `[W * blocks of a source, BINS]` slots of each block and local expert.
      invalid_ptr: `[blocks of a source]` invalid ids of each of this rank's blocks.
    """

    positions_ptr: Any
    counts_ptr: Any
    invalid_ptr: Any


@dataclasses.dataclass(frozen=True)
class CountTile:
    """How slots are counted by expert: in blocks, each worked on by some lanes at a time.

    Attributes:
      BLOCK: slots of a block.
      LANES: slots at a time.
      BINS: a power of two that covers the experts.
      ROWS: blocks whose counts are added up at a time.
    """

    BLOCK: int
    LANES: int
    BINS: int
    ROWS: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static sizes of the plan.

    Attributes:
      N: slots of a source, T * K.
      L: local experts.
      R: rows.
      ALIGNMENT: what the rows of each expert are a multiple of.
      FILL: rows that one task sets to -1.
      SOURCE_BLOCKS: a power of two that covers the blocks of a source.
      tile: how slots are counted.
    """

    N: int
    L: int
    R: int
    ALIGNMENT: int
    FILL: int
    SOURCE_BLOCKS: int
    tile: CountTile


@dataclasses.dataclass(frozen=True)
class SendOrder:
    """Static sizes of the order of sends: W ranks, T tokens of each, K experts of a token, L local experts."""

    W: int
    T: int
    K: int
    L: int
    tile: CountTile


@dataclasses.dataclass(frozen=True)
class SmallExchange:
    """Static sizes of an exchange of 32-bit values.

    Attributes:
      N: values that each rank has for all.
      BLOCK: values of a block.
    """

    N: int
    BLOCK: int


@dataclasses.dataclass(frozen=True)
class DispatchTile:
    """Blocks of dispatch.

    Attributes:
      BLOCK_T: tokens of a task and of a flag.
      BLOCK_H: columns at a time.
      BLOCK_R: rows of a task that clears padding.
      LAG: blocks between sending one and copying what has arrived.
    """

    BLOCK_T: int
    BLOCK_H: int
    BLOCK_R: int
    LAG: int


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Static sizes that dispatch and combine have in common.

    Attributes:
      T: tokens of a rank.
      K: experts of a token.
      H: columns.
      L: local experts.
      E: experts of all ranks.
      SCALES: byte offset in the data area of the scales of what travels as FP8.
      WEIGHTS: that of router weights, which travel along.
      FP8: tokens, or sums, travel as FP8.
    """

    T: int
    K: int
    H: int
    L: int
    E: int
    SCALES: int
    WEIGHTS: int
    FP8: bool


@dataclasses.dataclass(frozen=True)
class Dispatch(Exchange):
    """Static sizes of dispatch.

    Attributes:
      R: rows.
      QUANTIZED: rows stay FP8.
      CLEAR: rows without a token become zero.
      tile: blocks.
    """

    R: int
    QUANTIZED: bool
    CLEAR: bool
    tile: DispatchTile


@dataclasses.dataclass(frozen=True)
class SumTile:
    """How rows of a list are added up: BLOCK_H, LENGTH and STAGES as those of `CombineTile`."""

    BLOCK_H: int
    LENGTH: int
    STAGES: int


@dataclasses.dataclass(frozen=True)
class CombineTile:
    """Blocks of combine.

    Attributes:
      BLOCK_T: tokens of a task and of a flag.
      BLOCK_H: columns that are added up at a time.
      CHOICES: a power of two that covers K.
      RANKS: a power of two that covers W.
      LENGTH: entries of a list of rows.
      STAGES: rows under way at a time, and one.
      LAG: blocks between sending the sums of one and adding what has arrived.
    """

    BLOCK_T: int
    BLOCK_H: int
    CHOICES: int
    RANKS: int
    LENGTH: int
    STAGES: int
    LAG: int


@dataclasses.dataclass(frozen=True)
class Combine(Exchange):
    """Static sizes of combine, and its blocks."""

    tile: CombineTile


@dataclasses.dataclass(frozen=True)
class Product:
    """Static sizes that products of groups of rows and their matrices have in common, `[., K]` times `[G, K, N]`.

    Attributes:
      M: rows of all groups; of each where groups are masked.
      N: columns of a matrix.
      K: depth, the rows of a matrix.
      G: groups.
      GROUPS: a power of two that covers the groups.
    """

    M: int
    N: int
    K: int
    G: int
    GROUPS: int
