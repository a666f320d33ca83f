"""Generate text with a Hugging Face checkpoint of Qwen3-MoE, Mixtral or gpt-oss, with experts sharded over devices.

    python examples/serve_hf_moe.py FOLDER --prompt "The capital of France is" --prompt "def main("
    python examples/serve_hf_moe.py FOLDER --expert-parallel 4 --temperature 0.7 --top-p 0.9
    python examples/serve_hf_moe.py FOLDER --train 100 --text FILE    # fine-tunes all weights first, and saves them

FOLDER has config.json, model*.safetensors and tokenizer.json. To try it without a checkpoint, create a tiny model,
whose text is meaningless:

    python examples/hf/make_tiny_checkpoint.py qwen3_moe runs/tiny_qwen3_moe
"""

from __future__ import annotations

import argparse
import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax_ep.core.files import check_writable
from jax_ep.formats import FORMATS
from jax_ep.tools.command import Parser, count_or_zero, run
from lm.devices import make_mesh, prepare_cpu_devices

if TYPE_CHECKING:
    import jax
    from rich.console import Console
    from tokenizers import Tokenizer

    from hf.model import Decoder
    from lm.data import WindowIterator
    from lm.generation import Generated, Generator

EXPERTS = ("off", "same", *FORMATS)
PROMPTS = ["The capital of France is", "Once upon a time"]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("folder", type=Path, help="checkpoint in Hugging Face's format")
    add("--prompt", action="append", help="a text to continue; may be given several times")
    add("--max-new", type=int, default=64, help="tokens to generate after each prompt")
    add("--temperature", type=float, default=0.0, help="0 is greedy")
    add("--top-p", type=float, default=1.0, help="share of the probability that tokens are sampled from")
    add("--seed", type=count_or_zero, default=0)
    add("--experts", choices=EXPERTS, default="off", help="expert weights of the low-latency path in decoding")
    add("--dtype", choices=("bfloat16", "float32"), help="dtype of the computation; default: from config.json")
    add("--expert-parallel", type=int, help="devices that share the experts; default: all accelerators, or one CPU")
    add("--train", type=int, metavar="STEPS", help="fine-tune all weights on --text first")
    add("--text", type=Path, help="file to fine-tune on")
    add("--save", type=Path, help="folder for the fine-tuned checkpoint; default: FOLDER-trained")
    add("--learning-rate", type=float, default=1e-5)
    add("--batch-size", type=int, default=8, help="windows per step over all devices")
    add("--length", type=int, default=128, help="tokens per window")
    args = parser.parse_args(arguments)
    args.prompt = args.prompt or PROMPTS
    if (args.train is None) != (args.text is None):
        parser.error("--train and --text need each other")
    for file in [args.folder / "config.json", args.folder / "tokenizer.json", *([args.text] if args.text else [])]:
        if not file.is_file():
            parser.error(f"there is no {file}")
    args.save = args.save or Path(f"{args.folder.resolve()}-trained")
    if args.train and (args.save / "config.json").exists():
        parser.error(f"{args.save} has a checkpoint already: pass another folder with --save")
    if args.train:
        args.save.mkdir(parents=True, exist_ok=True)
        check_writable(args.save / "config.json")
    return args


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Train if requested, then generate; return losses, texts and speeds."""
    args = parse(arguments)
    prepare_cpu_devices(args.expert_parallel or 1)
    from rich.console import Console

    from lm.report import doing

    console = Console()
    with doing(console, "starting JAX"):
        import jax.numpy as jnp
        from flax import nnx

        from hf.config import stop_tokens
        from jax_ep.checkpoints import Checkpoint
        from jax_ep.flax import MoE
        from lm.generation import Generator, Sampling, check_lengths, serving_weights

        checkpoint = Checkpoint(args.folder)
        dtype = jnp.dtype(args.dtype or _dtype(checkpoint.config))
        options = checkpoint.moe_options()
        mesh = _mesh(options["num_experts"], args.expert_parallel)
        tokenizer = read_tokenizer(args.folder / "tokenizer.json")
        prompts = [tokenizer.encode(prompt).ids for prompt in args.prompt]
        check_lengths(prompts, args.max_new)
        Sampling.of(args.temperature, args.top_p)  # An error comes before the weights are read.
        if args.experts != "off":
            nnx.eval_shape(lambda: serving_weights(MoE(**options, mesh=mesh, rngs=nnx.Rngs(0)), args.experts))
        windows = read_windows(args, tokenizer, mesh) if args.train else None
    # Parameter updates are too small for bfloat16.
    decoder = load(console, checkpoint, mesh=mesh, dtype=dtype, param_dtype=jnp.float32 if args.train else dtype)
    checkpoint.close()
    result: dict[str, Any] = {}
    if windows is not None:
        result["losses"] = fine_tune(console, args, decoder, windows, mesh)
        with doing(console, f"writing {args.save}"):
            from hf.loading import save

            save(args.save, decoder, checkpoint.config, dtype=dtype)
            for file in ("tokenizer.json", "generation_config.json"):
                if (args.folder / file).is_file():
                    shutil.copy(args.folder / file, args.save)
    generator = Generator(decoder, mesh, stop_tokens=stop_tokens(args.folder), experts=args.experts)
    out = generate(console, args, generator, tokenizer, prompts)
    texts = [tokenizer.decode(tokens) for tokens in out.tokens]
    return result | {"texts": texts, "prefill_speed": out.prefill_speed, "decode_speed": out.decode_speed}


def read_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer.json."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # The package raises no subclass.
        raise ValueError(f"{path} is not a valid tokenizer ({error}): download it again") from error


def load(console: Console, checkpoint: Any, **options: Any) -> Decoder:
    """Read the checkpoint with a progress bar."""
    import jax
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    from hf.loading import load

    columns = [*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn()]
    # Refresh between layers only: while a layer is read, jax_ep shows its bytes on the same line.
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        task = progress.add_task("reading parameters")

        def advance(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total, refresh=True)

        decoder = load(checkpoint, advance=advance, **options)
    size = sum(leaf.size for leaf in jax.tree.leaves(decoder) if isinstance(leaf, jax.Array))
    devices = 1 if options["mesh"] is None else options["mesh"].size
    console.print(
        f"{checkpoint.config['model_type']}, {len(decoder.config.windows)} layers, {size:,} parameters on {devices}"
        f" {jax.devices()[0].device_kind} device(s), computing in {options['dtype']}",
        highlight=False,
    )
    return decoder


def read_windows(args: argparse.Namespace, tokenizer: Tokenizer, mesh: jax.sharding.Mesh | None) -> WindowIterator:
    """Read the text to fine-tune on."""
    import numpy as np

    from hf.training import windows_of

    tokens = np.array(tokenizer.encode(args.text.read_text()).ids, np.int32)
    return windows_of(tokens, batch_size=args.batch_size, length=args.length, mesh=mesh, seed=args.seed)


def fine_tune(
    console: Console,
    args: argparse.Namespace,
    decoder: Decoder,
    windows: WindowIterator,
    mesh: jax.sharding.Mesh | None,
) -> list[float]:
    """Train the weights of `decoder`; return the loss before each step. Numbers that are not finite are an error."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from hf.training import train
    from lm.report import TrainingBar

    losses = []
    with TrainingBar(console, total=args.train, done=0) as bar:
        for step in train(decoder, windows, steps=args.train, learning_rate=args.learning_rate, mesh=mesh):
            losses.append(step.loss)
            if not math.isfinite(step.loss):
                break
            bar.advance(step.loss, args.batch_size * args.length, step.load)
    weights = jax.tree.leaves(nnx.state(decoder, nnx.Param))
    if not (math.isfinite(losses[-1]) and all(jnp.isfinite(weight).all() for weight in weights)):
        raise ValueError(
            f"--train {args.train}: loss {losses[-1]} or weights after step {len(losses)} are not finite, so nothing"
            f" was saved; pass a --learning-rate below {args.learning_rate:g}."
        )
    console.print(f"loss {losses[0]:.3f} before the first step, {losses[-1]:.3f} before the last", highlight=False)
    return losses


