"""Jit-compiled generation: one prefill of all prompts, then a scan of single-token steps over a key-value cache."""

from __future__ import annotations

import time
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jax_ep.serving import ServingWeights
from lm.model import Cache, LanguageModel, empty_cache

Array = jax.Array
Experts = Literal["fp8", "same", "off"]


class Generated(NamedTuple):
    """What followed each prompt, and how long the device needed, compilation not counted.

    Attributes:
      texts: the new bytes of each prompt.
      logits: `[B, steps, 256]`, which chose them.
      prefill_seconds: of all prompts.
      decode_seconds: of all steps, in one program.
    """

    texts: list[bytes]
    logits: np.ndarray
    prefill_seconds: float
    decode_seconds: float


class _State(NamedTuple):
    """Between two steps: logits `[B, 256]` of the next byte, its position `[B]`, and the cache."""

    logits: Array
    position: Array
    cache: Cache


class Generator:
    """Prefill and decode of one model, compiled once for each shape.

    Args:
      model: what generates.
      mesh: its mesh.
      experts: the matrices of the experts where a device has so few tokens that `jax_ep.flax.MoE` takes its low-latency
        path, as in decoding: in "fp8", in the "same" dtype as the rest, or "off", which never takes it.
    """

    def __init__(self, model: LanguageModel, mesh: jax.sharding.Mesh, *, experts: Experts = "off") -> None:
        self.config, self.mesh = model.config, mesh
        self._graph, self._state = nnx.split(model)
        self._serving: ServingWeights | None = None
        if experts != "off":
            # One program, so that the matrices of a device are turned and quantised where they are.
            self._serving = nnx.jit(lambda model: model.blocks.moe.serving_weights(fp8=experts == "fp8"))(model)
        self._prefill = jax.jit(self._prefill_step, static_argnames="room")
        # No result has the shape of what is donated. On several devices XLA uses its memory all the same; on one, JAX
        # warns.
        self._decode = jax.jit(self._decode_steps, donate_argnames=("state",) if mesh.size > 1 else ())
        self._one_step = jax.jit(self._step, donate_argnames="state")
        self._compiled: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def __call__(
        self,
        prompts: list[bytes],
        *,
        max_new: int,
        temperature: float = 0.0,
        seed: int = 0,
        forced: list[bytes] | None = None,
    ) -> Generated:
        """Continues each prompt by `max_new` bytes: the likeliest ones at temperature 0, else sampled.

        With `forced`, texts of that length, these are the bytes, and what is of interest are the logits.
        """
        tokens, lengths = self._tokens(prompts, max_new)
        wanted = np.full((max_new, len(prompts)), -1, np.int32)
        if forced is not None:
            wanted[:] = np.array([list(text) for text in forced]).T
        arguments = (jnp.float32(temperature), jax.random.split(jax.random.key(seed), max_new), wanted)
        # Compilation and the first run, which sets up the executable, stay out of the times.
        prefill, decode = self._programs(tokens, lengths, arguments)
        begin = time.perf_counter()
        state = jax.block_until_ready(prefill(self._state, self._serving, tokens, lengths))
        prefilled = time.perf_counter()
        new, logits = jax.block_until_ready(decode(self._state, self._serving, state, *arguments))
        done = time.perf_counter()
        texts = [bytes(row.astype(np.uint8)) for row in np.asarray(new).T]
        return Generated(texts, np.asarray(logits).swapaxes(0, 1), prefilled - begin, done - prefilled)

    def _programs(self, tokens: Array, lengths: Array, arguments: tuple[Any, ...]) -> tuple[Any, Any]:
        """Prefill and decode for these shapes, compiled once, the first one warm."""
        max_new = len(arguments[-1])
        key = (*tokens.shape, max_new)
        if key not in self._compiled:
            prefill = self._prefill.lower(self._state, self._serving, tokens, lengths, room=max_new).compile()
            state = jax.block_until_ready(prefill(self._state, self._serving, tokens, lengths))
            self._compiled[key] = (
                prefill,
                self._decode.lower(self._state, self._serving, state, *arguments).compile(),
            )
        return self._compiled[key]

    def step_seconds(self, prompts: list[bytes], *, steps: int) -> np.ndarray:
        """Times of single steps, each one program that is waited for, as where every byte is sent to a user."""
        tokens, lengths = self._tokens(prompts, steps + 1)
        state = self._prefill(self._state, self._serving, tokens, lengths, room=steps + 1)
        key, free = jax.random.key(0), jnp.full(len(prompts), -1, jnp.int32)
        times = []
        for _ in range(steps + 1):  # the first one compiles
            begin = time.perf_counter()
            state, _ = jax.block_until_ready(
                self._one_step(self._state, self._serving, state, jnp.float32(0), key, free)
            )
            times.append(time.perf_counter() - begin)
        return np.array(times[1:])

    def _tokens(self, prompts: list[bytes], max_new: int) -> tuple[Array, Array]:
        """Bytes and lengths of the prompts, on the devices."""
        if min(map(len, prompts), default=0) == 0 or max_new < 1:
            raise ValueError(f"generation needs prompts of at least one byte and max_new >= 1, got {max_new}")
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        tokens = np.zeros((len(prompts), lengths.max()), np.int32)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = list(prompt)
        return self._put(tokens), self._put(lengths)

    def _put(self, array: np.ndarray) -> Array:
        """Rows over all devices where they divide evenly, else all rows on each."""
        spec = PartitionSpec(("data", "expert")) if len(array) % self.mesh.size == 0 else PartitionSpec()
        return jax.device_put(array, NamedSharding(self.mesh, spec))

    def _prefill_step(
        self, params: nnx.State, serving: ServingWeights | None, tokens: Array, lengths: Array, *, room: int
    ) -> _State:
        """Logits after the last byte of each prompt, and a cache with `room` more places.

        Prompts are padded at the end. The padding's entries in the cache lie past the position of every query until
        decoding overwrites them, so no query sees them.
        """
        cache = empty_cache(self.config, tokens.shape[0], tokens.shape[1] + room)
        logits, cache, _ = nnx.merge(self._graph, params)(tokens, cache=cache, weights=serving)
        last = jnp.take_along_axis(logits, (lengths - 1)[:, None, None], axis=1)[:, 0]
        return _State(last, lengths, cache)

    def _step(
        self,
        params: nnx.State,
        serving: ServingWeights | None,
        state: _State,
        temperature: Array,
        key: Array,
        forced: Array,
    ) -> tuple[_State, tuple[Array, Array]]:
        """One byte of each text, `forced [B]` where that is not negative, and the logits that chose it."""
        token = jnp.where(forced >= 0, forced, _choose(state.logits, temperature, key))
        model = nnx.merge(self._graph, params, copy=True)  # variables of the scan's own, or Flax objects
        logits, cache, _ = model(token[:, None], positions=state.position[:, None], cache=state.cache, weights=serving)
        return _State(logits[:, 0], state.position + 1, cache), (token, state.logits)

    def _decode_steps(
        self,
        params: nnx.State,
        serving: ServingWeights | None,
        state: _State,
        temperature: Array,
        keys: Array,
        forced: Array,
    ) -> tuple[Array, Array]:
        """`[steps, B]` new bytes and the logits `[steps, B, 256]` that chose them."""

        def step(state: _State, inputs: tuple[Array, Array]) -> tuple[_State, tuple[Array, Array]]:
            return self._step(params, serving, state, temperature, *inputs)

        return lax.scan(step, state, (keys, forced))[1]


