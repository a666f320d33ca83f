"""Launches for GPUs, without a GPU: kernels become machine code, and calls that contain it."""

import dataclasses
import functools
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ep import tuning
from jax_ep.core.kernel import Config, Descriptor, Kernel
from jax_ep.core.structs import regrouped, type_of
from jax_ep.megakernels import compile, grouped_gemm, pending, quantized_gemm
from jax_ep.megakernels import launch as launching
from jax_ep.megakernels.compile import Parameter
from jax_ep.megakernels.kernels import grouped_gemm as grouped_gemm_kernels
from jax_ep.megakernels.kernels import masked as masked_kernels
from jax_ep.megakernels.kernels import rows as rows_kernels
from jax_ep.megakernels.kernels import small_exchange as small_exchange_kernels
from jax_ep.megakernels.kernels.exchange_structs import Heap, Peers, SmallExchange
from jax_ep.megakernels.kernels.gemm_structs import MaskedGemm, MaskedTile, RowPass, WeightGradient, WeightGradientTile
from jax_ep.megakernels.launch import launch
from jax_ep.quantization import quantize, with_layout

triton = pytest.importorskip("triton")

BF16, I32 = np.dtype(jnp.bfloat16), np.dtype(np.int32)
GATHER = Kernel(rows_kernels.gather_rows)
GATHER_SIZES = {"S": RowPass(num_rows=32, width=128, num_groups=4, padded_groups=16, block_rows=16, block_columns=128)}
GRADIENT = Kernel(grouped_gemm_kernels.weight_gradient)
GRADIENT_TILE = WeightGradientTile(64, 64, 64, 8)
GRADIENT_SIZES = {"S": WeightGradient(256, 128, 192, 4, 16, store_parts=1, tma_store=True, tile=GRADIENT_TILE)}
Array = jax.ShapeDtypeStruct


@pytest.fixture
def on_hopper(monkeypatch):
    monkeypatch.setattr(compile, "device_capability", lambda: 90)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


def test_compilation_parameter_types():
    assert Parameter(BF16).type_name == "*bf16"
    assert Parameter(np.dtype(jnp.float8_e4m3fn), (1, 64)).type_name == "tensordesc<fp8e4nv[1, 64]>"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of Triton's own kernel
@pytest.mark.parametrize(("pattern", "damaged"), [("gather_rows.json", b'{"hash": '), ("__grp__*", b"3")])
def test_compilation_damaged_cache(monkeypatch, tmp_path, pattern, damaged):
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    parameters = tuple(Parameter(dtype) for dtype in (BF16, I32, I32, BF16))

    def make():
        monkeypatch.setattr(compile, "_begun", {})
        return compile.compile_kernel(GATHER, parameters, Config(8), GATHER_SIZES, 90).result()

    assert make() is not None
    next(tmp_path.rglob(pattern)).write_bytes(damaged)
    with pytest.raises(RuntimeError, match=f"^gather_rows: .* delete the folder {tmp_path} and try again"):
        make()


def test_compilation_cached(on_hopper):
    parameters = tuple(Parameter(dtype) for dtype in (BF16, I32, I32, BF16))
    make = functools.partial(compile.compile_kernel, GATHER, parameters, constants=GATHER_SIZES, capability=90)
    compiled = make(config=Config(8, num_warps=4)).result()
    assert compiled.name == "gather_rows" and compiled.code[:4] == b"\x7fELF" and compiled.copies == ()
    assert make(config=Config(9, num_warps=4)).result() is compiled, (
        "the number of programs is no option of the compiler"
    )
    assert make(config=Config(8, num_warps=8)).result().code != compiled.code


def test_compilation_without_source_lines(on_hopper):
    """The code is part of every call."""
    parameters = tuple(Parameter(dtype) for dtype in (BF16, I32, I32, BF16))
    code = compile.compile_kernel(GATHER, parameters, Config(1), GATHER_SIZES, 90).result().code
    assert b".debug_line" not in code and b"debug_ptx_txt" not in code


def test_compilation_unsupported_dtype():
    with pytest.raises(TypeError, match=r"arrays of complex64, expected one of .*bfloat16"):
        _ = Parameter(np.dtype(np.complex64)).type_name


def lowered(kernel, operands, results, config, constants, *shapes):
    """Return the StableHLO of a launch for CUDA devices."""
    run = lambda *arrays: launch(kernel, operands(*arrays), results, config, constants)  # noqa: E731
    return jax.jit(run).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


