"""Exchanges that XLA records into CUDA graphs and replays have the bits of those that it launches one by one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import harness
import jax
import numpy as np
import pytest
from cases import BF16, ROUTINGS, Shape, probabilities, reals
from jax.sharding import Mesh

import jax_ep

SHAPE = Shape(num_tokens=64, top_k=2, num_experts=8, hidden=512)
REPLAYS = 100
# As options of one compilation, not in XLA_FLAGS: so both programs are in one process.
NO_GRAPHS = {"xla_gpu_enable_command_buffer": ""}
KINDS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION"
GRAPHS = {
    "default": {},
    "everything but collectives": {"xla_gpu_enable_command_buffer": KINDS, "xla_gpu_graph_min_graph_size": 1},
    "custom calls": {"xla_gpu_enable_command_buffer": "FUSION,CUSTOM_CALL", "xla_gpu_graph_min_graph_size": 1},
}


def layers(x: Any, ids: Any, weights: Any) -> Any:
    """Two layers that differ, with elementwise work between their exchanges."""
    for layer in range(2):
        d = jax_ep.dispatch(x, ids[layer], weights[layer], num_experts=SHAPE.num_experts, implementation="triton")
        y = d.tokens * d.weights[:, None].astype(x.dtype)
        x = x + jax_ep.combine(y, d.handle, implementation="triton")
    return x


def inputs(num_ranks: int, seed: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    name = ("uniform", "zipf", "some_without_expert", "duplicates")[seed % 4]
    ids = np.stack([ROUTINGS[name](rng, num_ranks, SHAPE) for _ in range(2)], axis=1)
    return reals(rng, num_ranks, SHAPE.num_tokens, SHAPE.hidden, dtype=BF16), ids, probabilities(rng, *ids.shape)


@pytest.mark.parametrize("kind", GRAPHS)
def test_replays_have_the_bits_of_single_launches(
    kind: str, on_gpu: None, one_process: None, mesh: Mesh, same_bits: Any, tmp_path: Path
) -> None:
    fn = harness.per_rank(layers, mesh)
    dump = {"xla_dump_to": str(tmp_path)} if kind != "default" else {}
    launched = jax.jit(fn, compiler_options=NO_GRAPHS)
    replayed = jax.jit(lambda *arguments: fn(*arguments), compiler_options=GRAPHS[kind] | dump)
    different = [inputs(mesh.size, seed) for seed in range(10)]
    wanted = [np.asarray(launched(*arguments)) for arguments in different]
    assert len({result.tobytes() for result in wanted}) == len(different)
    for turn in range(REPLAYS // len(different)):
        # One after another without waiting, so that replays follow each other closely, in another order each time.
        order = np.random.default_rng(turn).permutation(len(different))
        results = [replayed(*different[i]) for i in order]
        same_bits([np.asarray(result) for result in results], [wanted[i] for i in order])
    if dump:
        assert has_graphs(tmp_path), f"XLA made no graph: {sorted(path.name for path in tmp_path.iterdir())}"


def test_a_kernel_may_run_first_while_it_is_recorded(
    on_gpu: None, one_process: None, mesh: Mesh, same_bits: Any
) -> None:
    """Its code is loaded then; no other test has kernels of this shape, so none has loaded it before."""
    shape = dataclasses.replace(SHAPE, num_tokens=71, hidden=648)
    rng = np.random.default_rng(0)
    ids = np.stack([ROUTINGS["uniform"](rng, mesh.size, shape) for _ in range(2)], axis=1)
    arguments = reals(rng, mesh.size, shape.num_tokens, shape.hidden, dtype=BF16), ids, probabilities(rng, *ids.shape)
    fn = harness.per_rank(layers, mesh)
    replayed = np.asarray(
        jax.jit(lambda *arguments: fn(*arguments), compiler_options=GRAPHS["custom calls"])(*arguments)
    )
    same_bits([replayed], [np.asarray(jax.jit(fn, compiler_options=NO_GRAPHS)(*arguments))])


def has_graphs(folder: Path) -> bool:
    """Whether a dumped program launches graphs: its list of thunks names them."""
    return any(b"kCommandBuffer" in path.read_bytes() for path in folder.rglob("*") if path.is_file())
