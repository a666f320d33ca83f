"""Dispatch and combine on GPUs: device time inside jit, compared with XLA's collectives in one run.

    python benchmarks/exchange.py [--tokens 4096 32768] [--routing uniform zipf] [--ranks 2 4]

Writes results/dispatch_combine.json. `--quick` without GPUs runs the kernels in Triton's interpreter.

Times are differences of chains of calls, which are longer for fewer tokens. Each includes the few small kernels that
chain the calls; the variant "chain alone" measures them. They matter below about 1000 tokens per rank.
Logical bytes count each (token, other rank) pair once, in bfloat16. Wire bytes are what a variant sends: FP8 with its
scales, or padding as well. Both are averages over the sending ranks. The peak is the copy engine's rate from one GPU to
another in the same run. The floor is the time of the busiest rank at that peak. The report also has the rate of each
GPU while the copy engines of all GPUs copy to all others.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

import jax_ep
from jax_ep.core.dtypes import FP8
from jax_ep.ops import registry
from jax_ep.tools.benchmark import harness, inputs, rates
from jax_ep.tools.benchmark.chains import Program, chain, on_each_rank
from jax_ep.tools.benchmark.harness import Report, Timing
from jax_ep.tools.benchmark.inputs import AXIS, Case, make_case
from jax_ep.tools.command import Default
from jax_ep.types import Handle, Schedule

TOKENS = Default([128, 1024, 4096, 32768], [8])
FEW_PROGRAMS = 24

Step = Callable[[Array, Any, Handle], Any]


class Variant(NamedTuple):
    """A variant, and what it sends."""

    step: Step  # `(zero, rows, handle) -> arrays`, of one rank
    rows: Any  # of all ranks
    handle: Handle  # of all ranks
    # "bf16" or "fp8" if each token is sent once to every other rank that needs it, "padded" if it is sent to all, None
    # if no tokens are sent.
    wire: str | None

    def program(self, case: Case, length: int) -> Program:
        """Return a chain of calls."""

        def step(zero: Array, rows: Any, handle: Handle) -> Any:
            return self.step(zero, rows, local_after(handle, zero))

        return chain(case.mesh, step, (self.rows, self.handle), length)


def traffic(case: Case, wire: str | None, peak: float) -> dict[str, float]:
    """Return the bytes that a call sends, and the time of the busiest rank at the peak; {} if it sends no tokens."""
    if wire is None:
        return {}
    remote, layout, row = case.remote, case.layout, case.row_bytes(wire)
    padded = float((layout.num_ranks - 1) * layout.num_tokens * row)
    mean = float(remote.sum() / layout.num_ranks)
    return {
        "logical_bytes": mean * case.row_bytes("bf16"),
        "wire_bytes": padded if wire == "padded" else mean * row,
        "floor_seconds": (padded if wire == "padded" else inputs.busiest(remote) * row) / peak,
    }


# --- handles ----------------------------------------------------------------------------------------------------------


def make_handle(case: Case, implementation: str) -> Handle:
    """Plan the all-to-all of a case; the handle of all ranks has a leading axis of ranks."""

    def plan(x: Array, ids: Array) -> Handle:
        sizes = {"num_experts": case.layout.num_experts, "capacity": case.layout.capacity}
        found = jax_ep.dispatch(x, ids, **sizes, implementation=implementation)
        return jax.tree.map(lambda leaf: leaf[None], found.handle)

    return jax.jit(on_each_rank(case.mesh, plan))(case.x, case.topk_idx)


def local(handle: Handle) -> Handle:
    """Return the rank's handle of one of all ranks."""
    return jax.tree.map(lambda leaf: leaf[0], handle)


def local_after(handle: Handle, zero: Array) -> Handle:
    """Return the rank's handle of one of all ranks, available only once the zero is."""
    handle = local(handle)
    if handle.group is not None:
        return dataclasses.replace(handle, group=handle.group + zero)
    return dataclasses.replace(
        handle, row_to_assignment=handle.row_to_assignment + zero, assignment_to_row=handle.assignment_to_row + zero
    )


def expert_rows(case: Case, handle: Handle, implementation: str) -> Array:
    """Dispatch the tokens of all ranks."""
    options: dict[str, Any] = {"num_experts": case.layout.num_experts, "implementation": implementation}

    def dispatch(x: Array, handle: Handle) -> Array:
        return jax_ep.dispatch(x, None, handle=local(handle), **options).tokens

    return jax.jit(on_each_rank(case.mesh, dispatch))(case.x, handle)


# --- variants ---------------------------------------------------------------------------------------------------------


def variants(case: Case, *, baselines: bool) -> dict[str, Variant]:
    """Return all variants of one case, by name; `baselines` includes the implementation `xla`."""
    found: dict[str, Variant] = {}
    for name in ("xla", "triton") if baselines else ("triton",):
        handle = make_handle(case, name)
        rows = expert_rows(case, handle, name)
        wire = "bf16" if name == "triton" else "padded"
        found[f"{name} plan"] = Variant(_plan(case, name), case.topk_idx, handle, None)
        found[f"{name} dispatch to rows"] = Variant(_dispatch(case, name), case.x, handle, wire)
        found[f"{name} combine"] = Variant(_combine(name), rows, handle, wire)
    few = {"num_communicating_programs": FEW_PROGRAMS, "num_combining_programs": FEW_PROGRAMS}
    for label, wire, choices in (("FP8 wire", "fp8", {"wire_dtype": FP8}), (f"{FEW_PROGRAMS} programs", "bf16", few)):
        schedule = Schedule(**choices)
        dispatch, combine = _dispatch(case, "triton", schedule), _combine("triton", schedule)
        found[f"triton dispatch to rows, {label}"] = Variant(dispatch, case.x, handle, wire)
        found[f"triton combine, {label}"] = Variant(combine, rows, handle, wire)
    found["all_to_all, padded"] = Variant(_all_to_all(case), case.x, handle, "padded")
    found["chain alone"] = Variant(lambda _, x, h: x[0, 0] + h.group[0].astype(x.dtype), case.x, handle, None)
    return found


