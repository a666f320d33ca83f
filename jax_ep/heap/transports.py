"""Selection of the transport that moves tokens between devices."""

from __future__ import annotations

import logging
import os
import re

import jax

from jax_ep.core import check
from jax_ep.heap import nvshmem, peer_access

_log = logging.getLogger("jax_ep")
REASONS = {
    "xla": "XLA's collectives, for devices whose kernels cannot write to a peer's memory",
    "peer": "one process drives several GPUs, with peer access between them",
    "nvshmem": "several processes with one GPU each, whose memory NVSHMEM maps into all processes",
    "shared_memory": "requested: kernels run in Triton's interpreter, one process per CPU device",
}
"""Condition under which each transport is used."""


def describe(transport: str) -> str:
    """Describe a transport and the reason for it."""
    text = f"{transport}: {REASONS[transport]}"
    of_processes = transport != "nvshmem"
    count = len(peer_access.domains(jax.devices(), of_processes=of_processes))
    if count == 1 or transport == "xla":
        return text
    what = "processes" if of_processes else "machines or NVLink domains"
    return f"{text}, in each of {count} {what}, which XLA's collectives connect"


def resolve(transport: str | None) -> str:
    """Return the requested transport, or the best one here, after checking that it works."""
    platform, num_processes = jax.default_backend(), jax.process_count()
    if transport is None:
        return best()
    check.choice("init", "transport", transport, tuple(REASONS), remedy="leave it None for the best one")
    needed = {"peer": "gpu", "nvshmem": "gpu", "shared_memory": "cpu"}.get(transport, platform)
    if needed != platform:
        raise ValueError(
            f"init: transport={transport!r} needs {needed} devices, but this process has {platform};"
            " leave it None for the best one here."
        )
    if transport == "nvshmem" and num_processes == 1:
        raise ValueError(
            "init: transport='nvshmem' needs several processes, but jax.process_count() is 1; leave it None for the"
            " best one here."
        )
    if transport in ("peer", "shared_memory") and num_processes > 1:
        reason = peer_access.unsupported_processes_reason()
        if reason is not None:
            raise ValueError(f"init: transport={transport!r}: {reason}, or call init(transport='xla').")
    if transport == "nvshmem" and (reason := nvshmem.unsupported_reason()) is not None:
        raise ValueError(f"init: transport='nvshmem': {reason}; or leave it None for the best one here.")
    if transport in ("peer", "nvshmem") and (reason := unordered_launches_reason()) is not None:
        raise ValueError(f"init: transport={transport!r}: {reason}, or call init(transport='xla').")
    return transport


def best() -> str:
    """Return the fastest transport that works here."""
    if jax.default_backend() != "gpu":
        return "xla"
    if (reason := unordered_launches_reason()) is not None:
        _log.warning("kernels are not used: %s", reason)
        return "xla"
    if jax.process_count() == 1:
        return "peer"
    wanted = "nvshmem" if peer_access.unsupported_processes_reason() is not None else "peer"
    reason = nvshmem.unsupported_reason() if wanted == "nvshmem" else peer_access.unsupported_reason()
    if reason is not None:
        _log.warning("transport %s is not used: %s", wanted, reason)
    return wanted if reason is None else "xla"


def unordered_launches_reason() -> str | None:
    """Return why this process cannot launch communication kernels, or None if it can.

    By default XLA runs the launches of a device in schedule order, also in CUDA graphs. In CONCURRENT mode it orders
    only launches that depend on each other. Two launches on one heap would then share its task queue and counters, and
    devices would run them in different orders.
    """
    modes = re.findall(r"--xla_gpu_command_buffer_scheduling_mode=(\S*)", os.environ.get("XLA_FLAGS", ""))
    if not modes or modes[-1].upper() != "CONCURRENT":
        return None
    return (
        "XLA_FLAGS has --xla_gpu_command_buffer_scheduling_mode=CONCURRENT, which lets launches of one device run at"
        " the same time and in any order; remove the flag"
    )
