"""Run as one of four processes, in two NVLink domains, that test_nvshmem.py starts; print the events as JSON.

python tests/helpers/domain_processes.py PROCESS COORDINATOR
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable

import jax
import numpy as np
from jax._src import distributed

import fake_nvshmem
from jax_ep import ffi
from jax_ep.heap import nvshmem, peer_access
from jax_ep.heap.nvshmem import NvshmemMemory
from jax_ep.heap.symmetric import SymmetricHeap
from meeting_processes import PATIENCE_S, outcome

ME, ADDRESS = int(sys.argv[1]), sys.argv[2]


def domains(devices: Iterable[jax.Device], *, of_processes: bool = False) -> list[list[int]]:
    """Group processes 0 and 2, and 1 and 3: JAX sees all CPU devices as one machine."""
    places = list(enumerate(devices))
    return [[place for place, device in places if device.process_index % 2 == parity] for parity in (0, 1)]


def end() -> None:
    """End this process without JAX's exit, which would wait; the coordinator ends last, or JAX aborts the others."""
    client = distributed.global_state.client
    if ME == 0:
        for other in (1, 2, 3):
            client.blocking_key_value_get(f"process {other} ends", int(1000 * PATIENCE_S))
        time.sleep(1)
    else:
        client.key_value_set(f"process {ME} ends", "")
    os._exit(0)


def main() -> None:
    """Allocate, fail in one process, and end."""
    fake = fake_nvshmem.install()
    jax.distributed.initialize(ADDRESS, 4, ME, cluster_detection_method="deactivate")
    peer_access.domains = domains
    found: dict[str, object] = {"missing": nvshmem.unsupported_reason()}
    memory = NvshmemMemory(PATIENCE_S, "the same")
    heap = SymmetricHeap(memory, None, 5.0)
    heap.reserve("dispatch", 100)
    table = jax.jit(lambda: ffi.pointer_table(heap.data.id, heap.num_table_entries))()
    found["table"] = [int(entry) for entry in table]
    found["addresses"] = heap.data.addresses
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2).T, ("node", "expert"))
    found["processes"] = [[device.process_index for device in node] for node in mesh.devices]
    numbers = heap.numbers(mesh)
    found["numbers"] = None if numbers is None else numbers.tolist()
    found["apart"] = [peer_access.unreachable_reason(mesh, axis) for axis in (("expert",), ("node",))]
    fake.out_of_memory = ME == 3
    found["no room in one"] = outcome(lambda: heap.reserve("combine", 1 << 26))
    heap.close()
    found["calls"] = [[str(part) for part in call] for call in fake.calls]
    print(json.dumps(found), flush=True)
    end()


if __name__ == "__main__":
    main()
