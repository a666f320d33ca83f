"""The expert layer on one GPU, from one token to thousands, by weight type, compared with alternatives and bounds.

    python benchmarks/fused_moe.py --models qwen3-30b mixtral-8x7b --tokens 1 16 4096
    python benchmarks/fused_moe.py --formats none mxfp4 --routing zipf --tensor-parallel 2

Variants, each forward, without gradients:

  fused_moe, FORMAT        the default choice, with bfloat16 or quantized weights; "FORMAT_tokens" quantizes tokens
                           too, to int8 with "int8" and to FP8 with all others
  one launch, FORMAT       one kernel, by the schedule
  several launches, FORMAT several kernels, by the schedule
  hidden rows, bfloat16    several kernels; the first GEMM stores the FFN hidden state, and another kernel activates it
  TILES, FORMAT            one kernel with other tiles, with `--tiles`
  moe_sort                 the sort alone, of all experts
  a step of the chain      the part of each measurement that is not its variant
  ragged_dot               sort, two `lax.ragged_dot` and the sums: JAX's operations
  PyTorch, _grouped_mm     the layer of PyTorch's grouped GEMMs, as a CUDA graph, if installed
  batched einsum           the GEMMs alone, with as many rows in equal groups of all experts, by cuBLAS

With few tokens, most of the time is reading the weights of the experts that have rows. So each row has the bytes of
these weights, as stored, and their rate as a share of the fastest rate at which XLA reads memory here. With many tokens
the figure is operations per second.
Writes results/fused_moe.json. `--shard N` takes the experts of one of N ranks, `--tensor-parallel N` an Nth of I.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import jax_ep
from jax_ep import formats
from jax_ep.ops import registry
from jax_ep.quantization import quantize, with_layout
from jax_ep.tools.benchmark import baselines, harness, plots, profiler, pytorch
from jax_ep.tools.benchmark.chains import Operation, chain
from jax_ep.tools.benchmark.harness import Report, Timing
from jax_ep.tools.benchmark.inputs import MODELS, Model, expert_mesh, make_weights, on_ranks, routing
from jax_ep.tools.benchmark.tiles import variations
from jax_ep.tools.command import count_or_zero
from jax_ep.types import Experts

if TYPE_CHECKING:  # these import Triton
    from jax_ep.megakernels.fused_moe import FusedTiles, Matrices

TOKENS, QUICK_TOKENS = [1, 4, 16, 64, 256, 1024, 4096, 16384], [1, 16]
MODELS_BY_DEFAULT, QUICK = ["qwen3-30b", "mixtral-8x7b", "deepseek-v3", "gpt-oss-120b"], "tiny"
ROUTINGS = ("uniform", "balanced", "zipf")
LENGTHS = {64: (8, 104), 512: (4, 24)}  # by the most tokens; for more:
LENGTHS_OF_MANY, QUICK_LENGTHS = (2, 10), (1, 3)
UNROLL = 8  # calls per step of a chain's loop; a step takes some microseconds in a CUDA graph
TORCH = "PyTorch, _grouped_mm"
READ, READ_BYTES, QUICK_READ_BYTES = "read of memory", 4 << 30, 1 << 20
FORMATS: dict[str, dict[str, str]] = {name: {"format": name} for name in formats.FORMATS}
FORMATS |= {f"{name}_tokens": {"format": name, "activations": formats.FORMATS[name].activations} for name in FORMATS}
FORMATS |= {name: {"format": name.removesuffix("_prepacked")} for name in formats.STORED}
SEVERAL = jax_ep.Schedule(single_launch=False)
WAYS = [("fused_moe", None), ("one launch", jax_ep.Schedule(single_launch=True)), ("several launches", SEVERAL)]


def make_ids(kind: str, tokens: int, model: Model, seed: int) -> np.ndarray:
    """Make `[T, K]` experts; "balanced": in turn, so that all have equally many assignments."""
    if kind == "balanced":
        return (np.arange(tokens * model.top_k, dtype=np.int32) % model.experts).reshape(tokens, model.top_k)
    return routing(kind, tokens, model, np.random.default_rng(seed))


def ragged(x: Array, ids: Array, weights: Array, w_gate_up: Array, w_down: Array) -> Array:
    """Compute the layer with JAX's operations; assignments without an expert here are sorted behind all groups."""
    num_experts = w_down.shape[0]
    groups = jnp.where(ids < 0, num_experts, ids).reshape(-1)
    order = jnp.argsort(groups, stable=True)
    sizes = jnp.bincount(groups, length=num_experts)[:num_experts].astype(jnp.int32)
    rows = lax.ragged_dot(x[order // ids.shape[1]], w_gate_up, sizes)
    rows = lax.ragged_dot(baselines.swiglu(rows), w_down, sizes)
    scaled = rows.astype(jnp.float32) * weights.reshape(-1)[order][:, None]
    scaled = jnp.where((groups[order] < num_experts)[:, None], scaled, 0)
    return jnp.zeros((x.shape[0], x.shape[1]), jnp.float32).at[order // ids.shape[1]].add(scaled).astype(x.dtype)


def batched(x: Array, w_gate_up: Array, w_down: Array) -> Array:
    """Compute both GEMMs of `[E, M, H]` rows."""
    return jnp.einsum("emi,eih->emh", baselines.swiglu(jnp.einsum("emh,ehf->emf", x, w_gate_up)), w_down)


def sort(ids: Array, weights: Array, num_experts: int) -> Any:
    """Sort the assignments by expert, in blocks of 64."""
    return jax_ep.moe_sort(ids, weights, num_experts=num_experts, block_size=64)


def with_hidden_rows(layer: Callable[..., Array], x: Array, *others: Array) -> Array:
    """Compute the layer as a gradient needs it: the first GEMM stores the FFN hidden state."""
    return jax.vjp(lambda x: layer(x, *others), x)[0]


def in_one_kernel(
    tiles: FusedTiles, x: Array, topk_idx: Array, topk_weights: Array, w_gate_up: Matrices, w_down: Matrices
) -> Array:
    """Compute the layer in one kernel with these tiles."""
    from jax_ep.megakernels.fused_moe import fused_moe as kernel  # imports Triton

    biases = (None, None)
    return kernel(Experts(), x, topk_idx, topk_weights, w_gate_up, w_down, biases, out_dtype=x.dtype, tiles=tiles)


def bytes_of(matrices: Any, num_experts: int, active: int) -> int:
    """Return the bytes of the weights of `active` experts, as stored."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(matrices)) // num_experts * active


def operations(
    args: argparse.Namespace, model: Model, tokens: int, matrices: tuple[Array, Array], stored: dict[str, Any]
) -> tuple[dict[str, Operation], dict[str, int], float]:
    """Return the variants, the bytes of weights that each of them reads, and the operations of the GEMMs."""
    mesh, num_experts = expert_mesh(1), matrices[1].shape[0]
    all_ids = make_ids(args.routing, tokens, model, args.seed)
    ids = np.where(all_ids < num_experts, all_ids, -1)  # -1 for experts of other shards
    all_ids = jnp.asarray(all_ids)
    slots, active = int((ids >= 0).sum()), len(np.unique(ids[ids >= 0]))
    x = on_ranks(mesh, (tokens, model.hidden), 2)
    layer = (x, jnp.asarray(ids), jnp.full(ids.shape, 1 / model.top_k, jnp.float32))
    found, read = {"ragged_dot": Operation(ragged, (*layer, *matrices))}, dict[str, int]()
    for expert_format, held in {"bfloat16": matrices, **stored}.items():
        ways = {way: partial(jax_ep.fused_moe, schedule=one, implementation=args.implementation) for way, one in WAYS}
        if args.tiles:
            bits = formats.FORMATS[FORMATS[expert_format]["format"]].bits if expert_format in FORMATS else 16
            from jax_ep.megakernels.fused_moe import fused_tiles  # imports Triton

            default = fused_tiles(ids.size, num_experts, model.hidden, model.intermediate, bits)
            ways |= {name: partial(in_one_kernel, tiles) for name, tiles in variations(default).items()}
        for way, function in ways.items():
            if way != "fused_moe" and expert_format == "int8_tokens":
                continue  # no kernel fuses it
            found[f"{way}, {expert_format}"] = Operation(function, (*layer, *held))
            read[f"{way}, {expert_format}"] = bytes_of(held, num_experts, active)
    several = partial(jax_ep.fused_moe, schedule=SEVERAL, implementation=args.implementation)
    found["hidden rows, bfloat16"] = Operation(partial(with_hidden_rows, several), (*layer, *matrices))
    read["hidden rows, bfloat16"] = bytes_of(matrices, num_experts, active)
    read["ragged_dot"] = bytes_of(matrices, num_experts, active)
    found["a step of the chain"] = Operation(lambda x: x[:1], (x,))
    found["moe_sort"] = Operation(partial(sort, num_experts=model.experts), (all_ids, layer[2]))
    rows = max(1, slots // num_experts)
    if slots >= num_experts:
        batches = on_ranks(mesh, (num_experts, rows, model.hidden), 3)
        found["batched einsum"] = Operation(batched, (batches, *matrices))
        read["batched einsum"] = bytes_of(matrices, num_experts, num_experts)
    return found, read, 6.0 * slots * model.hidden * model.intermediate


def check(found: dict[str, Operation], stored: Collection[str], chosen: Collection[str]) -> None:
    """Raise if a variant differs from JAX's operations by more than its format explains."""
    layers = [name for name in chosen if name.rpartition(", ")[2] in ("bfloat16", *stored)]
    if not layers:
        return
    want = jax.jit(found["ragged_dot"].step)(*found["ragged_dot"].arguments).astype(jnp.float32)

    def result_of(name: str) -> Array | None:
        try:
            return jax.jit(found[name].step)(*found[name].arguments).astype(jnp.float32)
        except (NotImplementedError, ValueError):
            return None  # reported later as a failure

    with ThreadPoolExecutor(harness.WORKERS) as pool:
        results = dict(zip(layers, pool.map(result_of, layers), strict=True))
    for name, got in results.items():
        if got is not None:
            # All tokens may have experts of other shards.
            error = float(jnp.linalg.norm(got - want) / jnp.maximum(jnp.linalg.norm(want), 1e-30))
            if not error < (0.02 if name.endswith("bfloat16") else 0.3):
                raise RuntimeError(f"{name} is wrong: error {error:.2g} in the norm.")


def read_memory(args: argparse.Namespace) -> float:
    """Measure the most bytes per second that XLA moves: it sums rows or columns, or copies."""
    count = (QUICK_READ_BYTES if args.quick else READ_BYTES) // 2
    x, zero = on_ranks(expert_mesh(1), (count // 4096, 4096), 7), jnp.zeros((1,), jnp.bfloat16)
    moved = {"sums of rows": x.nbytes, "sums of columns": x.nbytes, "copy": 2 * x.nbytes}
    # Each call needs `zero`, which is rewritten before it; writing into x might copy it.
    functions: dict[str, Callable[[Array, Array], Array]] = {
        "sums of rows": lambda zero, x: jnp.sum(x + zero, axis=1, dtype=jnp.float32),
        "sums of columns": lambda zero, x: jnp.sum(x + zero, axis=0, dtype=jnp.float32),
        "copy": lambda zero, x: x + zero,
    }
    chains = {n: partial(chain, expert_mesh(1), Operation(function, (zero, x))) for n, function in functions.items()}
    times = harness.measure_chained(chains, args.rounds, title=READ)
    rates = {name: moved[name] / max(timing.median, 1e-9) for name, timing in times.items()}
    print(READ, *(f"{name} {rate / 1e12:.2f} TB/s" for name, rate in rates.items()), sep=", ")
    return max(rates.values())


def stored_as(expert_format: str, w: Array) -> jax_ep.QuantizedWeights:
    """Quantize weights to one of `FORMATS`."""
    found = quantize(w, **FORMATS[expert_format])
    return with_layout(found, "prepacked") if expert_format.endswith("_prepacked") else found


def lengths(tokens: int) -> tuple[int, int]:
    """Return the lengths of chains: long chains for short calls."""
    return next((both for most, both in LENGTHS.items() if tokens <= most), LENGTHS_OF_MANY)


def measure(report: Report, args: argparse.Namespace, name: str, rate: float) -> None:
    """Measure all numbers of tokens of one model."""
    full = MODELS[name]
    model = full._replace(intermediate=full.intermediate // args.tensor_parallel)
    matrices = make_weights(expert_mesh(1), model._replace(experts=model.experts // args.shard))
    stored = {}
    for expert_format in args.formats:
        quantize = jax.jit(partial(stored_as, expert_format))
        try:
            stored[expert_format] = tuple(quantize(w) for w in matrices)
        except ValueError as error:
            report.failed(f"fused_moe, {expert_format}", {"model": name, "dtype": "bfloat16"}, str(error))
    for tokens in args.tokens or (QUICK_TOKENS if args.quick else TOKENS):
        found, read, flops = operations(args, model, tokens, matrices, stored)
        chosen = harness.chosen(found, args.only)
        if args.kernels:
            profile(report, {"model": name, "tokens": tokens, "dtype": "bfloat16"}, chosen, args.rounds)
            continue
        check(found, stored, chosen)
        unroll = UNROLL if args.graphs else 1
        failures: dict[str, str] = {}
        times = harness.measure_chained(
            {name: partial(chain, expert_mesh(1), one, unroll=unroll) for name, one in chosen.items()},
            args.rounds,
            lengths=args.lengths or (QUICK_LENGTHS if args.quick else lengths(tokens)),
            title=f"{name}, {tokens} tokens",
            workers=harness.WORKERS,
            failures=failures,
            compiler_options=harness.GRAPHS if args.graphs else None,
        )
        if pytorch.is_here() and args.shard == 1:
            try:
                times[TORCH] = pytorch.measure_layer(found["ragged_dot"].arguments, args.rounds)
                read[TORCH] = read["ragged_dot"]
            except RuntimeError as error:
                failures[TORCH] = str(error)
        show(report, {"model": name, "tokens": tokens, "dtype": "bfloat16"}, times, failures, read, flops, rate)


def profile(report: Report, shape: dict[str, Any], chosen: dict[str, Operation], rounds: int) -> None:
    """Profile the kernels of each variant."""
    for variant, operation in chosen.items():
        program = profiler.Program(operation.step, operation.arguments, 1)
        timing, found = profiler.profile(program, rounds)
        report.add(variant, shape, timing, **found)
        profiler.show(f"{shape['model']}, {shape['tokens']} tokens, {variant}", found)


def show(
    report: Report,
    shape: dict[str, Any],
    times: dict[str, Timing],
    failures: dict[str, str],
    read: dict[str, int],
    flops: float,
    rate: float,
) -> None:
    """Add one case to the report, and print it."""
    table = []
    for variant, timing in times.items():
        seconds, details = max(timing.median, 1e-9), dict[str, float]()
        if variant in read:
            details = {"matrix_bytes": read[variant], "of_read_rate": read[variant] / seconds / rate}
            details["flops_per_s"] = flops / seconds
        report.add(variant, shape, timing, **details)
        cells = [f"{details['of_read_rate']:.0%}", f"{details['flops_per_s'] / 1e12:.0f}"] if details else ["", ""]
        table.append([variant, *timing.microseconds(1), *cells])
    for variant, reason in failures.items():
        report.failed(variant, shape, reason)
        table.append([variant, "failed", reason[:60], "", ""])
    columns = ["variant", "us", "quartiles", "matrices, of read rate", "TFLOP/s"]
    harness.show_table(f"{shape['model']}, {shape['tokens']} tokens", columns, table)


def options(prog: str | None = None) -> argparse.ArgumentParser:
    """Return the command line."""
    parser = harness.parser(__doc__, "fused_moe", prog=prog, rounds=8, tokens=str(TOKENS))
    parser.add_argument("--models", nargs="+", choices=MODELS, help=f"default: {MODELS_BY_DEFAULT}")
    parser.add_argument("--formats", nargs="*", choices=FORMATS, default=["fp8", "fp8_tokens", "int8", "mxfp4"])
    parser.add_argument("--routing", choices=ROUTINGS, default="uniform")
    parser.add_argument("--seed", type=count_or_zero, default=0, help="of the routing")
    parser.add_argument("--shard", type=int, default=1, metavar="N", help="the experts of one of N ranks")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="an Nth of I")
    parser.add_argument("--graphs", action="store_true", help="launch chains as CUDA graphs, which short calls need")
    parser.add_argument("--tiles", action="store_true", help="also time one kernel with other tiles")
    parser.add_argument("--only", nargs="+", help="only variants whose names contain one of these")
    parser.add_argument("--kernels", action="store_true", help="profile each variant instead, see kernel_times.py")
    parser.add_argument("--lengths", type=int, nargs=2, help="lengths of chains; short calls need longer ones")
    parser.add_argument(
        "--implementation", choices=registry.available(), help="of jax_ep's variants; default: its choice"
    )
    return parser


def main(arguments: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Measure the models of the command line."""
    parser = options(prog)
    args = harness.parse(parser, arguments)
    if args.lengths and args.lengths[0] >= args.lengths[1]:
        parser.error(f"--lengths {args.lengths}: expected the shorter one first")
    harness.require_devices("fused_moe", args, num_devices=1)
    models = args.models or ([QUICK] if args.quick else MODELS_BY_DEFAULT)
    for model in (MODELS[name] for name in models):
        if model.experts % args.shard or model.intermediate % args.tensor_parallel:
            parser.error(f"--shard and --tensor-parallel must divide {model.experts} and {model.intermediate}")
    kept = ("routing", "seed", "shard", "tensor_parallel", "formats", "implementation")
    kept += ("graphs", "lengths")
    report = Report("fused_moe", args, {name: getattr(args, name) for name in kept})
    if args.tiles:
        # Direct calls of kernels do not initialize a context.
        jax_ep.init(transport=None if jax.default_backend() == "gpu" else "shared_memory")
    rate = 0.0 if args.kernels else read_memory(args)
    if rate:
        report.summarise(read_bytes_per_s=rate)
    for name in models:
        measure(report, args, name, rate)
    print(report.path)
    if image := plots.draw(report.path):
        print(image)
