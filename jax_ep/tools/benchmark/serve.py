"""A whole decoder on one GPU or several: prefill of a long prompt, and decode steps at several batches, by format.

    jax-ep bench serve --model qwen3-30b --formats bfloat16 mxfp4
    jax-ep bench serve --model gpt-oss-120b --formats mxfp4 --devices 2
    python benchmarks/serve.py --layers 4 --batches 1 16   # the same; the report goes to benchmarks/results

The model has the widths and layers of the published one, and random weights, made on the GPU layer by layer; see
decoder.py. The key-value cache has a fixed length, and is full at the end of a sample. A sample is one program of
`STEPS` greedy steps, without a wait in between; XLA launches each step as CUDA graphs.

The floor of a decode step is the bytes that it must read, divided by the rate at which XLA reads memory in the same
run: dense weights, the distinct experts that the batch chose (counted in the last step of each sample), and the filled
cache. The baseline is Hugging Face's transformers on the same GPU, in a separate process that ends before JAX starts;
see transformers_baseline.py. `--python` names an interpreter that has PyTorch and transformers.

With `--devices N` experts and texts are split over N GPUs, and dense weights are replicated. The prefill is that of
one prompt per GPU, with `moe`; decode steps run `low_latency_moe`. A batch of 1 runs on each GPU, and counts once. The
floor is that of one GPU, with the experts of the busiest one in each layer, and without the all-to-all. There is no
baseline.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep.tools.benchmark import decoder, harness, inputs, profiler, rates, train
from jax_ep.tools.benchmark.decoder import MODELS, SCOPES, State
from jax_ep.tools.benchmark.fused_moe import FORMATS
from jax_ep.tools.benchmark.harness import COLUMNS, Report, Timing
from jax_ep.tools.benchmark.train import Architecture, Params, flops_per_token
from jax_ep.tools.command import Default, count, layer_count

STEPS = 32  # of a sample
PROFILED = 2
MEMORY_FRACTION = "0.94"  # of the GPU; JAX's default of 0.75 is less than the bfloat16 weights
GRAPHS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION",
    "xla_gpu_graph_min_graph_size": 1,
}
GROUPS = (*SCOPES, "other")
DENSE = r"nvjet|cutlass|cublas|gem[mv]|splitk|_dot_"
BASELINE = "transformers"


# --- floors and groups ----------------------------------------------------------------------------------------------


def bytes_of(tree: Any) -> int:
    """Return the bytes of all arrays."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def floor_bytes(model: Architecture, params: Params, batch: int, length: int, touched: float) -> dict[str, float]:
    """Return the bytes that a device reads in a decode step of `batch` texts and `touched` experts per layer."""
    experts = bytes_of([experts for _, experts in params["layers"]])
    rows = 2 * batch * model.experts.hidden  # of the embedding
    dense = bytes_of(params) - experts - bytes_of(params["embedding"]) + rows
    # In a sample, the filled part of the cache grows to `length`.
    filled = [length - left for left in range(STEPS)]
    seen = [np.mean(np.minimum(filled, decoder.window_of(model, i) or length)) for i in range(len(params["layers"]))]
    cache = 4 * batch * model.widths[1] * float(sum(seen))
    return {"dense": dense, "experts": experts * touched / model.experts.experts, "cache": cache}


def scopes(text: str) -> dict[str, str]:
    """Return the scope of each instruction of a compiled program, by the name that XLA gives its kernel."""
    found = re.findall(rf'%?([\w.-]+) = [^\n]*op_name="[^"]*/({"|".join(SCOPES)})/', text)
    return {re.sub(r"[.-]", "_", name): scope for name, scope in found}


