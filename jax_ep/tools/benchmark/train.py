"""A whole training step on all GPUs: real widths, few layers; tokens/s, TFLOP/s, memory, and time by group of kernels.

    jax-ep bench train --model qwen3-30b --layers 4 --tokens 16384
    python benchmarks/train.py --model small          # the same; the report goes to benchmarks/results

The model is a pre-norm decoder in plain JAX: RMSNorm, grouped-query attention with rotary positions, a top-k router,
experts, and a shared expert where the architecture has one. Attention runs in cuDNN on GPUs. Dense weights are
replicated, experts and tokens are split over all GPUs. Master weights and AdamW are in float32, the rest in bfloat16.
Layers are unrolled, because a scan copies each layer's weights and residuals. The state is donated.

Variants differ in the expert layer only:

    jax_ep    `jax_ep.sharding.sharded_moe`, with `balance=`, `recipe=` or a `Schedule` where the name says so
    xla       the same with `implementation="xla"`
    padded    GShard's layer: all_to_all and a batched einsum of a capacity factor of 1.25; it drops tokens

TFLOP/s count the GEMMs of the model, three times for forward + backward, and half of the attention matrix:
`3 * layers * (2 H (Q + 2 KV) + 2 Q H + 2 S Q + 2 H E + 6 K H I + 6 H I_shared) + 6 H V` per token, where Q and KV are
the widths of all query heads and of all key heads. The peak is 989 TFLOP/s, that of dense bfloat16 on an H100 or H200.
"""

from __future__ import annotations

import argparse
import gc
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ep import Balance, Schedule, load_balancing_loss, topk_router
from jax_ep import Experts as ExpertFunction
from jax_ep.sharding import sharded_moe
from jax_ep.tools.benchmark import baselines, harness, inputs, profiler
from jax_ep.tools.benchmark.harness import Report, Timing
from jax_ep.tools.command import Default, layer_count

Array = jax.Array
type Params = dict[str, Any]
type Experts = Callable[..., Array]
"""`layer(x [N, H], topk_idx [N, K], topk_weights, w_gate_up [E, H, 2I], w_down [E, I, H]) -> [N, H]`"""

PEAK_TFLOPS = 989.0
CAPACITY_FACTOR = 1.25
STEPS = 4  # of a sample
PROFILED = 3
BALANCING_WEIGHT = 0.01
COMPILER_OPTIONS = {"xla_gpu_all_reduce_combine_threshold_bytes": 0}
"""XLA of JAX 0.11.2 can combine all-reduces of bfloat16 and float32 into one of bfloat16: float32 parts are wrong."""
VARIANTS: dict[str, dict[str, Any] | None] = {  # arguments of `sharded_moe`; None: not jax_ep
    "jax_ep": {},
    "jax_ep keep_tokens": {"schedule": Schedule(keep_tokens=True)},
    "jax_ep balance": {"balance": Balance()},
    "jax_ep fp8": {"recipe": "fp8"},
    "jax_ep balance fp8": {"balance": Balance(), "recipe": "fp8"},
    "xla": {"implementation": "xla"},
    "padded": None,
}
GROUPS = {
    "attention": r"cudnn|flash|fmha|sdpa",
    "experts": r"dispatch|combine|grouped_gemm|masked|gated|activat|plan|moe|weight_gradient|fp8|quantiz|exchange",
    "collectives": r"nccl|all_?reduce|all_?gather|all_?to_?all",
    "dense GEMMs": r"nvjet|cutlass|gemm|cublas",
    "copies": r"memcpy|memset|^copy|wrapped_(slice|concatenate)",
}


class Architecture(NamedTuple):
    """Widths of a model, and its published number of layers."""

    experts: inputs.Model
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    layers: int
    shared: int = 0  # intermediate size of the shared expert
    window: int | None = None  # positions that layers 0, 2, 4... see
    biases: bool = False  # of all but the head, and attention sinks, instead of norms of queries and keys
    function: ExpertFunction = ExpertFunction()

    @property
    def widths(self) -> tuple[int, int]:
        """Widths of all query heads, and of all key heads."""
        return self.heads * self.head_dim, self.kv_heads * self.head_dim


ARCHITECTURES = {
    "small": Architecture(inputs.Model(2048, 768, 64, 8), 16, 16, 128, 256, 4),
    "qwen3-30b": Architecture(inputs.MODELS["qwen3-30b"], 32, 4, 128, 151_936, 48),
    "mixtral-8x7b": Architecture(inputs.MODELS["mixtral-8x7b"], 32, 8, 128, 32_000, 32),
    "glm-4.5-air": Architecture(inputs.MODELS["glm-4.5-air"], 96, 8, 128, 151_552, 46, shared=1408),
    "tiny": Architecture(inputs.Model(128, 128, 8, 2), 4, 2, 32, 256, 2, shared=128),
}


