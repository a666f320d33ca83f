"""Selection of the transport that moves tokens between devices."""

from __future__ import annotations

import logging

import jax

from jax_ep.heap import check, nvshmem, peer_access

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
    if transport not in REASONS:
        raise ValueError(
            f"init: transport={transport!r}, expected one of {tuple(REASONS)}; leave it None for the best one."
        )
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
    if transport in ("peer", "nvshmem") and (reason := check.unordered_launches_reason()) is not None:
        raise ValueError(f"init: transport={transport!r}: {reason}, or call init(transport='xla').")
    return transport


def best() -> str:
    """Return the fastest transport that works here."""
    if jax.default_backend() != "gpu":
        return "xla"
    if (reason := check.unordered_launches_reason()) is not None:
        _log.warning("kernels are not used: %s", reason)
        return "xla"
    if jax.process_count() == 1:
        return "peer"
    wanted = "nvshmem" if peer_access.unsupported_processes_reason() is not None else "peer"
    reason = nvshmem.unsupported_reason() if wanted == "nvshmem" else peer_access.unsupported_reason()
    if reason is not None:
        _log.warning("transport %s is not used: %s", wanted, reason)
    return wanted if reason is None else "xla"
