"""Fine-tuning of all weights of a decoder on a text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from hf.model import Decoder
from lm.data import WindowIterator

Array = jax.Array


class Step(NamedTuple):
    """Results of one step: nats per token before the step, and the experts' `load [layers, E]`."""

    loss: float
    load: np.ndarray


def windows_of(
    tokens: np.ndarray, *, batch_size: int, length: int, mesh: jax.sharding.Mesh | None, seed: int = 0
) -> WindowIterator:
    """Return batches of `batch_size` random windows of `length` tokens of a text `[N]`, for all devices of `mesh`.

    Raises:
      ValueError: the text is shorter than a window, or the batch does not divide over the devices.
    """
    if mesh is not None and batch_size % mesh.size:
        raise ValueError(f"batch_size={batch_size} must be a multiple of the {mesh.size} devices")
    return WindowIterator(tokens, batch_size=batch_size, length=length, seed=seed)


def train(
    decoder: Decoder,
    windows: WindowIterator,
    *,
    steps: int,
    learning_rate: float,
    mesh: jax.sharding.Mesh | None = None,
) -> Iterator[Step]:
    """Fine-tune `decoder` in place for `steps` steps of AdamW, with a linear warm-up over the first tenth.

    Args:
      decoder: its parameters should be float32, because updates are too small for bfloat16.
      windows: the batch of each step, from `windows_of`.
      steps: their number.
      learning_rate: learning rate after the warm-up.
      mesh: mesh of the decoder.
    """
    schedule = optax.linear_schedule(learning_rate / 10, learning_rate, max(steps // 10, 1))
    rule = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.01))
    optimizer = nnx.Optimizer(decoder, rule, wrt=nnx.Param)
    placed = None if mesh is None else NamedSharding(mesh, PartitionSpec(("data", "expert")))
    for _ in range(steps):
        loss, load = _step(decoder, optimizer, jax.device_put(next(windows), placed))
        yield Step(float(loss), np.asarray(load))


@nnx.jit(donate_argnums=(0, 1))
def _step(decoder: Decoder, optimizer: nnx.Optimizer, windows: Array) -> tuple[Array, Array]:
    """Run one step on `windows [batch, length + 1]`; return the loss and the load."""

    def loss_of(decoder: Decoder) -> tuple[Array, tuple[Array, Array]]:
        output = decoder(windows[:, :-1])
        logits = decoder.logits(output.hidden)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()
        balance = jnp.stack([metrics.load_balancing_loss for metrics in output.metrics]).mean()
        load = jnp.stack([metrics.load for metrics in output.metrics])
        return loss + decoder.config.balance_weight * balance, (loss, load)

    (_, found), gradients = nnx.value_and_grad(loss_of, has_aux=True)(decoder)
    optimizer.update(decoder, gradients)
    return found
