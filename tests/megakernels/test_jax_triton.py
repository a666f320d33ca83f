"""Every kernel through jax-triton, which compiles them also on machines without GPUs."""

import importlib
import re
import subprocess
import sys
import types
from functools import partial
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import partial_eval

import harness
import jax_ep
from cases import BF16, F32
from jax_ep import Schedule, context
from jax_ep.core import jax_triton
from jax_ep.core.kernel import Config, Descriptor, Kernel
from jax_ep.megakernels import grouped_gemm
from jax_ep.quantization import quantize

pytest.importorskip("triton")

Array = jax.ShapeDtypeStruct
FP8, I32 = np.dtype(jnp.float8_e4m3fn), np.dtype(np.int32)
T, K, E, H, INNER = 64, 4, 8, 256, 128
TRITON = {"implementation": "triton"}
# Kernels by name.
EXCHANGE = {"plan.plan", "dispatch.dispatch", "combine.combine"}
PRODUCTS = {"grouped_gemm.grouped_gemm", "grouped_gemm.weight_gradient"}
ACTIVATION = {"activation.weighted_activation", "activation.weighted_activation_gradient"}
SENDS = {"send_order.send_order_count", "send_order.send_order_place", "exchange_gemm.dispatch_gemm"}
QUANTIZE = "fp8_matrices.quantize_matrices"
FP8_ROWS = {"activation.activate_quantized", "grouped_gemm.grouped_gemm_fp8"}
FP8_COLUMNS = {"fp8_columns.quantize_columns", "fp8_columns.activate_columns", "grouped_gemm.weight_gradient_fp8"}
LOW_LATENCY = {"low_latency_dispatch.low_latency_dispatch", "masked.masked_gated_activation"}
MASKED = {"masked.masked_grouped_gemm"}
SUMS_AFTER = {"low_latency_combine.low_latency_combine"}
SUMS_IN_PRODUCT = {"low_latency_gemm_combine.low_latency_gemm_combine"}
LOW_LATENCY_LAYER = LOW_LATENCY | MASKED | SUMS_IN_PRODUCT

TOKENS = Array((T, H), BF16), Array((T, K), I32), Array((T, K), F32)