def parameters_of(text):
    return [int(number) for number in text.split("parameters = dense<[")[1].split("]>")[0].split(",")]


def test_launch_attributes(on_hopper):
    shapes = Array((64, 128), BF16), Array((32,), I32), Array((4,), I32)
    results, config = (Array((32, 128), BF16),), Config(7, num_warps=4)
    text = lowered(GATHER, lambda *arrays: arrays, results, config, GATHER_SIZES, *shapes)
    assert "@jax_ep_launch_kernel" in text and r"\7FELF" in text
    for attribute in ("num_programs = 7 ", "num_threads = 128 ", "alignment = 16 ", 'name = "gather_rows"'):
        assert attribute in text
    assert "parameters = dense<0> : tensor<4xi64>" in text, "four addresses"


def test_launch_descriptors(on_hopper):
    """Rank, element type, bytes, swizzle; sizes, strides, box: for two bounded operands, a pointer, and the result."""
    shapes = Array((256, 192), BF16), Array((256, 128), BF16), Array((4,), I32)
    describe = lambda a, b, sizes: (Descriptor(a, (64, 64), bounded=True), Descriptor(b, (64, 64), bounded=True), sizes)  # noqa: E731
    results = (Descriptor(Array((4, 192, 128), BF16), (1, 64, 64)),)
    text = lowered(GRADIENT, describe, results, Config(7, num_warps=4), GRADIENT_SIZES, *shapes)
    far, bound = 0x7FFF0000, 1 << 30
    kind = [9, 2, 3]  # bfloat16, two bytes, 128 bytes swizzled.
    lhs = [4, *kind, far, far, bound, 192, (1 << 34) - 192, 192, 192, 1, 1, 1, 64, 64]
    rhs = [4, *kind, far, far, bound, 128, (1 << 34) - 128, 128, 128, 1, 1, 1, 64, 64]
    assert parameters_of(text) == [*lhs, *rhs, 0, 3, *kind, 4, 192, 128, 192 * 128, 128, 1, 1, 64, 64]


def test_launch_gluon(on_hopper, monkeypatch):
    """All warps are launched, the counter is written in place, and stores end where the kernel says."""
    monkeypatch.setattr(grouped_gemm, "num_programs", lambda *_: 132)
    fp8, f32 = np.dtype(jnp.float8_e4m3fn), np.dtype(np.float32)
    pairs = (Array((300, 384), fp8), Array((300, 3), f32)), (Array((4, 515, 384), fp8), Array((4, 5, 3), f32))
    settings = dataclasses.asdict(grouped_gemm.Fp8Tiles(gluon=True))

    def run(*operands):
        with tuning.override("grouped_gemm_fp8", **settings):
            return grouped_gemm.grouped_gemm_fp8(*operands, out_dtype=BF16)

    traced = jax.jit(run).trace(*pairs, Array((4,), I32))
    assert traced.out_info.shape == (300, 515)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "num_programs = 132 " in text and f"num_threads = {32 * 12} " in text
    assert "operand_index = 5" in text and "output_tuple_indices = [1]" in text
    far, bound = 0x7FFF0000, 1 << 30
    lhs, rhs = ([2, 0, 1, 3, rows, 384, 384, 1, box, 128] for rows, box in ((300, 128), (4 * 515, 256)))
    out = [4, 9, 2, 3, far, far, bound, 520, (1 << 34) - 520, 520, 520, 1, 1, 1, 64, 64]
    assert parameters_of(text) == [*lhs, *rhs, 0, 0, 0, 0, *out, 0]
    monkeypatch.setattr(compile, "device_capability", lambda: 100)
    with pytest.raises(NotImplementedError, match=r"^grouped_gemm: gluon=True on GPUs .* 10.0, expected 9.0"):
        jax.jit(run).trace((Array((12, 384), fp8), Array((12, 3), f32)), pairs[1], Array((4,), I32))


