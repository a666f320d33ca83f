"""Generate text from a checkpoint of train_moe_flax.py: jit-compiled prefill, and steps over a KV cache.

python examples/serve_moe.py
python examples/serve_moe.py --prompt "class Queue:" --prompt "import " --temperature 0.8 --max-new 300
python examples/serve_moe.py --experts same

With at most jax_ep.serving.LOW_LATENCY_TOKENS tokens per device, as in decoding, the expert layers use the low-latency
path, by default in FP8. A step is one program, with dispatch, GEMM, activation, GEMM and combine of each layer. The
greedy output is compared with that of the throughput path. In the same dtype they agree up to rounding; FP8 changes the
logits by a few percent of their spread, which the example prints.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from jax_ep.tools.command import run
from lm.command_line import CPU_DEVICES, make_parser
from lm.devices import make_mesh, prepare_cpu_devices

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console

    from lm.generation import Agreement

PROMPTS = [
    "def __init__(self",
    "import os\nimport ",
    "class Error(",
    "    for i in range(",
    "    return ",
    "if __name__",
]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    differs = "it may differ from that of the training"
    parser = make_parser(__doc__, out="folder that the training wrote to", expert_parallel=differs)
    add = parser.add_argument
    add("--prompt", action="append", help="a text to continue; may be given several times")
    add("--max-new", type=int, default=128, help="bytes to generate after each prompt")
    add("--temperature", type=float, action="append", help="default: 0.7; 0 is greedy; may be given several times")
    add(
        "--experts",
        choices=("auto", "fp8", "same", "off"),
        default="auto",
        help="expert weights of the low-latency path; auto: fp8 if the hidden size is a multiple of 128, else same",
    )
    add("--no-check", action="store_true", help="do not compare with the throughput path")
    args = parser.parse_args(arguments)
    args.prompt = args.prompt or PROMPTS
    if not all(args.prompt):
        parser.error("argument --prompt: '', expected at least one character")
    return args


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Generate with every requested temperature; return texts and speeds."""
    args = parse(arguments)
    prepare_cpu_devices(args.devices or CPU_DEVICES)
    if not (args.out / "checkpoints").is_dir():
        raise SystemExit(f"no checkpoints in {args.out}: run train_moe_flax.py first, or pass its --out")
    from rich.console import Console

    from lm.report import doing

    console = Console()
    with doing(console, "starting JAX and reading the checkpoint"):
        from lm.checkpoints import Checkpoints
        from lm.generation import Generator, compare

        checkpoints = Checkpoints(args.out / "checkpoints")
        config = dataclasses.replace(checkpoints.model_config(), balance_rows=0)  # few tokens: copies do not pay
        mesh = make_mesh(max_devices=args.devices, num_experts=config.experts, expert_parallel=args.expert_parallel)
        experts = args.experts
        if experts == "auto":
            experts = "fp8" if config.hidden % 128 == 0 else "same"
        model = checkpoints.restore_model(config, mesh)
        generator = Generator(model, mesh, experts=experts)
    console.print(
        f"step {checkpoints.latest_step()}, {config.layers} layers, mesh {dict(mesh.shape)}, experts: {experts}",
        highlight=False,
    )
    checkpoints.close()

    prompts = [text.encode() for text in args.prompt]
    results = []
    for temperature in args.temperature or [0.7]:
        what = "generating" if results else "compiling prefill and decoding, and generating"
        with doing(console, what):
            out = generator(prompts, max_new=args.max_new, temperature=temperature, seed=args.seed)
        texts = [bytes(text) for text in out.tokens]
        for prompt, text in zip(prompts, texts, strict=True):
            console.rule(f"temperature {temperature}", align="left")
            console.print((prompt + text).decode("utf-8", "replace").rstrip(), markup=False, highlight=False)
        console.rule()
        console.print(
            f"{len(prompts)} prompts: prefill {1e3 * out.prefill_seconds:.1f} ms,"
            f" decode {out.decode_speed:,.0f} tokens/s",
            highlight=False,
        )
        results.append({"temperature": temperature, "texts": texts, "tokens_per_second": out.decode_speed})
    with doing(console, "measuring steps alone"):
        latency = generator.step_seconds(prompts, steps=min(args.max_new, 64))
    results[0]["latency_ms"] = show_latency(console, latency)
    if experts != "off" and not args.no_check:
        with doing(console, "comparing with the throughput path"):
            found = compare(Generator(model, mesh), generator, prompts, max_new=min(args.max_new, 32))
        results[0]["agreement"] = show_agreement(console, found)
    return results


def show_latency(console: Console, seconds: np.ndarray) -> list[float]:
    """Show percentiles of the milliseconds per step with a wait after each."""
    import numpy as np

    percentiles = (50, 90, 99)
    times = np.percentile(1e3 * seconds, percentiles).tolist()
    shown = ", ".join(f"p{p} {t:.2f} ms" for p, t in zip(percentiles, times, strict=True))
    console.print(f"single steps: {shown}", highlight=False)
    return times


def show_agreement(console: Console, found: Agreement) -> Agreement:
    """Show how the greedy output compares with that of the throughput path."""
    console.print(
        f"compared with the throughput path: {100 * found.same_tokens:.1f} % of the greedy bytes are the same, the"
        f" texts {'are equal' if found.same_texts else 'differ'}; logits with root mean square {found.logit_scale:.3g}"
        f" differ by {found.logit_error:.3g}, at most {found.largest_error:.3g}",
        highlight=False,
    )
    return found


if __name__ == "__main__":
    run("serve_moe.py", main)
