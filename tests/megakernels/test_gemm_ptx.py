"""The grouped GEMM on each architecture: tensor cores, TMA, no spilled registers, memory that fits."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from compiling import TENSOR_CORES, compiled

from jax_ep import tuning
from jax_ep.core.expert_matrices import SplitWeights
from jax_ep.core.kernel import Descriptor, array_of
from jax_ep.megakernels import grouped_gemm, launch
from jax_ep.megakernels.grouped_gemm import Tiles, WeightTiles

pytest.importorskip("triton")

ELEMENTS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int32": "i32"}
# rows, K, N, groups
DEEPSEEK, FEW_ROWS, ODD = (32768, 7168, 4096, 64), (1024, 4096, 3072, 128), (4096, 1000, 520, 1000)


def type_name(operand):
    if isinstance(operand, tuple):
        return type(operand)(*map(type_name, operand))
    if isinstance(operand, Descriptor):
        block = ",".join(map(str, operand.blocks.block_shape))
        return f"tensordesc<{ELEMENTS[operand.array.dtype.name]}[{block}]>"
    return "*" + ELEMENTS[operand.dtype.name]


def is_argument(x):
    return isinstance(x, (Descriptor, jax.ShapeDtypeStruct))


def zeros_of(result):
    return jnp.zeros(array_of(result).shape, array_of(result).dtype)


@pytest.fixture
def compile_launch(monkeypatch):
    """Calls a launching function on shapes, and compiles what it would launch for an architecture."""

    def run(function, capability, shapes, dtype, tiles, spare=0, **options):
        arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes[:2]]
        if spare:
            home = arrays[1]
            arrays[1] = SplitWeights(home, home.update(shape=(spare, *home.shape[1:])))
        arrays += [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes[2:]]
        launches = []

        def record(kernel, operands, results, config, constants):
            launches.append((kernel, operands, results, config, constants))
            return [jax.tree.map(zeros_of, x, is_leaf=is_argument) for x in results]

        monkeypatch.setattr(grouped_gemm, "launch", record)
        monkeypatch.setattr(launch, "num_programs", lambda tasks, per_multiprocessor: 132 * per_multiprocessor)
        with tuning.override(function.__name__, **dataclasses.asdict(tiles)):
            jax.eval_shape(functools.partial(function.__wrapped__, **options), *arrays)
        ((kernel, operands, results, config, constants),) = launches
        given = dict(zip(kernel.body.arg_names, operands, strict=False))
        types = {name: None if x is None else type_name(x) for name, x in given.items()}
        types["out"] = type_name(results[0])
        checks = {"product": TENSOR_CORES[capability], "wide": False, "programs": tiles.programs}
        built = compiled(kernel, types, constants, config, capability, **checks)
        assert "cp.async.cg.shared.global" not in built["ptx"]
        return built

    return run


@pytest.fixture
def on_gpus(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


EVERYWHERE = [(DEEPSEEK, False, "bfloat16"), (DEEPSEEK, True, "bfloat16"), (DEEPSEEK, False, "float32")]
CASES = [(capability, *case) for case in EVERYWHERE for capability in (90, 100)]
CASES += [(90, FEW_ROWS, False, "bfloat16"), (90, ODD, False, "bfloat16")]


@pytest.mark.parametrize("spare", [0, 2], ids=["one array", "two arrays"])
@pytest.mark.parametrize(("capability", "size", "transpose", "out"), CASES)
def test_gemm_ptx_forward(on_gpus, compile_launch, capability, size, transpose, out, spare):
    rows, k, n, groups = size
    tiles = grouped_gemm.forward_tiles(rows, n, groups, jnp.dtype(out).itemsize)
    shapes = ((rows, k), (groups, n, k) if transpose else (groups, k, n), (groups + spare,))
    options = {"transpose": transpose, "out_dtype": jnp.dtype(out), "tiles": tiles, "spare": spare}
    built = compile_launch(grouped_gemm.grouped_gemm, capability, shapes, jnp.bfloat16, **options)
    stored = "cp.async.bulk.tensor.4d.global" if tiles.tma_store else "st.global.v4.b32"
    assert stored in built["ptx"]


WEIGHT_CASES = [(90, "float16"), (90, "float32"), (100, "float16")]


@pytest.mark.parametrize("num_home", [0, 62], ids=["one array", "two arrays"])
@pytest.mark.parametrize(("capability", "out"), WEIGHT_CASES)
def test_gemm_ptx_weights(on_gpus, compile_launch, capability, out, num_home):
    rows, k, n, groups = DEEPSEEK
    tiles = grouped_gemm.weight_tiles(jnp.dtype(out).itemsize)
    options = {"out_dtype": jnp.dtype(out), "tiles": tiles, "num_home": num_home}
    shapes = ((rows, k), (rows, n), (groups,))
    compile_launch(grouped_gemm.weight_gradient, capability, shapes, jnp.float16, **options)


VARIANTS = {
    "stored by TMA": Tiles(num_stages=3, tma_store=True),
    "stored by TMA in halves": Tiles(tma_store=True, store_parts=2),
    "stored by TMA in quarters": Tiles(tma_store=True, store_parts=4),
    "stored by pointers": Tiles(),
}


@pytest.mark.parametrize("capability", [90])
@pytest.mark.parametrize("name", VARIANTS)
def test_gemm_ptx_variants(on_gpus, compile_launch, capability, name):
    rows, k, n, groups = DEEPSEEK
    options = {"transpose": False, "out_dtype": jnp.dtype(jnp.bfloat16), "tiles": VARIANTS[name]}
    shapes = ((rows, k), (groups, k, n), (groups,))
    built = compile_launch(grouped_gemm.grouped_gemm, capability, shapes, jnp.bfloat16, **options)
    assert ("cp.async.bulk.tensor.4d.global" in built["ptx"]) == VARIANTS[name].tma_store


WEIGHT_VARIANTS = {
    "stored by TMA": WeightTiles(num_stages=3, tma_store=True),
    "stored by TMA in halves": WeightTiles(tma_store=True, store_parts=2),
    "stored by TMA in quarters": WeightTiles(tma_store=True, store_parts=4),
    "two programs": WeightTiles(block_n=128, num_warps=4, num_stages=3, programs=2, tma_store=True, store_parts=2),
    "two programs, stored by pointers": WeightTiles(block_n=128, num_warps=4, num_stages=3, programs=2),
    "stored in halves": WeightTiles(store_parts=2),
}


@pytest.mark.parametrize("capability", [90])
@pytest.mark.parametrize("name", WEIGHT_VARIANTS)
def test_gemm_ptx_weight_variants(on_gpus, compile_launch, capability, name):
    """Descriptors of results come from the host: those that a kernel makes in scratch memory end a command buffer."""
    tiles = WEIGHT_VARIANTS[name]
    options = {"out_dtype": jnp.dtype(jnp.bfloat16), "tiles": tiles}
    rows, k, n, groups = DEEPSEEK
    shapes = ((rows, k), (rows, n), (groups,))
    built = compile_launch(grouped_gemm.weight_gradient, capability, shapes, jnp.bfloat16, **options)
    assert ("cp.async.bulk.tensor.3d.global" in built["ptx"]) == tiles.tma_store
