"""Bytes between nodes and times of a dispatch, flat and hierarchical, as scale_model.py predicts; needs no GPU.

    python benchmarks/nodes.py [--model deepseek-v3] [--ranks 8 16 ... 1024] [--link-rate 370e9] [--nic-rate 45e9]

Writes results/nodes.json and a plot. Rows have, for a dispatch of bfloat16 tokens, the bytes of the busiest GPU between
nodes and inside its node, and predicted seconds. Samples are random routings.

  uniform           all experts equally popular, in closed form
  zipf              by Zipf's law in a random order, which differs between samples
  4 of 8 groups     DeepSeek-V3's router: the experts of a token are in 4 of 8 groups of consecutive experts
  at most 4 nodes   the same router with a group for each node, as DeepSeek-V3's is on 8 nodes
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

import jax_ep
import scale_model
from jax_ep.tools.benchmark import harness, inputs, plots
from jax_ep.tools.benchmark.harness import Report, Timing
from jax_ep.tools.command import Default
from scale_model import Rates, Rows, Topology

RANKS = Default([8, 16, 32, 64, 128, 256, 512, 1024], [4, 8, 16])
LIMITED = {"4 of 8 groups": 8, "at most 4 nodes": None}  # groups; None: the nodes that hold one copy of all experts
ROUTINGS = ("uniform", "zipf", *LIMITED)
CHOSEN_GROUPS = 4
SAMPLES = 16384  # tokens that give the shares


def num_groups(kind: str, topology: Topology) -> int:
    """Return the number of groups of a limited router."""
    return LIMITED[kind] or topology.num_nodes // topology.copies


def shares(
    kind: str, model: inputs.Model, topology: Topology, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return the shares of tokens with an expert on each rank and on each node, for `scale_model.expected`."""
    if kind == "uniform":
        return scale_model.uniform_shares(topology, model.top_k)
    if kind == "zipf":
        popularity = inputs.popularity(kind, model.experts, rng)
        ids = inputs.choose(popularity, SAMPLES, model.top_k, rng)
    else:
        logits = rng.standard_normal((SAMPLES, model.experts), np.float32)
        ids = np.asarray(limited_router(model.top_k, num_groups(kind, topology))(logits))
    found = scale_model.sampled_shares(scale_model.spread(ids, topology, rng), topology)
    # A limited router treats all ranks alike: their differences are chance.
    return found if kind == "zipf" else tuple(np.full_like(part, part.mean()) for part in found)


def limited_router(top_k: int, groups: int) -> Any:
    """Return a function of logits that chooses experts of the best groups."""
    router = jax_ep.Router(score="sigmoid", num_groups=groups, topk_groups=min(CHOSEN_GROUPS, groups))
    return jax.jit(lambda logits: jax_ep.topk_router(logits, top_k, router=router).topk_idx)


def cases(args: argparse.Namespace) -> Iterator[tuple[str, Topology]]:
    """Yield the cases that the model's experts and the numbers of ranks allow."""
    model = inputs.MODELS[args.model]
    for num_ranks in args.ranks:
        topology = Topology(num_ranks, args.gpus_per_node, model.experts)
        for kind in ROUTINGS:
            if kind in LIMITED:
                size, rest = divmod(model.experts, num_groups(kind, topology))
                if rest or min(CHOSEN_GROUPS, num_groups(kind, topology)) * size < model.top_k or size < 2:
                    continue
            yield kind, topology


def predict(args: argparse.Namespace) -> Report:
    """Predict all cases."""
    rates = Rates(args.link_rate, args.nic_rate)
    settings = {"model": args.model, "ranks": args.ranks}
    settings |= {"gpus_per_node": args.gpus_per_node, "tokens": args.tokens, "rates": rates._asdict()}
    report = Report("nodes", args, settings)
    report.summarize(seconds="predicted by benchmarks/scale_model.py from the rates of the settings, not measured")
    model = inputs.MODELS[args.model]
    sizes = {"tokens": args.tokens, "row_bytes": 2 * model.hidden, "rates": rates}
    for kind, topology in cases(args):
        samples = [shares(kind, model, topology, np.random.default_rng(seed)) for seed in range(args.rounds)]
        found = [scale_model.expected(*of_sample, topology) for of_sample in samples]
        shape = {"model": args.model, "ranks": topology.num_ranks, "routing": kind, "tokens_per_rank": args.tokens}
        shape |= {"gpus_per_node": args.gpus_per_node, "hidden": model.hidden, "dtype": "bfloat16"}
        per_token = {
            "ranks_per_token": float(np.median([of_ranks.sum() for of_ranks, _ in samples])),
            "nodes_per_token": float(np.median([of_nodes.sum() for _, of_nodes in samples])),
        }
        for way in scale_model.WAYS:
            rows = [ways[way] for ways in found]
            times = tuple(scale_model.seconds(r, way, topology=topology, **sizes) for r in rows)
            report.add(way, shape, Timing(times), **sent(rows, args.tokens * 2 * model.hidden), **per_token)
    return report


