"""Train a byte-level MoE language model on the Python standard library's sources, with experts on all devices.

    python examples/train_moe_flax.py                   # 8 virtual CPU devices, or all GPUs if there are any
    python examples/train_moe_flax.py --help

An interrupted run continues from its newest checkpoint, with the same bits as without the interruption.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import time
from typing import TYPE_CHECKING, Any

from jax_ep.tools.command import count_or_zero
from jax_ep.tools.command import run as run_command
from lm.command_line import CPU_DEVICES, make_parser
from lm.devices import make_mesh, prepare_cpu_devices

if TYPE_CHECKING:
    from rich.console import Console

    from lm.checkpoints import Checkpoints
    from lm.data import Corpus
    from lm.model import ModelConfig
    from lm.report import History
    from lm.training import TrainConfig, Trainer, TrainState

HELD_OUT_WINDOWS = 128
PROMPT = b"def main("


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line; the defaults train in minutes on a laptop's CPU."""
    written = "folder of checkpoints, metrics.json and curves.png"
    parser = make_parser(__doc__, out=written, expert_parallel="the rest is data parallel")
    add = parser.add_argument
    add("--restart", action="store_true", help="delete the checkpoints in --out instead of continuing from them")
    add("--steps", type=int, default=400, help="length of the learning-rate schedule")
    add("--stop-after", type=int, help="end after this step, as an interruption would")
    add("--checkpoint-every", type=int, default=200)
    add("--evaluate-every", type=int, default=100)
    add("--batch-size", type=int, default=8, help="windows per step over all devices")
    add("--microbatches", type=int, default=1, help="microbatches per step, whose gradients are summed")
    add("--length", type=int, default=128, help="bytes per window")
    add("--learning-rate", type=float, default=4e-3)
    add("--hidden", type=int, default=128)
    add("--layers", type=int, default=3)
    add("--heads", type=int, default=4)
    add("--intermediate", type=int, default=192, help="width of one expert")
    add("--experts", type=int, default=8)
    add("--top-k", type=int, default=2)
    add("--shared-experts", type=count_or_zero, default=0)
    what = "keep the router even by an auxiliary loss, or by DeepSeek-V3's selection bias"
    add("--router-balance", choices=["loss", "bias"], default="loss", help=what)
    what = "most rows per rank, as a multiple of the mean: hot experts get copies; 0: experts stay on their ranks"
    add("--balance-rows", type=float, default=1.1, help=what)
    add("--dropout", type=float, default=0.0)
    what = "dtype of the computation; weights are float32"
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help=what)
    add("--recipe", choices=["fp8"], help="recipe of the experts; default: they compute in --dtype")
    add("--capacity", type=int, help="rows per expert rank; default: dropless")
    add("--remat", choices=["none", "full", "keep-experts"], default="none", help="what the backward pass recomputes")
    add("--implementation", help="jax_ep implementation, e.g. xla; default: the best that fits")
    return parser.parse_args(arguments)


