"""A training step of MaxText: with its own expert layers, and with jax_ep's, in turns.

    python benchmarks/maxtext_step.py [--model qwen3-30b-a3b] [--layers 4] [--batch 8] [--length 2048]

Writes results/maxtext_step.json. It needs MaxText 0.2.5 with what its trainer imports, as in the environment that
`make test-maxtext` makes; for GPUs, `pip install '.[cuda13]'` there.

The model has the published widths and `--layers` of its layers. The step is MaxText's `train_step`: float32 weights,
AdamW, full rematerialization, bfloat16 activations, and synthetic data. All variants continue from one training state,
so only the layer differs. Their first step starts from the same weights; a row has its loss and gradient norm, for a
comparison. TFLOP/s follow MaxText's formula. On several GPUs, experts are split over all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

try:
    import maxtext
except ImportError as missing:
    sys.exit(f"maxtext_step.py: needs MaxText ({missing}); `make test-maxtext` installs it in .venv-maxtext")
from flax import nnx
from flax.core.spmd import logical_axis_rules
from maxtext.common import train_state_nnx
from maxtext.configs import pyconfig
from maxtext.trainers.pre_train import train
from maxtext.utils import maxtext_utils, model_creation_utils, sharding, train_utils

import jax_ep
from jax_ep.integrations.maxtext import use
from jax_ep.tools.benchmark import harness, profiler
from jax_ep.tools.benchmark.harness import Report
from jax_ep.tools.command import Default

BASE = os.path.join(os.path.dirname(maxtext.__file__), "configs", "base.yml")
PROFILED = 3  # steps
VOCABULARY_TILES = 8  # logits of all tokens would need more memory than the layers
TINY = {"base_emb_dim": 128, "base_mlp_dim": 128, "base_moe_mlp_dim": 128, "vocab_size": 128, "num_experts": 8}


class Variant(NamedTuple):
    """MaxText options of an expert layer, and the arguments of `use`; None: MaxText's own layer."""

    options: dict[str, Any]
    replaced: dict[str, Any] | None = None


_SPARSE = {"sparse_matmul": True, "megablox": False}
VARIANTS = {
    "MaxText, ragged_dot": Variant(_SPARSE),
    "MaxText, capacity 1.25, drops tokens": Variant({"sparse_matmul": False, "capacity_factor": 1.25}),
    "jax_ep": Variant(_SPARSE, {}),
    "jax_ep, fp8": Variant(_SPARSE, {"recipe": "fp8"}),
}


def configuration(args: argparse.Namespace, variant: Variant) -> Any:
    """Return MaxText's configuration."""
    on_gpu = jax.default_backend() == "gpu"
    options: dict[str, Any] = {
        "run_name": "maxtext_step",
        "base_output_directory": str(args.out),
        "hardware": "gpu" if on_gpu else "cpu",
        "attention": "cudnn_flash_jax" if on_gpu else "dot_product",
        "model_name": args.model,
        "override_model_config": True,
        "base_num_decoder_layers": args.layers,
        "per_device_batch_size": args.batch,
        "max_target_length": args.length,
        "num_vocab_tiling": VOCABULARY_TILES,
        "dataset_type": "synthetic",
        "enable_checkpointing": False,
        "log_config": False,
        "skip_jax_distributed_system": True,
        "ici_expert_parallelism": jax.device_count(),
        "ici_fsdp_parallelism": 1,
    }
    return pyconfig.initialize([None, BASE], **(options | (TINY if args.quick else {}) | variant.options))


def graph_of(config: Any, mesh: jax.sharding.Mesh) -> Any:
    """Return the structure of the training state of a configuration."""
    create, model = model_creation_utils.create_nnx_abstract_model(config, mesh)
    _, optimizer = train_utils.create_training_optimizer(config, model, mesh=mesh)

    def make() -> Any:
        made = create()
        return train_state_nnx.TrainStateNNX(made, nnx.Optimizer(made, optimizer, wrt=nnx.Param))

    with logical_axis_rules(config.logical_axis_rules):
        return nnx.graphdef(nnx.eval_shape(make))


