"""Jit-compiled generation: prefill of padded prompts, then a loop of single-token steps over a key-value cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from hf.model import Decoder, empty_cache
from jax_ep.flax import MoE
from jax_ep.serving import ExpertWeights
from lm.attention import Cache
from lm.generation import padded, round_up, serving_weights

Array = jax.Array
Experts = str  # "off", "same", or a format of quantize
# Number of tokens per text that one program generates before they are shown.
STEPS_PER_PROGRAM = 8
# Prompts are padded to a multiple of this, so that similar lengths share compiled programs.
_LENGTH_STEP = 16


class Generated(NamedTuple):
    """Generated tokens and times, without compilation.

    Attributes:
      tokens: the new ids of each prompt, including the stop token, if any.
      prompt_logits: `[B, vocab_size]` after the last token of each prompt.
      prefill_seconds: time for all prompts and their first new tokens.
      decode_seconds: time for all further tokens.
      num_prompt_tokens: tokens of all prompts, without padding.
    """

    tokens: list[list[int]]
    prompt_logits: np.ndarray
    prefill_seconds: float
    decode_seconds: float
    num_prompt_tokens: int

    @property
    def prefill_speed(self) -> float:
        """Prefill tokens per second."""
        return self.num_prompt_tokens / self.prefill_seconds

    @property
    def decode_speed(self) -> float:
        """Decoded tokens per second over all texts; 0 if prefill generated all tokens."""
        made = sum(len(tokens) - 1 for tokens in self.tokens)
        return made / self.decode_seconds if made else 0.0


class Sampling(NamedTuple):
    """Sampling settings, as arrays so that other values run the same program.

    Attributes:
      temperature: 0 selects the most likely token.
      top_p: tokens beyond this share of the probability are never sampled.
    """

    temperature: Array
    top_p: Array

    @classmethod
    def of(cls, temperature: float, top_p: float) -> Sampling:
        """Check the values and convert them to arrays."""
        if temperature < 0 or not 0 < top_p <= 1:
            raise ValueError(f"got temperature={temperature}, top_p={top_p}, expected temperature >= 0, 0 < top_p <= 1")
        return cls(jnp.float32(temperature), jnp.float32(top_p))


class _State(NamedTuple):
    """The state between two steps.

    Attributes:
      token: `[B]`, chosen but not yet seen by the model.
      position: `[B]` of that token.
      finished: `[B]` bool: the text has ended.
      cache: cache of each layer.
      key: random key of the next choice.
    """

    token: Array
    position: Array
    finished: Array
    cache: list[Cache]
    key: Array


class Generator:
    """Prefill and decode of one decoder, compiled once per shape.

    Args:
      decoder: the model.
      mesh: its mesh, or None for one device.
      stop_tokens: ids that end a text.
      experts: expert weights for batches so small that `jax_ep.flax.MoE` takes its low-latency path, as in decoding:
        "fp8", with FP8 tokens; "same", in the model's dtype; another format of `jax_ep.quantize`, with tokens in the
        model's dtype; or "off", which disables that path.
    """

    def __init__(
        self,
        decoder: Decoder,
        mesh: jax.sharding.Mesh | None = None,
        *,
        stop_tokens: Sequence[int] = (),
        experts: Experts = "off",
    ) -> None:
        self.config, self.mesh, self._dtype = decoder.config, mesh, decoder.dtype
        self._stop_tokens = np.array(stop_tokens, np.int32)
        self._graph, self._params = nnx.split(decoder)
        self._serving: list[ExpertWeights | None] | None = None
        if experts != "off":
            prepare = nnx.jit(lambda moe: serving_weights(moe, experts))
            mlps = [layer.mlp for layer in decoder.model.layers]
            self._serving = [prepare(mlp) if isinstance(mlp, MoE) else None for mlp in mlps]
        self._programs: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        show: Callable[[list[list[int]]], None] = lambda tokens: None,
    ) -> Generated:
        """Continue each prompt by at most `max_new` ids, up to a stop token.

        Args:
          prompts: ids of each text, of any lengths.
          max_new: maximum number of new ids per text.
          temperature, top_p: see `Sampling`.
          seed: random seed.
          show: called regularly with all new ids so far.

        Raises:
          ValueError: a prompt is empty, or another argument is out of range.
        """
        sampling = Sampling.of(temperature, top_p)
        tokens, lengths = padded(prompts, max_new, self.mesh, multiple=_LENGTH_STEP)
        prefill, decode = self._compiled(tokens, lengths, max_new)

        began = time.perf_counter()
        state, logits = jax.block_until_ready(
            prefill(self._params, self._serving, tokens, lengths, sampling, jax.random.key(seed))
        )
        prefilled = time.perf_counter()
        new = [[token] for token in np.asarray(state.token).tolist()]
        show(new)
        seconds = 0.0
        while (missing := max_new - max(map(len, new))) > 0 and not np.asarray(state.finished).all():
            began_steps = time.perf_counter()
            state, made = jax.block_until_ready(
                decode(self._params, self._serving, state, sampling, jnp.int32(min(missing, STEPS_PER_PROGRAM)))
            )
            seconds += time.perf_counter() - began_steps
            for text, row in zip(new, np.asarray(made).tolist(), strict=True):
                text += [token for token in row if token >= 0]
            show(new)
        return Generated(new, np.asarray(logits), prefilled - began, seconds, sum(map(len, prompts)))

    def compile(self, prompts: Sequence[Sequence[int]], *, max_new: int) -> None:
        """Compile the programs for prompts of these lengths ahead of time."""
        tokens, lengths = padded(prompts, max_new, self.mesh, multiple=_LENGTH_STEP)
        self._compiled(tokens, lengths, max_new)

    def _compiled(self, tokens: Array, lengths: Array, max_new: int) -> tuple[Any, Any]:
        """Compile and warm up prefill and decode for these shapes, so that timings exclude both."""
        room = tokens.shape[1] + round_up(max_new, _LENGTH_STEP)
        key = (*tokens.shape, room)
        if key not in self._programs:
            model, sampling, no_steps = (self._params, self._serving), Sampling.of(0.0, 1.0), jnp.int32(0)
            inputs = tokens, lengths, sampling, jax.random.key(0)
            prefill = jax.jit(self._prefill, static_argnames="room").lower(*model, *inputs, room=room).compile()
            state, _ = prefill(*model, *inputs)
            # The output of decode is its next input, so both have the same sharding.
            shardings = jax.tree.map(lambda leaf: leaf.sharding, state), None
            decode = jax.jit(self._decode, donate_argnames="state", out_shardings=shardings)
            decode = decode.lower(*model, state, sampling, no_steps).compile()
            jax.block_until_ready(decode(*model, state, sampling, no_steps))
            self._programs[key] = prefill, decode
        return self._programs[key]

    def _prefill(
        self,
        params: nnx.State,
        serving: list[ExpertWeights | None] | None,
        tokens: Array,
        lengths: Array,
        sampling: Sampling,
        key: Array,
        *,
        room: int,
    ) -> tuple[_State, Array]:
        """Return the first new token of each prompt, and its logits; prompts are padded at the end.

        Cache entries of padding lie past the position of every query until decoding overwrites them.
        """
        decoder = nnx.merge(self._graph, params)
        cache = empty_cache(self.config, tokens.shape[0], room, self._dtype)
        mask = jnp.arange(tokens.shape[1])[None] < lengths[:, None]
        output = decoder(tokens, cache=cache, token_mask=mask, serving=serving)
        last = jnp.take_along_axis(output.hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
        logits = decoder.logits(last)
        key, used = jax.random.split(key)
        token = choose(logits, sampling, used)
        return _State(token, lengths, self._ends(token), output.cache, key), logits

    def _decode(
        self,
        params: nnx.State,
        serving: list[ExpertWeights | None] | None,
        state: _State,
        sampling: Sampling,
        steps: Array,
    ) -> tuple[_State, Array]:
        """Generate at most `steps` further tokens of each text: `[B, STEPS_PER_PROGRAM]`, padded with -1."""

        def goes_on(carry: tuple[_State, Array, Array]) -> Array:
            state, _, step = carry
            return (step < steps) & ~state.finished.all()

        def advance(carry: tuple[_State, Array, Array]) -> tuple[_State, Array, Array]:
            state, made, step = carry
            decoder = nnx.merge(self._graph, params, copy=True)  # The loop needs its own variables of Flax objects.
            output = decoder(
                state.token[:, None],
                positions=state.position[:, None],
                cache=state.cache,
                token_mask=~state.finished[:, None],  # A finished text needs no expert computation.
                serving=serving,
            )
            key, used = jax.random.split(state.key)
            token = choose(decoder.logits(output.hidden[:, 0]), sampling, used)
            made = made.at[:, step].set(jnp.where(state.finished, -1, token))
            finished = state.finished | self._ends(token)
            return _State(token, state.position + 1, finished, output.cache, key), made, step + 1

        made = jnp.full((state.token.shape[0], STEPS_PER_PROGRAM), -1, jnp.int32)
        state, made, _ = lax.while_loop(goes_on, advance, (state, made, jnp.int32(0)))
        return state, made

    def _ends(self, token: Array) -> Array:
        """Return whether tokens are stop tokens."""
        return jnp.isin(token, self._stop_tokens)


def choose(logits: Array, sampling: Sampling, key: Array) -> Array:
    """Choose `[B]` int32 tokens from `logits [B, vocab_size]`.

    Source: Holtzman et al., "The Curious Case of Neural Text Degeneration", https://arxiv.org/abs/1904.09751 (top-p)
    """

    def sample() -> Array:
        scaled = logits / sampling.temperature
        descending = jnp.sort(scaled, axis=-1, descending=True)
        share = jax.nn.softmax(descending, axis=-1)
        # Keep a token if the more likely ones together have less than top_p, so the most likely one is always kept.
        stays = jnp.cumsum(share, axis=-1) - share < sampling.top_p
        least = jnp.min(jnp.where(stays, descending, jnp.inf), axis=-1, keepdims=True)
        return jax.random.categorical(key, jnp.where(scaled >= least, scaled, -jnp.inf)).astype(jnp.int32)

    return lax.cond(sampling.temperature > 0, sample, lambda: jnp.argmax(logits, axis=-1).astype(jnp.int32))