def group_kernels(names: Sequence[str], by_name: Mapping[str, str]) -> list[str]:
    """Return the group of each kernel, in the order of their launches.

    Names tell the kernels of jax_ep, cuDNN and XLA, which are instructions of the program; XLA runs equal instructions
    as one kernel, with the name of the first. The kernels around dense GEMMs identify them: a layer
    launches that of queries, keys and values, the core of attention, the output projection, the router, the experts.
    """

    def kind(name: str) -> str:
        lower = name.lower()
        core = rf"^attend$|{train.GROUPS['attention']}"
        patterns = {"experts": train.GROUPS["experts"], "core": core, "router": "^route$", "dense": DENSE}
        found = next((kind for kind, pattern in patterns.items() if re.search(pattern, lower)), None)
        return found or by_name.get(name, "other")

    kinds = [kind(name) for name in names]
    markers, following = ("core", "experts", "head"), list[str]()
    for found in reversed(kinds):
        following.append(found if found in markers else following[-1] if following else "head")
    following.reverse()
    groups, before, gemms = [], "", 0
    for i, found in enumerate(kinds):
        if found in markers:
            before, gemms = found, 0
        if found == "dense":
            gemms += i == 0 or kinds[i - 1] != "dense"  # some GEMMs are two kernels
            is_router = following[i] == "experts" and (before != "core" or gemms > 1)
            found = "head" if following[i] == "head" else "router" if is_router else "attention"
        groups.append("attention" if found == "core" else found)
    return groups


# --- measuring ------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A program to measure."""

    phase: str  # "prefill" or "decode"
    batch: int  # texts on all devices
    length: int  # tokens of each text, or positions of its cache


def cases_of(args: argparse.Namespace) -> list[Case]:
    """Return the cases of the command line."""
    steps = [Case("decode", batch, args.cache) for batch in args.batches]
    return [case for case in (Case("prefill", args.devices, args.prompt), *steps) if case.phase in args.phases]


def compile_program(
    model: Architecture, layers: int, mesh: Mesh | None, weight_format: str, case: Case
) -> tuple[Any, float]:
    """Compile a program for abstract arguments, before there are weights; also return the seconds it took."""
    began, params = time.perf_counter(), decoder.abstract_params(model, layers, weight_format, mesh)
    specs, state_specs, split = decoder.specs_of(layers), decoder.STATE_SPECS, P(inputs.AXIS)
    if case.phase == "prefill":
        tokens = jax.ShapeDtypeStruct((case.batch, case.length), jnp.int32)
        run = partial(decoder.prefill, model)
        lowered = decoder.on_mesh(mesh, run, (specs, split), (state_specs, split)).lower(params, tokens)
    else:
        state = jax.eval_shape(partial(decoder.init_state, model, layers, case.batch, case.length, mesh))

        def sample(params: Params, state: State) -> State:
            # A constant: a copy from the host would stand apart from the kernels in a profile.
            return decoder.decode(model, STEPS, params, state._replace(position=jnp.int32(case.length - STEPS)))

        program = decoder.on_mesh(mesh, sample, (specs, state_specs), state_specs, donate_argnums=1)
        lowered = program.lower(params, state)
    return lowered.compile(GRAPHS if jax.default_backend() == "gpu" else None), time.perf_counter() - began


def runner(model: Architecture, params: Params, mesh: Mesh | None, case: Case, program: Any) -> Callable[[], State]:
    """Return a function that runs one sample and returns the state after it."""
    if case.phase == "prefill":
        tokens = jax.random.randint(jax.random.key(2), (case.batch, case.length), 0, model.vocabulary, jnp.int32)
        return lambda: program(params, tokens)[0]
    state = decoder.init_state(model, len(params["layers"]), case.batch, case.length, mesh)

    def run() -> State:
        nonlocal state
        state = program(params, state)
        return state

    return run


