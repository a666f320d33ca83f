"""Simulate what `jax_ep.Balance` does to the most loaded rank; needs no GPU.

    python benchmarks/balance.py [--models deepseek-v3 qwen3-30b] [--ranks 4 8 16 32 64] [--rows 1.1] [--spare 2]

Experts are chosen by Zipf's law with several exponents. The plan is the one that the layer makes on the device. The
report has, per case, rows of the most loaded rank over the mean without balance, copies in all and on the fullest rank,
and the number of passes. Writes results/balance.json and a plot. Seconds are those of a plan on this machine's CPU.

Predicted seconds, with and without balance, are those of a layer in bfloat16 with the routing of benchmarks/layer.py.
They add up what the busiest rank takes: GEMMs of its rows, all-to-alls, and copies of experts that it sends or
receives. A forward pass has two all-to-alls; forward + backward has five and three times the GEMMs, writes gradients of
the weights at home, and moves copies three times. All ranks reach each other by links. Nothing overlaps.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import scale_model
from jax_ep import Balance
from jax_ep.tools.benchmark import harness, inputs, plots
from jax_ep.tools.benchmark.harness import Report, Timing
from jax_ep.tools.command import Default
from jax_ep.xla.balance_plan import place_assignments, plan_pass

MODELS = Default(["deepseek-v3", "qwen3-30b"], ["tiny"])
RANKS = Default([4, 8, 16, 32, 64], [2, 4])
EXPONENTS = (0.5, 0.75, 1.0, 1.25)
# Measured on H200s (docs/performance.md): grouped GEMMs, all GPUs of four copying to all others, and memory.
FLOPS, LINK, MEMORY = 620e12, 371e9, 4.4e12
# All-to-alls, GEMMs relative to the forward pass, transfers of each copy, and writes of the weights' gradients.
DIRECTIONS = {"forward": (2, 1, 1, 0), "forward + backward": (5, 3, 3, 1)}


def ids_of(model: inputs.Model, num_ranks: int, tokens: int, exponent: float, seed: int) -> np.ndarray:
    """Expert ids `[W, T, K]` of random tokens."""
    rng = np.random.default_rng(seed)
    popularity = inputs.popularity("zipf", model.experts, rng, exponent)
    return inputs.choose(popularity, num_ranks * tokens, model.top_k, rng).reshape(num_ranks, tokens, model.top_k)


def counts_of(ids: np.ndarray, num_experts: int) -> np.ndarray:
    """Assignments `[W, E]` from each rank to each expert; -1 is none."""
    return np.stack([np.bincount(i[i >= 0], minlength=num_experts) for i in ids]).astype(np.int32)


def pass_seconds(model: inputs.Model, holders: np.ndarray, copies: np.ndarray, direction: str) -> float:
    """Predict a pass in which rank `holders [W, T, K]`, or -1, computes an assignment, with `copies [W, S]`."""
    num_ranks, per_rank = len(holders), model.experts // len(holders)
    exchanges, gemms, transfers, writes = DIRECTIONS[direction]
    rows = np.bincount(holders[holders >= 0], minlength=num_ranks).max()
    sent = np.bincount(copies[copies >= 0] // per_rank, minlength=1).max()
    moved = max(sent, (copies >= 0).sum(axis=1).max(initial=0))
    tokens = scale_model.counted(holders, scale_model.Topology(num_ranks, num_ranks, num_ranks))["flat"].link
    flops, num_bytes = 6 * model.hidden * model.intermediate, 2 * model.hidden
    expert = 3 * model.intermediate * num_bytes
    on_links = exchanges * tokens * num_bytes + transfers * moved * expert
    return gemms * rows * flops / FLOPS + on_links / LINK + writes * per_rank * expert / MEMORY


def predict(model: inputs.Model, ids: np.ndarray, rows: int, spare: int) -> dict[str, dict[str, float]]:
    """Predict the seconds of a layer without and with balance, by direction."""
    per_rank, nothing = model.experts // len(ids), np.full((len(ids), 0), -1)
    found = {way: {"off": pass_seconds(model, ids // per_rank, nothing, way), "on": 0.0} for way in DIRECTIONS}
    place = jax.jit(jax.vmap(place_assignments, (0, None, None, 0)))
    while (ids >= 0).any():
        counts = counts_of(ids, model.experts)
        plan = plan_pass(jnp.asarray(counts), rows, spare)
        slots, ids = jax.device_get(place(jnp.asarray(ids), counts, plan, np.arange(len(ids), dtype=np.int32)))
        holders = np.where(slots < 0, -1, slots // (per_rank + spare))
        for way, seconds in found.items():
            seconds["on"] += pass_seconds(model, holders, np.asarray(plan.copies), way)
    return found


def run_passes(counts: np.ndarray, plan: Any) -> tuple[int, np.ndarray, float]:
    """The number of passes, the copies `[W]` of the first one, and the seconds of its plan."""
    passes, copies, seconds = 0, np.zeros(len(counts), int), 0.0
    while counts.any():
        start = time.perf_counter()
        made = jax.device_get(plan(counts))
        if passes == 0:
            copies, seconds = (made.copies >= 0).sum(1), time.perf_counter() - start
        counts, passes = made.left, passes + 1
    return passes, copies, seconds


def measure(args: argparse.Namespace) -> Report:
    """Simulate all models, ranks and exponents."""
    report = Report(
        "balance", args, {"models": args.models, "tokens": args.tokens, "rows": args.rows, "spare": args.spare}
    )
    for name in args.models:
        model = inputs.MODELS[name]
        for num_ranks in harness.progress([n for n in args.ranks if model.experts % n == 0], name):
            rows = Balance(args.rows).rows_per_rank(args.tokens * model.top_k)
            plan = jax.jit(lambda counts, rows=rows: plan_pass(counts, rows, args.spare))
            for exponent in args.exponents:
                found = []
                for seed in range(args.rounds):
                    ids = ids_of(model, num_ranks, args.tokens, exponent, seed)
                    counts = counts_of(ids, model.experts)
                    if seed == 0:
                        predicted = predict(model, ids, rows, args.spare)
                    loads = counts.sum(0).reshape(num_ranks, -1).sum(1)
                    run_passes(counts, plan)  # compile
                    found.append((loads.max() / loads.mean(), *run_passes(counts, plan)))
                before, passes, copies, seconds = zip(*found, strict=True)
                shape = {"model": name, "ranks": num_ranks, "exponent": exponent, "dtype": "int32"}
                report.add(
                    "plan",
                    shape,
                    Timing(tuple(seconds)),
                    most_loaded_over_mean=float(np.median(before)),
                    most_passes=max(passes),
                    copies=float(np.median([c.sum() for c in copies])),
                    copies_of_fullest_rank=int(max(c.max() for c in copies)),
                    predicted_seconds=predicted,
                )
    return report


def show(report: Report) -> None:
    """Print a table of each model."""
    columns = ["ranks", "exponent", "most / mean before", "copies", "on the fullest rank", "passes"]
    columns += [f"ms {direction}: off, on" for direction in DIRECTIONS]
    for name, rows in report.by("model").items():
        cells = [
            [
                row["shape"]["ranks"],
                row["shape"]["exponent"],
                f"{row['most_loaded_over_mean']:.2f}",
                f"{row['copies']:g}",
                row["copies_of_fullest_rank"],
                row["most_passes"],
                *(f"{1e3 * s['off']:.2f}, {1e3 * s['on']:.2f}" for s in row["predicted_seconds"].values()),
            ]
            for row in rows
        ]
        harness.show_table(name, columns, cells)


def draw(report: Report, limit: float) -> None:
    """Draw the most loaded rank before and after, by ranks, if matplotlib is installed."""
    models = report.by("model")
    figure, grid = plots.make_figure(1, len(models), (5 * len(models), 3.5))
    if figure is None:
        return
    for (name, own), ax in zip(models.items(), grid[0], strict=True):
        for exponent in sorted({row["shape"]["exponent"] for row in own}):
            line = [r for r in own if r["shape"]["exponent"] == exponent]
            at, before = [r["shape"]["ranks"] for r in line], [r["most_loaded_over_mean"] for r in line]
            ax.plot(at, before, marker="o", label=f"Zipf {exponent:g}, without balance")
        ax.axhline(limit, color="black", linestyle="--", label=f"Balance(rows={limit:g})")
        ax.set(title=plots.NAMES.get(name, name), xlabel="ranks", ylabel="most loaded rank / mean")
        ax.set(xscale="log", yscale="log")
        plots.powers_of_two(ax.xaxis, ax.yaxis)
        ax.grid(alpha=0.3)
        ax.legend(fontsize=7)
    figure.savefig(report.path.with_suffix(".png"), dpi=100)


def options() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = harness.parser(__doc__, "balance", rounds=5)
    add = parser.add_argument
    add("--models", nargs="+", choices=inputs.MODELS, default=MODELS, help="default: %(default)s")
    add("--tokens", type=int, default=Default(4096, 256), help="per rank (default: %(default)s)")
    add("--ranks", type=int, nargs="+", default=RANKS, help="those that divide the experts (default: %(default)s)")
    add("--exponents", type=float, nargs="+", default=EXPONENTS, help="of Zipf's law (default: %(default)s)")
    add("--rows", type=float, default=1.1, help="see jax_ep.Balance (default: 1.1)")
    add("--spare", type=int, default=2, help="spare experts per rank (default: 2)")
    return parser


def main() -> None:
    """Simulate, and draw."""
    args = harness.parse(options())
    inputs.check_ranks(args.models, args.ranks)
    report = measure(args)
    show(report)
    draw(report, args.rows)


if __name__ == "__main__":
    harness.run(main)
