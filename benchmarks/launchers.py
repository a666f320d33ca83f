"""What a launch costs by the package's own custom call and by jax-triton: chains of small kernels on one GPU.

    python benchmarks/launchers.py [--kernels gather_rows grouped_gemm masked_grouped_gemm]

Writes results/launchers.json. Each call of a chain takes the result of the one before, and nothing else runs: the time
per launch is the difference of two chains over that of their lengths. Kernels this small end in a few microseconds.
What is above that, the launch has cost the host; with `"graphs": true` the calls are in CUDA graphs.

A launcher that does not work here has a row with the reason. `--quick` without GPUs runs the kernels in Triton's
interpreter, whichever launcher there is.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jax_ep
from jax_ep.megakernels import grouped_gemm, masked, rows
from lib import harness
from lib.harness import Report

LAUNCHERS = ("ffi", "jax-triton")
ROWS, GROUPS, WIDTH = 16, 4, 128
LENGTHS, QUICK_LENGTHS = (40, 200), (1, 3)
KERNELS = ("gather_rows", "grouped_gemm", "masked_grouped_gemm")
WITHOUT_GRAPHS = {"xla_gpu_enable_command_buffer": ""}
BF16 = jnp.bfloat16


class Chain(NamedTuple):
    """A kernel whose result can be its operand again: `step(x, *rest)` is like x."""

    step: Callable[..., Any]
    x: jax.Array
    rest: tuple[jax.Array, ...]


def make_chains() -> dict[str, Chain]:
    """The kernels by name."""
    x, sizes = jnp.ones((ROWS, WIDTH), BF16), jnp.full((GROUPS,), ROWS // GROUPS, jnp.int32)
    matrices = jnp.ones((GROUPS, WIDTH, WIDTH), BF16) / WIDTH
    product = partial(grouped_gemm.grouped_gemm, transpose_rhs=False, out_dtype=BF16)
    of_blocks = partial(masked.masked_grouped_gemm, out_dtype=BF16, expected_rows=None)
    blocks = jnp.ones((GROUPS, ROWS, WIDTH), BF16)
    return {
        "gather_rows": Chain(rows.gather_rows, x, (jnp.arange(ROWS, dtype=jnp.int32), sizes)),
        "grouped_gemm": Chain(product, x, (matrices, sizes)),
        "masked_grouped_gemm": Chain(lambda x, w, n: of_blocks(x, w, n, None, None), blocks, (matrices, sizes)),
    }


def use(launcher: str) -> None:
    """From here on kernels are launched so; what is compiled already stays as it is."""
    jax_ep.finalize()
    jax_ep.init(transport=None if jax.default_backend() == "gpu" else "shared_memory", launcher=launcher)


def make(launcher: str, chain: Chain, length: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """So many launches, each of the result of the one before."""
    use(launcher)

    def run(x: jax.Array, *rest: jax.Array) -> jax.Array:
        for _ in range(length):
            x = chain.step(x, *rest)
        return x

    return jax.jit(run), (chain.x, *chain.rest)


def measure(report: Report, kernel: str, chain: Chain, launchers: list[str], args: argparse.Namespace) -> None:
    """Times both launchers in turns, with and without CUDA graphs."""
    on_gpu = jax.default_backend() == "gpu"
    lengths = QUICK_LENGTHS if args.quick else LENGTHS
    for graphs in (False, True) if on_gpu else (False,):
        shape = {"kernel": kernel, "shape": list(chain.x.shape), "dtype": chain.x.dtype.name, "graphs": graphs}
        failures: dict[str, str] = {}
        times = harness.measure_chained(
            {launcher: partial(make, launcher, chain) for launcher in launchers},
            args.rounds,
            lengths=lengths,
            title=kernel,
            failures=failures,
            compiler_options=(harness.GRAPHS if graphs else WITHOUT_GRAPHS) if on_gpu else None,
        )
        for launcher, timing in times.items():
            report.add(launcher, shape, timing)
        for launcher, reason in failures.items():
            report.failed(launcher, shape, reason)
        cells = [[name, *timing.microseconds(1)] for name, timing in times.items()]
        cells += [[name, "failed", reason[:100]] for name, reason in failures.items()]
        title = f"{kernel} of {shape['shape']}{', in CUDA graphs' * graphs}"
        harness.show_table(title, ["launcher", "us per launch", "quartiles"], cells)


def working_launchers(report: Report) -> list[str]:
    """Those that work here; others get a row."""
    found = []
    for launcher in LAUNCHERS:
        try:
            use(launcher)
        except (ImportError, RuntimeError) as error:
            report.failed(launcher, {"dtype": jnp.dtype(BF16).name}, str(error))
            print(f"{launcher}: {error}")
        else:
            found.append(launcher)
    return found


def options() -> argparse.ArgumentParser:
    """The command line."""
    parser = harness.parser(__doc__ or "", rounds=15)
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS), help="default: all")
    return parser


def main() -> None:
    """Measures what the command line asks for and writes the report."""
    args = harness.parse(options())
    if not harness.can_measure("launchers", args, num_devices=1):
        return
    lengths = QUICK_LENGTHS if args.quick else LENGTHS
    settings = {"rounds": args.rounds, "quick": args.quick, "kernels": args.kernels, "chain_lengths": lengths}
    report = Report(f"launchers{args.suffix}", args.out, settings)
    launchers, chains = working_launchers(report), make_chains()
    for kernel in args.kernels:
        measure(report, kernel, chains[kernel], launchers, args)
    jax_ep.finalize()
    print(report.path)


if __name__ == "__main__":
    main()