@pytest.mark.parametrize(
    ("rows", "settings", "in_gluon"),
    [(4, {}, True), (4, {"gluon": False}, False), (160, {}, True), (160, {"gluon": False}, False)],
)
def test_launch_gluon_prepacked_weights(on_hopper, monkeypatch, rows, settings, in_gluon):
    """Few and many rows take the kernel in Gluon, unless a setting does not; each kernel has its own tiles."""
    monkeypatch.setattr(quantized_gemm, "num_programs", lambda _, programs: 132 * programs)
    monkeypatch.setattr(launching, "num_programs", lambda _, programs: 132 * programs)
    rhs = jax.eval_shape(lambda w: with_layout(quantize(w, "mxfp4"), "prepacked"), Array((4, 256, 128), jnp.float32))

    def run(*operands):
        with tuning.override("quantized_gemm", **settings):
            return quantized_gemm.grouped_gemm(*operands, out_dtype=BF16)

    traced = jax.jit(run).trace(Array((4 * rows, 256), BF16), rhs, Array((4,), I32))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    make = quantized_gemm.gluon_tiles if in_gluon else functools.partial(quantized_gemm.quantized_tiles, prepacked=True)
    threads = 256 if in_gluon else 32 * make(rows).num_warps
    assert f"num_programs = {132 * make(rows).programs} " in text and f"num_threads = {threads} " in text


def test_launch_none_pointers(on_hopper):
    """Pointers that the constants name are not parameters of the code, at any position."""
    sizes = MaskedGemm(64, 128, 64, 4, 16, fp8=False, tile=MaskedTile(64, 128, 64, swap_ab=False))
    constants = {"S": sizes, "lhs_scales_ptr": None, "rhs_scales_ptr": None}
    shapes = Array((4, 64, 64), BF16), Array((4, 128, 64), BF16), Array((4,), I32)
    describe = lambda a, b, sizes: (Descriptor(a, (1, 64, 64)), Descriptor(b, (1, 128, 64)), sizes)  # noqa: E731
    results, config = (Array((4, 64, 128), BF16),), Config(7, num_warps=4)
    text = lowered(Kernel(masked_kernels.masked_grouped_gemm), describe, results, config, constants, *shapes)
    described = 1 + 3 + 3 * 3  # Rank, kind, and sizes, strides and box of three dimensions.
    assert len(parameters_of(text)) == 2 * described + 2


def test_launch_named_tuple_parameters(on_hopper):
    """The code takes an address for each array, in order; results are returned in the same NamedTuple."""
    constants = {"S": SmallExchange(4096, 1024), "HEAP": Heap(2, 2, 1 << 20, 4096, 32768, 1)}
    shapes = Array((4096,), I32), Array((3,), I32), Array((7,), np.dtype(np.int64))
    together = lambda x, group, table: (x, Peers(group, table))  # noqa: E731
    results, config = (Array((2, 4096), I32),), Config(7, num_warps=4)
    with jax.enable_x64(True):
        text = lowered(Kernel(small_exchange_kernels.all_gather_i32), together, results, config, constants, *shapes)
    assert "parameters = dense<0> : tensor<4xi64>" in text
    assert regrouped("abc", [None, type_of(Peers(1, 2))]) == ["a", Peers("b", "c")]