class Training:
    """A training state that the compiled steps of all variants share, and a batch."""

    def __init__(self, config: Any) -> None:
        made = train_utils.setup_train_loop(config, None)
        self.shardings, self.mesh, loader, state = made[2], made[4], made[7], made[-1]
        self.state = nnx.split(state)[1]
        self.batch = loader.load_next_batch()
        self.params_shardings, self.shardings = sharding.maybe_update_params_sharding_with_opt(config, self.shardings)

    def compile(self, config: Any, variant: Variant) -> Any:
        """Compile the step of a variant."""
        step, _ = train_utils.jit_train_and_eval_step(
            config,
            graph_of(config, self.mesh),
            self.mesh,
            self.state,
            self.shardings,
            train.train_step,
            params_shardings=self.params_shardings,
        )
        replaced = contextlib.nullcontext() if variant.replaced is None else use(**variant.replaced)
        with jax.set_mesh(self.mesh), logical_axis_rules(config.logical_axis_rules), replaced:
            return step.lower(self.state, self.batch).compile()

    def runner(self, step: Any) -> Callable[[], jax.Array]:
        """Return a function that makes one step."""

        def run() -> jax.Array:
            self.state, metrics = step(self.state, self.batch)
            return metrics["scalar"]["learning/loss"]

        return run


def first_step(training: Training, step: Any) -> dict[str, float]:
    """Return loss and gradient norm of a step whose result is dropped."""
    metrics = step(jax.tree.map(jnp.copy, training.state), training.batch)[1]["scalar"]
    return {name: float(metrics[f"learning/{name}"]) for name in ("loss", "raw_grad_norm")}


def profile(run: Callable[[], Any]) -> dict[str, Any]:
    """Return milliseconds per step: busy, and of the longest kernels."""
    if jax.default_backend() != "gpu":
        return {}
    found = profiler.summarize(profiler.trace(run, PROFILED))
    kernels = [{"name": k["name"], "calls": k["calls"], "us": k["us"]} for k in found["kernels"][:40]]
    return {"busy_ms": found["busy_us"] / 1e3, "kernels": kernels}


def measure(args: argparse.Namespace) -> Report:
    """Measure all variants in turns; a variant that fails leaves the others their rows."""
    chosen = harness.chosen(VARIANTS, args.only)
    configs = {name: configuration(args, variant) for name, variant in chosen.items()}
    report = Report("maxtext_step", args, {"model": args.model, "layers": args.layers})
    training = Training(next(iter(configs.values())))
    if jax.device_count() > 1 and jax.default_backend() == "gpu":
        jax_ep.init(training.mesh)
    shape = {"model": args.model, "layers": args.layers, "devices": jax.device_count()}
    shape |= {"batch": args.batch, "length": args.length}
    runs: dict[str, Callable[[], Any]] = {}
    facts: dict[str, dict[str, Any]] = {}
    for name, variant in chosen.items():
        try:
            step = training.compile(configs[name], variant)
            memory = step.memory_analysis()
            facts[name] = {"temporary_bytes": memory.temp_size_in_bytes, **first_step(training, step)}
            runs[name] = training.runner(step)
        except Exception as error:
            report.failed(name, shape, f"{type(error).__name__}: {error}")
    times = harness.measure_interleaved(runs, args.rounds, settle_s=0.0 if args.quick else 1.0)
    for name, timing in times.items():
        tflops = maxtext_utils.calculate_tflops_training_per_device(configs[name], log=False)[0]
        tokens = jax.device_count() * args.batch * args.length
        facts[name] |= {"tokens_per_s": tokens / timing.median, "tflops": tflops / timing.median}
        report.add(name, shape, timing, **facts[name], **profile(runs[name]))
    return report


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a table."""
    parser = harness.parser(__doc__, "maxtext_step", rounds=5)
    add = parser.add_argument
    add("--model", default="qwen3-30b-a3b", help="a model of MaxText (default: %(default)s)")
    add("--layers", type=int, default=Default(4, 2), help="layers of the model (default: %(default)s)")
    add("--batch", type=int, default=Default(8, 1), help="texts per GPU (default: %(default)s)")
    add("--length", type=int, default=Default(2048, 32), help="tokens of a text (default: %(default)s)")
    add("--only", nargs="+", metavar="PART", help="variants whose names contain one of these parts")
    args = harness.parse(parser, arguments)
    harness.require_devices(args, num_devices=1)
    report = measure(args)
    columns = ("tokens_per_s", "tflops", "temporary_bytes", "loss", "raw_grad_norm")
    cells = []
    for row in report.rows:
        time = f"{1e3 * row['seconds']['median']:.1f}" if "seconds" in row else row["failed"].splitlines()[0][:80]
        shown = harness.figures(row, columns[:3]) + [f"{row[name]:.4f}" for name in columns[3:] if name in row]
        cells.append([row["variant"], time, *shown])
    titles = [harness.COLUMNS[name][0] for name in columns[:3]]
    harness.show_table("step", ["variant", "ms", *titles, "loss", "gradient norm"], cells)


if __name__ == "__main__":
    harness.run(main)
