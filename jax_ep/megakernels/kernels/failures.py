"""What a kernel leaves for the host when a launch cannot succeed, and how it stops waiting."""

import triton
import triton.language as tl

FAILED = tl.constexpr(2)  # which control word is 1 after a failure

STATE_TIMEOUT = tl.constexpr(1)
STATE_WRITING = tl.constexpr(3)
STATE_WRONG_MESH = tl.constexpr(4)


@triton.jit
def give_up(
    table_ptr, flag, epoch, control, rank, peer_rank, task, timeout_ns, OPERATION: tl.constexpr, D: tl.constexpr
):
    """Ends all waiting on this device after that for `flag` has expired."""
    tl.atomic_store(control + FAILED, 1, sem="relaxed", scope="gpu")
    seen = tl.atomic_load(flag, sem="relaxed", scope="sys")
    report_timeout(table_ptr, rank, peer_rank, epoch, seen, task, timeout_ns, OPERATION, D)


@triton.jit
def report_timeout(table_ptr, rank, peer_rank, epoch, seen, task, timeout_ns, OPERATION: tl.constexpr, D: tl.constexpr):
    """Tells the host of a wait that has expired."""
    detail = (timeout_ns // 1000000).to(tl.int32)
    report(table_ptr, STATE_TIMEOUT, rank, peer_rank, epoch, seen, task, detail, OPERATION, D)


@triton.jit
def report(table_ptr, state, rank, peer_rank, expected, seen, task, detail, OPERATION: tl.constexpr, D: tl.constexpr):
    """Fills the status record (jax_ep/ffi/csrc/status.h), unless an earlier failure holds it."""
    status = tl.load(table_ptr + D).to(tl.pointer_type(tl.int32))
    if tl.atomic_cas(status, 0, STATE_WRITING, sem="relaxed", scope="sys") == 0:
        tl.store(status + 1, OPERATION)
        tl.store(status + 2, rank)
        tl.store(status + 3, peer_rank)
        tl.store(status + 4, expected)
        tl.store(status + 5, seen)
        tl.store(status + 6, task)
        tl.store(status + 7, detail)
        tl.atomic_store(status, state, sem="release", scope="sys")