def sent(rows: list[Rows], bytes_of_all: int) -> dict[str, float]:
    """Return the bytes of the busiest GPU, medians over the samples."""
    return {
        f"{leg}_bytes": bytes_of_all * float(np.median([getattr(of_sample, leg) for of_sample in rows]))
        for leg in ("nic", "link")
    }


def show(report: Report) -> None:
    """Print a table for each routing."""
    columns = ["ranks", "way", "nodes per token", "MB over the NIC", "MB over links", "us"]
    for kind, rows in report.by("routing").items():
        cells = [
            [
                row["shape"]["ranks"],
                row["variant"],
                f"{row['nodes_per_token']:.2f}",
                *(f"{row[leg] / 1e6:.1f}" for leg in ("nic_bytes", "link_bytes")),
                f"{1e6 * row['seconds']['median']:.0f}",
            ]
            for row in rows
        ]
        harness.show_table(f"{kind}: a dispatch, predicted", columns, cells)


def draw(report: Report, model: str) -> None:
    """Draw bytes over the NIC and seconds, a column for each routing, if matplotlib is installed."""
    kinds = report.by("routing")
    figure, grid = plots.make_figure(2, len(kinds), (4 * len(kinds), 6.5), sharex=True)
    if figure is None:
        return
    for (kind, rows), over_nic, over_time in zip(kinds.items(), *grid, strict=True):
        for way, line in zip(scale_model.WAYS, ("--", "-"), strict=True):
            own = [row for row in rows if row["variant"] == way]
            ranks = [row["shape"]["ranks"] for row in own]
            over_nic.plot(ranks, [row["nic_bytes"] / 1e6 for row in own], line, marker="o", markersize=3, label=way)
            times = np.array([[row["seconds"][q] for q in ("median", "q1", "q3")] for row in own]).T * 1e3
            spread = np.abs(times[1:] - times[0])
            over_time.errorbar(ranks, times[0], spread, linestyle=line, marker="o", markersize=3, capsize=2, label=way)
        over_nic.set(title=kind, ylabel="MB over the NIC of the busiest GPU")
        over_time.set(xlabel="ranks", ylabel="ms of a dispatch, predicted")
        for axes in (over_nic, over_time):
            axes.set(xscale="log")
            if kind == "zipf":  # the busiest rank receives tokens of all
                axes.set(yscale="symlog" if axes is over_nic else "log")
            else:
                axes.set(ylim=(0, None))
            plots.powers_of_two(axes.xaxis)
            axes.grid(alpha=0.3)
            axes.legend(fontsize=8)
    figure.suptitle(f"{plots.NAMES.get(model, model)}, predicted")
    figure.savefig(report.path.with_suffix(".png"), dpi=100)


def options() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = harness.parser(__doc__, "nodes", rounds=5)
    add = parser.add_argument
    add("--model", choices=inputs.MODELS, default=inputs.DEFAULT, help="default: %(default)s")
    add("--tokens", type=int, default=4096, help="of each rank (default: 4096)")
    add("--ranks", type=int, nargs="+", default=RANKS, help="of whole nodes (default: %(default)s)")
    add("--gpus-per-node", type=int, default=Default(8, 4), help="default: %(default)s")
    add("--link-rate", type=float, default=370e9, help="bytes/s of a GPU inside its node (default: 370e9)")
    add("--nic-rate", type=float, default=45e9, help="bytes/s of a GPU over the boundary (default: 45e9)")
    return parser


def complete(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Sort the ranks, and reject partial nodes and experts that do not divide."""
    args.ranks = sorted(set(args.ranks))
    experts = inputs.MODELS[args.model].experts
    for name in ("link_rate", "nic_rate"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: expected more than 0")
    for num_ranks in args.ranks:
        if num_ranks % args.gpus_per_node:
            parser.error(f"--ranks {num_ranks}: expected a multiple of the {args.gpus_per_node} GPUs of a node")
        if max(experts, num_ranks) % min(experts, num_ranks):
            parser.error(f"--ranks {num_ranks}: {experts} experts must divide it, or it must divide them")
        if num_ranks > experts and experts % args.gpus_per_node:
            parser.error(f"--ranks {num_ranks}: copies of {experts} experts do not fill whole nodes")


def main() -> None:
    """Predict, and draw."""
    parser = options()
    args = harness.parse(parser)
    complete(args, parser)
    report = predict(args)
    show(report)
    draw(report, args.model)


if __name__ == "__main__":
    harness.run(main)
