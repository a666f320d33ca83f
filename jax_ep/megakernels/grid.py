"""How many programs a launch has, and of how many registers."""

from __future__ import annotations

import jax

_REGISTERS = 65536  # of a multiprocessor


def num_programs(num_tasks: int, per_multiprocessor: int = 1) -> int:
    """Programs that run at a time, at least one; in the interpreter, where they run one after another, two."""
    if jax.default_backend() == "cpu":
        return 2
    return max(1, min(num_tasks, all_programs(per_multiprocessor)))


def all_programs(per_multiprocessor: int = 1) -> int:
    """As many as the device runs at a time."""
    if jax.default_backend() == "cpu":
        return 2
    return jax.local_devices()[0].core_count * per_multiprocessor


def thread_registers(per_multiprocessor: int, num_warps: int) -> int:
    """A thread's share of the registers, where so many programs run on a multiprocessor at a time."""
    return _REGISTERS // (per_multiprocessor * num_warps * 32)


def whole_registers(per_multiprocessor: int, num_warps: int) -> int:
    """The same in eights, as the compiler gives them, so that no thread has more."""
    return thread_registers(per_multiprocessor, num_warps) // 8 * 8
