"""What may move tokens between devices, and which of it is for the platform and the processes of this program."""

from __future__ import annotations

import logging

import jax

from jax_ep.heap import check, nvshmem, peer_access

_log = logging.getLogger("jax_ep")
REASONS = {
    "xla": "collectives of XLA, for devices whose memory kernels of a peer cannot write",
    "peer": "a process drives several GPUs, and XLA enables peer access between them",
    "nvshmem": "several processes with one GPU each, whose memory NVSHMEM maps into all of them",
    "shared_memory": "asked for: kernels run in Triton's interpreter, one process per CPU device",
}
"""Of each transport, in which situation it is the one."""


def described(transport: str) -> str:
    """A transport and its reason, in words."""
    text = f"{transport}: {REASONS[transport]}"
    of_processes = transport != "nvshmem"
    count = len(peer_access.domains(jax.devices(), of_processes=of_processes))
    if count == 1 or transport == "xla":
        return text
    what = "processes" if of_processes else "machines or NVLink domains"
    return f"{text}, in each of {count} {what}; between them XLA's collectives go"


def checked(transport: str | None) -> str:
    """The transport asked for, or the best one here."""
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
        reason = peer_access.missing_in_processes()
        if reason is not None:
            raise ValueError(f"init: transport={transport!r}: {reason}, or call init(transport='xla').")
    if transport == "nvshmem" and (reason := nvshmem.missing()) is not None:
        raise ValueError(f"init: transport='nvshmem': {reason}; or leave it None for the best one here.")
    if transport in ("peer", "nvshmem") and (reason := check.concurrent_launches()) is not None:
        raise ValueError(f"init: transport={transport!r}: {reason}, or call init(transport='xla').")
    return transport


def best() -> str:
    """The fastest one that works here."""
    if jax.default_backend() != "gpu":
        return "xla"
    if (reason := check.concurrent_launches()) is not None:
        _log.warning("kernels are not used: %s", reason)
        return "xla"
    if jax.process_count() == 1:
        return "peer"
    wanted = "nvshmem" if peer_access.missing_in_processes() is not None else "peer"
    reason = nvshmem.missing() if wanted == "nvshmem" else peer_access.missing()
    if reason is not None:
        _log.warning("transport %s is not used: %s", wanted, reason)
    return wanted if reason is None else "xla"
