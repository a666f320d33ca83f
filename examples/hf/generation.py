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
from jax.sharding import NamedSharding, PartitionSpec

from hf.model import Cache, Decoder, empty_cache
from jax_ep.flax import MoE
from jax_ep.serving import ServingWeights

Array = jax.Array
Experts = str  # "off", "same", or a format of quantize_experts
# So many tokens of each text are made in one program, and then shown.
STEPS_PER_PROGRAM = 8
# Prompts are padded to a multiple of it: lengths that differ a little run the same compiled programs.
_LENGTH_STEP = 16


class Generated(NamedTuple):
    """What followed each prompt, and how long the devices needed, compilation not counted.

    Attributes:
      tokens: the new ids of each prompt, with the one that ended it, if any.
      prompt_logits: `[B, vocab_size]` after the last token of each prompt.
      prefill_seconds: of all prompts, to their first new tokens.
      decode_seconds: of all further tokens.
      num_prompt_tokens: of all prompts, padding not counted.
    """

    tokens: list[list[int]]
    prompt_logits: np.ndarray
    prefill_seconds: float
    decode_seconds: float
    num_prompt_tokens: int

    @property
    def prefill_speed(self) -> float:
        """Tokens per second."""
        return self.num_prompt_tokens / self.prefill_seconds

    @property
    def decode_speed(self) -> float:
        """Tokens per second, over all texts; 0 where prefill has made all there are."""
        made = sum(len(tokens) - 1 for tokens in self.tokens)
        return made / self.decode_seconds if made else 0.0


class Sampling(NamedTuple):
    """How tokens are chosen: arrays, so that other values run the same program.

    Attributes:
      temperature: 0 takes the likeliest token.
      top_p: the least likely tokens beyond this share of the probability are never taken.
    """

    temperature: Array
    top_p: Array

    @classmethod
    def of(cls, temperature: float, top_p: float) -> Sampling:
        """Checked values."""
        if temperature < 0 or not 0 < top_p <= 1:
            raise ValueError(f"got temperature={temperature}, top_p={top_p}, expected temperature >= 0, 0 < top_p <= 1")
        return cls(jnp.float32(temperature), jnp.float32(top_p))


class _State(NamedTuple):
    """Between two steps.

    Attributes:
      token: `[B]`, chosen, but not yet seen by the model.
      position: `[B]` of that token.
      finished: `[B]` bool: the text has ended.
      cache: of each layer.
      key: for the next choice.
    """

    token: Array
    position: Array
    finished: Array
    cache: list[Cache]
    key: Array


