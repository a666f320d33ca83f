"""Generates text from a checkpoint of train_moe_flax.py: jit-compiled prefill, and a decode scan over a KV cache.

python examples/serve_moe.py
python examples/serve_moe.py --prompt "class Queue:" --prompt "import " --temperature 0.8 --max-new 300
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from lm.devices import make_mesh, prepare_cpu_devices

CPU_DEVICES = 8
PROMPTS = [
    "def __init__(self",
    "import os\nimport ",
    "class Error(",
    "    for i in range(",
    "    return ",
    "if __name__",
]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/moe_lm"), help="folder that the training wrote to")
    add("--prompt", action="append", help="a text to continue; may be given several times")
    add("--max-new", type=int, default=128, help="bytes to generate after each prompt")
    add("--temperature", type=float, help="default: once greedy (0), once at 0.7")
    add("--seed", type=int, default=0)
    add("--devices", type=int, help=f"devices to use; default: all accelerators, or {CPU_DEVICES} virtual CPU devices")
    add("--expert-parallel", type=int, help="devices on the expert axis; it may differ from the training's")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Generates with every temperature asked for; returns texts and speeds."""
    args = parse(arguments)
    prepare_cpu_devices(args.devices or CPU_DEVICES)
    from lm.checkpoints import Checkpoints
    from lm.generation import Generator
    from rich.console import Console

    if not (args.out / "checkpoints").is_dir():
        raise SystemExit(f"no checkpoints in {args.out}: run train_moe_flax.py first, or pass its --out")
    console, checkpoints = Console(), Checkpoints(args.out / "checkpoints")
    config = checkpoints.model_config()
    mesh = make_mesh(max_devices=args.devices, num_experts=config.experts, expert_parallel=args.expert_parallel)
    generator = Generator(checkpoints.restore_model(config, mesh), mesh)
    console.print(f"step {checkpoints.latest_step()}, {config.layers} layers, mesh {dict(mesh.shape)}")
    checkpoints.close()

    prompts = [text.encode() for text in args.prompt or PROMPTS]
    results = []
    for temperature in [0.0, 0.7] if args.temperature is None else [args.temperature]:
        out = generator(prompts, max_new=args.max_new, temperature=temperature, seed=args.seed)
        for prompt, text in zip(prompts, out.texts, strict=True):
            console.rule(f"temperature {temperature}", align="left")
            console.print((prompt + text).decode("utf-8", "replace").rstrip(), markup=False, highlight=False)
        per_step = out.decode_seconds / args.max_new
        speed = len(prompts) / per_step
        console.rule()
        console.print(
            f"{len(prompts)} prompts: prefill {1e3 * out.prefill_seconds:.1f} ms, decode {1e3 * per_step:.2f} ms/step,"
            f" {speed:,.0f} tokens/s"
        )
        results.append({"temperature": temperature, "texts": out.texts, "tokens_per_second": speed})
    return results


if __name__ == "__main__":
    main()
