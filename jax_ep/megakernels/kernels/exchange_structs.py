"""Structs of the kernels that exchange tokens: protocol.py, plan.py, dispatch.py, combine.py and small_exchange.py.

Two kinds of structs hold what kernels take, here and in the other `*_structs.py`:

- Static sizes are frozen dataclasses. A kernel takes one as the `tl.constexpr` parameter `S` and reads `S.hidden`. They
  have fields only: Triton's cache identifies a kernel by the printed value of its constants and ignores properties.
- Runtime values are NamedTuples: pointers that a launch passes to a kernel.

Both the launches and the interpreter's processes create these values, so these modules import neither JAX nor Triton.
Structs that only kernels create are declared in the kernel's file.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from .gemm_structs import Pointer


@dataclasses.dataclass(frozen=True)
class Heap:
    """Layout of each device's heap, and the identity of the launch."""

    num_ranks: int  # ranks of the EP group
    num_devices: int  # devices of the heap; the EP group is a subset
    data_offset: int  # byte offset of the data area
    flags_offset: int  # byte offset of the block flags
    max_blocks: int  # flags per device and parity
    launch_id: int  # operation and hash of the kernel, equal on all ranks that launch the same (protocol.py)
    traced: bool = False  # whether the kernel records events (trace.py)


class Peers(NamedTuple):
    """The arrays of a launch through which a kernel finds its peers."""

    group_ptr: Pointer  # [num_ranks + 1] int32: the device of each rank, then this rank
    table_ptr: Pointer  # [num_devices + 6] int64: heap addresses, then the words of failures.py


class Rows(NamedTuple):
    """Rows in the wire dtype."""

    values_ptr: Pointer
    scales_ptr: Pointer  # float32 scales of FP8 values; unused for other dtypes


class Sums(NamedTuple):
    """Results and scratch memory of combine."""

    out_ptr: Pointer  # [num_tokens, hidden]
    lists_ptr: Pointer  # scratch: the lists of rows that each program adds up (listed_sums.py)


class PlanScratch(NamedTuple):
    """Scratch memory of the plan."""

    positions_ptr: Pointer  # [num_ranks, num_assignments] local expert and position of an assignment in its block
    counts_ptr: Pointer  # [num_ranks * blocks per source, bins] assignments per block and local expert
    invalid_ptr: Pointer  # [blocks per source] invalid expert ids in each block of this rank


@dataclasses.dataclass(frozen=True)
class CountTile:
    """Blocks in which assignments are counted by expert."""

    block: int  # assignments per block
    lanes: int  # assignments processed at a time
    bins: int  # power of two >= local experts
    blocks_at_once: int  # blocks whose counts are added up at a time


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static sizes of the plan."""

    num_assignments: int  # of one source: num_tokens * top_k
    num_local_experts: int
    num_rows: int  # capacity: expert rows of this rank
    alignment: int  # rows of each expert are padded to a multiple of this
    fill_rows: int  # rows that one task sets to -1
    source_blocks: int  # power of two >= blocks per source
    tile: CountTile


@dataclasses.dataclass(frozen=True)
class SendOrder:
    """Static sizes of the send order."""

    num_ranks: int
    num_tokens: int  # per rank
    top_k: int
    num_local_experts: int
    tile: CountTile


@dataclasses.dataclass(frozen=True)
class SmallExchange:
    """Static sizes of an all-gather of 32-bit values."""

    num_values: int  # values of each rank
    block: int  # values per block


@dataclasses.dataclass(frozen=True)
class CopySizes:
    """Static sizes of `fetch_copies` and `add_gradients`."""

    num_local_experts: int
    spare: int  # slots for copies per rank
    num_elements: int  # of an expert; a multiple of 16 bytes
    block: int  # elements per task and flag, a power of two
    num_blocks: int  # per expert
    padded_slots: int  # power of two >= num_ranks * spare
    padded_experts: int  # power of two >= num_local_experts
    zeroed: bool  # free slots become zero


@dataclasses.dataclass(frozen=True)
class PassSizes:
    """Static sizes of `plan_pass`."""

    num_ranks: int
    num_experts: int  # of all ranks
    num_local_experts: int
    spare: int  # slots for copies per rank
    rows: int  # rows of a rank in a pass
    padded_experts: int  # power of two >= num_experts
    padded_ranks: int  # power of two >= num_ranks
    padded_slots: int  # power of two >= num_ranks * spare


@dataclasses.dataclass(frozen=True)
class PlaceSizes:
    """Static sizes of `count_shares` and `place_assignments`."""

    num_assignments: int  # of this rank
    num_ranks: int
    num_experts: int  # of all ranks
    spare: int  # slots for copies per rank
    tile: CountTile  # a block for each program, with bins for all experts


@dataclasses.dataclass(frozen=True)
class DispatchTile:
    """Blocks of dispatch."""

    block_tokens: int  # tokens per task and flag
    block_hidden: int  # columns copied at a time
    block_rows: int  # rows per task that clears padding
    lag: int  # blocks between sending a block and copying a received one


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Static sizes that dispatch and combine share."""

    num_tokens: int  # per rank
    top_k: int
    hidden: int
    num_local_experts: int
    num_experts: int  # of all ranks
    scales_offset: int  # byte offset of FP8 scales in the data area
    weights_offset: int  # byte offset of router weights in the data area
    fp8: bool  # whether tokens or sums travel as FP8


@dataclasses.dataclass(frozen=True)
class Dispatch(Exchange):
    """Static sizes of dispatch."""

    num_rows: int  # capacity: expert rows of this rank
    quantized: bool  # whether the result stays FP8 with scales
    clears_padding: bool  # whether rows without a token become zero
    tile: DispatchTile


@dataclasses.dataclass(frozen=True)
class SumTile:
    """How the rows of a list are added up."""

    block_hidden: int  # columns added up at a time
    list_length: int  # capacity of a list of rows
    rows_in_flight: int  # rows that are on their way while others are added
    in_registers: bool  # rows go to registers, else to shared memory first


@dataclasses.dataclass(frozen=True)
class CombineTile(SumTile):
    """Blocks of combine, and how their rows are added up."""

    block_tokens: int  # tokens per task and flag
    padded_top_k: int  # power of two >= top_k
    padded_ranks: int  # power of two >= num_ranks
    lag: int  # blocks between sending the sums of a block and adding received ones


@dataclasses.dataclass(frozen=True)
class Combine(Exchange):
    """Static sizes of combine."""

    tile: CombineTile