def flops_per_token(model: Architecture, layers: int, length: int) -> float:
    """FLOPs of forward + backward per token, as the module describes; a window w below S / 2 replaces S by 2 w."""
    hidden, inner, experts, top_k = model.experts
    query, key = model.widths
    attention = 2 * hidden * (query + 2 * key) + 2 * query * hidden
    seen = layers // 2 * length + -(-layers // 2) * min(length, 2 * (model.window or length))
    ffn = 2 * hidden * experts + 6 * top_k * hidden * inner + 6 * hidden * model.shared
    return 3.0 * (layers * (attention + ffn) + 2 * seen * query) + 6 * hidden * model.vocabulary


# --- the model ------------------------------------------------------------------------------------------------------


def init_params(model: Architecture, layers: int, key: Array) -> Params:
    """Return random float32 weights."""
    hidden, inner, experts, _ = model.experts
    query, kv = model.widths
    shapes = {
        "qkv": (hidden, query + 2 * kv),
        "out": (query, hidden),
        "router": (hidden, experts),
        "w_gate_up": (experts, hidden, 2 * inner),
        "w_down": (experts, inner, hidden),
    }
    if model.shared:
        shapes |= {"shared_gate_up": (hidden, 2 * model.shared), "shared_down": (model.shared, hidden)}

    def matrix(number: int, shape: Sequence[int]) -> Array:
        return jax.random.normal(jax.random.fold_in(key, number), shape, jnp.float32) * shape[-2] ** -0.5

    params: Params = {"layers": []}
    for layer in range(layers):
        first = (layer + 1) * len(shapes)
        made = {name: matrix(first + i, shape) for i, (name, shape) in enumerate(shapes.items())}
        norms = {name: jnp.ones(hidden, jnp.float32) for name in ("attention_norm", "experts_norm")}
        params["layers"].append(made | norms)
    params["embedding"] = matrix(0, (model.vocabulary, hidden)) * math.sqrt(model.vocabulary) * 0.5
    params["head"] = matrix(1, (hidden, model.vocabulary))
    return params | {"norm": jnp.ones(hidden, jnp.float32)}


def specs_of(params: Params) -> Params:
    """Return partition specs: expert weights are split over `expert`, the rest is replicated."""
    experts = ("w_gate_up", "w_down")
    return jax.tree_util.tree_map_with_path(
        lambda path, _: P("expert") if getattr(path[-1], "key", "") in experts else P(), params
    )


ROTARY_BASE = 10_000.0