def configs(args: argparse.Namespace) -> tuple[ModelConfig, TrainConfig]:
    """Return the model and training configurations of a command line."""
    from lm.model import ModelConfig
    from lm.training import TrainConfig

    shared = {field.name for field in dataclasses.fields(ModelConfig)} & set(vars(args))
    model = ModelConfig(**{name: getattr(args, name) for name in shared})
    train = TrainConfig(
        steps=args.steps,
        batch_size=args.batch_size,
        microbatches=args.microbatches,
        length=args.length,
        peak_learning_rate=args.learning_rate,
        seed=args.seed,
    )
    return model, train


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the training; return the content of metrics.json."""
    args = parse(arguments)
    prepare_cpu_devices(args.devices or CPU_DEVICES)
    import matplotlib.figure  # noqa: F401  # plots come last: without it, the error comes first
    from rich.console import Console

    from lm.report import doing, plot

    console, began = Console(), time.perf_counter()
    with doing(console, "starting JAX and reading the standard library's sources"):
        import jax

        from lm.checkpoints import Checkpoints
        from lm.data import read_corpus, unigram_entropy
        from lm.generation import Generator
        from lm.training import Trainer

        model, train = configs(args)
        mesh = make_mesh(max_devices=args.devices, num_experts=model.experts, expert_parallel=args.expert_parallel)
        corpus = read_corpus()
        entropy = unigram_entropy(corpus.held_out)
    console.print(
        f"{len(corpus.train):,} bytes to train on, {len(corpus.held_out):,} held out with a unigram entropy of"
        f" {entropy:.3f} nats/byte; mesh {dict(mesh.shape)} of {jax.devices()[0].device_kind}",
        highlight=False,
    )
    with doing(console, "initializing the model"):
        trainer = Trainer(train, model, mesh)
    with contextlib.closing(Checkpoints(args.out / "checkpoints")) as checkpoints:
        state, history = run(args, trainer, corpus, checkpoints, console)

    if args.stop_after is not None and args.stop_after < args.steps:
        return history.metrics

    loss = history.metrics["held_out"][-1]["loss"]
    result = history.metrics
    if history.has_grown:  # Otherwise a training that has already finished keeps its files.
        result = history.write(held_out_loss=loss, unigram_entropy=entropy, seconds=time.perf_counter() - began)
        plot(args.out / "curves.png", history.metrics, entropy)
    with doing(console, "compiling the generation of a sample, and generating"):
        options = {"max_new": 200, "temperature": 0.7, "seed": args.seed}
        (sample,) = Generator(trainer.module(state), mesh)([PROMPT], **options).tokens
    console.rule("a sample at temperature 0.7")
    console.print((PROMPT + bytes(sample)).decode("utf-8", "replace").rstrip(), markup=False, highlight=False)
    console.rule()
    console.print(
        f"held-out loss {loss:.3f}, unigram entropy {entropy:.3f} nats/byte; files in {args.out}", highlight=False
    )
    return result


def run(
    args: argparse.Namespace, trainer: Trainer, corpus: Corpus, checkpoints: Checkpoints, console: Console
) -> tuple[TrainState, History]:
    """Train from the newest checkpoint, or from the start, to the last step."""
    import numpy as np

    from lm.data import WindowIterator
    from lm.report import History, TrainingBar, doing

    config = trainer.config
    held_out = corpus.held_out_windows(max(HELD_OUT_WINDOWS, config.batch_size), config.length)
    batches = WindowIterator(corpus.train, batch_size=config.batch_size, length=config.length, seed=config.seed)
    start = 0 if args.restart else checkpoints.latest_step() or 0
    end = min(args.steps, args.stop_after or args.steps)
    if start:
        _, state, data = checkpoints.restore(trainer)
        batches.restore(data)
        what = f"continuing after step {start}" if start < end else f"nothing left to train after step {start}"
        console.print(f"{what}; --restart would begin anew")
    else:
        with doing(console, "making the parameters"):
            state = trainer.initial_state()
    history = History(args.out / "metrics.json", resume_at=start)
    if start >= end:
        if not history.metrics["held_out"]:  # metrics.json is missing.
            history.metrics["held_out"] = [{"step": start, "loss": trainer.held_out_loss(state.model, held_out)}]
        return state, history
    with doing(console, "compiling the training step and the held-out loss"):
        trainer.compile()
    if args.restart:  # What this run cannot train keeps its checkpoints.
        checkpoints.delete_all()
    with TrainingBar(console, total=args.steps, done=start) as bar:
        waiting = None  # The GPUs compute a step while the host reads the metrics of the step before.

        def note(step: int, metrics: dict[str, Any]) -> None:
            read = {name: np.asarray(value) for name, value in metrics.items()}
            speed = bar.advance(float(read["loss"]), config.batch_size * config.length, read["load"])
            row = {name: value.tolist() for name, value in read.items()}
            history.add("train", {"step": step, "tokens_per_second": speed, **row})

        for step in range(start + 1, end + 1):
            state, metrics = trainer.train_step(state, trainer.put(next(batches)))
            if waiting is not None:
                note(*waiting)
            waiting = step, metrics
            evaluates = step % args.evaluate_every == 0 or step == end
            saves = step % args.checkpoint_every == 0 or step == end
            if not evaluates and not saves:
                continue
            note(*waiting)
            waiting = None
            if evaluates:
                loss = trainer.held_out_loss(state.model, held_out)
                history.add("held_out", {"step": step, "loss": loss})
                console.print(f"step {step}: held-out loss {loss:.3f} nats/byte", highlight=False)
            if saves:
                checkpoints.save(step, state, batches.state(), trainer.model)
                history.write()
            bar.pause()
    return state, history


if __name__ == "__main__":
    run_command("train_moe_flax.py", main)
