"""Train state, train step and held-out loss, as pure functions under jit with fixed shardings."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jax_ep.serving import ExpertWeights
from lm.model import LanguageModel, ModelConfig

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Hyperparameters of the training."""

    steps: int = 400
    batch_size: int = 8
    microbatches: int = 1
    length: int = 128
    peak_learning_rate: float = 4e-3
    warmup_steps: int = 20
    weight_decay: float = 0.1
    gradient_clip: float = 1.0
    load_balancing_weight: float = 0.01
    z_loss_weight: float = 1e-3
    bias_rate: float = 1e-3
    seed: int = 0

    def optimizer(self) -> optax.GradientTransformation:
        """AdamW with gradient clipping, warm-up and a cosine schedule down to a tenth."""
        peak = self.peak_learning_rate
        warmup = min(self.warmup_steps, self.steps)
        schedule = optax.warmup_cosine_decay_schedule(0.0, peak, warmup, max(self.steps, warmup + 1), 0.1 * peak)
        decayed = functools.partial(jax.tree.map, lambda parameter: parameter.ndim >= 2)
        adamw = optax.adamw(schedule, b2=0.98, weight_decay=self.weight_decay, mask=decayed)
        return optax.chain(optax.clip_by_global_norm(self.gradient_clip), adamw)


class TrainState(NamedTuple):
    """Everything that a step updates: float32 master weights, optimizer state, and the random key of the dropout."""

    model: Any
    optimizer: Any
    key: Array


