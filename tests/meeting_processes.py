"""One of two processes that test_nvshmem.py starts; prints, as JSON, what has happened in it.

python tests/meeting_processes.py PROCESS COORDINATOR
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

import fake_nvshmem
import jax

from jax_ep import ffi
from jax_ep.heap import SymmetricHeap
from jax_ep.nvshmem import NvshmemMemory
from jax_ep.processes import Meetings

TIMEOUT_S = 3.0
ME, ADDRESS = int(sys.argv[1]), sys.argv[2]


def outcome(call: Callable[[], object]) -> str:
    """The error that `call` ends in."""
    try:
        call()
    except RuntimeError as error:  # JaxRuntimeError is one
        return f"{type(error).__name__}: {error}"
    return "no error"


def life(fake: fake_nvshmem.Fake) -> dict[str, object]:
    """One context from its start to its end, and the table that a program of this process sees."""
    memory = NvshmemMemory(30.0, "the same")
    heap = SymmetricHeap(memory, None, 5.0)
    heap.reserve("dispatch", 100)
    table = jax.jit(lambda: ffi.pointer_table(heap.id, heap.num_table_entries))()
    addresses = memory.addresses(ME)
    found = {"table": [int(entry) for entry in table], "addresses": addresses}
    found["nonzero"] = sum(fake.bytes_at(addresses[ME]))
    heap.reserve("combine", 1 << 22)
    heap.close()
    heap.close()
    return {**found, "calls": [[str(part) for part in call] for call in fake.calls]}


def refuse() -> str:
    raise OSError("no such library")


def late_by(seconds: float) -> Callable[[], object]:
    """Comes to a meeting, process 1 later than process 0 waits."""
    meetings = Meetings(TIMEOUT_S)

    def come() -> None:
        if ME == 1:
            time.sleep(seconds)
        meetings.meet("dispatch", "allocating")

    return come


def main() -> None:
    """Everything in one life of the two processes, because starting JAX takes the longest."""
    fake = fake_nvshmem.install()
    jax.distributed.initialize(ADDRESS, 2, ME, cluster_detection_method="deactivate")
    found: dict[str, object] = {"first": life(fake), "second": life(fake)}
    meetings = Meetings(30.0)
    found["said"] = meetings.meet("init", "talking", words=f"I am {ME}\nreally")
    found["other wish"] = outcome(lambda: meetings.meet("dispatch", "allocating", same=f"{100 + ME} bytes"))
    found["other function"] = outcome(lambda: meetings.meet(("dispatch", "combine")[ME], "allocating"))
    found["one fails"] = outcome(lambda: meetings.attempt("init", "loading", refuse if ME == 1 else lambda: ""))
    found["settings"] = outcome(lambda: NvshmemMemory(30.0, f"timeout_s={ME}"))
    found["in step again"] = meetings.meet("init", "talking", words="yes")
    found["late"] = outcome(late_by(TIMEOUT_S + 2.5))
    found["in step after all"] = meetings.meet("init", "talking", words="yes")
    memory = NvshmemMemory(TIMEOUT_S, "the same")
    if ME == 1:
        print(json.dumps(found), flush=True)
        os._exit(0)  # as a process that crashes: without a word to the other
    start = time.monotonic()
    found["alone"] = outcome(memory.close)
    found["still alone"] = outcome(lambda: NvshmemMemory(TIMEOUT_S, "the same"))
    found["seconds alone"] = time.monotonic() - start
    print(json.dumps(found), flush=True)
    os._exit(0)  # jax.distributed would wait for the other


if __name__ == "__main__":
    main()
