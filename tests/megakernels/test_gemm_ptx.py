"""The grouped GEMM on each architecture: tensor cores, TMA, no spilled registers, memory that fits."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest
from compiling import TENSOR_CORES, compiled, registers

from jax_ep import tuning
from jax_ep.core.expert_matrices import SplitWeights
from jax_ep.core.facts import GemmFacts
from jax_ep.core.kernel import Descriptor, array_of
from jax_ep.core.layout import Bias
from jax_ep.megakernels import compile, grouped_gemm, launch
from jax_ep.megakernels.grouped_gemm import Tiles, WeightTiles
from jax_ep.types import Experts

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

    def run(function, capability, shapes, dtype, tiles, spare=0, spills=0, operation=None, **options):
        arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes[:2]]
        if spare:
            home = arrays[1]
            arrays[1] = SplitWeights(home, home.update(shape=(spare, *home.shape[1:])))
        arrays += [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes[2:]]
        launches = []

        def record(kernel, operands, results, config, constants, **_):
            launches.append((kernel, operands, results, config, constants))
            return [jax.tree.map(zeros_of, x, is_leaf=is_argument) for x in results]

        monkeypatch.setattr(grouped_gemm, "launch", record)
        monkeypatch.setattr(launch, "num_programs", lambda tasks, per_multiprocessor: 132 * per_multiprocessor)
        monkeypatch.setattr(grouped_gemm, "num_programs", lambda tasks: 132)
        monkeypatch.setattr(compile, "device_capability", lambda: capability)
        with tuning.override(operation or function.__name__, **dataclasses.asdict(tiles)):
            jax.eval_shape(functools.partial(function.__wrapped__, **options), *arrays)
        ((kernel, operands, results, config, constants),) = launches
        given = dict(zip(kernel.body.arg_names, operands, strict=False))
        types = {name: None if x is None else type_name(x) for name, x in given.items()}
        types |= dict(
            zip([name for name in kernel.body.arg_names if name not in types], map(type_name, results), strict=False)
        )
        checks = {"product": TENSOR_CORES[capability], "wide": False, "programs": tiles.programs, "spills": spills}
        built = compiled(kernel, types, constants, config, capability, **checks)
        assert "cp.async.cg.shared.global" not in built["ptx"]
        # In Gluon two consumer warpgroups, and a producer in a third one, which owns registers that it does not need.
        assert (".reqntid 384" in built["ptx"]) == tiles.gluon
        assert not tiles.gluon or registers(built) * 32 * 12 <= 65536
        return built

    return run


@pytest.fixture
def on_gpus(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


@pytest.fixture
def tiles_on(on_gpus, monkeypatch):
    """Return the tiles that are chosen for facts on GPUs of a compute capability."""

    def run(capability, choose, facts):
        monkeypatch.setattr(compile, "device_capability", lambda: capability)
        return choose(facts)

    return run


TRITON = Tiles(block_n=128)
EVERYWHERE = [(DEEPSEEK, False, "bfloat16"), (DEEPSEEK, True, "bfloat16"), (DEEPSEEK, False, "float32")]
CASES = [(capability, *case) for case in EVERYWHERE for capability in (90, 100)]
CASES += [(90, FEW_ROWS, False, "bfloat16"), (90, ODD, False, "bfloat16")]
CASES = [
    (*case, spare, tiles)
    for case in CASES
    for spare in (0, 2)
    for tiles in (None, TRITON)
    if case[0] == 90 or not tiles
]
# Stored by TMA, whole or in parts, or by pointers.
VARIANTS = (Tiles(num_stages=3, tma_store=True), *(Tiles(tma_store=True, store_parts=n) for n in (2, 4)), Tiles())
CASES += [(90, DEEPSEEK, False, "bfloat16", 0, tiles) for tiles in VARIANTS]


@pytest.mark.parametrize(("capability", "size", "transpose", "out", "spare", "tiles"), CASES, ids=str)
def test_gemm_ptx_forward(tiles_on, compile_launch, capability, size, transpose, out, spare, tiles):
    """With the last experts in a separate array if there are `spare` ones, and with chosen or given tiles."""
    rows, k, n, groups = size
    facts = GemmFacts(jnp.dtype(jnp.bfloat16), rows, k, n, groups + spare, jnp.dtype(out))
    tiles = tiles or tiles_on(capability, grouped_gemm.forward_tiles, facts)
    shapes = ((rows, k), (groups, n, k) if transpose else (groups, k, n), (groups + spare,))
    options = {"transpose": transpose, "out_dtype": jnp.dtype(out), "tiles": tiles, "spare": spare}
    built = compile_launch(grouped_gemm.grouped_gemm, capability, shapes, jnp.bfloat16, **options)
    by_tma = tiles.tma_store or tiles.gluon
    assert ("cp.async.bulk.tensor.4d.global" in built["ptx"]) == by_tma
    assert by_tma or "st.global.v4.b32" in built["ptx"]


TWO_PROGRAMS = WeightTiles(block_n=128, num_warps=4, num_stages=3, programs=2)
WEIGHT_VARIANTS = (
    *(WeightTiles(num_stages=3, tma_store=True), WeightTiles(store_parts=2), TWO_PROGRAMS),
    *(WeightTiles(tma_store=True, store_parts=n) for n in (2, 4)),
    dataclasses.replace(TWO_PROGRAMS, tma_store=True, store_parts=2),
)
WEIGHT_CASES = [
    (*case, home, None) for case in ((90, "float16"), (90, "float32"), (100, "float16")) for home in (0, 62)
]
WEIGHT_CASES += [(90, "bfloat16", 0, tiles) for tiles in WEIGHT_VARIANTS]


@pytest.mark.parametrize(("capability", "out", "num_home", "tiles"), WEIGHT_CASES, ids=str)
def test_gemm_ptx_weights(tiles_on, compile_launch, capability, out, num_home, tiles):
    """Descriptors of results come from the host: those that a kernel makes in scratch memory end a command buffer."""
    rows, k, n, groups = DEEPSEEK
    dtype = jnp.bfloat16 if out == "bfloat16" else jnp.float16
    facts = GemmFacts(jnp.dtype(dtype), rows, k, n, groups, jnp.dtype(out))
    tiles = tiles or tiles_on(capability, grouped_gemm.weight_tiles, facts)
    options = {"out_dtype": jnp.dtype(out), "tiles": tiles, "num_home": num_home}
    shapes = ((rows, k), (rows, n), (groups,))
    built = compile_launch(grouped_gemm.weight_gradient, capability, shapes, dtype, **options)
    assert ("cp.async.bulk.tensor.3d.global" in built["ptx"]) == (tiles.tma_store or tiles.gluon)


def test_gemm_ptx_gluon_bias(on_gpus, compile_launch):
    """Adding a bias spills registers, behind the loop over K."""
    bias = Bias(jnp.zeros((64, 4096), jnp.bfloat16), jnp.zeros(32768))
    options = {"transpose": False, "out_dtype": jnp.bfloat16, "tiles": Tiles(gluon=True), "bias": bias, "spills": 220}
    built = compile_launch(
        grouped_gemm.grouped_gemm, 90, ((32768, 7168), (64, 7168, 4096), (64,)), jnp.bfloat16, **options
    )
    loops = re.findall(r"HGMMA.*?BRA", built["code"], re.DOTALL)
    assert not any(re.search(r"\b(STL|LDL)\b", loop) for loop in loops if "SYNCS.ARRIVE" in loop)


@pytest.mark.parametrize("spare", [0, 2])
def test_gemm_ptx_activation(on_gpus, compile_launch, spare):
    shapes = (32768, 2048), (64, 2048, 1536), (64 + spare,), (32768,)
    options = {"operation": "grouped_gemm", "tiles": Tiles(gluon=True), "spare": spare, "experts": Experts()}
    compile_launch(grouped_gemm.gemm_activation, 90, shapes, jnp.bfloat16, **options)