def placed(state: Any, mesh: jax.sharding.Mesh) -> Any:
    """Add shardings to an abstract `state`: experts and their moments by their metadata, the rest replicated."""

    def place(leaf: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(place, state, nnx.get_partition_spec(state))


class Trainer:
    """Compiled steps of one model on one mesh; the caller keeps the state."""

    def __init__(self, config: TrainConfig, model: ModelConfig, mesh: jax.sharding.Mesh) -> None:
        self.config, self.model, self.mesh = config, model, mesh
        rows = mesh.size * config.microbatches
        if config.batch_size % rows:
            raise ValueError(
                f"batch_size={config.batch_size} must be a multiple of the {mesh.size} devices, times"
                f" microbatches={config.microbatches}"
            )
        self._batch = NamedSharding(mesh, PartitionSpec(("data", "expert")))
        self._replicated = NamedSharding(mesh, PartitionSpec())
        abstract = nnx.eval_shape(self._build)
        self._model_graph, self._optimizer_graph = (nnx.graphdef(part) for part in abstract)
        model_state, optimizer_state = (placed(nnx.state(part), mesh) for part in abstract)
        key = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
        key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=self._replicated)
        self._abstract = TrainState(model_state, optimizer_state, key)
        self._state = jax.tree.map(lambda leaf: leaf.sharding, self._abstract)
        self.train_step: Any = self._make_train_step()
        self._loss: Any = jax.jit(self._mean_loss, in_shardings=(self._state.model, self._batch))

    def compile(self) -> None:
        """Compile the train step and the held-out loss ahead of time."""
        shape = self.config.batch_size, self.config.length + 1
        windows = jax.ShapeDtypeStruct(shape, np.int32, sharding=self._batch)
        self.train_step = self.train_step.lower(self._abstract, windows).compile()
        self._loss = self._loss.lower(self._abstract.model, windows).compile()

    def initial_state(self) -> TrainState:
        """Initialize random parameters; each device creates only its own share."""

        def build() -> TrainState:
            model, optimizer = (nnx.state(part) for part in self._build())
            return TrainState(model, optimizer, jax.random.key_data(jax.random.key(self.config.seed + 1)))

        return jax.jit(build, out_shardings=self._state)()

    def abstract_state(self) -> TrainState:
        """Return shapes, dtypes and shardings of the state."""
        return self._abstract

    def module(self, state: TrainState) -> LanguageModel:
        """Return the model with the parameters of `state`."""
        return nnx.merge(self._model_graph, state.model)

    def put(self, windows: np.ndarray) -> Array:
        """Shard a batch from the host over all devices."""
        return jax.device_put(windows, self._batch)

    def held_out_loss(self, model: Any, windows: np.ndarray) -> float:
        """Return mean nats per byte over `windows [count, length + 1]`, in batches."""
        size = self.config.batch_size
        batches = [windows[i : i + size] for i in range(0, len(windows) - size + 1, size)]
        return float(np.mean([self._loss(model, self.put(batch)) for batch in batches]))

    def _build(self) -> tuple[LanguageModel, nnx.Optimizer]:
        model = LanguageModel(self.model, mesh=self.mesh, rngs=nnx.Rngs(self.config.seed))
        return model, nnx.Optimizer(model, self.config.optimizer(), wrt=nnx.Param)

    def _make_train_step(self) -> Any:
        config = self.config

        def step(state: TrainState, windows: Array) -> tuple[TrainState, dict[str, Array]]:
            model = nnx.merge(self._model_graph, state.model)
            optimizer = nnx.merge(self._optimizer_graph, state.optimizer)
            key, dropout_key = jax.random.split(jax.random.wrap_key_data(state.key))
            gradients, metrics = self._gradients(model, windows, dropout_key)
            optimizer.update(model, gradients)
            if self.model.router_balance == "bias":
                model.blocks.moe.update_bias(metrics["load"], rate=config.bias_rate)
            metrics["gradient_norm"] = optax.tree.norm(gradients)
            return TrainState(nnx.state(model), nnx.state(optimizer), jax.random.key_data(key)), metrics

        return jax.jit(
            step,
            in_shardings=(self._state, self._batch),
            out_shardings=(self._state, self._replicated),
            donate_argnums=0,
        )

    def _gradients(self, model: LanguageModel, windows: Array, key: Array) -> tuple[Any, dict[str, Array]]:
        """Return the gradients of a step, summed over microbatches, and its metrics."""
        count = self.config.microbatches
        # Round FP8 expert weights once for all microbatches.
        weights = model.blocks.moe.training_weights() if self.model.recipe else None

        def gradients_of(
            model: LanguageModel, weights: Any, windows: Array, key: Array
        ) -> tuple[Any, dict[str, Array]]:
            gradient = nnx.value_and_grad(self._training_loss, has_aux=True)
            (_, metrics), gradients = gradient(model, weights, windows, key)
            return gradients, metrics

        if count == 1:
            return gradients_of(model, weights, windows, key)

        @nnx.scan(in_axes=(nnx.Carry, None, None, 0, 0), out_axes=(nnx.Carry, 0))
        def add(total: Any, model: LanguageModel, weights: Any, windows: Array, key: Array) -> tuple[Any, Any]:
            gradients, metrics = gradients_of(model, weights, windows, key)
            return jax.tree.map(jnp.add, total, gradients), metrics

        # Take every count-th window, so that each device keeps its own.
        parts = windows.reshape(-1, count, windows.shape[1]).swapaxes(0, 1)
        zeros = jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param))
        total, metrics = add(zeros, model, weights, parts, jax.random.split(key, count))
        sums = {name: metrics.pop(name).sum(axis=0) for name in ("dropped", "load")}
        gradients, means = jax.tree.map(lambda x: x / count, (total, {n: x.sum(axis=0) for n, x in metrics.items()}))
        return gradients, means | sums

    def _training_loss(
        self, model: LanguageModel, weights: ExpertWeights | None, windows: Array, key: Array
    ) -> tuple[Array, dict[str, Array]]:
        config = self.config
        logits, _, metrics = model(windows[:, :-1], key=key if self.model.dropout else None, weights=weights)
        loss = _cross_entropy(logits, windows[:, 1:])
        balance, z_loss = metrics.load_balancing_loss.mean(), metrics.router_z_loss.mean()
        total = loss + config.z_loss_weight * z_loss
        if self.model.router_balance == "loss":
            total = total + config.load_balancing_weight * balance
        aux = {"loss": loss, "balance": balance, "z_loss": z_loss, "dropped": metrics.dropped.sum()}
        # Rows of each rank with and without copies of experts; only several ranks can balance.
        rows = {name: metrics[name] for name in ("rows_before", "rows_after") if name in metrics}
        return total, aux | {"load": metrics.load} | rows

    def _mean_loss(self, state: Any, windows: Array) -> Array:
        model = nnx.merge(self._model_graph, state)
        logits, _, _ = model(windows[:, :-1])
        return _cross_entropy(logits, windows[:, 1:])


def _cross_entropy(logits: Array, targets: Array) -> Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