def layer(matrices=None, *, num_local=E // 2):
    """Return arguments of `moe` for one rank."""
    shapes = Array((num_local, H, 2 * INNER), BF16), Array((num_local, INNER, H), BF16)
    return *TOKENS, *(shapes if matrices is None else (jax.eval_shape(matrices, w) for w in shapes))


def gradient(fn, *wanted):
    return jax.grad(lambda *args: fn(*args).astype(F32).sum(), argnums=wanted)


def moe(**options):
    return partial(jax_ep.moe, num_experts=E, **TRITON, **options)


def low_latency(x, ids, weights, *matrices, **options):
    options |= {"num_experts": E, "max_tokens_per_rank": T}
    return jax_ep.low_latency_moe(x, ids, weights, *matrices, **options, **TRITON)


def low_latency_apart(x, ids, weights):
    arrived = jax_ep.low_latency_dispatch(x, ids, num_experts=E, max_tokens_per_rank=T, **TRITON)
    values = arrived.tokens[0] if isinstance(arrived.tokens, tuple) else arrived.tokens
    return jax_ep.low_latency_combine(values.astype(BF16), ids, weights, arrived.handle, **TRITON)


def quantized(expert_format, **options):
    return partial(quantize, format=expert_format, **options)


FUSED = Schedule(dispatch_mode="fused", combine_mode="scatter")
SERIAL = Schedule(dispatch_mode="serial", combine_mode="serial")

# name: (function of one rank, its arguments, kernels among those that it launches).
CASES = {
    "serial": (gradient(moe(schedule=SERIAL), 0, 2, 3, 4), layer(), EXCHANGE | PRODUCTS | ACTIVATION),
    "fused": (gradient(moe(schedule=FUSED), 0, 2, 3, 4), layer(), SENDS | {"exchange_gemm.gemm_combine"}),
    "very many experts": (
        lambda x, ids: jax_ep.dispatch(x, ids, num_experts=4096, **TRITON).tokens,
        TOKENS[:2],
        {"small_exchange.all_gather_i32", "dispatch.dispatch"},
    ),
    "FP8": (gradient(moe(recipe="fp8"), 0, 2, 3, 4), layer(), FP8_ROWS | FP8_COLUMNS | {QUANTIZE}),
    "FP8, biased": (
        gradient(lambda *args: moe(recipe="fp8")(*args[:-1], biases=(None, args[-1])), 5),
        (*layer(), Array((E // 2, H), BF16)),
        FP8_ROWS | {"rows.dequantize_rows"},
    ),
    "FP8 rows": (
        partial(jax_ep.grouped_gemm, **TRITON),
        (TOKENS[0], jax.eval_shape(quantized("fp8", activations="fp8"), layer()[3]), Array((E // 2,), I32)),
        {"rows.quantize_rows", "grouped_gemm.grouped_gemm_fp8"},
    ),
    "quantized": (moe(), layer(quantized("int8")), {"quantized_gemm.quantized_grouped_gemm"}),
    "low latency": (low_latency, layer(), LOW_LATENCY_LAYER),
    "low latency, FP8": (low_latency, layer(quantized("fp8", activations="fp8")), LOW_LATENCY_LAYER),
    "low latency, quantized": (
        low_latency,
        layer(quantized("mxfp4")),
        LOW_LATENCY | SUMS_IN_PRODUCT | {"quantized_gemm.quantized_masked_grouped_gemm"},
    ),
    "low latency, apart": (low_latency_apart, TOKENS, SUMS_AFTER),
    "one launch": (
        partial(jax_ep.fused_moe, schedule=Schedule(single_launch=True), **TRITON),
        layer(num_local=E),
        {"fused_moe.fused_moe", "moe_sort.moe_sort"},
    ),
}


def named(kernel):
    return f"{kernel.path.stem}.{kernel.name}"


@pytest.fixture
def mesh(kept_context):
    """Two ranks whose kernels are launched through jax-triton."""
    return kept_context(harness.make_mesh((2,), (harness.EXPERT,)), launcher="jax-triton")


@pytest.fixture
def launched(mesh, monkeypatch):
    """Record kernels that are launched through jax-triton from now on."""
    found = set()

    def record(kernel, *arguments, **options):
        found.add(named(kernel))
        return launch(kernel, *arguments, **options)

    launch = jax_triton.launch_kernel
    monkeypatch.setattr(jax_triton, "launch_kernel", record)
    jax.clear_caches()  # Traces of other tests.
    return found


@pytest.fixture
def compiled(mesh, monkeypatch):
    """Record the PTX of kernels that jax-triton compiles from now on; it caches those of earlier tests."""
    library = sys.modules["jax_triton.triton_lib"].triton_kernel_call_lib
    make, found = library.TritonKernel, list[str]()

    def record(name, num_warps, num_ctas, shared, ptx, *rest):
        found.append(ptx)
        return make(name, num_warps, num_ctas, shared, ptx, *rest)

    monkeypatch.setattr(library, "TritonKernel", record)
    return found


def assemble(ptx, folder):
    """Return the assembler's report."""
    import triton

    source = folder / "kernel.ptx"
    source.write_text(ptx)
    command = [triton.knobs.nvidia.ptxas.path, "-v", "-arch=sm_90a", source, "-o", folder / "kernel.cubin"]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True).stdout


def lower(fn, mesh, arguments):
    """Lower a per-rank function for CUDA devices."""
    stacked = jax.tree.map(lambda x: Array((mesh.size, *x.shape), x.dtype), arguments)
    return jax.jit(harness.per_rank(fn, mesh)).trace(*stacked).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("name", CASES)
def test_jax_triton_kernels(name, mesh, launched, compiled, on_h200, tmp_path):
    fn, arguments, kernels = CASES[name]
    text = lower(fn, mesh, arguments).as_text()
    assert "@triton_kernel_call_ffi" in text and "@jax_ep_launch_kernel" not in text
    assert kernels <= launched
    for ptx in compiled:
        assert ".version 8.8" in ptx and ".target sm_90a" in ptx
        report = assemble(ptx, tmp_path)
        assert re.findall(r"(\d+) bytes spill stores", report) == ["0"], report


def test_jax_triton_in_place_counters(mesh, launched, on_h200):
    """XLA must know about in-place updates: the initial zeros may be a constant."""
    fn, arguments, _ = CASES["one launch"]
    calls = [line for line in lower(fn, mesh, arguments).as_text().splitlines() if "@triton_kernel_call_ffi" in line]
    assert ["output_operand_aliases = [#" in line for line in calls].count(True) == 1


def test_jax_triton_transformations(mesh, launched, on_h200):
    """Layers in a scan, each recomputed in the backward pass, and a launch per element of a batch."""
    x, ids, weights, w_gate_up, w_down = layer()

    def layers(x, ids, weights, *matrices):
        body = jax.checkpoint(lambda x, w: (moe(schedule=SERIAL)(x, ids, weights, *w), None))
        return jax.lax.scan(body, x, matrices)[0]

    stacks = [Array((3, *w.shape), w.dtype) for w in (w_gate_up, w_down)]
    text = lower(gradient(layers, 0, 3, 4), mesh, (x, ids, weights, *stacks)).as_text()
    assert text.count("@triton_kernel_call_ffi") > len(EXCHANGE | PRODUCTS | ACTIVATION)
    rows = Array((3, T, H), BF16), Array((3, 4, H, INNER), BF16), Array((3, 4), I32)
    fn = partial(grouped_gemm.grouped_gemm, transpose=False, out_dtype=BF16)
    text = jax.jit(jax.vmap(fn)).trace(*rows).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@triton_kernel_call_ffi") == 1 and "stablehlo.while" in text


def test_jax_triton_on_cpu_uses_interpreter(mesh, rng):
    lhs, rhs = rng.standard_normal((24, 16)).astype(BF16), rng.standard_normal((2, 16, 8)).astype(BF16)
    sizes = np.array([10, 14], np.int32)
    got = np.asarray(jax_ep.grouped_gemm(lhs, rhs, sizes, **TRITON), np.float64)
    exact = lhs.astype(np.float64), rhs.astype(np.float64)
    want = np.concatenate([exact[0][:10] @ exact[1][0], exact[0][10:] @ exact[1][1]])
    np.testing.assert_allclose(got, want, rtol=2e-2, atol=2e-2)


def use_of_one_result(x):
    """Call jax-triton in two jitted functions: one uses one of two results, the other uses none."""

    def call(x):
        options = {"grid": (1,), "compute_capability": 90, "backend_options": jax_triton._compiler_options(Config(1))}
        return package.triton_call(x, x, kernel=kernel, out_type=(x, x), **options)

    package = jax_triton.load()
    kernel = jax_triton._compilable("two", "def two(a, b, c, d):\n    tl.store(c, tl.load(a) + tl.load(b))\n", {})
    return jax.jit(lambda x: (call(x)[1], call(x))[0])(x)


@pytest.fixture
def rules():
    """JAX's dead-code rules, which the test may change."""
    rules = partial_eval.dce_rules
    saved = dict(rules)
    yield rules
    rules.clear()
    rules.update(saved)


def primitive():
    return importlib.import_module("jax_triton.triton_lib").triton_kernel_call_p


def test_jax_triton_dce_rule_adapted(rules):
    """Dead-code elimination runs in jitted functions, in the bodies of scans, and with a Ref."""

    def loss(x):
        ref = jax.new_ref(x)
        carried, _ = jax.lax.scan(lambda c, _: (use_of_one_result(c), None), x, None, length=2)
        ref[...] = carried
        return jax.lax.cond(x[0] > 0, use_of_one_result, lambda x: x, ref[...])

    text = jax.jit(loss).trace(Array((1,), F32)).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@triton_kernel_call_ffi") >= 2
    rules[primitive()] = lambda used, live, eqn: ([True] * len(eqn.invars), eqn)
    rules[primitive()].__module__ = "jax_triton.triton_lib"
    fixed = rules[primitive()]
    jax_triton.load()
    assert rules[primitive()] is fixed, "a jax-triton that takes three arguments is left alone"


def test_launcher_unknown(no_context):
    with pytest.raises(ValueError, match=r"launcher='pallas', expected one of \('ffi', 'jax-triton'\)"):
        jax_ep.init(launcher="pallas")
    assert context.transport() is None, "a context was made"


def test_jax_triton_missing(no_context, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    with pytest.raises(ImportError, match=r"pip install '\.\[jax-triton\]', or leave launcher out"):
        jax_ep.init(launcher="jax-triton")
    assert context.transport() is None and context.launcher() == "ffi"


RULE, DISK = TypeError("its rule takes 2 positional arguments but 3 were given"), OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("failure", "error", "text"),
    [
        (RULE, RuntimeError, r"jax-triton 0\.0 with jax .* fails in TypeError: its rule takes 2"),
        (DISK, OSError, r"launcher='jax-triton' does not work here: .*No space left.*; set TMPDIR and"),
    ],
)
def test_jax_triton_fails(failure, error, text, no_context, monkeypatch):
    package = types.ModuleType("jax_triton")
    package.triton_call, package.__version__ = Mock(side_effect=failure), "0.0"
    monkeypatch.setitem(sys.modules, "jax_triton", package)
    with pytest.raises(error, match=text):
        jax_ep.init(launcher="jax-triton")
    assert context.transport() is None and context.launcher() == "ffi"


def test_jax_triton_result_descriptors_unsupported():
    result = Descriptor(Array((64, 64), BF16), (16, 16))
    with pytest.raises(NotImplementedError, match=r"copy: .*jax-triton supports descriptors of operands only"):
        jax_triton.launch_kernel(
            Kernel(types.SimpleNamespace(__name__="copy")), (), (result,), Config(1), {}, capability=90
        )


def test_launcher_change_drops_traces(no_context, monkeypatch):
    """Jitted functions contain launches and must not outlive the choice."""
    monkeypatch.setattr(jax_triton, "check", lambda: None)
    seen = []
    fn = jax.jit(lambda x: (seen.append(context.launcher()), x + 1)[1])
    for launcher in (None, "jax-triton", "jax-triton", None):
        jax_ep.finalize()
        jax_ep.init(transport="xla", launcher=launcher)
        fn(1)
    assert seen == ["ffi", "jax-triton", "jax-triton", "ffi"]
