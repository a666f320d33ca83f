"""Memory in which kernels record what they do: of each device its own, which no peer sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np


class TraceArea(Protocol):
    """Areas of int64 words, one for each device of this process.

    Attributes:
      addresses: of the area of each device, by its number.
    """

    addresses: dict[int, int]

    def read(self, device: int) -> np.ndarray:
        """The words of one area, once nothing writes them any more; only once."""


class DeviceTraceArea:
    """Areas in the memory of GPUs, as arrays of JAX.

    Args:
      devices: those of this process, and their numbers.
      header: `[N]` int64, the first words of each area.
      num_words: words of an area; the others are zero.

    Raises:
      jax.errors.JaxRuntimeError: there is not so much memory.
    """

    def __init__(self, devices: Sequence[tuple[int, jax.Device]], header: np.ndarray, num_words: int) -> None:
        halves = header.view(np.uint32)  # JAX may be in 32-bit mode

        def make() -> jax.Array:
            return jnp.zeros((2 * num_words,), jnp.uint32).at[: halves.size].set(halves)

        self._areas = {
            number: jax.block_until_ready(jax.jit(make, out_shardings=jax.sharding.SingleDeviceSharding(device))())
            for number, device in devices
        }
        self.addresses = {number: area.unsafe_buffer_pointer() for number, area in self._areas.items()}

    def read(self, device: int) -> np.ndarray:
        """See `TraceArea`: JAX would show what it has read before."""
        return np.asarray(self._areas.pop(device)).view(np.int64)
