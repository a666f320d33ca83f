"""The expert layer and its fused parts on GPUs, compared with plain JAX: device time inside jit.

    python benchmarks/layer.py --models deepseek-v3 --tokens 4096 --routing uniform

Writes results/moe_layer.json, and draws layer_by_model.png of all such reports. Without GPUs `--quick` runs the layers
in plain XLA, and parts, if requested, in Triton's interpreter.

Parts compare a fused kernel with all-to-all and GEMM apart and in sequence; dispatch + GEMM 1 also with the GEMM of
`pallas`. GEMM 2 + combine runs with the default choice, and in each mode. The batched einsum has as many rows in equal
groups.

Layers run forward, and with the gradients of tokens, router weights and expert weights. The baselines are in
baselines.py. The capacity of `jax_ep.moe` and of the ragged baseline is the number of rows of the most loaded rank,
rounded up to 128, so nothing is dropped. "dropless" has no capacity, hence W * T * K rows; "balance" has `Balance()`.
The other baseline drops; the report says how much. `--layers scatter serial` runs the layer in each mode of GEMM +
combine, "fused dispatch" and "serial dispatch" in those of dispatch + GEMM, "reproducible" with bits that depend on no
other token. "fp8" quantizes the weights in each call, "fp8 once" once for all calls. With "one-hot" routing all tokens
choose the first K experts, those of one rank.

TFLOP/s are per GPU, count real rows only, and count three times the forward pass for forward + backward. Temporary
bytes are per GPU and include the results of a call, such as gradients. The parts of a case are interleaved, and so are
its layers. The ragged baseline takes up to fifty times as long, and runs only on request: `--layers moe ragged`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import jax_ep
from jax_ep.tools.benchmark import baselines, harness, plots
from jax_ep.tools.benchmark.chains import Program, chain, on_each_rank
from jax_ep.tools.benchmark.exchange import expert_rows, local, local_after, make_handle
from jax_ep.tools.benchmark.harness import Report, Timing
from jax_ep.tools.benchmark.inputs import MODELS, Case, expert_mesh, initialize, make_case, make_weights, on_ranks
from jax_ep.tools.command import Default
from jax_ep.types import Schedule

BUDGET_S = 2.0
CAPACITY_FACTOR = 1.25
DEFAULT_MODELS = Default(["deepseek-v3", "qwen3-235b", "mixtral-8x7b"], ["tiny"])
DEFAULT_LAYERS = ["moe", "xla", "capacity"]
DIRECTIONS = {"forward": False, "forward + backward": True}
PARTS = ("dispatch", "combine")
SCHEDULES = {
    "scatter": Schedule(combine_mode="scatter"),
    "serial": Schedule(combine_mode="serial"),
    "fused dispatch": Schedule(dispatch_mode="fused"),
    "serial dispatch": Schedule(dispatch_mode="serial"),
    "reproducible": Schedule(reproducible=True),
}
LAYERS = {
    "moe": "jax_ep.moe",
    "dropless": "jax_ep.moe, dropless",
    "balance": "jax_ep.moe, balance",
    "balance fp8 once": "jax_ep.moe, balance, recipe fp8, matrices quantised before",
    "fp8": "jax_ep.moe, recipe fp8",
    "fp8 once": "jax_ep.moe, recipe fp8, matrices quantised before",
    **{key: f"jax_ep.moe, {key}" for key in SCHEDULES},
    "xla": "jax_ep.moe, implementation xla",
    "capacity": f"all_to_all + einsum, capacity {CAPACITY_FACTOR}",
    "ragged": "ragged_all_to_all + ragged_dot",
}
BASELINES = ("xla", "capacity", "ragged")


class Variant(NamedTuple):
    """A variant of a part or of the layer."""

    step: Callable[..., Any]  # `(zero, *arrays) -> arrays`, of one rank; see `chain`
    arrays: tuple[Any, ...]  # of all ranks
    flops: float = 0.0  # of the real rows of one rank, on average
    same_as: str | None = None  # a variant whose results are equal except for rounding
    touched: int = 0  # see `chain`
    tuned: bool = False  # XLA times candidates to choose the algorithms of its GEMMs
    options: dict[str, Any] | None = None  # compiler options
    limit: float = 0.25  # of the difference from `same_as`; several GEMMs in bfloat16 differ by some hundredths

    def program(self, case: Case, length: int) -> Program:
        """Return a chain of calls."""
        return chain(case.mesh, self.step, self.arrays, length, touched=self.touched, options=self.options)

    def first_results(self, case: Case, length: int = 1) -> Program:
        """Return a program of one call, whose results are the first numbers of those of each rank."""

        def body(*arrays: Any) -> list[Array]:
            leaves = jax.lax.optimization_barrier(jax.tree.leaves(self.step(jnp.int32(0), *arrays)))
            return [leaf.reshape(-1)[:1024].astype(jnp.float32) for leaf in leaves]

        return jax.jit(on_each_rank(case.mesh, body), compiler_options=self.options), self.arrays


# --- parts ------------------------------------------------------------------------------------------------------------


def dispatch_part(case: Case, weights: tuple[Array, Array], implementation: str) -> dict[str, Variant]:
    """Return dispatch and the first GEMM, in one kernel and in two; on GPUs also with the GEMM of `pallas`."""
    options: dict[str, Any] = {"num_experts": case.model.experts, "implementation": implementation}
    handle, w = make_handle(case, implementation), weights[0]

    def dispatch(zero: Array, x: Array, handle: Any) -> Array:
        return jax_ep.dispatch(x, None, handle=local_after(handle, zero), **options).tokens

    def gemm(name: str, zero: Array, rows: Array, w: Array, handle: Any) -> Array:
        return jax_ep.grouped_gemm(rows, w, local(handle).group_sizes + zero, implementation=name)

    def sequence(name: str, zero: Array, x: Array, w: Array, handle: Any) -> Array:
        return gemm(name, zero, dispatch(zero, x, handle), w, handle)

    def fused(mode: str | None, zero: Array, x: Array, w: Array, handle: Any) -> Array:
        keywords = options | {"handle": local_after(handle, zero), "schedule": Schedule(dispatch_mode=mode)}
        return jax_ep.dispatch_grouped_gemm(x, None, None, w, **keywords).hidden

    rows = expert_rows(case, handle, implementation)
    flops = 2.0 * case.assignments * w.shape[1] * w.shape[2]
    arrays, same = (case.x, w, handle), "dispatch, then GEMM 1"
    found = {
        "dispatch": Variant(dispatch, (case.x, handle)),
        "einsum 1, equal groups": einsum(case, w, flops),
        "dispatch + GEMM 1, fused": Variant(partial(fused, "fused"), arrays, flops, same),
        "dispatch + GEMM 1, as chosen": Variant(partial(fused, None), arrays, flops, same),
    }
    for name, suffix in ((implementation, ""), *([("pallas", ", pallas")] if jax.default_backend() == "gpu" else [])):
        found[f"GEMM 1{suffix}"] = Variant(partial(gemm, name), (rows, w, handle), flops, same)
        found[f"{same}{suffix}"] = Variant(partial(sequence, name), arrays, flops, same if suffix else None)
    return found


def combine_part(case: Case, weights: tuple[Array, Array], implementation: str) -> dict[str, Variant]:
    """Return the second GEMM and combine, in one kernel and in two."""
    handle, w = make_handle(case, implementation), weights[1]

    def combine(zero: Array, rows: Array, handle: Any) -> Array:
        return jax_ep.combine(rows, local_after(handle, zero), implementation=implementation)

    def gemm(zero: Array, hidden: Array, w: Array, handle: Any) -> Array:
        return jax_ep.grouped_gemm(hidden, w, local(handle).group_sizes + zero, implementation=implementation)

    def sequence(zero: Array, hidden: Array, w: Array, handle: Any) -> Array:
        return combine(zero, gemm(zero, hidden, w, handle), handle)

    def fused(mode: str | None, zero: Array, hidden: Array, w: Array, handle: Any) -> Array:
        keywords = {"schedule": Schedule(combine_mode=mode), "implementation": implementation}
        return jax_ep.grouped_gemm_combine(hidden, w, local_after(handle, zero), **keywords)

    hidden, rows = (on_ranks(case.mesh, (case.layout.capacity, width), width) for width in w.shape[1:])
    flops = 2.0 * case.assignments * w.shape[1] * w.shape[2]
    arrays, same = (hidden, w, handle), "GEMM 2, then combine"
    modes = {"fused": None, "scatter": "scatter", "serial": "serial"}
    return {
        "combine": Variant(combine, (rows, handle)),
        "GEMM 2": Variant(gemm, arrays, flops),
        **{f"GEMM 2 + combine, {name}": Variant(partial(fused, m), arrays, flops, same) for name, m in modes.items()},
        same: Variant(sequence, arrays, flops),
        "einsum 2, equal groups": einsum(case, w, flops),
    }


def einsum(case: Case, w: Array, flops: float) -> Variant:
    """Return the batched GEMM of equal groups with as many rows in total, by cuBLAS."""
    num_local = case.layout.num_local_experts
    batches = on_ranks(case.mesh, (num_local, case.assignments // num_local, w.shape[1]), 7)
    return Variant(lambda _, x, w: jnp.einsum("gmk,gkn->gmn", x, w), (batches, w), flops, touched=1, tuned=True)


# --- layers -----------------------------------------------------------------------------------------------------------


def slot_capacity(case: Case) -> int:
    """Return the rows of an expert for the tokens of one rank, in the baseline with fixed capacity."""
    return math.ceil(CAPACITY_FACTOR * case.assignments / case.layout.num_experts)


def dropped(case: Case) -> float:
    """Return the share of assignments that this baseline drops."""
    layout = case.layout
    source = np.arange(layout.num_ranks).repeat(case.assignments)
    counts = np.bincount(source * layout.num_experts + case.ids.reshape(-1))
    return float(np.maximum(counts - slot_capacity(case), 0).sum() / case.ids.size)


def layers(case: Case, weights: tuple[Array, Array], chosen: Iterable[str], *, backward: bool) -> dict[str, Variant]:
    """Return the layers, forward or with the gradients of tokens, router weights and expert weights."""
    chosen, moe = list(chosen), partial(jax_ep.moe, capacity=case.layout.capacity)
    balanced, expected = partial(jax_ep.moe, balance=jax_ep.Balance()), "xla" if "xla" in chosen else "moe"
    functions: dict[str, Callable[..., Array]] = {
        "moe": moe,
        "dropless": jax_ep.moe,
        "balance": balanced,
        "balance fp8 once": partial(balanced, recipe="fp8"),
        "fp8": partial(moe, recipe="fp8"),
        "fp8 once": partial(moe, recipe="fp8"),
        **{key: partial(moe, schedule=schedule) for key, schedule in SCHEDULES.items()},
        "xla": partial(moe, implementation="xla"),
        "capacity": partial(baselines.capacity_layer, capacity=slot_capacity(case)),
        "ragged": partial(baselines.ragged_layer, capacity=case.layout.capacity),
    }
    touched = (case.x, on_ranks(case.mesh, (case.layout.num_tokens, case.model.hidden), 3))[: 2 if backward else 1]
    flops = (18.0 if backward else 6.0) * case.assignments * case.model.hidden * case.model.intermediate
    found = {}
    for key in chosen:
        held = _quantized_once(case, weights) if key.endswith("fp8 once") else weights
        found[LAYERS[key]] = Variant(
            _layer_step(partial(functions[key], num_experts=case.model.experts), backward=backward),
            (*touched, case.topk_idx, case.topk_weights, *held),
            flops,
            None if key in ("xla", "capacity", expected) else LAYERS[expected],
            len(touched),
            key in BASELINES,
            baselines.RAGGED_OPTIONS if key == "ragged" else None,
            # A relative error of 0.05 to 0.1 in the norm is several times that in single elements.
            0.8 if "fp8" in key else 0.25,
        )
    return found


def _quantized_once(case: Case, weights: tuple[Array, Array]) -> Any:
    """Quantize the weights, on the device of each rank."""
    quantize = partial(jax_ep.quantize, format="fp8", for_training=True)
    return jax.jit(on_each_rank(case.mesh, lambda *weights: tuple(quantize(w) for w in weights)))(*weights)


def _layer_step(layer: Callable[..., Array], *, backward: bool) -> Callable[..., Any]:
    def forward(zero: Array, x: Array, ids: Array, router_weights: Array, *weights: Any) -> Array:
        return layer(x, ids + zero, router_weights + zero.astype(jnp.float32), *weights)

    def forward_and_backward(
        zero: Array, x: Array, d_y: Array, ids: Array, router_weights: Array, *weights: Any
    ) -> Any:
        scaled = router_weights + zero.astype(jnp.float32)
        y, pull = jax.vjp(lambda x, s, w, v: layer(x, ids + zero, s, w, v), x, scaled, *weights)
        return y, *(g.master if isinstance(g, jax_ep.QuantizedWeights) else g for g in pull(d_y))

    return forward_and_backward if backward else forward


# --- measuring --------------------------------------------------------------------------------------------------------


def chain_lengths(tokens: int, *, layer: bool, quick: bool) -> tuple[int, int]:
    """Return calls of the short and the long chain, whose difference must exceed the scatter of one launch."""
    if quick:
        return 1, 3
    if tokens <= 1024:
        return (2, 10) if layer else (4, 36)
    return (1, 4) if layer or tokens > 4096 else (2, 12)


class Run(NamedTuple):
    """One case: the report, the layer and its tokens, its model's name, expert weights, and the command line."""

    report: Report
    case: Case
    name: str
    weights: tuple[Array, Array]
    args: argparse.Namespace

    @property
    def shape(self) -> dict[str, Any]:
        """Facts of the case in its rows."""
        layout, rows = self.case.layout, self.case.rows
        return {
            "model": self.name,
            "routing": self.case.routing,
            "tokens_per_rank": layout.num_tokens,
            "ranks": layout.num_ranks,
            **self.case.model._asdict(),
            "capacity": layout.capacity,
            "rows_mean": float(rows.mean()),
            "rows_max": int(rows.max()),
            "dtype": "bfloat16",
        }

    @property
    def label(self) -> str:
        """The name of the case in tables and in the summary."""
        return f"{self.name}, {self.case.title}, {self.case.routing}"

    def measure(
        self,
        direction: str,
        variants: Mapping[str, Variant],
        lengths: tuple[int, int],
        notes: Mapping[str, dict[str, Any]],
    ) -> dict[str, Timing]:
        """Measure interleaved variants by chains of two lengths, and add a row for each, with its notes.

        Return the times of those that did not fail.
        """
        factories = {name: partial(variant.program, self.case) for name, variant in variants.items()}
        _tune(factories, variants, lengths[0])
        failures: dict[str, str] = {}
        title = f"{self.label}, {direction}"
        options = {"lengths": lengths, "budget_s": BUDGET_S, "failures": failures, "title": title}
        options["resolve"] = not self.args.quick  # tiny layers take less than the noise of a busy machine
        times = harness.measure_chained(factories, self.args.rounds, **options)
        differences = _differences(self.case, {name: variants[name] for name in times})
        for name in [name for name in times if not differences.get(name, 0.0) < variants[name].limit]:
            failures[name] = f"wrong: differs by {differences[name]:.2g} from {variants[name].same_as}"
            del times[name]

        def details(name: str, timing: Timing) -> dict[str, Any]:
            found = notes.get(name, {}) | ({"difference": differences[name]} if name in differences else {})
            flops = variants[name].flops
            found = found | {"temporary_bytes": timing.temporary_bytes}
            return found | ({"tflops": 1e-12 * flops / timing.median} if flops else {})

        self.report.record(title, self.shape, times, failures, details, direction=direction)
        return times

    def summarize(self, ratios: Mapping[str, float]) -> None:
        """Add ratios of the case to the summary, and print them."""
        self.report.summarize(**{self.label: self.report.summary.get(self.label, {}) | ratios})
        for name, ratio in ratios.items():
            print(f"  {name}: {ratio:.3f}")


