"""Tokens per second of a training: the steps of examples/train_moe_flax.py, with experts over several devices."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import jax_ep
from jax_ep.tools.benchmark.harness import Timing, progress

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
WARMUP = 3


class Sizes(NamedTuple):
    """Sizes of the model and of a step; the batch has `windows` per device."""

    hidden: int = 1024
    layers: int = 4
    heads: int = 8
    intermediate: int = 1024
    experts: int = 32
    top_k: int = 4
    windows: int = 8
    length: int = 1024


QUICK = Sizes(hidden=32, layers=1, heads=2, intermediate=32, experts=8, top_k=2, windows=1, length=16)


def reason_against() -> str | None:
    """Return why no training can be measured here, or None."""
    if not (EXAMPLES / "lm" / "training.py").is_file():
        return "the example's code is only in a source checkout"
    try:
        import flax  # noqa: F401
        import optax  # noqa: F401
    except ImportError as error:
        return f"{error.name} is not installed: pip install 'jax-ep[examples]'"
    return None


def measure(num_ranks: int, sizes: Sizes, rounds: int) -> Timing:
    """Measure the seconds of one step, including its batch from the host, with `num_ranks` devices."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    from lm.data import WindowIterator, read_corpus
    from lm.devices import make_mesh
    from lm.model import ModelConfig
    from lm.training import TrainConfig, Trainer

    mesh = make_mesh(max_devices=num_ranks, num_experts=sizes.experts, expert_parallel=num_ranks)
    jax_ep.finalize()
    if jax.default_backend() == "gpu":
        jax_ep.init(mesh)
    batch = num_ranks * sizes.windows
    config = ModelConfig(**{name: getattr(sizes, name) for name in (*Sizes._fields[:6],)})
    trainer = Trainer(TrainConfig(batch_size=batch, length=sizes.length), config, mesh)
    trainer.compile()
    windows = WindowIterator(read_corpus().train, batch_size=batch, length=sizes.length, seed=0)
    return Timing(tuple(_steps(trainer, windows, rounds, f"training, {num_ranks} ranks")))


def _steps(trainer: Any, windows: Any, rounds: int, title: str) -> list[float]:
    state, samples = trainer.initial_state(), []
    for i in progress(range(WARMUP + rounds), title):
        start = time.perf_counter()
        state, metrics = trainer.train_step(state, trainer.put(next(windows)))
        loss = float(np.asarray(metrics["loss"]))
        if not np.isfinite(loss):
            raise ArithmeticError(f"the loss is {loss} after {i + 1} steps; a training that diverges has no rate")
        if i >= WARMUP:
            samples.append(time.perf_counter() - start)
    return samples
