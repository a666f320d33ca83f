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
    """

    W: int
    D: int
    DATA: int
    FLAGS: int
    MAX_BLOCKS: int
    LAUNCH: int


class Peers(NamedTuple):
    """What each kernel that uses the heap takes of its launch.

    Attributes:
      group_ptr: `[W + 1]` int32: numbers of the group's devices, and this rank.
      table_ptr: `[D + 5]` int64: see table.py.
      after_ptr: what must come earlier; not read.
    """

    group_ptr: Any
    table_ptr: Any
    after_ptr: Any


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
      N: values that each rank has for each other.
      TO_EACH: they are different for each rank (all-to-all), not the same (all-gather).
      BLOCK: values of a block.
    """

    N: int
    TO_EACH: bool
    BLOCK: int


@dataclasses.dataclass(frozen=True)
class DispatchTile:
    """Blocks of dispatch.

    Attributes:
      BLOCK_T: tokens of a task and of a flag.
      BLOCK_H: columns at a time.
      BLOCK_R: padding rows that one task clears.
      LAG: blocks between sending one and copying what has arrived.
    """

    BLOCK_T: int
    BLOCK_H: int
    BLOCK_R: int
    LAG: int


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """Static sizes of dispatch.

    Attributes:
      T: tokens of a rank.
      K: experts of a token.
      H: columns.
      L: local experts.
      E: experts of all ranks.
      R: rows.
      SCALES: byte offset of the scales of FP8 tokens.
      FP8: tokens travel as FP8.
      QUANTIZED: rows stay FP8.
      CLEAR: rows without a token become zero.
      tile: blocks.
    """

    T: int
    K: int
    H: int
    L: int
    E: int
    R: int
    SCALES: int
    FP8: bool
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
class Combine:
    """Static sizes of combine: T, K, H, L, E, SCALES and FP8 as those of dispatch, for sums; and blocks."""

    T: int
    K: int
    H: int
    L: int
    E: int
    SCALES: int
    FP8: bool
    tile: CombineTile


class LowLatencyBuffers(NamedTuple):
    """The low-latency buffers of a launch (low_latency_buffers.py), each `[RANKS]` by rank.

    Attributes:
      epochs: numbers of this launch.
      outgoing: addresses of the buffers to write to.
      incoming: addresses of the buffers to read.
    """

    epochs: Any
    outgoing: Any
    incoming: Any


class LowLatencyPlan(NamedTuple):
    """What a low-latency dispatch says of its rows, as `LowLatencyHandle`.

    Attributes:
      sizes_ptr: `[L]` rows of each local expert.
      token_ptr: `[L, W * M]` token of each row at its source; -1: none.
      start_ptr: `[L, W]` position of the first row of each source.
      count_ptr: `[L, W]` rows of each source.
      slot_row_ptr: `[W, M, K]` row of each slot here; -1: none.
      own_ids_ptr: `[M, K]` ids of this rank's tokens.
      num_invalid_ptr: `[]` invalid ones among them.
    """

    sizes_ptr: Any
    token_ptr: Any
    start_ptr: Any
    count_ptr: Any
    slot_row_ptr: Any
    own_ids_ptr: Any
    num_invalid_ptr: Any


class RowSources(NamedTuple):
    """Where rows of a low-latency dispatch came from, and where they belong: as those of `LowLatencyPlan`."""

    token_ptr: Any
    start_ptr: Any
    slot_row_ptr: Any
    own_ids_ptr: Any


@dataclasses.dataclass(frozen=True)
class LowLatencyDispatchTile:
    """Blocks of low-latency dispatch.

    Attributes:
      SEND_H: columns of a token that are sent at a time.
      BLOCK_T: tokens of a task that brings them to their rows.
      BLOCK_H: columns of these at a time.
      BLOCK_G: a power of two that covers G.
      CHOICES: a power of two that covers K.
      RANKS: a power of two that covers W.
      CHUNK: tokens whose ids are compared at a time.
      LAG: blocks between sending one and copying what has arrived.
      DIRECT: each copy computes its rows by itself.
    """

    SEND_H: int
    BLOCK_T: int
    BLOCK_H: int
    BLOCK_G: int
    CHOICES: int
    RANKS: int
    CHUNK: int
    LAG: int
    DIRECT: bool


