"""Load of the most loaded rank with copies of popular experts, by simulation; needs no GPU.

    python benchmarks/placement.py [--models deepseek-v3 qwen3-235b] [--ranks 8 16 32 64 128 256] [--copies-per-rank 1]

Writes results/placement.json and a plot. Experts are chosen by Zipf's law with several exponents. A plan is made from
the load of some tokens, and evaluated with other tokens. With drift, a share of the experts exchanges its popularity in
between. The load of a rank is its number of expert rows. The figure is the load of the most loaded rank, which all
ranks wait for, over the mean. Seconds are those of planning one layer.

  contiguous    without a placement: E / W experts per rank in their order
  packed        as many slots as experts: experts move, without copies
  global        with copies on any rank
  hierarchical  with copies on the node of their group, if the model has groups and nodes of eight GPUs divide them
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from jax_ep.placement import Placement, plan
from jax_ep.tools.benchmark import harness, inputs, plots
from jax_ep.tools.benchmark.harness import Report, Timing
from jax_ep.tools.command import Default

MODELS = Default(["deepseek-v3", "qwen3-235b"], ["tiny"])
RANKS = Default([8, 16, 32, 64, 128, 256], [2, 4])
EXPONENTS = (0.25, 0.5, 0.75, 1.0, 1.25)
DRIFTS = (0.0, 0.1, 0.25, 0.5, 1.0)
GROUPS = {"deepseek-v3": 8}
GPUS_PER_NODE = 8
SHOWN_RANKS, SHOWN_EXPONENT = 32, 0.75  # of the plot over drift


def drifted(popularity: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """Return popularities after a random share of the experts has exchanged theirs."""
    changed = rng.permutation(len(popularity))[: round(share * len(popularity))]
    later = popularity.copy()
    later[changed] = popularity[rng.permutation(changed)]
    return later


def sampled_loads(popularity: np.ndarray, model: inputs.Model, tokens: int, rng: np.random.Generator) -> np.ndarray:
    """Return `[E]` tokens of each expert."""
    chosen = inputs.choose(popularity, tokens, model.top_k, rng)
    return np.bincount(chosen.reshape(-1), minlength=model.experts)


def imbalance(placement: Placement, loads: np.ndarray) -> float:
    """Return the load of the most loaded rank over the mean."""
    of_ranks = placement.rank_loads(loads)
    return float(of_ranks.max() / of_ranks.mean())


def policies(name: str, experts: int, num_ranks: int, copies_per_rank: int) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield the names of policies, and their arguments of `plan`."""
    more = experts + copies_per_rank * num_ranks
    yield "packed", {"num_slots": experts, "num_ranks": num_ranks}
    yield "global", {"num_slots": more, "num_ranks": num_ranks}
    nodes, groups = num_ranks // GPUS_PER_NODE, GROUPS.get(name, 1)
    if nodes > 1 and groups % nodes == 0:
        yield "hierarchical", {"num_slots": more, "num_ranks": num_ranks, "num_nodes": nodes, "num_groups": groups}


def simulate(args: argparse.Namespace, name: str, exponent: float, seed: int) -> Iterator[tuple[Any, float, float]]:
    """Yield `((policy, ranks, drift), seconds of planning, imbalance)` of all cases of one random popularity."""
    rng, model = np.random.default_rng(seed), inputs.MODELS[name]
    before = inputs.popularity("zipf", model.experts, rng, exponent)
    known = sampled_loads(before, model, args.tokens, rng)
    served = {d: sampled_loads(drifted(before, d, rng), model, args.tokens, rng) for d in args.drifts}
    for num_ranks in (n for n in args.ranks if model.experts % n == 0):
        start = time.perf_counter()
        contiguous = Placement(np.arange(model.experts), model.experts, num_ranks)
        placements = {"contiguous": (contiguous, time.perf_counter() - start)}
        for policy, sizes in policies(name, model.experts, num_ranks, args.copies_per_rank):
            start = time.perf_counter()
            placements[policy] = plan(known, **sizes), time.perf_counter() - start
        for policy, (placement, seconds) in placements.items():
            for drift, loads in served.items():
                yield (policy, num_ranks, drift), seconds, imbalance(placement, loads)


def spread(drift: float, samples: list[tuple[float, float]]) -> dict[str, float]:
    """Return median and quartiles of the ratios of all seeds."""
    q1, median, q3 = (float(q) for q in np.quantile([ratio for _, ratio in samples], (0.25, 0.5, 0.75)))
    return {"drift": drift, "median": median, "q1": q1, "q3": q3}