def rms_norm(x: Array, scale: Array) -> Array:
    """Apply the root-mean-square norm in float32."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6) * scale).astype(x.dtype)


def rotate(x: Array, start: Array | int = 0) -> Array:
    """Apply the rotary embedding to `[B, S, heads, D]` at positions `start` to `start + S - 1`."""
    length, half = x.shape[1], x.shape[3] // 2
    frequency = ROTARY_BASE ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = (start + jnp.arange(length)).astype(jnp.float32)[:, None, None] * frequency
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def attend(model: Architecture, weights: Params, x: Array) -> Array:
    """Compute causal grouped-query attention of `[B, S, H]`."""
    query, kv = model.widths
    parts = jnp.split(x @ weights["qkv"], (query, query + kv), axis=-1)
    heads = [part.reshape(*x.shape[:2], -1, model.head_dim) for part in parts]
    on_gpu = jax.default_backend() == "gpu"
    mixed = jax.nn.dot_product_attention(
        rotate(heads[0]), rotate(heads[1]), heads[2], is_causal=True, implementation="cudnn" if on_gpu else "xla"
    )
    return mixed.reshape(*x.shape[:2], query) @ weights["out"]


def forward(model: Architecture, experts: Experts, params: Params, tokens: Array) -> tuple[Array, Array, Array]:
    """Return logits `[B, S, V]`, the mean load-balancing loss, and the load `[layers, E]`."""
    _, _, num_experts, top_k = model.experts
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16) if p.ndim > 1 else p, params)
    x, losses, loads = params["embedding"][tokens], [], []
    for weights in params["layers"]:
        x = x + attend(model, weights, rms_norm(x, weights["attention_norm"]))
        flat = rms_norm(x, weights["experts_norm"]).reshape(-1, x.shape[-1])
        routing = topk_router((flat @ weights["router"]).astype(jnp.float32), top_k)
        losses.append(load_balancing_loss(routing.scores, routing.topk_idx))
        loads.append(jnp.zeros(num_experts, jnp.int32).at[routing.topk_idx].add(1))
        y = experts(flat, routing.topk_idx, routing.topk_weights, weights["w_gate_up"], weights["w_down"])
        if model.shared:
            y += baselines.swiglu(flat @ weights["shared_gate_up"]) @ weights["shared_down"]
        x = x + y.reshape(x.shape)
    return rms_norm(x, params["norm"]) @ params["head"], jnp.stack(losses).mean(), jnp.stack(loads)


def expert_layer(variant: str, model: Architecture, mesh: jax.sharding.Mesh, num_tokens: int) -> Experts:
    """Return the expert layer of a variant, for global arrays; `num_tokens`: T per rank."""
    _, _, num_experts, top_k = model.experts
    if (options := VARIANTS[variant]) is not None:
        return sharded_moe(mesh, num_experts=num_experts, **options)
    rows = math.ceil(CAPACITY_FACTOR * num_tokens * top_k / num_experts)
    padded = partial(baselines.capacity_layer, num_experts=num_experts, capacity=rows)
    return jax.shard_map(padded, mesh=mesh, in_specs=(P("expert"),) * 5, out_specs=P("expert"))


class Training(NamedTuple):
    """A compiled step `(params, optimizer, windows) -> (params, optimizer, metrics)`, and how to make its state."""

    init: Callable[[], tuple[Params, Any]]
    step: Any


def make_training(
    model: Architecture, experts: Experts, mesh: jax.sharding.Mesh, layers: int, batch: int, length: int
) -> Training:
    """Compile the training step of one variant."""
    import optax

    optimizer = optax.adamw(1e-4, b2=0.95)

    def init() -> tuple[Params, Any]:
        params = init_params(model, layers, jax.random.key(0))
        return params, optimizer.init(params)

    def loss_of(params: Params, windows: Array) -> tuple[Array, dict[str, Array]]:
        logits, balancing, load = forward(model, experts, params, windows[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), windows[:, 1:])
        return losses.mean() + BALANCING_WEIGHT * balancing, {"loss": losses.mean(), "load": load}

    def step(params: Params, state: Any, windows: Array) -> tuple[Params, Any, dict[str, Array]]:
        gradients, metrics = jax.grad(loss_of, has_aux=True)(params, windows)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, metrics

    def placed(tree: Any) -> Any:
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs_of(tree))

    shapes = jax.eval_shape(init)
    shardings = tuple(map(placed, shapes))
    data = NamedSharding(mesh, P("expert"))
    jitted = jax.jit(step, in_shardings=(*shardings, data), out_shardings=(*shardings, None), donate_argnums=(0, 1))
    windows = jax.ShapeDtypeStruct((batch, length + 1), jnp.int32)
    return Training(jax.jit(init, out_shardings=shardings), jitted.lower(*shapes, windows).compile(COMPILER_OPTIONS))


# --- measuring ------------------------------------------------------------------------------------------------------


def time_by_group(kernels: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the milliseconds per step of each group of kernels."""
    found = dict.fromkeys([*GROUPS, "other"], 0.0)
    for kernel in kernels:
        name = kernel["name"].lower()
        group = next((group for group, pattern in GROUPS.items() if re.search(pattern, name)), "other")
        found[group] += kernel["us"] / 1e3
    return found


def profile(run: Callable[[], Any]) -> dict[str, Any]:
    """Profile `PROFILED` steps; return busy and idle time, time by group, and the longest kernels."""
    found = profiler.summarize(profiler.trace(run, PROFILED))
    kernels = [{k: kernel[k] for k in ("name", "calls", "us")} for kernel in found["kernels"]]
    times = {"busy_ms": found["busy_us"] / 1e3, "idle_ms": found["idle_us"] / 1e3}
    return times | {"groups_ms": time_by_group(kernels), "kernels": kernels[:40]}


