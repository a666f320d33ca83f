"""Jit-compiled generation: prefill of padded prompts, then a loop of single-token steps over a key-value cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jax_ep.flax import MoE
from jax_ep.serving import ExpertWeights

Array = jax.Array
# Number of tokens per text that one program generates before they are shown.
STEPS_PER_PROGRAM = 8
# Prompts are padded to a multiple of this, so that similar lengths share compiled programs.
_LENGTH_STEP = 16
_MOST_TOKENS = 2**31 - 32  # padded positions are int32


class Model(Protocol):
    """What generation needs of a model."""

    def empty_cache(self, batch: int, length: int) -> Any:
        """Create the caches of all layers for `length` positions of each of `batch` texts."""

    def serving_weights(self, experts: str) -> Any:
        """Return the expert weights of all layers, see `serving_weights`."""

    def decode(
        self, tokens: Array, last: Array, cache: Any, *, positions: Array | None, token_mask: Array, serving: Any
    ) -> tuple[Array, Any]:
        """Read `tokens [B, S]`; return logits `[B, V]` float32 after index `last [B]` of each text, and the cache."""


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
    cache: Any
    key: Array


class Generator:
    """Prefill and decode of one model, compiled once per shape.

    Args:
      model: the model.
      mesh: its mesh, or None for one device.
      stop_tokens: ids that end a text.
      experts: expert weights for batches so small that `jax_ep.flax.MoE` takes its low-latency path, as in decoding:
        see `serving_weights`, or "off", which disables that path.
    """

    def __init__(
        self,
        model: Model,
        mesh: jax.sharding.Mesh | None = None,
        *,
        stop_tokens: Sequence[int] = (),
        experts: str = "off",
    ) -> None:
        self.mesh = mesh
        self._stop_tokens = np.array(stop_tokens, np.int32)
        self._graph, params = nnx.split(model)
        self._arguments = params, None if experts == "off" else model.serving_weights(experts)
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
        texts, prefill, decode = self._compiled(prompts, max_new)

        began = time.perf_counter()
        state, logits = jax.block_until_ready(prefill(*self._arguments, *texts, sampling, jax.random.key(seed)))
        prefilled = time.perf_counter()
        new = [[token] for token in np.asarray(state.token).tolist()]
        show(new)
        seconds = 0.0
        while (missing := max_new - max(map(len, new))) > 0 and not np.asarray(state.finished).all():
            began_steps = time.perf_counter()
            state, made = jax.block_until_ready(
                decode(*self._arguments, state, sampling, jnp.int32(min(missing, STEPS_PER_PROGRAM)))
            )
            seconds += time.perf_counter() - began_steps
            for text, row in zip(new, np.asarray(made).tolist(), strict=True):
                text += [token for token in row if token >= 0]
            show(new)
        return Generated(new, np.asarray(logits), prefilled - began, seconds, sum(map(len, prompts)))

    def compile(self, prompts: Sequence[Sequence[int]], *, max_new: int) -> None:
        """Compile the programs for prompts of these lengths ahead of time."""
        self._compiled(prompts, max_new)

    def step_seconds(self, prompts: Sequence[Sequence[int]], *, steps: int) -> np.ndarray:
        """Time single steps, each as one program that is waited for, as when every token is streamed to a user."""
        texts, prefill, decode = self._compiled(prompts, steps + 1)
        sampling, one_step, times = Sampling.of(0.0, 1.0), jnp.int32(1), []
        state, _ = jax.block_until_ready(prefill(*self._arguments, *texts, sampling, jax.random.key(0)))
        for _ in range(steps):
            begin = time.perf_counter()
            state, _ = jax.block_until_ready(decode(*self._arguments, state, sampling, one_step))
            times.append(time.perf_counter() - begin)
        return np.array(times)

    def logits_of(self, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]) -> np.ndarray:
        """Return the logits `[B, steps, V]` of each token of `texts`, of equal lengths, which continue the prompts."""
        padded_prompts, prefill, _ = self._compiled(prompts, len(texts[0]))
        state, first = prefill(*self._arguments, *padded_prompts, Sampling.of(0.0, 1.0), jax.random.key(0))
        others = jax.jit(self._read)(*self._arguments, state, jnp.array([list(text) for text in texts], jnp.int32))
        return np.concatenate([np.asarray(first)[:, None], np.asarray(others)], axis=1)

    def _compiled(self, prompts: Sequence[Sequence[int]], max_new: int) -> tuple[tuple[Array, Array], Any, Any]:
        """Return padded prompts and lengths, and prefill and decode for these shapes.

        Both are compiled and have run once, so that timings exclude that.
        """
        tokens, lengths = padded(prompts, max_new, self.mesh)
        room = tokens.shape[1] + round_up(max_new)
        key = (*tokens.shape, room)
        if key not in self._programs:
            sampling, no_steps = Sampling.of(0.0, 1.0), jnp.int32(0)
            inputs = *self._arguments, tokens, lengths, sampling, jax.random.key(0)
            prefill = jax.jit(self._prefill, static_argnames="room").lower(*inputs, room=room).compile()
            state, _ = prefill(*inputs)
            # The output of decode is its next input, so both have the same sharding.
            shardings = jax.tree.map(lambda leaf: leaf.sharding, state), None
            decode = jax.jit(self._decode, donate_argnames="state", out_shardings=shardings)
            decode = decode.lower(*self._arguments, state, sampling, no_steps).compile()
            jax.block_until_ready(decode(*self._arguments, state, sampling, no_steps))
            self._programs[key] = prefill, decode
        return (tokens, lengths), *self._programs[key]

    def _prefill(
        self,
        params: nnx.State,
        serving: Any,
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
        model = nnx.merge(self._graph, params)
        cache = model.empty_cache(tokens.shape[0], room)
        mask = jnp.arange(tokens.shape[1])[None] < lengths[:, None]
        logits, cache = model.decode(tokens, lengths - 1, cache, positions=None, token_mask=mask, serving=serving)
        key, used = jax.random.split(key)
        token = choose(logits, sampling, used)
        return _State(token, lengths, self._ends(token), cache, key), logits

    def _decode(
        self,
        params: nnx.State,
        serving: Any,
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
            logits, cache = self._step(params, serving, state)
            key, used = jax.random.split(state.key)
            token = choose(logits, sampling, used)
            made = made.at[:, step].set(jnp.where(state.finished, -1, token))
            finished = state.finished | self._ends(token)
            return _State(token, state.position + 1, finished, cache, key), made, step + 1

        made = jnp.full((state.token.shape[0], STEPS_PER_PROGRAM), -1, jnp.int32)
        state, made, _ = lax.while_loop(goes_on, advance, (state, made, jnp.int32(0)))
        return state, made

    def _read(self, params: nnx.State, serving: Any, state: _State, texts: Array) -> Array:
        """Read `texts [B, steps]`; return the logits `[B, steps - 1, V]` after all tokens but the last."""

        def step(state: _State, token: Array) -> tuple[_State, Array]:
            logits, cache = self._step(params, serving, state._replace(token=token))
            return state._replace(position=state.position + 1, cache=cache), logits

        return lax.scan(step, state, texts[:, :-1].T)[1].swapaxes(0, 1)

    def _step(self, params: nnx.State, serving: Any, state: _State) -> tuple[Array, Any]:
        """Read the token of each text; return logits `[B, V]` of the next one, and the cache."""
        return nnx.merge(self._graph, params, copy=True).decode(  # A loop needs its own variables of Flax objects.
            state.token[:, None],
            jnp.zeros_like(state.position),
            state.cache,
            positions=state.position[:, None],
            token_mask=~state.finished[:, None],  # A finished text needs no expert computation.
            serving=serving,
        )

    def _ends(self, token: Array) -> Array:
        """Return whether tokens are stop tokens."""
        return jnp.isin(token, self._stop_tokens)


class Agreement(NamedTuple):
    """Agreement of two generators on the greedy texts of the first, which both read.

    Attributes:
      same_tokens: share of positions where both find the same token most likely.
      same_texts: the second generator's own greedy texts equal those of the first.
      logit_error: root mean square of the differences of the logits.
      typical_error: the median over tokens of that error. It ignores tokens with a near tie in the router, which may go
        to another expert because of roundings that differ between processors.
      largest_error: the largest difference.
      logit_scale: root mean square of the logits, centered per row.
    """

    same_tokens: float
    same_texts: bool
    logit_error: float
    typical_error: float
    largest_error: float
    logit_scale: float


def compare(reference: Generator, other: Generator, prompts: Sequence[Sequence[int]], *, max_new: int) -> Agreement:
    """Compare the greedy output of `other` with that of `reference`."""
    texts = reference(prompts, max_new=max_new).tokens
    want, got = (generator.logits_of(prompts, texts) for generator in (reference, other))
    error, centered = got - want, want - want.mean(axis=-1, keepdims=True)
    return Agreement(
        float((got.argmax(axis=-1) == want.argmax(axis=-1)).mean()),
        other(prompts, max_new=max_new).tokens == texts,
        float(np.sqrt(np.mean(error**2))),
        float(np.median(np.sqrt(np.mean(error**2, axis=-1)))),
        float(np.abs(error).max()),
        float(np.sqrt(np.mean(centered**2))),
    )


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


def last_rows(rows: Array, last: Array) -> Array:
    """Return `rows [B, S, ...]` at the index `last [B]` of each text."""
    return jnp.take_along_axis(rows, last[:, None, None], axis=1)[:, 0]


def serving_weights(moe: MoE, experts: str) -> ExpertWeights:
    """Convert the weights of a layer.

    `experts` is "fp8", with tokens in FP8; "same", in the layer's dtype; or another format of `jax_ep.quantize`, with
    tokens in the layer's dtype.
    """
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


def padded(prompts: Sequence[Sequence[int]], max_new: int, mesh: jax.sharding.Mesh | None) -> tuple[Array, Array]:
    """Return tokens `[B, S]`, padded at the end, and lengths `[B]`.

    Rows are sharded over all devices of `mesh` if they divide evenly, else replicated.
    """
    check_lengths(prompts, max_new)
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    tokens = np.zeros((len(prompts), round_up(lengths.max())), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = list(prompt)
    if mesh is None:
        return jnp.asarray(tokens), jnp.asarray(lengths)
    spec = PartitionSpec(("data", "expert")) if len(prompts) % mesh.size == 0 else PartitionSpec()
    return jax.device_put((tokens, lengths), NamedSharding(mesh, spec))


def round_up(length: int) -> int:
    """Round up to a multiple of `_LENGTH_STEP`."""
    return -(-int(length) // _LENGTH_STEP) * _LENGTH_STEP
