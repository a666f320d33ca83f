"""Launches recorded into CUDA graphs and replayed give the same bits as single launches."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import harness
import jax_ep
from cases import BF16, Shape, probabilities, reals
from jax_ep.ops.moe_low_latency import low_latency_gemm_combine
from routings import ROUTINGS

SHAPE = Shape(num_tokens=64, top_k=2, num_experts=8, hidden=512)
REPLAYS = 100
# As options of one compilation, not in XLA_FLAGS, so that both programs run in one process.
NO_GRAPHS = {"xla_gpu_enable_command_buffer": ""}
KINDS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION"
GRAPHS = {
    "default": {},
    "everything but collectives": {"xla_gpu_enable_command_buffer": KINDS, "xla_gpu_graph_min_graph_size": 1},
    "custom calls": {"xla_gpu_enable_command_buffer": "FUSION,CUSTOM_CALL", "xla_gpu_graph_min_graph_size": 1},
}


OPTIONS = {"num_experts": SHAPE.num_experts, "implementation": "triton"}


def exchanges(x, ids, weights, w_gate_up, w_down):
    """Run two different layers, with elementwise work between their all-to-alls."""
    for layer in range(2):
        d = jax_ep.dispatch(x, ids[layer], weights[layer], **OPTIONS)
        y = d.tokens * d.weights[:, None].astype(x.dtype)
        x = x + jax_ep.combine(y, d.handle, implementation="triton")
    return x


def fused(x, ids, weights, w_gate_up, w_down):
    """Run dispatch + GEMM and GEMM + combine, one launch each."""
    for layer in range(2):
        modes = jax_ep.Schedule(dispatch_mode="fused", combine_mode="scatter")
        x = x + jax_ep.moe(x, ids[layer], weights[layer], w_gate_up, w_down, schedule=modes, **OPTIONS)
    return x


def gradients(x, ids, weights, w_gate_up, w_down):
    """Run a layer's backward pass."""

    def loss(x, *matrices):
        y = jax_ep.moe(x, ids[0], weights[0], *matrices, **OPTIONS)
        return jnp.sum(jnp.square(y.astype(jnp.float32)))

    return jax.grad(loss, argnums=(0, 1, 2))(x, w_gate_up, w_down)


def low_latency(x, ids, weights, w_gate_up, w_down):
    """Dispatch and combine FP8 tokens; the experts are one GEMM that sends its rows itself."""
    most = {"max_tokens_per_rank": SHAPE.num_tokens}
    d = jax_ep.low_latency_dispatch(x, ids[0], **most, **OPTIONS)
    rows = (d.tokens.astype(jnp.float32) * jnp.repeat(d.scales, 128, axis=-1)).astype(x.dtype)
    x = x + jax_ep.low_latency_combine(rows, ids[0], weights[0], d.handle, implementation="triton")
    d = jax_ep.low_latency_dispatch(x, ids[1], quantize=False, **most, **OPTIONS)
    square = w_gate_up[:, :, : SHAPE.hidden]
    arguments = (d.tokens, square, d.group_sizes, ids[1], weights[1], d.handle)
    return x + low_latency_gemm_combine(*arguments, preferred_element_type=x.dtype, implementation="triton")


def serving(x, ids, weights, w_gate_up, w_down):
    """Run layers of decode-sized batches."""
    matrices = [jax_ep.quantize(w, None) for w in (w_gate_up, w_down)]
    for layer in range(2):
        x = x + jax_ep.low_latency_moe(x, ids[layer], weights[layer], *matrices, **OPTIONS)
    return x


def one_device(x, ids, weights, w_gate_up, w_down):
    """Run the layer of the local experts in one launch, whose counters start at zero in every replay."""
    local = w_down.shape[0]
    for layer in range(2):
        schedule = jax_ep.Schedule(single_launch=True)
        found = jax_ep.fused_moe(x, ids[layer] % local, weights[layer], w_gate_up, w_down, schedule=schedule)
        x = x + found
    return x


PROGRAMS = {f.__name__: f for f in (exchanges, fused, gradients, low_latency, serving, one_device)}


def inputs(num_ranks, seed, shape=SHAPE):
    rng = np.random.default_rng(seed)
    name = ("uniform", "zipf", "some_without_expert", "duplicates")[seed % 4]
    ids = np.stack([ROUTINGS[name](rng, num_ranks, shape) for _ in range(2)], axis=1)
    local, hidden = shape.num_experts // num_ranks, shape.hidden
    matrices = [reals(rng, num_ranks, local, hidden, columns, dtype=BF16) for columns in (2 * hidden, hidden)]
    matrices = [(w * np.float32(hidden**-0.5)).astype(BF16) for w in matrices]
    return reals(rng, num_ranks, shape.num_tokens, hidden, dtype=BF16), ids, probabilities(rng, *ids.shape), *matrices


@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_cuda_graphs_replay_same_bits(name, kind, on_gpu, one_process, mesh, same_bits, tmp_path):
    fn = harness.per_rank(PROGRAMS[name], mesh)
    dump = {"xla_dump_to": str(tmp_path)} if kind != "default" else {}
    launched = jax.jit(fn, compiler_options=NO_GRAPHS)
    replayed = jax.jit(lambda *arguments: fn(*arguments), compiler_options=GRAPHS[kind] | dump)
    different = [inputs(mesh.size, seed) for seed in range(10)]
    wanted = [harness.to_numpy(launched(*arguments)) for arguments in different]
    assert len({jax.tree.leaves(result)[0].tobytes() for result in wanted}) == len(different)
    for turn in range(REPLAYS // len(different)):
        # Without waiting, so that replays follow each other closely, in a different order each time.
        order = np.random.default_rng(turn).permutation(len(different))
        results = [replayed(*different[i]) for i in order]
        same_bits(harness.to_numpy(results), [wanted[i] for i in order])
    if dump:
        assert has_graphs(tmp_path), f"XLA made no graph: {sorted(path.name for path in tmp_path.iterdir())}"


def test_cuda_graphs_all_launches(on_gpu, one_process, mesh, same_bits):
    """Record all launches together, in one graph or several."""

    def fn(*arguments):
        return harness.in_turn([(PROGRAMS[name], arguments) for name in PROGRAMS])

    fn = harness.per_rank(fn, mesh)
    replayed = jax.jit(lambda *arguments: fn(*arguments), compiler_options=GRAPHS["custom calls"])
    launched = jax.jit(fn, compiler_options=NO_GRAPHS)
    for seed in range(3):
        arguments = inputs(mesh.size, seed)
        want = harness.to_numpy(launched(*arguments))
        for _ in range(4):
            same_bits(harness.to_numpy(replayed(*arguments)), want)


def test_cuda_graphs_first_run_during_capture(on_gpu, one_process, mesh, same_bits):
    """Its code is loaded during the capture; no other test has loaded kernels of this shape."""
    shape = dataclasses.replace(SHAPE, num_tokens=71, hidden=648)
    arguments = inputs(mesh.size, 0, shape)
    fn = harness.per_rank(exchanges, mesh)
    replayed = np.asarray(jax.jit(lambda *args: fn(*args), compiler_options=GRAPHS["custom calls"])(*arguments))
    same_bits([replayed], [np.asarray(jax.jit(fn, compiler_options=NO_GRAPHS)(*arguments))])


def has_graphs(folder):
    """Return whether a dumped program launches graphs, according to its list of thunks."""
    return any(b"kCommandBuffer" in path.read_bytes() for path in folder.rglob("*") if path.is_file())