def _tune(factories: Mapping[str, Callable[[int], Program]], variants: Mapping[str, Variant], n: int) -> None:
    """Compile, one at a time, the variants for which XLA times candidates; later compilations reuse its choices."""
    for name, variant in variants.items():
        if variant.tuned and jax.default_backend() == "gpu":
            with contextlib.suppress(Exception):  # it fails again later, and is reported there
                function, arguments = factories[name](n)
                function.lower(*arguments).compile()


def _differences(case: Case, variants: Mapping[str, Variant]) -> dict[str, float]:
    """Return the differences from the results of the variants that must match, if present."""
    pairs = {name: variant.same_as for name, variant in variants.items() if variant.same_as in variants}
    programs = {
        name: partial(variants[name].first_results, case) for name in {**pairs, **dict.fromkeys(pairs.values())}
    }
    # Failures, such as of a reference that does not fit into memory, leave results without a difference.
    runs = harness.compile_chains(programs, (1,), failures={})
    found = {name: [np.asarray(leaf) for leaf in run()] for name, (run,) in runs.items()}
    known = {name: same for name, same in pairs.items() if {name, same} <= set(found)}
    return {name: harness.largest_difference(found[name], found[same]) for name, same in known.items()}


def measure_parts(run: Run) -> None:
    """Measure parts of the layer; the summary has ratios of fused kernels to the sequence, and of GEMMs to einsums."""
    lengths = chain_lengths(run.case.layout.num_tokens, layer=False, quick=run.args.quick)
    makers = {"dispatch": dispatch_part, "combine": combine_part}
    variants: dict[str, Variant] = {}
    for part in run.args.parts:
        variants |= makers[part](run.case, run.weights, "triton")
    times = run.measure("forward", variants, lengths, {})
    ratios = {}
    for name, timing in times.items():
        for other in (variants[name].same_as, f"einsum {name[-1]}, equal groups" if name.startswith("GEMM") else ""):
            if other in times:
                ratios[f"{name} / {other}"] = timing.ratio_to(times[other])
    run.summarize(ratios)