def measure(args: argparse.Namespace) -> Report:
    """Simulate all models, exponents, ranks and drifts."""
    settings = {"models": args.models, "ranks": args.ranks}
    settings |= {"tokens": args.tokens, "copies_per_rank": args.copies_per_rank, "gpus_per_node": GPUS_PER_NODE}
    report = Report("placement", args, settings)
    worst: dict[str, float] = {}
    for name in args.models:
        for exponent in harness.progress(args.exponents, name):
            found: dict[Any, list[tuple[float, float]]] = {}
            for seed in range(args.rounds):
                for case, seconds, ratio in simulate(args, name, exponent, seed):
                    found.setdefault(case, []).append((seconds, ratio))
            for policy, num_ranks in dict.fromkeys(case[:2] for case in found):
                shape = {"model": name, "ranks": num_ranks, "exponent": exponent, "dtype": "float64"}
                by_drift = [spread(drift, found[policy, num_ranks, drift]) for drift in args.drifts]
                seconds = tuple(sample[0] for sample in found[policy, num_ranks, args.drifts[0]])
                report.add(policy, shape, Timing(seconds), most_loaded_over_mean=by_drift)
                worst[policy] = max(worst.get(policy, 1.0), by_drift[0]["median"])
    report.summarize(largest_median_with_least_drift=worst)
    return report


def show(report: Report) -> None:
    """Print a table of each model, with all drifts."""
    for name, rows in report.by("model").items():
        drifts = [found["drift"] for found in rows[0]["most_loaded_over_mean"]]
        cells = [
            [row["shape"]["exponent"], row["shape"]["ranks"], row["variant"]]
            + [f"{found['median']:.2f}" for found in row["most_loaded_over_mean"]]
            for row in rows
        ]
        columns = ["exponent", "ranks", "policy", *(f"drift {drift:g}" for drift in drifts)]
        harness.show_table(f"{name}: most loaded rank over mean", columns, cells)


def draw(report: Report) -> None:
    """Draw imbalance over ranks and over drift, for each model, if matplotlib is installed."""
    models = report.by("model")
    figure, grid = plots.make_figure(len(models), 2, (13, 4 * len(models)))
    if figure is None:
        return
    for (name, own), (over_ranks, over_drift) in zip(models.items(), grid, strict=True):
        for i, exponent in enumerate(sorted({row["shape"]["exponent"] for row in own})):
            for policy, line in (("contiguous", ":"), ("global", "-")):
                of_policy = [row for row in own if (row["variant"], row["shape"]["exponent"]) == (policy, exponent)]
                points = [(row["shape"]["ranks"], row["most_loaded_over_mean"][0]) for row in of_policy]
                _curve(over_ranks, points, f"C{i}", line, f"{exponent:g}, {policy}")
        fixed = {
            "exponent": min((row["shape"]["exponent"] for row in own), key=lambda e: abs(e - SHOWN_EXPONENT)),
            "ranks": min((row["shape"]["ranks"] for row in own), key=lambda n: abs(n - SHOWN_RANKS)),
        }
        for i, row in enumerate(row for row in own if fixed.items() <= row["shape"].items()):
            points = [(found["drift"], found) for found in row["most_loaded_over_mean"]]
            _curve(over_drift, points, f"C{i}", "-", row["variant"])
        title = plots.NAMES.get(name, name)
        over_ranks.set(title=f"{title}, by Zipf's exponent", xlabel="ranks", xscale="log", yscale="log")
        plots.powers_of_two(over_ranks.xaxis, over_ranks.yaxis)
        what = f"{fixed['ranks']} ranks, exponent {fixed['exponent']:g}"
        over_drift.set(title=f"{title}, {what}", xlabel="share of experts whose popularity changed after the plan")
        for axes in (over_ranks, over_drift):
            axes.set(ylabel="most loaded rank / mean")
            axes.grid(alpha=0.3)
            axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.savefig(report.path.with_suffix(".png"), dpi=100)


def _curve(axes: Any, points: list[tuple[float, Any]], color: str, line: str, label: str) -> None:
    """Draw medians with quartiles."""
    if not points:
        return
    at = [x for x, _ in points]
    middle = np.array([found["median"] for _, found in points])
    spread = np.abs(np.array([[found["q1"], found["q3"]] for _, found in points]).T - middle)
    axes.errorbar(at, middle, spread, marker="o", markersize=3, capsize=2, color=color, linestyle=line, label=label)


def options() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = harness.parser(__doc__, "placement", rounds=9)
    add = parser.add_argument
    add("--models", nargs="+", choices=inputs.MODELS, default=MODELS, help="default: %(default)s")
    tokens = Default(32768, 512)
    add("--tokens", type=int, default=tokens, help="of a plan, and as many to evaluate it (default: %(default)s)")
    add("--ranks", type=int, nargs="+", default=RANKS, help="those that divide the experts (default: %(default)s)")
    add("--exponents", type=float, nargs="+", default=EXPONENTS, help="of Zipf's law (default: %(default)s)")
    add("--drifts", type=float, nargs="+", default=DRIFTS, help="shares of the experts (default: %(default)s)")
    add("--copies-per-rank", type=int, default=1, help="slots of a rank beyond E / W (default: 1)")
    return parser


def main() -> None:
    """Simulate, and draw."""
    parser = options()
    args = harness.parse(parser)
    inputs.check_ranks(args.models, args.ranks)
    args.drifts = sorted(args.drifts)
    if wrong := [d for d in args.drifts if not 0 <= d <= 1]:
        parser.error(f"--drifts {wrong[0]}: expected shares from 0 to 1")
    report = measure(args)
    show(report)
    draw(report)


if __name__ == "__main__":
    harness.run(main)
