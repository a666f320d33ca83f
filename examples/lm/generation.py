"""Jit-compiled generation: one prefill of all prompts, then a scan of single-token steps over a key-value cache."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jax_ep.flax import MoE
from jax_ep.serving import ExpertWeights
from lm.attention import Cache
from lm.model import LanguageModel, empty_cache

Array = jax.Array
Experts = Literal["fp8", "same", "off"]
_MOST_TOKENS = 2**31 - 32  # padded positions are int32


class Generated(NamedTuple):
    """Generated texts and times, without compilation.

    Attributes:
      texts: the new bytes of each prompt.
      logits: `[B, steps, 256]` of the new bytes.
      prefill_seconds: time for all prompts.
      decode_seconds: time for all steps, in one program.
    """

    texts: list[bytes]
    logits: np.ndarray
    prefill_seconds: float
    decode_seconds: float


class _State(NamedTuple):
    """The state between two steps: logits `[B, 256]` of the next byte, its position `[B]`, and the cache."""

    logits: Array
    position: Array
    cache: Cache


class Generator:
    """Prefill and decode of one model, compiled once per shape.

    Args:
      model: the model.
      mesh: its mesh.
      experts: expert weights for batches so small that `jax_ep.flax.MoE` takes its low-latency path, as in decoding:
        "fp8", "same" (the model's dtype), or "off", which disables that path.
    """

    def __init__(self, model: LanguageModel, mesh: jax.sharding.Mesh, *, experts: Experts = "off") -> None:
        self.config, self.mesh = model.config, mesh
        self._graph, self._state = nnx.split(model)
        self._serving: ExpertWeights | None = None
        if experts != "off":
            # Transpose and quantize the weights in one program, so that each device processes its own.
            self._serving = nnx.jit(lambda model: serving_weights(model.blocks.moe, experts))(model)
        self._prefill = jax.jit(self._prefill_step, static_argnames="room")
        # No result has the shape of the donated state. On several devices XLA still reuses its memory; on one, JAX
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
        """Continue each prompt by `max_new` bytes: the most likely ones at temperature 0, else sampled.

        With `forced`, texts of that length, return their bytes and the logits at each of them.
        """
        tokens, lengths = padded(prompts, max_new, self.mesh)
        wanted = np.full((max_new, len(prompts)), -1, np.int32)
        if forced is not None:
            wanted[:] = np.array([list(text) for text in forced]).T
        arguments = (jnp.float32(temperature), jax.random.split(jax.random.key(seed), max_new), wanted)
        # Exclude compilation and the first run, which sets up the executable, from the times.
        prefill, decode = self._programs(tokens, lengths, arguments)
        begin = time.perf_counter()
        state = jax.block_until_ready(prefill(self._state, self._serving, tokens, lengths))
        prefilled = time.perf_counter()
        new, logits = jax.block_until_ready(decode(self._state, self._serving, state, *arguments))
        done = time.perf_counter()
        texts = [bytes(row.astype(np.uint8)) for row in np.asarray(new).T]
        return Generated(texts, np.asarray(logits).swapaxes(0, 1), prefilled - begin, done - prefilled)

    def _programs(self, tokens: Array, lengths: Array, arguments: tuple[Any, ...]) -> tuple[Any, Any]:
        """Compile prefill and decode once for these shapes, and run prefill once."""
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
        """Time single steps, each as one program that is waited for, as when every byte is streamed to a user."""
        tokens, lengths = padded(prompts, steps + 1, self.mesh)
        state = self._prefill(self._state, self._serving, tokens, lengths, room=steps + 1)
        key, free = jax.random.key(0), jnp.full(len(prompts), -1, jnp.int32)
        times = []
        for _ in range(steps + 1):  # The first step compiles.
            begin = time.perf_counter()
            state, _ = jax.block_until_ready(
                self._one_step(self._state, self._serving, state, jnp.float32(0), key, free)
            )
            times.append(time.perf_counter() - begin)
        return np.array(times[1:])

    def _prefill_step(
        self, params: nnx.State, serving: ExpertWeights | None, tokens: Array, lengths: Array, *, room: int
    ) -> _State:
        """Return logits after the last byte of each prompt, and a cache with `room` more positions.

        Prompts are padded at the end. Cache entries of padding lie past the position of every query until decoding
        overwrites them, so no query sees them.
        """
        cache = empty_cache(self.config, tokens.shape[0], tokens.shape[1] + room)
        logits, cache, _ = nnx.merge(self._graph, params)(tokens, cache=cache, weights=serving)
        last = jnp.take_along_axis(logits, (lengths - 1)[:, None, None], axis=1)[:, 0]
        return _State(last, lengths, cache)

    def _step(
        self,
        params: nnx.State,
        serving: ExpertWeights | None,
        state: _State,
        temperature: Array,
        key: Array,
        forced: Array,
    ) -> tuple[_State, tuple[Array, Array]]:
        """Return one byte of each text, `forced [B]` if not negative, and its logits."""
        token = jnp.where(forced >= 0, forced, _choose(state.logits, temperature, key))
        model = nnx.merge(self._graph, params, copy=True)  # The scan needs its own variables of Flax objects.
        logits, cache, _ = model(token[:, None], positions=state.position[:, None], cache=state.cache, weights=serving)
        return _State(logits[:, 0], state.position + 1, cache), (token, state.logits)

    def _decode_steps(
        self,
        params: nnx.State,
        serving: ExpertWeights | None,
        state: _State,
        temperature: Array,
        keys: Array,
        forced: Array,
    ) -> tuple[Array, Array]:
        """Return `[steps, B]` new bytes and their logits `[steps, B, 256]`."""

        def step(state: _State, inputs: tuple[Array, Array]) -> tuple[_State, tuple[Array, Array]]:
            return self._step(params, serving, state, temperature, *inputs)

        return lax.scan(step, state, (keys, forced))[1]


class Agreement(NamedTuple):
    """Agreement of two generators on the greedy texts of the first, which both read.

    Attributes:
      same_bytes: share of positions where both find the same byte most likely.
      same_texts: the second generator's own greedy texts equal those of the first.
      logit_error: root mean square of the differences of the logits.
      typical_error: the median over bytes of that error. It ignores tokens with a near tie in the router, which may go
        to another expert because of roundings that differ between processors.
      largest_error: the largest difference.
      logit_scale: root mean square of the logits, centered per row.
    """

    same_bytes: float
    same_texts: bool
    logit_error: float
    typical_error: float
    largest_error: float
    logit_scale: float


def compare(reference: Generator, other: Generator, prompts: list[bytes], *, max_new: int) -> Agreement:
    """Compare the greedy output of `other` with that of `reference`."""
    want = reference(prompts, max_new=max_new)
    got = other(prompts, max_new=max_new, forced=want.texts)
    error = got.logits - want.logits
    centered = want.logits - want.logits.mean(axis=-1, keepdims=True)
    return Agreement(
        float((got.logits.argmax(axis=-1) == want.logits.argmax(axis=-1)).mean()),
        other(prompts, max_new=max_new).texts == want.texts,
        float(np.sqrt(np.mean(error**2))),
        float(np.median(np.sqrt(np.mean(error**2, axis=-1)))),
        float(np.abs(error).max()),
        float(np.sqrt(np.mean(centered**2))),
    )


def _choose(logits: Array, temperature: Array, key: Array) -> Array:
    sampled = jax.random.categorical(key, logits / jnp.maximum(temperature, 1e-6))
    return jnp.where(temperature > 0, sampled, jnp.argmax(logits, axis=-1)).astype(jnp.int32)


def serving_weights(moe: MoE, experts: str) -> ExpertWeights:
    """Convert the weights of a layer to "fp8" with FP8 tokens, "same", or another format of `jax_ep.quantize`."""
    form = {"format": None if experts == "same" else experts}
    return moe.serving_weights(**form, **({"activations": "fp8"} if experts == "fp8" else {}))


def check_lengths(prompts: Sequence[Sequence[int]], max_new: int) -> None:
    """Raise a `ValueError` unless these prompts can be continued by `max_new` tokens."""
    lengths = [len(prompt) for prompt in prompts]
    if not lengths or not all(lengths):
        raise ValueError(f"got prompts of {lengths} tokens, expected at least one prompt with at least one token each")
    if not 1 <= max_new <= _MOST_TOKENS - max(lengths):
        raise ValueError(
            f"got max_new={max_new}, expected 1 or more, and with the prompt at most {_MOST_TOKENS} tokens"
        )


def padded(
    prompts: Sequence[Sequence[int]], max_new: int, mesh: jax.sharding.Mesh | None, *, multiple: int = 1
) -> tuple[Array, Array]:
    """Return tokens `[B, S]`, padded at the end to a multiple, and lengths `[B]`.

    Rows are sharded over all devices of `mesh` if they divide evenly, else replicated.
    """
    check_lengths(prompts, max_new)
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    tokens = np.zeros((len(prompts), round_up(lengths.max(), multiple)), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = list(prompt)
    if mesh is None:
        return jnp.asarray(tokens), jnp.asarray(lengths)
    spec = PartitionSpec(("data", "expert")) if len(prompts) % mesh.size == 0 else PartitionSpec()
    return jax.device_put((tokens, lengths), NamedSharding(mesh, spec))


def round_up(length: int, multiple: int) -> int:
    """Round up to a multiple."""
    return -(-int(length) // multiple) * multiple
