"""Orbax checkpoints of everything that a run needs to continue exactly."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from flax import nnx

from lm.model import LanguageModel, ModelConfig
from lm.training import Trainer, TrainState, placed


class Restored(NamedTuple):
    """A train state and the matching state of the data iterator."""

    step: int
    state: TrainState
    data: dict[str, Any]


class Checkpoints:
    """The latest two checkpoints of a folder: parameters, optimizer, random key, data iterator, and model sizes."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        options = ocp.CheckpointManagerOptions(max_to_keep=2)
        self._manager = ocp.CheckpointManager(folder.resolve(), options=options)

    def latest_step(self) -> int | None:
        """Return the newest complete checkpoint, or None."""
        return self._manager.latest_step()

    def delete_all(self) -> None:
        """Delete every checkpoint of the folder."""
        for step in self._manager.all_steps():
            self._manager.delete(step)

    def save(self, step: int, state: TrainState, data: dict[str, Any], model: ModelConfig) -> None:
        """Start saving; writing continues in the background from a copy of the arrays."""
        arrays = {name: ocp.args.StandardSave(part) for name, part in _parts(state).items()}
        notes = {"data": ocp.args.JsonSave(data), "config": ocp.args.JsonSave(dataclasses.asdict(model))}
        self._manager.save(step, args=ocp.args.Composite(**arrays, **notes))

    def restore(self, trainer: Trainer) -> Restored:
        """Restore the newest checkpoint with the shardings of `trainer`."""
        step, saved = self._newest(), self.model_config()
        if saved != trainer.model:
            raise ValueError(
                f"the checkpoint has the model {saved}, but this run has {trainer.model}: use another folder"
            )
        parts = {name: ocp.args.StandardRestore(part) for name, part in _parts(trainer.abstract_state()).items()}
        found = self._restore(**parts, data=ocp.args.JsonRestore())
        return Restored(step, TrainState(found["model"], found["optimizer"], found["random"]["key"]), found["data"])

    def model_config(self) -> ModelConfig:
        """Return the sizes of the saved model."""
        return ModelConfig(**self._restore(config=ocp.args.JsonRestore())["config"])

    def restore_model(self, config: ModelConfig, mesh: jax.sharding.Mesh) -> LanguageModel:
        """Restore only the parameters, on any mesh; each device reads its share."""
        graph, state = nnx.split(nnx.eval_shape(lambda: LanguageModel(config, mesh=mesh, rngs=nnx.Rngs(0))))
        return nnx.merge(graph, self._restore(model=ocp.args.StandardRestore(placed(state, mesh)))["model"])

    def close(self) -> None:
        """Wait until everything is on disk."""
        self._manager.wait_until_finished()
        self._manager.close()

    def _restore(self, **items: Any) -> Any:
        """Restore items of the newest checkpoint."""
        step = self._newest()
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**items))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"checkpoint {step} in {self._manager.directory} is damaged ({error}): delete its folder, to continue"
                " from the one before"
            ) from error

    def _newest(self) -> int:
        step = self.latest_step()
        if step is None:
            raise FileNotFoundError(f"no checkpoint in {self._manager.directory}; train first: train_moe_flax.py")
        return step


def _parts(state: TrainState) -> dict[str, Any]:
    """Split the state, so that serving can read the parameters only."""
    return {"model": state.model, "optimizer": state.optimizer, "random": {"key": state.key}}