def measure_layers(run: Run) -> None:
    """Measure the layer in both directions."""
    lengths = chain_lengths(run.case.layout.num_tokens, layer=True, quick=run.args.quick)
    notes = {LAYERS["capacity"]: {"dropped": dropped(run.case)}}
    for direction, backward in DIRECTIONS.items():
        variants = layers(run.case, run.weights, run.args.layers, backward=backward)
        times = run.measure(direction, variants, lengths, notes)
        ours = times.pop(LAYERS["moe"], None)
        if ours is not None:
            run.summarize({f"{direction}, moe / {name}": ours.ratio_to(timing) for name, timing in times.items()})


def options(prog: str | None = None) -> argparse.ArgumentParser:
    """Return the command line."""
    parser = harness.parser(__doc__, "layer", prog=prog, rounds=8, tokens=Default([4096, 1024, 16384], [16, 48]))
    add = parser.add_argument
    add("--models", nargs="+", choices=MODELS, default=DEFAULT_MODELS, help="default: %(default)s")
    kinds, routing = ["uniform", "zipf", "one-hot"], Default(["uniform", "zipf"], ["uniform"])
    add("--routing", nargs="+", choices=kinds, default=routing, help="default: %(default)s")
    add("--parts", nargs="*", choices=PARTS, help="default: all on GPUs; none: layers only")
    add("--layers", nargs="*", choices=LAYERS, default=DEFAULT_LAYERS, help="none: parts only")
    return parser


def main(arguments: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Measure the cases of the command line, and write the report."""
    args = harness.start(options(prog), arguments)
    on_gpus = jax.default_backend() == "gpu"
    args.parts = (list(PARTS) if on_gpus else []) if args.parts is None else args.parts
    if args.parts and not on_gpus:
        initialize()
    report, mesh = Report("moe_layer", args), expert_mesh(jax.device_count())
    for name in args.models:
        weights = make_weights(mesh, MODELS[name])
        for kind, tokens in itertools.product(args.routing, args.tokens):
            run = Run(report, make_case(mesh, kind, tokens, MODELS[name]), name, weights, args)
            if args.parts:
                measure_parts(run)
            if args.layers:
                measure_layers(run)
            gc.collect()
        del run, weights  # the next ones need the memory
    plots.draw_layers(args.out)