class Generator:
    """Prefill and decode of one decoder, compiled once for each shape.

    Args:
      decoder: what generates.
      mesh: its mesh, or None for one device.
      stop_tokens: ids that end a text.
      experts: the matrices of the experts where a device has so few tokens that `jax_ep.flax.MoE` takes its
        low-latency path, as in decoding: in "fp8", with tokens in FP8 too; in the "same" dtype as the rest, or in a
        format of `jax_ep.quantization.quantize_experts`, with tokens in that dtype; or "off", which never takes it.
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
        self._serving: list[ServingWeights | None] | None = None
        if experts != "off":
            kept = None if experts in ("same", "fp8") else experts
            quantize = nnx.jit(lambda moe: moe.serving_weights(fp8=experts == "fp8", format=kept))
            mlps = [layer.mlp for layer in decoder.model.layers]
            self._serving = [quantize(mlp) if isinstance(mlp, MoE) else None for mlp in mlps]
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
        """Continues each prompt by at most `max_new` ids, until the one that ends its text.

        Args:
          prompts: ids of each text, of any lengths.
          max_new: most ids to make for each.
          temperature, top_p: see `Sampling`.
          seed: of the choices.
          show: is called with all new ids so far, now and then.

        Raises:
          ValueError: a prompt without ids, or another argument out of its range.
        """
        sampling = Sampling.of(temperature, top_p)
        tokens, lengths = self._padded(prompts)
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
        """Compiles what generation from prompts of these lengths runs, so that it need not wait for that."""
        self._compiled(*self._padded(prompts), max_new)

    def _padded(self, prompts: Sequence[Sequence[int]]) -> tuple[Array, Array]:
        """Ids `[B, S]`, padded at the end, and lengths `[B]`, on the devices."""
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        if not lengths.all() or not len(lengths):
            raise ValueError(f"got prompts of {lengths} ids, expected one prompt or more, of one id or more each")
        tokens = np.zeros((len(prompts), _up(lengths.max())), np.int32)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = prompt
        return self._put(tokens), self._put(lengths)

    def _compiled(self, tokens: Array, lengths: Array, max_new: int) -> tuple[Any, Any]:
        """Prefill and decode for these shapes, compiled once and warm, so that neither is in the times."""
        if max_new < 1:
            raise ValueError(f"got max_new={max_new}, expected 1 or more")
        room = tokens.shape[1] + _up(max_new)
        key = (*tokens.shape, room)
        if key not in self._programs:
            model, sampling, no_steps = (self._params, self._serving), Sampling.of(0.0, 1.0), jnp.int32(0)
            inputs = tokens, lengths, sampling, jax.random.key(0)
            prefill = jax.jit(self._prefill, static_argnames="room").lower(*model, *inputs, room=room).compile()
            state, _ = prefill(*model, *inputs)
            # Its output is its next input: placed alike.
            shardings = jax.tree.map(lambda leaf: leaf.sharding, state), None
            decode = jax.jit(self._decode, donate_argnames="state", out_shardings=shardings)
            decode = decode.lower(*model, state, sampling, no_steps).compile()
            jax.block_until_ready(decode(*model, state, sampling, no_steps))
            self._programs[key] = prefill, decode
        return self._programs[key]

    def _put(self, array: np.ndarray) -> Array:
        """Texts spread over all devices where they divide evenly, else all on each."""
        if self.mesh is None:
            return jnp.asarray(array)
        spec = PartitionSpec(("data", "expert")) if len(array) % self.mesh.size == 0 else PartitionSpec()
        return jax.device_put(array, NamedSharding(self.mesh, spec))

    def _prefill(
        self,
        params: nnx.State,
        serving: list[ServingWeights | None] | None,
        tokens: Array,
        lengths: Array,
        sampling: Sampling,
        key: Array,
        *,
        room: int,
    ) -> tuple[_State, Array]:
        """The first new token of each prompt, and the logits that chose it; prompts are padded at the end.

        The padding's entries in the cache lie past the position of every query until decoding overwrites them.
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
        serving: list[ServingWeights | None] | None,
        state: _State,
        sampling: Sampling,
        steps: Array,
    ) -> tuple[_State, Array]:
        """At most `steps` further tokens of each text: `[B, STEPS_PER_PROGRAM]`, -1 where there is none."""

        def goes_on(carry: tuple[_State, Array, Array]) -> Array:
            state, _, step = carry
            return (step < steps) & ~state.finished.all()

        def advance(carry: tuple[_State, Array, Array]) -> tuple[_State, Array, Array]:
            state, made, step = carry
            decoder = nnx.merge(self._graph, params, copy=True)  # variables of the loop's own, or Flax objects
            output = decoder(
                state.token[:, None],
                positions=state.position[:, None],
                cache=state.cache,
                token_mask=~state.finished[:, None],  # a text that has ended costs no expert
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
        """Whether tokens end their texts."""
        return jnp.isin(token, self._stop_tokens)


def choose(logits: Array, sampling: Sampling, key: Array) -> Array:
    """`[B]` int32 tokens from `logits [B, vocab_size]`.

    Source: Holtzman et al., "The Curious Case of Neural Text Degeneration", https://arxiv.org/abs/1904.09751 (top-p)
    """

    def sample() -> Array:
        scaled = logits / sampling.temperature
        descending = jnp.sort(scaled, axis=-1, descending=True)
        share = jax.nn.softmax(descending, axis=-1)
        # A token stays where those before it have less than top_p together: the likeliest one always does.
        stays = jnp.cumsum(share, axis=-1) - share < sampling.top_p
        least = jnp.min(jnp.where(stays, descending, jnp.inf), axis=-1, keepdims=True)
        return jax.random.categorical(key, jnp.where(scaled >= least, scaled, -jnp.inf)).astype(jnp.int32)

    return lax.cond(sampling.temperature > 0, sample, lambda: jnp.argmax(logits, axis=-1).astype(jnp.int32))


def _up(length: int) -> int:
    """The next multiple of `_LENGTH_STEP`."""
    return -(-int(length) // _LENGTH_STEP) * _LENGTH_STEP
