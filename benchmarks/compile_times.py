"""Compile time of the expert layer: cold, and with JAX's persistent compilation cache.

    python benchmarks/compile_times.py [--models deepseek-v3 qwen3-30b] [--tokens 4096] [--recipe fp8]

Writes results/compile_times.json. Programs are `jax.jit` of the layer and of the gradient of its sum in all arrays.
Each is compiled in a separate process: first with empty caches of JAX and Triton, then with the compiled programs and
lowered kernels that the first process has left in them. A row has the times of tracing, lowering and compiling, and
their sum as its time. Nothing is executed, and arrays are only shapes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jax_ep
from jax_ep.tools.benchmark import harness
from jax_ep.tools.benchmark.harness import Report, Timing
from jax_ep.tools.benchmark.inputs import MODELS, Model, expert_mesh
from jax_ep.tools.command import Default

PROGRAMS = ("forward", "forward + backward")
CACHES = ("cold", "cached")
PARTS = ("trace", "lower", "compile")
LEAST_S = 0.0  # JAX caches programs that took longer than this


def make_programs(model: Model, tokens: int, recipe: str | None) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Return functions to compile, and the shapes of their arguments, over all devices."""
    mesh = expert_mesh(jax.device_count())
    ranks, spec = mesh.devices.size, jax.sharding.PartitionSpec("expert")
    sharding = jax.sharding.NamedSharding(mesh, spec)

    def shape(*sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)

    slots = ranks * tokens, model.top_k
    arguments = (
        shape(ranks * tokens, model.hidden),
        shape(*slots, dtype=jnp.float32),
        shape(model.experts, model.hidden, 2 * model.intermediate),
        shape(model.experts, model.intermediate, model.hidden),
        shape(*slots, dtype=jnp.int32),
    )

    def layer(x: Any, weights: Any, w_gate_up: Any, w_down: Any, ids: Any) -> Any:
        return jax_ep.moe(x, ids, weights, w_gate_up, w_down, num_experts=model.experts, recipe=recipe)

    sharded = jax.shard_map(layer, mesh=mesh, in_specs=(spec,) * 5, out_specs=spec)
    gradient = jax.grad(lambda *a: jnp.sum(sharded(*a), dtype=jnp.float32), argnums=(0, 1, 2, 3))
    return {name: (function, arguments) for name, function in zip(PROGRAMS, (sharded, gradient), strict=True)}


def measure_here(program: str, model: Model, tokens: int, recipe: str | None) -> dict[str, float]:
    """Measure the seconds of each part of a program, in this process."""
    function, arguments = make_programs(model, tokens, recipe)[program]
    times = [time.perf_counter()]
    traced = jax.jit(function).trace(*arguments)
    times.append(time.perf_counter())
    lowered = traced.lower()
    times.append(time.perf_counter())
    lowered.compile()
    times.append(time.perf_counter())
    return {part: times[i + 1] - times[i] for i, part in enumerate(PARTS)}


def measure_in_process(program: str, name: str, tokens: int, recipe: str | None, folder: str) -> dict[str, float]:
    """Measure the seconds of each part of a program in a process whose caches are in a folder."""
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": f"{folder}/jax", "TRITON_CACHE_DIR": f"{folder}/triton"}
    environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": str(LEAST_S)}
    command = [sys.executable, __file__, "--here", program, "--models", name, "--tokens", str(tokens)]
    command += [] if recipe is None else ["--recipe", recipe]
    completed = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if completed.returncode:
        raise RuntimeError(
            completed.stderr.strip().splitlines()[-1] if completed.stderr.strip() else "it ended at once"
        )
    found: dict[str, float] = json.loads(completed.stdout.splitlines()[-1])
    return found


def measure(report: Report, rounds: int, name: str, tokens: int, recipe: str | None) -> list[tuple[str, ...]]:
    """Add the rows of one model, and return lines of the table."""
    samples: dict[tuple[str, str], list[dict[str, float]]] = {}
    for _, program in harness.progress(list(itertools.product(range(rounds), PROGRAMS)), name):
        with tempfile.TemporaryDirectory() as folder:
            for cache in CACHES:
                parts = measure_in_process(program, name, tokens, recipe, folder)
                samples.setdefault((cache, program), []).append(parts)
    table = []
    shape = {"model": name, "tokens_per_rank": tokens, "ranks": jax.device_count(), **MODELS[name]._asdict()}
    shape |= {"dtype": "bfloat16", "recipe": recipe}
    for (cache, program), found in samples.items():
        whole = Timing(tuple(sum(parts.values()) for parts in found))
        medians = {f"{part}_s": sorted(parts[part] for parts in found)[len(found) // 2] for part in PARTS}
        report.add(cache, shape, whole, direction=program, **medians)
        title = f"{name}, {program}, {cache}" if recipe is None else f"{name}, {recipe}, {program}, {cache}"
        table.append((title, *(f"{s:.1f}" for s in (*medians.values(), whole.median))))
    return table


def options() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = harness.parser(__doc__, "compile_times", rounds=3, tokens=Default([4096], [32]))
    models = Default(["deepseek-v3", "qwen3-30b"], ["tiny"])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=models, help="default: %(default)s")
    parser.add_argument("--recipe", choices=["fp8"], help="of the layer; default: none")
    parser.add_argument(
        "--here", choices=PROGRAMS, help="measure this program once in this process, and print JSON alone"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every model in separate processes, or one program in this process."""
    args = harness.parse(options(), arguments)
    if args.here is not None:
        print(json.dumps(measure_here(args.here, MODELS[args.models[0]], args.tokens[0], args.recipe)))
        return
    # This process only asks for the number of devices, and must leave their memory to the others.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    report = Report("compile_times", args)
    table = []
    for name, tokens in itertools.product(args.models, args.tokens):
        table += measure(report, args.rounds, name, tokens, args.recipe)
    harness.show_table("seconds to compile", ["", *PARTS, "sum"], table)


if __name__ == "__main__":
    harness.run(main)
