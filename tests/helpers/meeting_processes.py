"""Run as one of two processes that test_nvshmem.py starts; print the events as JSON."""

import json
import os
import sys

import jax
from jax._src import distributed

import fake_nvshmem
from jax_ep import ffi
from jax_ep.heap.nvshmem import NvshmemMemory
from jax_ep.heap.rendezvous import Meetings
from jax_ep.heap.symmetric import SymmetricHeap

TIMEOUT_S = 3.0  # For waits for a missing process.
PATIENCE_S = 1000.0  # For all others: beyond the time limit of the test.
ME, ADDRESS = int(sys.argv[1]), sys.argv[2]


def outcome(call):
    """Return the error that `call` raises."""
    try:
        call()
    except RuntimeError as error:  # Includes JaxRuntimeError.
        return f"{type(error).__name__}: {error}"
    return "no error"


def life(fake):
    """Run one context from start to end, and return the table that a program of this process sees."""
    fake.calls.clear()
    memory = NvshmemMemory(PATIENCE_S, "the same")
    heap = SymmetricHeap(memory, None, 5.0)
    heap.reserve("dispatch", 100)
    first = heap.data
    table = jax.jit(lambda: ffi.pointer_table(first.id, heap.num_table_entries))()
    addresses = first.addresses[ME]
    found = {"table": [int(entry) for entry in table], "addresses": addresses}
    found["nonzero"] = sum(fake.bytes_at(addresses[ME]))
    fake.out_of_memory = ME == 1
    found["no room in one"] = outcome(lambda: heap.reserve("combine", 1 << 26))
    fake.out_of_memory = False
    heap.reserve("combine", 1 << 25)
    heap.close()
    heap.close()
    return {**found, "calls": [[str(part) for part in call] for call in fake.calls]}


def refuse():
    raise OSError("no such library")


def meet_late():
    """Attend a meeting, process 1 after process 0 has given up."""
    client = distributed.global_state.client
    if ME == 1:
        client.blocking_key_value_get("process 0 has given up", int(1000 * PATIENCE_S))
    try:
        Meetings(TIMEOUT_S).meet("dispatch", "allocating")
    finally:
        if ME == 0:
            client.key_value_set("process 0 has given up", "")


def main():
    """Run everything in one process pair, because starting JAX dominates."""
    fake = fake_nvshmem.install()
    jax.distributed.initialize(ADDRESS, 2, ME, cluster_detection_method="deactivate")
    found = {"first": life(fake), "second": life(fake)}
    meetings = Meetings(PATIENCE_S)
    found["payloads"] = meetings.meet("init", "talking", payload=f"I am {ME}\nreally")
    found["other wish"] = outcome(lambda: meetings.meet("dispatch", "allocating", same=f"{100 + ME} bytes"))
    found["other function"] = outcome(lambda: meetings.meet(("dispatch", "combine")[ME], "allocating"))
    found["one fails"] = outcome(lambda: meetings.attempt("init", "loading", refuse if ME == 1 else lambda: ""))
    found["settings"] = outcome(lambda: NvshmemMemory(PATIENCE_S, f"timeout_s={ME}"))
    found["in step again"] = meetings.meet("init", "talking", payload="yes")
    found["late"] = outcome(meet_late)
    found["in step after all"] = meetings.meet("init", "talking", payload="yes")
    memory = NvshmemMemory(PATIENCE_S, "the same")
    if ME == 1:
        print(json.dumps(found), flush=True)
        os._exit(0)  # As a process that crashes, without notice.
    memory._meetings._timeout_s = TIMEOUT_S
    found["alone"] = outcome(memory.close)
    found["still alone"] = outcome(lambda: NvshmemMemory(TIMEOUT_S, "the same"))
    print(json.dumps(found), flush=True)
    os._exit(0)  # jax.distributed would wait for the other.


if __name__ == "__main__":
    main()