def measure(
    name: str, training: Training, windows: Sequence[Array], rounds: int, vocabulary: int
) -> tuple[Timing, dict[str, Any]]:
    """Time `rounds` samples of `STEPS` steps, then profile; return what the report says of the variant."""
    state: Any = training.init()
    metrics, samples, count = {}, [], 0
    state_bytes = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))

    def one() -> Any:
        nonlocal state, metrics, count
        *state, metrics = training.step(*state, windows[count % len(windows)])
        count += 1
        return metrics

    losses = [float(one()["loss"]) for _ in range(3)]
    if not abs(losses[0] - math.log(vocabulary)) < 2:
        raise ArithmeticError(f"{name}: the first loss is {losses[0]}, expected about {math.log(vocabulary):.2f}")
    start = time.perf_counter()
    for i in harness.progress(range(rounds * STEPS), name):
        one()
        if i % STEPS == STEPS - 1:
            jax.block_until_ready(state)
            samples.append((time.perf_counter() - start) / STEPS)
            start = time.perf_counter()
    load = np.asarray(metrics["load"], float)
    by_rank = load.reshape(load.shape[0], jax.device_count(), -1).sum(-1)
    facts: dict[str, Any] = {
        "losses": losses,
        "state_bytes": state_bytes,
        "most_loaded_rank": float((by_rank.max(1) / by_rank.mean(1)).max()),
        "most_loaded_expert": float((load.max(1) / load.mean(1)).max()),
    }
    if jax.default_backend() == "gpu":
        facts |= profile(one)
    return Timing(tuple(samples)), facts


def measure_all(args: argparse.Namespace) -> Report:
    """Measure all variants, one after another, on the same tokens and initial weights."""
    model, devices = ARCHITECTURES[args.model], jax.device_count()
    mesh = inputs.expert_mesh(devices)
    batch = args.tokens * devices // args.length
    rng = np.random.default_rng(0)
    data = NamedSharding(mesh, P("expert"))
    texts = [rng.integers(0, model.vocabulary, (batch, args.length + 1), np.int32) for _ in range(4)]
    windows = [jax.device_put(text, data) for text in texts]
    flops = flops_per_token(model, args.layers, args.length)
    shape = {"model": args.model, "layers": args.layers, "tokens": args.tokens, "length": args.length, "ranks": devices}
    report = Report("train", args, shape)
    for name in args.variants:
        gc.collect()
        began = time.perf_counter()
        experts = expert_layer(name, model, mesh, args.tokens)
        training = make_training(model, experts, mesh, args.layers, batch, args.length)
        compile_s = time.perf_counter() - began
        memory = training.step.memory_analysis()
        timing, facts = measure(name, training, windows, args.rounds, model.vocabulary)
        rate = batch * args.length / timing.median
        tflops = rate * flops / devices / 1e12
        # The devices' own peak would be that of all variants so far.
        live = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
        facts |= {"donated_bytes": memory.alias_size_in_bytes, "compile_s": compile_s}
        facts["program_bytes"] = live - memory.alias_size_in_bytes
        report.add(
            name,
            shape | {"dtype": "bfloat16"},
            timing,
            tokens_per_second=rate,
            tflops_per_gpu=tflops,
            share_of_peak=tflops / PEAK_TFLOPS,
            **facts,
        )
        del training
    return report


def show(report: Report) -> None:
    """Print the steps, and the time of each group of kernels."""
    cells = [
        [
            row["variant"],
            f"{1e3 * row['seconds']['median']:.1f}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['tflops_per_gpu']:.0f}",
            f"{row['share_of_peak']:.0%}",
            f"{row['program_bytes'] / 1e9:.1f}",
            f"{row['most_loaded_rank']:.2f}",
            f"{row['compile_s']:.0f}",
        ]
        for row in report.rows
    ]
    columns = ["variant", "ms", "tokens/s", "TFLOP/s per GPU", "of peak", "GB", "most loaded rank", "compile s"]
    harness.show_table("training step", columns, cells)
    profiler.show_groups("ms of the first GPU per step", {row["variant"]: row for row in report.rows})


def options(prog: str | None = None) -> argparse.ArgumentParser:
    """Return the command line."""
    parser = harness.parser(__doc__, "train", prog=prog, rounds=5)
    add = parser.add_argument
    add("--model", choices=ARCHITECTURES, default=Default("qwen3-30b", "tiny"), help="default: %(default)s")
    add("--layers", type=layer_count, default=Default(4, 2), help="default: %(default)s")
    add("--tokens", type=int, default=Default(16384, 64), help="per GPU and step (default: %(default)s)")
    add("--length", type=int, default=Default(1024, 32), help="tokens of a text (default: %(default)s)")
    add(
        "--variants",
        nargs="+",
        choices=VARIANTS,
        default=["jax_ep", "xla", "padded"],
        help="default: jax_ep xla padded",
    )
    return parser


def main(arguments: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Measure, and print tables."""
    parser = options(prog)
    args = harness.start(parser, arguments)
    if args.tokens % args.length:
        parser.error(f"--tokens={args.tokens}: expected a multiple of --length={args.length}")
    report = measure_all(args)
    show(report)