class Agreement(NamedTuple):
    """How two generators compare on the greedy texts of the first: both read these, so that they see the same.

    Attributes:
      same_bytes: share of the places where both find the same byte likeliest.
      same_texts: the second one's own greedy texts are those of the first.
      logit_error: root mean square of the differences of the logits.
      typical_error: the same of the logits of one byte, the median of all. A token whose router weighs two experts
        alike may go to the other one, by roundings that differ from processor to processor, which this does not see.
      largest_error: the largest difference.
      logit_scale: root mean square of the logits, each row less its mean.
    """

    same_bytes: float
    same_texts: bool
    logit_error: float
    typical_error: float
    largest_error: float
    logit_scale: float


def compare(reference: Generator, other: Generator, prompts: list[bytes], *, max_new: int) -> Agreement:
    """The greedy output of `other` beside that of `reference`."""
    want = reference(prompts, max_new=max_new)
    got = other(prompts, max_new=max_new, forced=want.texts)
    error = got.logits - want.logits
    centred = want.logits - want.logits.mean(axis=-1, keepdims=True)
    return Agreement(
        float((got.logits.argmax(axis=-1) == want.logits.argmax(axis=-1)).mean()),
        other(prompts, max_new=max_new).texts == want.texts,
        float(np.sqrt(np.mean(error**2))),
        float(np.median(np.sqrt(np.mean(error**2, axis=-1)))),
        float(np.abs(error).max()),
        float(np.sqrt(np.mean(centred**2))),
    )


def _choose(logits: Array, temperature: Array, key: Array) -> Array:
    sampled = jax.random.categorical(key, logits / jnp.maximum(temperature, 1e-6))
    return jnp.where(temperature > 0, sampled, jnp.argmax(logits, axis=-1)).astype(jnp.int32)