def generate(
    console: Console, args: argparse.Namespace, generator: Generator, tokenizer: Tokenizer, prompts: list[list[int]]
) -> Generated:
    """Continue the prompts; show progress on a terminal."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from lm.report import doing

    options = {"max_new": args.max_new, "temperature": args.temperature, "top_p": args.top_p, "seed": args.seed}
    with doing(console, "compiling"):
        generator.compile(prompts, max_new=args.max_new)

    def texts(new: list[list[int]]) -> Group:
        pairs = zip(args.prompt, new, strict=True)
        return Group(*(Text.assemble((prompt, "bold"), tokenizer.decode(made), "\n") for prompt, made in pairs))

    with Live(console=console, auto_refresh=False, vertical_overflow="visible") as live:
        out = generator(prompts, show=lambda new: live.update(texts(new), refresh=True), **options)
    console.print(
        f"{len(prompts)} prompts: prefill {out.prefill_speed:,.0f} tokens/s, decode {out.decode_speed:,.0f} tokens/s",
        highlight=False,
    )
    return out


def _dtype(config: dict[str, Any]) -> str:
    """Return float32 if the checkpoint has that dtype, else bfloat16."""
    name = config.get("dtype") or config.get("torch_dtype")
    return "float32" if name == "float32" else "bfloat16"


def _mesh(num_experts: int, expert_parallel: int | None) -> jax.sharding.Mesh | None:
    """Create a mesh of the requested number of devices, or of all that can share the experts; None for one device."""
    import jax

    devices = expert_parallel or math.gcd(jax.device_count(), num_experts)
    if devices == 1:
        return None
    return make_mesh(max_devices=devices, num_experts=num_experts, expert_parallel=devices)


if __name__ == "__main__":
    run("serve_hf_moe.py", main)
