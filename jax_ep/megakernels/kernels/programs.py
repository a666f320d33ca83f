"""What the programs of one launch know of each other: which have begun, and which have stored their part."""

import triton
import triton.language as tl

from .table import DONE, STARTED


@triton.jit
def count_stored(launch, part):
    """Counts this program among those that have stored their share of a part; returns whether it is the last one."""
    # Stores of all threads come before the count, and those of all programs before what the last count allows.
    tl.debug_barrier()
    return tl.atomic_add(launch.control + DONE + part, 1, sem="acq_rel", scope="sys") == tl.num_programs(0) - 1


@triton.jit
def all_begun(launch):
    """Whether all programs of this launch have begun: the last one to begin always sees it.

    Only then may a program wait for other ranks, or for other programs: none that it waits for can be one that begins
    when this one ends.
    """
    return tl.atomic_add(launch.control + STARTED, 0, sem="relaxed", scope="gpu") == tl.num_programs(0)
