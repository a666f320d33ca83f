"""Inline PTX in the interpreter: the few instructions that the kernels use, on arrays of registers.

Source: the PTX ISA, sections 9.7.1 (integers), 9.7.3 (floats), 9.7.8 (logic and shift) and 9.7.9 (prmt, mov, cvt),
9.7.4 for halves of a register, and 10 for special registers.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np


def run(asm: str, constraints: str, packs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Run the instructions once for each pack.

    Args:
      asm: instructions on 32-bit registers; `$0`, `$1`, ... are the results, then the arguments.
      constraints: `=r` for each result register, then `r` for each argument register; without arguments also `=l`, of
        64 bits. Clobbers are ignored.
      packs: `[packs]` uint32 for each argument register.

    Returns:
      `[packs]` uint32 for each result register; without arguments `[1]` uint32, or uint64 for 64-bit registers.

    Raises:
      NotImplementedError: an instruction or constraint is not supported.
    """
    kinds = [kind for kind in constraints.replace(" ", "").split(",") if not kind.startswith("~")]
    if not packs:
        return [_special(line) for line in filter(None, map(str.strip, asm.split(";")))]
    num_results = kinds.count("=r")
    if kinds != ["=r"] * num_results + ["r"] * len(packs):
        raise NotImplementedError(
            f"constraints {constraints!r} for {len(packs)} registers: the interpreter supports only =r, then r"
        )
    registers = {f"${num_results + i}": pack for i, pack in enumerate(packs)}

    def value(operand: str) -> np.ndarray:
        if operand in registers:
            return registers[operand]
        # Floats are written as their bits, with the prefix 0f.
        return np.asarray(int(operand.replace("0f", "0x"), 0), np.uint32)

    for line in filter(None, (line.strip() for line in re.sub(r"[{}]", "", asm).split(";"))):
        name, operands = line.split(maxsplit=1)
        if name == ".reg":
            continue
        target, *sources = (operand.strip() for operand in operands.split(","))
        if name not in _INSTRUCTIONS:
            raise NotImplementedError(f"{line!r}: the interpreter supports {', '.join(_INSTRUCTIONS)}")
        registers[target] = _INSTRUCTIONS[name](*map(value, sources))
    shape = packs[0].shape
    return [np.broadcast_to(registers[f"${i}"], shape) for i in range(num_results)]


def _special(line: str) -> np.ndarray:
    """Return the value of a special register; programs of a device run one after another, as on one multiprocessor.

    The time is that of one clock that all workers share, so that times of different workers compare.
    """
    source = line.rpartition(" ")[2]
    if line.startswith("mov.u64 $0,") and source == "%globaltimer":
        return np.array([time.monotonic_ns()], np.uint64)
    if line.startswith("mov.u32 $0,") and source == "%smid":
        return np.array([0], np.uint32)
    raise NotImplementedError(f"{line!r}: without arguments the interpreter supports %globaltimer and %smid")


def _permute(low: np.ndarray, high: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """Select four of eight bytes (prmt). A 4-bit selector holds the byte's number and a replicate-sign bit."""
    low, high, selector = np.broadcast_arrays(low, high, selector)
    pool = np.stack([(word >> np.uint32(8 * i)) & np.uint32(255) for word in (low, high) for i in range(4)])
    result = np.zeros(selector.shape, np.uint32)
    for place in range(4):
        which = selector >> np.uint32(4 * place) & np.uint32(15)
        byte = np.take_along_axis(pool, (which & np.uint32(7)).astype(np.intp)[None], axis=0)[0]
        byte = np.where(which > 7, np.where(byte > 127, 255, 0), byte).astype(np.uint32)
        result |= byte << np.uint32(8 * place)
    return result


def _logic(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Apply a truth table bitwise (lop3): bits of a, b and c form the index, with a's bit the highest."""
    result = np.zeros(np.broadcast_shapes(np.shape(a), np.shape(b), np.shape(c)), np.uint32)
    for row in range(8):
        if int(table) >> row & 1:
            picked = (x if row & bit else ~x for x, bit in ((a, 4), (b, 2), (c, 1)))
            result |= np.bitwise_and.reduce([*np.broadcast_arrays(*picked)])
    return result


def _funnel(low: np.ndarray, high: np.ndarray, amount: np.ndarray) -> np.ndarray:
    """Shift two words left together and return the upper one (shf.l): a rotation if both are the same."""
    both = np.asarray(high, np.uint64) << np.uint64(32) | np.asarray(low, np.uint64)
    return (both << (np.asarray(amount, np.uint64) & np.uint64(31)) >> np.uint64(32)).astype(np.uint32)


def _smaller_halves(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the smaller 16-bit integer in either half of two registers (min.u16x2)."""
    halves = (np.asarray(x, np.uint32)[..., None].view(np.uint16) for x in np.broadcast_arrays(a, b))
    return np.minimum(*halves).view(np.uint32)[..., 0]


def _in_bfloat16(operation: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Callable[..., np.ndarray]:
    """Apply an operation to the bfloat16 halves of two registers; float32 is precise enough for one rounding."""

    def both_halves(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        wide = [
            x.astype(np.uint32)[..., None].view(ml_dtypes.bfloat16).astype(np.float32) for x in map(np.asarray, (a, b))
        ]
        return operation(*wide).astype(ml_dtypes.bfloat16).view(np.uint32)[..., 0]

    return both_halves


def _together(low: np.ndarray, high: np.ndarray | None = None) -> np.ndarray:
    """Combine a register, or two 16-bit halves, into a register (mov)."""
    return low if high is None else low | high << np.uint32(16)


def _in_float32(operation: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Apply a float32 operation with one rounding: float64 holds float32 products and sums precisely enough."""

    def of_bits(*registers: np.ndarray) -> np.ndarray:
        values = (np.asarray(x, np.uint32).view(np.float32).astype(np.float64) for x in registers)
        with np.errstate(all="ignore"):
            return operation(*values).astype(np.float32).view(np.uint32)

    return of_bits


def _two_codes(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """Convert two float32 to saturated e4m3 in the lower half of a register."""
    low, high = (
        np.clip(x.astype(np.uint32).view(np.float32), -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        for x in (low, high)
    )
    return low | high.astype(np.uint32) << np.uint32(8)


_INSTRUCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "mov.b32": _together,
    "cvt.rn.satfinite.e4m3x2.f32": _two_codes,
    "and.b32": np.bitwise_and,
    "or.b32": np.bitwise_or,
    "add.u32": np.add,
    "shl.b32": np.left_shift,
    "shr.b32": np.right_shift,
    "shf.l.wrap.b32": _funnel,
    "lop3.b32": _logic,
    "prmt.b32": _permute,
    "min.u16x2": _smaller_halves,
    "neg.f32": _in_float32(np.negative),
    "rcp.approx.ftz.f32": _in_float32(np.reciprocal),
    "fma.rn.f32": _in_float32(lambda a, b, c: a * b + c),
    "mul.bf16x2": _in_bfloat16(np.multiply),
    "sub.bf16x2": _in_bfloat16(np.subtract),
}
