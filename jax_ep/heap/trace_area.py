"""Per-device memory in which kernels record traces; peers do not access it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np


class TraceArea(Protocol):
    """Areas of int64 words, one for each device of this process.

    Attributes:
      addresses: address of each device's area, by device number.
    """

    addresses: dict[int, int]

    def read(self, device: int) -> np.ndarray:
        """Return the words of one area. Call it once, after all writes have ended."""


class DeviceTraceArea:
    """Trace areas in GPU memory, as JAX arrays.

    Args:
      devices: numbers and devices of this process.
      header: `[N]` int64, the first words of each area.
      num_words: words of an area; words after the header are zero.

    Raises:
      jax.errors.JaxRuntimeError: memory is insufficient.
    """

    def __init__(self, devices: Sequence[tuple[int, jax.Device]], header: np.ndarray, num_words: int) -> None:
        halves = header.view(np.uint32)  # JAX may be in 32-bit mode.

        def make() -> jax.Array:
            return jnp.zeros((2 * num_words,), jnp.uint32).at[: halves.size].set(halves)

        self._areas = {
            number: jax.block_until_ready(jax.jit(make, out_shardings=jax.sharding.SingleDeviceSharding(device))())
            for number, device in devices
        }
        self.addresses = {number: area.unsafe_buffer_pointer() for number, area in self._areas.items()}

    def read(self, device: int) -> np.ndarray:
        """Return the words of one area. The array is dropped, because JAX would return its cached host copy."""
        return np.asarray(self._areas.pop(device)).view(np.int64)