def _plan(case: Case, name: str) -> Step:
    run, options = registry.EXCHANGE.by(name), registry.options("dispatch", AXIS, name)
    return lambda zero, ids, _: run.plan(options, ids + zero, case.layout)


def _dispatch(case: Case, name: str, schedule: Schedule | None = None) -> Step:
    options: dict[str, Any] = {"num_experts": case.layout.num_experts, "schedule": schedule, "implementation": name}

    return lambda zero, x, handle: jax_ep.dispatch(x, None, handle=handle, **options).tokens


def _combine(name: str, schedule: Schedule | None = None) -> Step:
    return lambda zero, rows, handle: jax_ep.combine(rows, handle, schedule=schedule, implementation=name)


def _all_to_all(case: Case) -> Step:
    """Return NCCL's all-to-all with fixed capacity, here of all tokens for every rank."""

    def step(zero: Array, x: Array, _: Handle) -> Array:
        blocks = jnp.broadcast_to(x[None] * (1 + zero).astype(x.dtype), (case.layout.num_ranks, *x.shape))
        return lax.all_to_all(blocks, AXIS, 0, 0)

    return step


# --- measuring --------------------------------------------------------------------------------------------------------


def chain_lengths(tokens: int, quick: bool) -> tuple[int, int]:
    """Return calls of the short and the long chain, whose difference must exceed the scatter of one launch."""
    if quick:
        return 1, 2
    return (2, 10) if tokens > 8192 else (4, 36) if tokens > 2048 else (16, 272)


def measure(report: Report, case: Case, todo: Mapping[str, Variant], args: argparse.Namespace, peak: float) -> None:
    """Measure variants of one case, and add them to the report."""

    def details(name: str, timing: Timing) -> dict[str, Any]:
        found: dict[str, Any] = {"wire": todo[name].wire, **traffic(case, todo[name].wire, peak)}
        for kind in ("logical", "wire") if todo[name].wire else ():
            found[f"{kind}_bytes_per_s"] = found[f"{kind}_bytes"] / timing.median
        return found | ({"peak_share": found["wire_bytes_per_s"] / peak} if todo[name].wire else {})

    title, failures = f"{case.routing}, {case.title}", dict[str, str]()
    times = harness.measure_chained(
        {name: partial(variant.program, case) for name, variant in todo.items()},
        args.rounds,
        lengths=chain_lengths(case.layout.num_tokens, args.quick),
        title=title,
        failures=failures,
        resolve=not args.quick,
        compiler_options=harness.GRAPHS_WITH_COLLECTIVES if args.graphs else None,
    )
    shape = {"routing": case.routing, "tokens_per_rank": case.layout.num_tokens, "ranks": case.layout.num_ranks}
    shape |= {"hidden": case.model.hidden, "dtype": case.x.dtype.name}
    report.record(title, shape, times, failures, details)


def options(prog: str | None = None) -> argparse.ArgumentParser:
    """Return the command line."""
    parser = harness.parser(__doc__, "exchange", prog=prog, rounds=8, tokens=TOKENS)
    add = parser.add_argument
    add("--model", choices=inputs.MODELS, default=inputs.DEFAULT, help="default: %(default)s")
    add("--routing", nargs="+", default=["uniform", "zipf"], choices=["uniform", "zipf"])
    add("--ranks", type=int, nargs="+", default=[2, 4], help="GPUs, the first of the machine")
    add("--graphs", action="store_true", help="launch chains as CUDA graphs, collectives in them")
    return parser


def main(arguments: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Measure all cases and write the report."""
    args = harness.start(options(prog), arguments)
    ranks = [n for n in args.ranks if n <= jax.device_count()]
    if not ranks:
        raise ValueError(f"--ranks {args.ranks}, expected at most {jax.device_count()}, the devices; pass fewer")
    model = inputs.MODELS[args.model]
    peak, engines = rates.link(*jax.devices()[:2]), {}
    settings: dict[str, Any] = {"experts": model.experts, "top_k": model.top_k, "graphs": args.graphs, "ranks": ranks}
    settings |= {"tokens": args.tokens, "routing": args.routing}
    settings["chain_lengths"] = {str(tokens): chain_lengths(tokens, args.quick) for tokens in args.tokens}
    report = Report("dispatch_combine", args, settings)
    report.summarize(copy_engine_bytes_per_s=peak)
    for num_ranks in ranks:
        mesh = inputs.expert_mesh(num_ranks)
        engines[str(num_ranks)] = rates.links_together(list(mesh.devices.flat))
        report.summarize(copy_engines_together_bytes_per_s=engines)
        inputs.initialize(mesh)
        for kind, tokens in itertools.product(args.routing, args.tokens):
            case = make_case(mesh, kind, tokens, model)
            measure(report, case, variants(case, baselines=kind == "uniform"), args, peak)
