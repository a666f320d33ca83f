"""Jit-compiled generation: one prefill of all prompts, then a scan of single-token steps over a key-value cache."""

from __future__ import annotations

import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from lm.model import Cache, LanguageModel, empty_cache

Array = jax.Array


class Generated(NamedTuple):
    """New bytes of each prompt, and how long the device needed, compilation not counted."""

    texts: list[bytes]
    prefill_seconds: float
    decode_seconds: float


class Generator:
    """Prefill and decode of one model, compiled once for each shape."""

    def __init__(self, model: LanguageModel, mesh: jax.sharding.Mesh) -> None:
        self.config, self.mesh = model.config, mesh
        self._graph, self._state = nnx.split(model)
        self._prefill = jax.jit(self._prefill_step, static_argnames="room")
        self._decode = jax.jit(self._decode_steps, static_argnames="steps", donate_argnames="cache")

    def __call__(self, prompts: list[bytes], *, max_new: int, temperature: float = 0.0, seed: int = 0) -> Generated:
        """Continues each prompt by `max_new` bytes: the likeliest ones at temperature 0, else sampled."""
        if min(map(len, prompts), default=0) == 0 or max_new < 1:
            raise ValueError(f"generation needs prompts of at least one byte and max_new >= 1, got {max_new}")
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        tokens = np.zeros((len(prompts), lengths.max()), np.int32)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = list(prompt)
        tokens, lengths = self._put(tokens), self._put(lengths)
        options = {"temperature": jnp.float32(temperature), "key": jax.random.key(seed)}

        # Compilation and the first run, which sets up the executable, stay out of the times.
        prefill = self._prefill.lower(self._state, tokens, lengths, room=max_new).compile()
        jax.block_until_ready(prefill(self._state, tokens, lengths))
        begin = time.perf_counter()
        logits, cache = jax.block_until_ready(prefill(self._state, tokens, lengths))
        prefilled = time.perf_counter()
        decode = self._decode.lower(self._state, logits, lengths, cache, steps=max_new, **options).compile()
        ready = time.perf_counter()
        new = np.asarray(decode(self._state, logits, lengths, cache, **options))
        done = time.perf_counter()
        return Generated([bytes(row.astype(np.uint8)) for row in new], prefilled - begin, done - ready)

    def _put(self, array: np.ndarray) -> Array:
        """Rows over all devices where they divide evenly, else all rows on each."""
        spec = PartitionSpec(("data", "expert")) if len(array) % self.mesh.size == 0 else PartitionSpec()
        return jax.device_put(array, NamedSharding(self.mesh, spec))

    def _prefill_step(self, state: nnx.State, tokens: Array, lengths: Array, *, room: int) -> tuple[Array, Cache]:
        """Logits after the last byte of each prompt, and a cache with `room` more places.

        Prompts are padded at the end. The padding's entries in the cache lie past the position of every query until
        decoding overwrites them, so no query sees them.
        """
        cache = empty_cache(self.config, tokens.shape[0], tokens.shape[1] + room)
        logits, cache, _ = nnx.merge(self._graph, state)(tokens, cache=cache)
        last = jnp.take_along_axis(logits, (lengths - 1)[:, None, None], axis=1)[:, 0]
        return last, cache

    def _decode_steps(
        self,
        state: nnx.State,
        logits: Array,
        lengths: Array,
        cache: Cache,
        *,
        steps: int,
        temperature: Array,
        key: Array,
    ) -> Array:
        """`[B, steps]` new bytes; `logits [B, 256]` choose the first of them."""

        def step(carry: tuple[Array, Array, Cache], key: Array) -> tuple[tuple[Array, Array, Cache], Array]:
            logits, position, cache = carry
            token = _choose(logits, temperature, key)
            model = nnx.merge(self._graph, state, copy=True)  # variables of the scan's own, or Flax objects
            logits, cache, _ = model(token[:, None], positions=position[:, None], cache=cache)
            return (logits[:, 0], position + 1, cache), token

        _, tokens = lax.scan(step, (logits, lengths, cache), jax.random.split(key, steps))
        return tokens.T


def _choose(logits: Array, temperature: Array, key: Array) -> Array:
    sampled = jax.random.categorical(key, logits / jnp.maximum(temperature, 1e-6))
    return jnp.where(temperature > 0, sampled, jnp.argmax(logits, axis=-1)).astype(jnp.int32)
