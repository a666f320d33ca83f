"""Device selection of the examples. XLA reads its flags once, at first use of a device."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax

# Virtual CPU devices share the machine's cores, so one may be late. By default XLA assumes that a collective hangs
# after seconds, and aborts the process.
_PATIENCE = {
    "xla_cpu_collective_timeout_seconds": 1800,
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": 600,
    "xla_cpu_collective_call_terminate_timeout_seconds": 1800,
}
_MOST = 1024  # XLA takes minutes to make many more


def prepare_cpu_devices(count: int) -> None:
    """Split the CPU into `count` virtual devices if it is JAX's platform; call it before JAX uses a device.

    Accelerators are not affected. Flags that the user has set stay unchanged.
    """
    if count > _MOST:
        raise ValueError(f"got {count} devices, expected at most {_MOST}; ask for fewer")
    flags = os.environ.get("XLA_FLAGS", "")
    wanted = {"xla_force_host_platform_device_count": count, **_PATIENCE}
    added = [f"--{name}={value}" for name, value in wanted.items() if name not in flags]
    os.environ["XLA_FLAGS"] = " ".join([flags, *added]).strip()


def make_mesh(*, max_devices: int | None, num_experts: int, expert_parallel: int | None) -> jax.sharding.Mesh:
    """Create a (data, expert) mesh over the available devices.

    Args:
      max_devices: maximum number of devices; None uses all.
      num_experts: experts of the model; the expert axis must divide them.
      expert_parallel: size of the expert axis; None uses half of the devices if there are at least four, else all.
    """
    import jax

    devices = jax.devices()[:max_devices]
    if expert_parallel is None:
        expert_parallel = len(devices) // (2 if len(devices) >= 4 else 1)
    if len(devices) % expert_parallel or num_experts % expert_parallel:
        raise ValueError(
            f"an expert axis of {expert_parallel} devices must divide the {len(devices)} devices and the {num_experts}"
            " experts; set --expert-parallel or --devices"
        )
    shape = (len(devices) // expert_parallel, expert_parallel)
    # Automatic axes: the compiler shards everything except the experts, which the layer shards itself. The models
    # gather embeddings and caches, which have no sharding rule on explicit axes.
    axis_types = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh(shape, ("data", "expert"), axis_types=axis_types, devices=devices)