def profile(run: Callable[[], Any], text: str, steps: int) -> dict[str, Any]:
    """Return milliseconds per step: busy, by group, and of the longest kernels; nothing if runs differ in kernels."""
    runs = profiler.trace(run, PROFILED)
    found, groups = profiler.summarize(runs), dict.fromkeys(GROUPS, 0.0)
    if not found["same_calls"]:
        return {}
    for event, group in zip(runs[-1], group_kernels([e.name for e in runs[-1]], scopes(text)), strict=True):
        groups[group] += event.duration / 1e3 / steps
    kernels = [{"name": k["name"], "calls": k["calls"] / steps, "us": k["us"] / steps} for k in found["kernels"][:40]]
    return {"busy_ms": found["busy_us"] / 1e3 / steps, "groups_ms": groups, "kernels": kernels}


def touched_experts(topk_idx: np.ndarray, num_experts: int, devices: int) -> float:
    """Return the mean over layers of how many experts of `[layers, B, K]` the busiest device reads."""
    owners = [np.unique(layer) // (num_experts // devices) for layer in topk_idx]
    return float(np.mean([np.bincount(of_layer).max() for of_layer in owners]))


def measure(
    model: Architecture, params: Params, mesh: Mesh | None, case: Case, program: Any, rounds: int
) -> tuple[Timing, dict[str, Any]]:
    """Time a program, and profile it on a GPU; return seconds per step, and what the report says of it."""
    run, chosen = runner(model, params, mesh, case, program), list[Array]()

    def sample() -> State:
        state = run()
        chosen.append(jnp.copy(state.topk_idx))  # the next sample overwrites the state
        return state

    steps = STEPS if case.phase == "decode" else 1
    samples = harness.measure_interleaved({"run": sample}, rounds, title=" ".join(map(str, case)))["run"].samples
    timing = Timing(tuple(sample / steps for sample in samples))
    facts: dict[str, Any] = {}
    if case.phase == "decode":
        sizes = model.experts.experts, 1 if mesh is None else mesh.size
        facts["touched_experts"] = float(np.mean([touched_experts(np.asarray(of), *sizes) for of in chosen]))
    if jax.default_backend() != "gpu":
        return timing, facts
    profiled = profile(run, program.as_text(), steps)
    if profiled:
        profiled["idle_ms"] = max(0.0, 1e3 * timing.median - profiled["busy_ms"])
    return timing, facts | profiled


def figures(
    model: Architecture, params: Params, case: Case, devices: int, seconds: float, rate: float, touched: float = 0.0
) -> dict[str, float]:
    """Return what follows from the seconds of a step; see the module's docstring. FLOPs and bytes are per device."""
    if case.phase == "prefill":
        tokens, head = case.batch * case.length, 2 * model.experts.hidden * model.vocabulary
        per_token = flops_per_token(model, len(params["layers"]), case.length) / 3 - head
        tflops = 1e-12 * (tokens * per_token + case.batch * head) / seconds / devices
        return {"tokens_per_s": tokens / seconds, "tflops": tflops}
    parts = floor_bytes(model, params, -(-case.batch // devices), case.length, touched)
    floor = sum(parts.values()) / rate
    found = {"tokens_per_s": case.batch / seconds, "floor_seconds": floor, "of_floor": floor / seconds}
    return found | {f"{name}_bytes": count for name, count in parts.items()}


def sees_gpu() -> bool:
    """Return whether JAX finds a GPU, in another process: in this one it would take the memory for the baseline."""
    asked = [sys.executable, "-c", "import jax, sys; sys.exit(jax.default_backend() != 'gpu')"]
    return subprocess.run(asked, check=False).returncode == 0


def run_baseline(model: Architecture, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run transformers_baseline.py; return its rows, and one for its failure, if it fails."""
    hidden, inner, experts, top_k = model.experts
    config = {
        "hidden_size": hidden,
        "num_experts": experts,
        "head_dim": model.head_dim,
        "num_experts_per_tok": top_k,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "vocab_size": model.vocabulary,
        "num_hidden_layers": args.layers,
    }
    if model.biases:
        config |= {"model_type": "gpt_oss", "intermediate_size": inner, "sliding_window": model.window}
    else:
        config |= {"model_type": "qwen3_moe", "moe_intermediate_size": inner, "norm_topk_prob": True}
    settings = {"config": config, "cases": [case._asdict() for case in cases_of(args)]}
    settings |= {"steps": STEPS, "rounds": args.rounds, "quick": args.quick}
    print(f"{BASELINE} runs for at most {args.baseline_s:.0f} s; --python '' leaves it out", file=sys.stderr)
    script = Path(__file__).with_name("transformers_baseline.py")
    # -P: the modules next to the script must not hide others of the same name.
    command = [args.python, "-P", str(script), json.dumps(settings)]
    reason, out = None, b""
    try:
        done = subprocess.run(command, capture_output=True, timeout=args.baseline_s, check=False)
        out = done.stdout
        if done.returncode:
            last = (done.stderr.decode(errors="replace").strip() or "-").splitlines()[-1]
            reason = f"exit status {done.returncode}: {last}"
    except subprocess.TimeoutExpired as error:
        out = error.stdout or b""
        reason = f"not done after {args.baseline_s} s, see --baseline-s"
    except OSError as error:
        reason = f"--python {args.python}: {error}"
    lines = out.decode(errors="replace").splitlines(keepends=True)
    rows = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}\n")]
    return rows if reason is None else [*rows, {"variant": BASELINE, "failed": reason}]


def record_baseline(
    report: Report, model: Architecture, args: argparse.Namespace, rows: Sequence[Any], rate: float
) -> None:
    """Add the rows of the baseline."""
    params = decoder.abstract_params(model, args.layers, "bfloat16")
    for row in rows:
        case = Case(**row["case"]) if "case" in row else None
        shape = shape_of(args, case, "bfloat16")
        if case is None or "failed" in row:
            report.failed(row["variant"], shape, row["failed"])
            continue
        timing, touched = Timing(tuple(row["samples"])), row.get("touched_experts", 0.0)
        facts = {"touched_experts": touched} if case.phase == "decode" else {}
        facts |= figures(model, params, case, 1, timing.median, rate, touched)
        report.add(row["variant"], shape, timing, **facts)


def shape_of(args: argparse.Namespace, case: Case | None, dtype: str) -> dict[str, Any]:
    """Return the shape of a row."""
    shape = {"model": args.model, "layers": args.layers, "devices": args.devices, "dtype": dtype}
    return shape | (case._asdict() if case else {})


def measure_all(args: argparse.Namespace) -> Report:
    """Measure the baseline, then all formats; a variant that fails leaves the others their rows."""
    model, with_baseline = MODELS[args.model], args.python and args.devices == 1
    if with_baseline and not args.quick and not sees_gpu():
        harness.require_devices(args, num_devices=1)
    baseline = run_baseline(model, args) if with_baseline else []  # before JAX takes the memory of the GPU
    harness.require_devices(args, num_devices=args.devices)
    mesh = inputs.expert_mesh(args.devices) if args.devices > 1 else None
    if mesh is not None and jax.default_backend() == "gpu":
        jax_ep.init(mesh)
    settings = {"model": args.model, "layers": args.layers, "devices": args.devices, "steps": STEPS}
    report = Report("serve", args, settings)
    rate = rates.memory()
    report.summarize(read_bytes_per_s=rate)
    record_baseline(report, model, args, baseline, rate)
    wanted = [(weight_format, case) for weight_format in args.formats for case in cases_of(args)]
    began = time.perf_counter()
    with ThreadPoolExecutor(harness.WORKERS) as pool:  # ends before anything is measured
        compiled = {key: pool.submit(compile_program, model, args.layers, mesh, *key) for key in wanted}
    report.summarize(compile_s=time.perf_counter() - began)
    for weight_format in args.formats:
        gc.collect()  # the weights of the previous format
        params = decoder.init_params(model, args.layers, weight_format, mesh)
        for case in cases_of(args):
            variant, shape = f"jax_ep, {weight_format}", shape_of(args, case, weight_format)
            try:
                program, compile_s = compiled.pop((weight_format, case)).result()
                timing, facts = measure(model, params, mesh, case, program, args.rounds)
            except Exception as error:
                report.failed(variant, shape, f"{type(error).__name__}: {error}")
                continue
            touched = facts.get("touched_experts", 0.0)
            facts |= figures(model, params, case, args.devices, timing.median, rate, touched)
            report.add(variant, shape, timing, compile_s=compile_s, **facts)
        del params
    return report


def show(report: Report) -> None:
    """Print the times of each phase, and the time of each group of kernels."""
    measured = [row for row in report.rows if "seconds" in row]
    for phase, columns in (
        ("prefill", ("tokens_per_s", "tflops")),
        ("decode", ("tokens_per_s", "floor_seconds", "of_floor")),
    ):
        cells = []
        for row in measured:
            if row["shape"]["phase"] == phase:
                time_ms = f"{1e3 * row['seconds']['median']:.2f}"
                cells.append([row["variant"], row["shape"]["batch"], time_ms, *harness.figures(row, columns)])
        if cells:
            titles = [COLUMNS[name][0] for name in columns]
            harness.show_table(phase, ["variant", "batch", "ms", *titles], cells)
    label = "{shape[phase]} {shape[batch]}, {variant}"
    profiler.show_groups("ms per step", {label.format(**row): row for row in measured})
    failed = [[row["variant"], row["failed"].splitlines()[0][:120]] for row in report.rows if "failed" in row]
    if failed:
        harness.show_table("failed", ["variant", "reason"], failed)


def options(prog: str | None = None) -> argparse.ArgumentParser:
    """Return the command line."""
    parser = harness.parser(__doc__, "serve", prog=prog, rounds=5)
    add = parser.add_argument
    add("--model", choices=MODELS, default=Default("qwen3-30b", "tiny"), help="default: %(default)s")
    add("--layers", type=layer_count, help="default: those of the model")
    add("--devices", type=count, default=1, help="GPUs that share experts and texts (default: 1)")
    # `serving_weights` prepacks where that is faster.
    formats = ("bfloat16", *(name for name in FORMATS if not name.endswith("_prepacked")))
    add(
        "--formats",
        nargs="+",
        choices=formats,
        metavar="FORMAT",
        default=["bfloat16", "fp8", "fp8_tokens", "mxfp4"],
        help=f"of experts: {', '.join(formats)} (default: bfloat16 fp8 fp8_tokens mxfp4)",
    )
    add("--phases", nargs="+", choices=("prefill", "decode"), default=["prefill", "decode"], help="default: both")
    batches, cache, prompt = Default([1, 16, 64], [1, 2]), Default(1024, 64), Default(4096, 64)
    add("--batches", type=int, nargs="+", default=batches, help="texts of a decode step (default: %(default)s)")
    add("--cache", type=int, default=cache, help="positions of the key-value cache (default: %(default)s)")
    add("--prompt", type=int, default=prompt, help="tokens of the prefill (default: %(default)s)")
    add("--python", default=sys.executable, help="interpreter with PyTorch and transformers; '' for no baseline")
    add("--baseline-s", type=float, default=200.0, help="seconds after which the baseline ends (default: 200)")
    return parser


def main(arguments: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Measure, and print tables."""
    parser = options(prog)
    args = harness.parse(parser, arguments)
    args.formats, args.batches = (list(dict.fromkeys(given)) for given in (args.formats, args.batches))
    args.layers = args.layers or MODELS[args.model].layers
    if args.cache < STEPS:
        parser.error(f"--cache={args.cache}: expected at least {STEPS}, the steps of a sample")
    if MODELS[args.model].experts.experts % args.devices:
        parser.error(f"--devices={args.devices}: expected a divisor of the model's experts")
    if args.devices > 1:
        jax.config.update("jax_num_cpu_devices", args.devices)
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", MEMORY_FRACTION)
    report = measure_all(args)
    show(report)
