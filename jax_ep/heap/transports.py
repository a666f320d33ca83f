"""What may move tokens between devices, and which of it is for the platform and the processes of this program."""

from __future__ import annotations

import logging

import jax

from jax_ep.heap import check, nvshmem, peer_access

_log = logging.getLogger("jax_ep")
REASONS = {
    "xla": "collectives of XLA, for devices whose memory kernels of a peer cannot write",
    "peer": "one process drives every GPU, and XLA enables peer access between them",
    "nvshmem": "several processes with one GPU each, whose memory NVSHMEM maps into all of them",
    "shared_memory": "asked for: kernels run in Triton's interpreter, one process per CPU device",
}
"""Of each transport, in which situation it is the one."""


def described(transport: str) -> str:
    """A transport and its reason, in words."""
    text = f"{transport}: {REASONS[transport]}"
    count = len(peer_access.domains(jax.devices())) if transport == "nvshmem" else 1
    if count == 1:
        return text
    return f"{text}, in each of {count} machines or NVLink domains; between them XLA's collectives go"


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
    if transport != "xla" and (transport == "nvshmem") != (num_processes > 1):
        wanted = "several processes" if transport == "nvshmem" else "one process that drives every device"
        raise ValueError(
            f"init: transport={transport!r} needs {wanted}, but jax.process_count() is {num_processes};"
            " leave it None for the best one here."
        )
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
    reason = nvshmem.missing()
    if reason is not None:
        _log.warning("transport nvshmem is not used: %s", reason)
    return "nvshmem" if reason is None else "xla"
