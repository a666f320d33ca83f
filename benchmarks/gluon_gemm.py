"""Probe: FP8 grouped GEMM in Gluon, compared with `jax_ep.grouped_gemm` (`pallas`) and PyTorch on one Hopper GPU.

    python benchmarks/gluon_gemm.py --out FOLDER

Triton launches the kernel of `gluon/` on PyTorch's arrays. Each variant is checked first, on poisoned
outputs, against float32 sums of the same products. Then all variants run in turns under a steady load, because the
power limit decides the clock; the report has the clock and the power in the middle of each sample.

PyTorch multiplies the same operands with one scale per row, which needs no promotion; `pallas` quantizes them
by blocks. The time of `pallas` includes the kernel that lists its tiles.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.path.insert(0, str(Path(__file__).parent / "gluon"))

import fp8_kernel
import jax
import jax.numpy as jnp
import numpy as np
import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

import jax_ep
from jax_ep.quantization import quantize, quantize_fp8
from jax_ep.tools import command

SHAPES = ((32768, 64, 7168, 4096), (32768, 64, 2048, 7168))  # rows, groups, K, N
ROUTINGS = ("equal", "multinomial", "zipf")
VARIANTS = {
    "gluon": {"STAGES": 4, "BAND": 4, "DYNAMIC": True},
    "gluon, bands of 16": {"STAGES": 4, "BAND": 16, "DYNAMIC": True},
    "gluon, static tiles": {"STAGES": 4, "BAND": 4, "DYNAMIC": False},
}
FLOPS_PER_CLOCK = 8192  # of one multiprocessor
WARMUP_S, SAMPLE_S = 0.6, 0.4  # the power limit settles within some tenths of a second
TILES = {bits: gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=2) for bits in (8, 16)}


def described(array: torch.Tensor, block: tuple[int, int]) -> TensorDescriptor:
    """Return a TMA descriptor of a matrix."""
    layout = TILES[8 * array.itemsize]
    return TensorDescriptor(array, list(array.shape), [array.shape[1], 1], list(block), layout)


class Fp8:
    """FP8 operands on the GPU: `a [M, K]`, `b [G, N, K]`, and scales per 1x128 and 128x128 block."""

    def __init__(self, rows: int, groups: int, k: int, n: int) -> None:
        a = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
        b = torch.randn(groups, n, k, device="cuda", dtype=torch.bfloat16) * k**-0.5
        self.a, self.b = a.to(torch.float8_e4m3fn), b.mul(64).to(torch.float8_e4m3fn)
        padded = torch.rand(k // 128 * rows + 128, device="cuda") + 0.5  # tiles read scales past the last row
        self.a_scales = padded[:-128].view(k // 128, rows)
        self.b_scales = torch.rand(groups, n // 128, k // 128, device="cuda") + 0.5
        self.out = torch.empty(rows, n, device="cuda", dtype=torch.bfloat16)
        in_fp8 = partial(quantize, format="fp8", activations="fp8")
        self.for_jax = (
            *jax.jit(quantize_fp8)(jnp.from_dlpack(a)),
            jax.jit(in_fp8)(jnp.from_dlpack(b.transpose(1, 2).contiguous())),
        )

    def gluon(self, sizes: torch.Tensor, queue: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
        """Return the kernel and its arguments."""
        (m, k), (groups, n, _) = self.a.shape, self.b.shape
        descriptors = described(self.a, (128, 128)), described(self.b.view(groups * n, k), (256, 128))
        arrays = described(self.out, (64, 128)), sizes, self.a_scales, self.b_scales, self.out, queue
        return fp8_kernel.grouped_gemm_fp8, (*descriptors, *arrays, groups, m, n, k)

    def torch(self, offsets: torch.Tensor) -> Callable[[], Any]:
        """Return PyTorch's grouped product of the same operands, with one scale per row and column."""
        ones = torch.ones(self.a.shape[0], device="cuda"), torch.ones(self.b.shape[:2], device="cuda")
        keywords = {"offs": offsets, "out_dtype": torch.bfloat16, "use_fast_accum": True}
        return lambda: torch._scaled_grouped_mm(self.a, self.b.transpose(1, 2), *ones, **keywords)

    def pallas(self, sizes: jax.Array) -> Callable[[], Any]:
        """Return `jax_ep.grouped_gemm` of the same matrices."""
        run = jax.jit(lambda q, qs, w, s: jax_ep.grouped_gemm(q, w, s, lhs_scales=qs))
        return partial(run, *self.for_jax, sizes)

    def exact(self, rows: torch.Tensor, group: int) -> torch.Tensor:
        """Return rows of the result, in float32."""
        want = torch.zeros(len(rows), self.b.shape[1], device="cuda")
        for k in range(self.a.shape[1] // 128):
            part = slice(128 * k, 128 * k + 128)
            product = self.a[rows, part].float() @ self.b[group, :, part].float().t()
            scales = self.b_scales[group, :, k].repeat_interleave(128)
            want += product * self.a_scales[k, rows][:, None] * scales[None]
        return want


def group_sizes(routing: str, groups: int, rows: int, seed: int = 1) -> np.ndarray:
    """Rows of each group, int32, which add up to `rows`."""
    rng = np.random.default_rng(seed)
    if routing == "equal":
        return np.full(groups, rows // groups, np.int32)
    weights = np.ones(groups) if routing == "multinomial" else rng.permutation(1 / np.arange(1, groups + 1))
    return rng.multinomial(rows, weights / weights.sum()).astype(np.int32)


def gluon_call(operands: Fp8, sizes: np.ndarray, variant: dict[str, Any]) -> Callable[[], Any]:
    """Return a launch of the kernel that writes `operands.out`."""
    queue = torch.zeros(2, dtype=torch.int32, device="cuda")
    kernel, arguments = operands.gluon(torch.from_numpy(np.append(sizes, np.int32(0))).cuda(), queue)
    launch = kernel[(torch.cuda.get_device_properties(0).multi_processor_count,)]
    return lambda: launch(*arguments, GROUPS=triton.next_power_of_2(len(sizes)), **variant, num_warps=4)


def error_of(operands: Fp8, sizes: np.ndarray) -> float:
    """Return the largest relative error of a group's first and last rows; every element must have been written."""
    assert not torch.isnan(operands.out).any(), "elements were not written"
    worst, first = 0.0, 0
    for group, size in enumerate(map(int, sizes)):
        rows = torch.arange(first, first + size, device="cuda")
        rows = torch.cat([rows[:40], rows[-40:]]).unique()
        if size:
            want = operands.exact(rows, group)
            worst = max(worst, ((operands.out[rows].float() - want).norm() / want.norm()).item())
        first += size
    return worst


def clock_and_power() -> tuple[float, float]:
    """Return the SM clock in MHz and the power in W, now."""
    query = ["nvidia-smi", "-i", "0", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
    clock, power = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split(",")
    return float(clock), float(power)


def sample(call: Callable[[], Any], wait: Callable[[Any], Any]) -> dict[str, float]:
    """Return seconds per call under a steady load, and the SM clock and power in the middle of it."""
    start, calls = time.perf_counter(), 0
    while time.perf_counter() - start < WARMUP_S:
        wait([call() for _ in range(4)])
        calls += 4
    repeats = max(4, round(calls * SAMPLE_S / WARMUP_S))
    start = time.perf_counter()
    for _ in range(repeats):
        last = call()
    clock, power = clock_and_power()
    wait(last)
    return {"seconds": (time.perf_counter() - start) / repeats, "clock_mhz": clock, "power_w": power}


def measure(operands: Fp8, routing: str, rounds: int) -> dict[str, Any]:
    """Check, then time all variants on groups of one routing; return the case of the report."""
    (rows, k), n, groups = operands.a.shape, operands.out.shape[1], operands.b.shape[0]
    sizes = group_sizes(routing, groups, rows)
    on_gpu = partial(sample, wait=lambda _: torch.cuda.synchronize())
    calls, errors = {}, {}
    for name, variant in VARIANTS.items():
        call = gluon_call(operands, sizes, variant)
        operands.out.fill_(float("nan"))
        call()
        torch.cuda.synchronize()
        errors[name] = error_of(operands, sizes)
        assert errors[name] < 4e-3, f"{name}: relative error {errors[name]}"  # bfloat16 rounds by 2**-9
        calls[name] = partial(on_gpu, call)
    calls["torch"] = partial(on_gpu, operands.torch(torch.from_numpy(np.cumsum(sizes, dtype=np.int32)).cuda()))
    pallas = operands.pallas(jnp.asarray(sizes))
    jax.block_until_ready(pallas())  # compile
    calls["pallas"] = partial(sample, pallas, wait=jax.block_until_ready)
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in calls}
    for number in range(rounds):
        for name in list(calls)[:: -1 if number % 2 else 1]:  # so that each follows another variant
            samples[name].append(calls[name]())
    print(f"--- {rows} x {k} x {n}, {groups} groups, {routing}")
    case = {"rows": rows, "groups": groups, "K": k, "N": n, "routing": routing, "errors": errors, "variants": {}}
    for name, some in samples.items():
        seconds, clock, power = (np.median([one[x] for one in some]) for x in ("seconds", "clock_mhz", "power_w"))
        flops = 2 * rows * k * n / seconds
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        share = flops / (processors * FLOPS_PER_CLOCK * clock * 1e6)
        case["variants"][name] = {"samples": some, "tflops": flops / 1e12, "share_at_clock": share}
        facts = f"{seconds * 1e6:6.0f} us {flops / 1e12:5.0f} TFLOP/s {clock:5.0f} MHz {power:4.0f} W {share:.2f}"
        print(f"{name:24s} {facts}", flush=True)
    return case


def main() -> None:
    parser = command.Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"), help="folder of gluon_gemm.json")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    report = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "jax": jax.__version__},
        "cases": [],
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    for shape in SHAPES:
        operands = Fp8(*shape)
        for routing in ROUTINGS:
            report["cases"].append(measure(operands, routing, arguments.rounds))
            (arguments.out / "gluon_gemm.json").write_text(json.dumps(report, indent=1) + "\n")
        del operands


if __name__ == "__main__":
    command.run("gluon_gemm.py", main)