@dataclasses.dataclass(frozen=True)
class LowLatencyDispatch:
    """Static sizes of low-latency dispatch.

    Attributes:
      W: ranks of the group.
      T: tokens of a rank.
      M: tokens that a rank may have.
      K: experts of a token.
      H: columns.
      L: local experts.
      G: scales of a token.
      GROUP: columns of a scale, where the kernel quantises; else 0.
      IDS: byte offset of the ids in a low-latency buffer.
      VALUES: byte offset of the tokens.
      SCALES: byte offset of their scales.
      COUNTED: only some of the tokens count.
      tile: blocks.
    """

    W: int
    T: int
    M: int
    K: int
    H: int
    L: int
    G: int
    GROUP: int
    IDS: int
    VALUES: int
    SCALES: int
    COUNTED: bool
    tile: LowLatencyDispatchTile


@dataclasses.dataclass(frozen=True)
class LowLatencyCombineTile:
    """Blocks of low-latency combine.

    Attributes:
      BLOCK_H: columns at a time.
      CHOICES: a power of two that covers K.
      RANKS: a power of two that covers W.
      LAG: tokens between sending for one and adding what has arrived.
      SUMS: the weighted sum of a token's rows travels, not each row.
    """

    BLOCK_H: int
    CHOICES: int
    RANKS: int
    LAG: int
    SUMS: bool


@dataclasses.dataclass(frozen=True)
class LowLatencyCombine:
    """Static sizes of low-latency combine: those of dispatch, for what travels back.

    Attributes:
      W, T, M, K, H, L: as those of `LowLatencyDispatch`.
      WEIGHTS: byte offset of the router weights in a low-latency buffer.
      VALUES: byte offset of the sums or rows.
      SCALES: byte offset of their scales.
      FP8: they travel as FP8.
      tile: blocks.
    """

    W: int
    T: int
    M: int
    K: int
    H: int
    L: int
    WEIGHTS: int
    VALUES: int
    SCALES: int
    FP8: bool
    tile: LowLatencyCombineTile


@dataclasses.dataclass(frozen=True)
class MaskedTile:
    """How a masked product is covered.

    Attributes:
      BM: rows of a tile.
      BN: columns of a tile.
      BK: depth of one step.
      SWAP: the product is turned.
    """

    BM: int
    BN: int
    BK: int
    SWAP: bool


@dataclasses.dataclass(frozen=True)
class MaskedGemm:
    """Static sizes of a masked grouped GEMM, `[G, M, K]` times `[G, N, K]`.

    Attributes:
      M: rows of a group, in use or not.
      N: columns.
      K: depth.
      G: groups.
      GROUPS: a power of two that covers the groups.
      FP8: operands have scales.
      tile: blocks.
    """

    M: int
    N: int
    K: int
    G: int
    GROUPS: int
    FP8: bool
    tile: MaskedTile


@dataclasses.dataclass(frozen=True)
class MaskedActivationTile:
    """Blocks of the masked activation: BM rows, BN columns."""

    BM: int
    BN: int


@dataclasses.dataclass(frozen=True)
class MaskedActivation:
    """Static sizes of a masked gated activation.

    Attributes:
      M, G, GROUPS: as those of `MaskedGemm`.
      N: columns of the result.
      ACTIVATION: its name.
      QUANTIZE: the result is FP8 with scales.
      tile: blocks.
    """

    M: int
    N: int
    G: int
    GROUPS: int
    ACTIVATION: str
    QUANTIZE: bool
    tile: MaskedActivationTile


@dataclasses.dataclass(frozen=True)
class LowLatencyGemmCombine:
    """Static sizes of a masked grouped GEMM with low-latency combine.

    Attributes:
      W, T, M, K, H, L: as those of `LowLatencyDispatch`.
      VALUES: byte offset of the rows in a low-latency buffer.
      BLOCK_H: columns that are added up at a time.
      CHOICES: a power of two that covers K.
      RANKS: a power of two that covers W.
      gemm: of the product.
    """

    W: int
    T: int
    M: int
    K: int
    H: int
    L: int
    VALUES: int
    BLOCK_H: int
    CHOICES: int
    RANKS: int
    gemm: MaskedGemm


@dataclasses.dataclass(frozen=True)
class RowPass:
    """Static sizes of a pass over the rows in use of `[R, H]`.

    Attributes:
      R: rows, in use or not.
      H: columns.
      G: groups.
      GROUPS: a power of two that covers the groups.
      BR: rows of a block.
      BC: columns of a block.
    """

    R: int
    H: int
    G: int
    GROUPS: int
    BR: int
    BC: int


@dataclasses.dataclass(frozen=True)
class Activation:
    """Which activation: its name, and whether half of the columns are factors of the activated others."""

    NAME: str
    GATED: bool