def test_compilation_scratch_memory_unsupported(on_hopper, monkeypatch, tmp_path):
    """A kernel that creates descriptors needs scratch memory."""
    (tmp_path / "kernel_of_test.py").write_text(
        "import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef copy(x_ptr, out_ptr, N: tl.constexpr):\n"
        "    x = tl.make_tensor_descriptor(x_ptr, [N, N], [N, 1], [16, 16])\n"
        "    tl.make_tensor_descriptor(out_ptr, [N, N], [N, 1], [16, 16]).store([0, 0], x.load([0, 0]))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    kernel = Kernel(__import__("kernel_of_test").copy)
    with pytest.raises(NotImplementedError, match="no scratch memory"):
        compile.compile_kernel(kernel, (Parameter(BF16),) * 2, Config(1), {"N": 64}, 90).result()


ROWS = Array((64, 128), BF16), Array((32,), I32), Array((4,), I32)
GATHERED = (Array((32, 128), BF16),)


def gather(*arrays, warps=4):
    return launch(GATHER, arrays, GATHERED, Config(7, num_warps=warps), GATHER_SIZES)[0]


@pytest.fixture
def slow_compiler(monkeypatch):
    """Block compilation until `go` is set; record requests to the compiler."""
    go, asked = threading.Event(), []

    def compile_slowly(compilation):
        asked.append(compilation.kernel.name)
        assert go.wait(60)
        return compiled(compilation)

    compiled = compile._compile
    monkeypatch.setattr(compile, "_compile", compile_slowly)
    monkeypatch.setattr(compile, "_begun", {})
    yield go, asked
    go.set()


def test_async_compile_tracing_does_not_wait(on_hopper, slow_compiler):
    """Two kernels are compiling when the program is traced; lowering it waits for both."""
    go, asked = slow_compiler
    traced = jax.jit(lambda *arrays: (gather(*arrays), gather(*arrays, warps=8))).trace(*ROWS)
    assert "7FELF" not in str(traced.jaxpr) and not go.is_set()
    while not asked:  # the compiler's thread may start later
        time.sleep(0.01)
    threading.Timer(0.1, go.set).start()
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @jax_ep_launch_kernel") == 2 == len(asked)


def test_async_compile_shared_code(on_hopper, slow_compiler):
    go, asked = slow_compiler
    go.set()
    traced = jax.jit(lambda *arrays: (gather(*arrays), gather(*arrays))).trace(*ROWS)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert len(asked) == 1 and text.count("custom_call @jax_ep_launch_kernel") == 2


def test_async_compile_retries_after_failure(on_hopper, monkeypatch):
    """The error is raised when the program is lowered, and is not cached: the assembler may be found the next time."""
    compiled = compile._compile
    monkeypatch.setattr(compile, "_begun", {})
    monkeypatch.setattr(compile, "_compile", lambda *_: 1 / 0)
    traced = jax.jit(lambda *arrays: gather(*arrays)).trace(*ROWS)
    with pytest.raises(ZeroDivisionError):
        traced.lower(lowering_platforms=("cuda",))
    monkeypatch.setattr(compile, "_compile", compiled)
    assert "7FELF" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_launch_vmap(on_hopper):
    x, *others = ROWS
    batch = jax.vmap(gather, in_axes=(0, None, None))
    traced = jax.jit(batch).trace(Array((3, *x.shape), x.dtype), *others)
    assert traced.out_info.shape == (3, 32, 128)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @jax_ep_launch_kernel") == 1 and "stablehlo.while" in text


def test_launch_eager(monkeypatch):
    """Each call launches code that is compiled once; JAX's own gather stands in, because there is no GPU."""
    asked = []

    def gather_on_cpu(name, code, operands, results, **numbers):
        asked.append((name, code[:4], numbers["num_programs"], numbers["num_threads"], numbers["parameters"]))
        return (operands[0][operands[1]],)

    monkeypatch.setattr(pending.ffi, "launch_kernel", gather_on_cpu)
    parameters = tuple(Parameter(dtype) for dtype in (BF16, I32, I32, BF16))
    code = compile.compile_kernel(GATHER, parameters, Config(7), GATHER_SIZES, 90)
    call = lambda *arrays: pending.launch(code, arrays, GATHERED, [None] * 4, Config(7, num_warps=8), {})[0]  # noqa: E731
    x = jnp.arange(3 * 64 * 128, dtype=BF16).reshape(3, 64, 128)
    index, sizes = jnp.arange(32, dtype=I32)[::-1] * 2, jnp.zeros(4, I32)
    for _ in range(2):
        np.testing.assert_array_equal(call(x[0], index, sizes), x[0][index])
    assert asked == [("gather_rows", b"\x7fELF", 7, 256, [(0,)] * 4)]
    np.testing.assert_array_equal(jax.vmap(call, in_axes=(0, None, None))(x, index, sizes), x[:, index])
    with pytest.raises(NotImplementedError, match="Differentiation rule"):
        jax.grad(lambda x: call(x, index, sizes).sum().astype(jnp.float32))(x[0])


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_launch_results_vary_like_operands(on_hopper, kind):
    mesh = jax.make_mesh((2,), ("expert",), axis_types=(kind,))
    spec = jax.P("expert")
    shapes = [Array((2 * x.shape[0], *x.shape[1:]), x.dtype) for x in ROWS]
    sharded = jax.shard_map(gather, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    sharding = jax.sharding.NamedSharding(mesh, spec)
    traced = jax.jit(sharded).trace(*(Array(x.shape, x.dtype, sharding=sharding) for x in shapes))
    assert traced.out_info.shape == (64, 128)
    assert "@jax_ep_launch_kernel" in traced.lower(lowering_platforms=("cuda",)).as_text()
