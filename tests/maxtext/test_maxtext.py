"""`RoutedMoE` of the MaxText wheel, with and without `use()`. `make test-maxtext` runs it in its own environment."""

import contextlib
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

if "maxtext" not in os.environ.get("JAX_EP_TESTS_OF", ""):
    pytest.skip("runs in the environment of `make test-maxtext`", allow_module_level=True)

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"

import jax
import jax.numpy as jnp
import maxtext
import numpy as np
from flax import nnx
from flax.linen import logical_axis_rules
from jax.sharding import AxisType, Mesh
from maxtext.configs import pyconfig
from maxtext.layers import initializers, moe

from jax_ep import Balance, Schedule
from jax_ep.integrations.maxtext import use

BASE = os.path.join(os.path.dirname(maxtext.__file__), "configs", "base.yml")
TOLERANCE = 1e-6  # of float32 results, relative to the norm
MIXTRAL = {"model_name": "mixtral-8x7b"}
DEEPSEEK = {"model_name": "deepseek3-671b", "num_experts": 16, "n_routing_groups": 4, "topk_routing_group": 2}
DEEPSEEK["routed_bias_update_rate"] = 0.01
BLOCKS = {
    "mixtral": MIXTRAL,
    "deepseek": DEEPSEEK,
    "deepseek2": {"model_name": "deepseek2-16b", "num_experts": 8},
    "qwen3_moe": {"model_name": "qwen3-30b-a3b", "num_experts": 16},
    "gpt_oss": {"model_name": "gpt-oss-20b", "num_experts": 8, "base_num_decoder_layers": 2},
    "llama4": {"model_name": "llama4-17b-16e", "num_experts": 8},
    "gemma4": {"model_name": "gemma4-26b", "num_experts": 16},
}
DENSE = {"sparse_matmul": False}
RING = {"use_ring_of_experts": True, "megablox": True, "ici_expert_parallelism": 4}  # runs on several CPU devices


def configuration(**options):
    defaults = {"run_name": "test", "hardware": "cpu", "enable_checkpointing": False, "log_config": False}
    defaults |= {"skip_jax_distributed_system": True, "override_model_config": True, "attention": "dot_product"}
    defaults |= {"dtype": "float32", "weight_dtype": "float32", "per_device_batch_size": 1, "max_target_length": 16}
    defaults |= {"base_emb_dim": 32, "base_mlp_dim": 16, "base_moe_mlp_dim": 16, "vocab_size": 64, "megablox": False}
    defaults |= {"load_balance_loss_weight": 0.01, "ici_fsdp_parallelism": 1}
    return pyconfig.initialize([None, BASE], **(defaults | options))


def mesh_of(config, **axes):
    shape = [axes.get(name, 1) for name in config.mesh_axes]
    kind = AxisType.Explicit if config.shard_mode.value == "explicit" else AxisType.Auto
    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    return Mesh(devices, config.mesh_axes, axis_types=(kind,) * len(shape))


class Changed:
    """A configuration with other values."""

    def __init__(self, config, **values):
        self.__dict__.update(values, _config=config)

    def __getattr__(self, name):
        return getattr(self._config, name)


def make_layer(config, mesh, **options):
    options |= {"config": config, "mesh": mesh, "rngs": nnx.Rngs(0), "kernel_axes": ("embed", None)}
    options |= {name: getattr(config, name) for name in ("num_experts", "num_experts_per_tok", "dtype", "weight_dtype")}
    options["kernel_init"] = initializers.nd_dense_init(1.0, "fan_in", "truncated_normal")
    layer = moe.RoutedMoE(intermediate_dim=config.moe_mlp_dim, **options)
    for i, (path, variable) in enumerate(nnx.to_flat_state(nnx.state(layer))):
        if "bias" in str(path[-1]) or "scale" in str(path[-1]):
            variable[...] += 0.3 * jax.random.normal(jax.random.key(i), variable.shape, variable.dtype)
    return layer


@contextlib.contextmanager
def rules(config, mesh):
    with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
        yield


def results(config, mesh, x, replaced, *, layer=None, options=None, **inputs):
    """Output, loss, update of the router bias, and gradients of parameters and tokens."""
    with rules(config, mesh), use(**(options or {})) if replaced else contextlib.nullcontext():
        graph, parameters, rest = nnx.split(make_layer(config, mesh, **(layer or {})), nnx.Param, ...)

        def objective(parameters, x):
            y, loss, update = nnx.merge(graph, parameters, rest)(x, **inputs)
            return jnp.sum(jnp.sin(y)) + (0.0 if loss is None else 10 * loss), (y, loss, update)

        (_, outputs), gradients = jax.jit(jax.value_and_grad(objective, (0, 1), has_aux=True))(parameters, x)
    return outputs, gradients


def tokens(config, batch=4, length=8):
    return jax.random.normal(jax.random.key(1), (batch, length, config.emb_dim))


def assert_same(config, mesh, x, **inputs):
    got = results(config, mesh, x, True, **inputs)
    want = results(config, mesh, x, False, **inputs)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        error = np.linalg.norm(np.float64(a) - np.float64(b)) / max(np.linalg.norm(np.float64(b)), 1e-30)
        assert error < TOLERANCE, (jax.tree_util.keystr(path), error)


@pytest.mark.parametrize("block", BLOCKS)
def test_block_on_one_device(block):
    config = configuration(**BLOCKS[block])
    assert_same(config, mesh_of(config), tokens(config))


DATA, TENSOR = {"data": 2, "expert": 2}, {"tensor": 2, "expert": 2}
ON_MESHES = {  # By name: the block, mesh axes, and other options.
    **{f"{block} on data": (block, DATA, {}) for block in ("mixtral", "deepseek", "qwen3_moe", "gpt_oss")},
    "expert": ("mixtral", {"expert": 4}, {}),
    "fsdp": ("deepseek", {"fsdp": 2, "expert": 2}, {}),
    "tensor": ("gpt_oss", TENSOR, {}),
    "fsdp and tensor": ("gpt_oss", {"fsdp": 2, "tensor": 2}, {}),
    "context": ("mixtral", {"context": 2, "expert": 2}, {}),
    "ring of experts": ("deepseek", {"expert": 4}, RING),
    "explicit axes": ("mixtral", {"fsdp": 2, "expert": 2}, {"shard_mode": "explicit"}),
    "fused weights and a limit": ("deepseek", TENSOR, {"prefuse_moe_weights": True, "mlp_activations_limit": 0.5}),
    "activation without a name in jax_ep": ("mixtral", TENSOR, {"mlp_activations": ["tanh", "linear"]}),
    "sequence loss of Megatron": ("deepseek", DATA, {"moe_use_megatron_seq_aux_loss": True}),
    "counts for gradient accumulation": ("deepseek", DATA, {"gradient_accumulation_steps": 2}),
}


@pytest.mark.parametrize("name", ON_MESHES)
def test_block_on_four_devices(name):
    block, axes, options = ON_MESHES[name]
    config = configuration(**BLOCKS[block], **({} if options is RING else DENSE), **options)
    assert_same(config, mesh_of(config, **axes), tokens(config))


@pytest.mark.parametrize("axes", [{}, {"expert": 4}, TENSOR], ids=str)
def test_balance(axes):
    """Rows of overloaded ranks move to others; the results are those of MaxText."""
    config = configuration(**MIXTRAL, **DENSE)
    assert_same(config, mesh_of(config, **axes), tokens(config), options={"balance": Balance(rows=1.0)})


@pytest.mark.parametrize("block", ["mixtral", "deepseek"])
def test_forced_routed_experts(block):
    config = configuration(**BLOCKS[block], **DENSE)
    shape = (4, 8, config.num_experts)
    forced = jax.lax.top_k(jax.random.normal(jax.random.key(2), shape), config.num_experts_per_tok)[1]
    unused = jax.random.bernoulli(jax.random.key(3), 0.2, forced.shape)
    forced = jnp.where(unused, -1, forced)
    assert_same(config, mesh_of(config, **DATA), tokens(config), forced_routed_experts=forced)


def test_decoding_of_one_sequence():
    config = configuration(**BLOCKS["gpt_oss"], **DENSE)
    assert_same(config, mesh_of(config, **TENSOR), tokens(config, batch=1, length=1))


UNSUPPORTED = {"quantization": "fp8", "te_moe_block": True, "use_batch_split_schedule": True, "attention": "vllm_rpa"}
UNSUPPORTED |= {"use_random_routing": True, "moe_quantize_combine_bwd_method": "absmax", "moe_log_max_load_ratio": True}
UNSUPPORTED |= {"defer_small_all_reduces": True, "log_required_ragged_buffer_factor": True}
UNSUPPORTED |= {"num_moe_token_chunks": 2, "ragged_buffer_factor": 1.5, "eval_ragged_buffer_factor": 2.0}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_value_is_named(name):
    config = configuration(**MIXTRAL)
    mesh, x = mesh_of(config), tokens(config)
    with rules(config, mesh):
        layer = make_layer(config, mesh)
        layer.config = Changed(config, **{name: UNSUPPORTED[name]})
        with use(), pytest.raises(NotImplementedError, match=rf"use: {name}={UNSUPPORTED[name]!r} of MaxText's"):
            layer(x)


@pytest.mark.parametrize(("name", "value"), [("capacity_factor", 1.0), ("matmul_precision", "highest")])
def test_unsupported_value_of_the_dense_path(name, value):
    config = Changed(configuration(**MIXTRAL, **DENSE), **{name: value})
    mesh = mesh_of(config)
    with rules(config, mesh), use(), pytest.raises(NotImplementedError, match=f"{name}={value!r}"):
        make_layer(config, mesh)


@pytest.mark.parametrize(("axis", "name"), [("stage", "pipeline"), ("tensor_sequence", "tensor_sequence")])
def test_unsupported_mesh_axis(axis, name):
    config = configuration(**MIXTRAL)
    mesh = mesh_of(config, **{axis: 2})
    with rules(config, mesh), use(), pytest.raises(NotImplementedError, match=f"ici_{name}_parallelism=2"):
        make_layer(config, mesh)(tokens(config))


def test_sizes_that_the_mesh_does_not_divide():
    config = configuration(**MIXTRAL)
    mesh = mesh_of(config, expert=4)
    with (
        rules(config, mesh),
        use(),
        pytest.raises(ValueError, match="batch size is 3, expected a multiple of 4, the ranks"),
    ):
        make_layer(config, mesh)(tokens(config, batch=3))


def test_options_reach_the_layer():
    config = configuration(**MIXTRAL)
    mesh = mesh_of(config)
    options = {"implementation": "xla", "schedule": Schedule(dispatch_mode="fused")}
    with rules(config, mesh), use(**options), pytest.raises(NotImplementedError, match="xla: it has no fused"):
        make_layer(config, mesh)(tokens(config))


def test_leaving_restores_maxtext():
    before = {name: getattr(moe.RoutedMoE, name) for name in ("__init__", "__call__", "sparse_matmul", "dense_matmul")}
    with use():
        assert all(getattr(moe.RoutedMoE, name) is not method for name, method in before.items())
    assert {name: getattr(moe.RoutedMoE, name) for name in before} == before


def test_other_signature_is_refused(monkeypatch):
    monkeypatch.setattr(moe.RoutedMoE, "dense_matmul", lambda self, inputs: inputs)
    with pytest.raises(ImportError, match=r"dense_matmul has the parameters \('self', 'inputs'\)"):
        use()


def test_program_of_the_docs(tmp_path):
    """Its losses are those of MaxText without `use()`."""
    root = Path(__file__).resolve().parents[2]
    page = (root / "docs" / "integrations.md").read_text()
    program = re.search(r"^```text\n(import os\n.*?)^```$", page, re.MULTILINE | re.DOTALL)[1]
    losses = []
    for variant in (
        program,
        program.replace("jax_ep.integrations.maxtext.use()", "").replace('True, "mega', 'False, "mega'),
    ):
        command, environment = [sys.executable, "-c", variant], os.environ | {"PYTHONPATH": str(root)}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        losses.append(re.findall(r"completed step: \d, .* loss: ([\d.]+), lm_loss", done.stderr))
        assert done.returncode == 0 and len(losses[-1]) == 3, done.stderr
    np.testing.assert_allclose(*np.asarray(losses, float), atol=0.01)


def test_step_benchmark(tmp_path):
    """benchmarks/maxtext_step.py trains the same model with each expert layer."""
    script = Path(__file__).resolve().parents[2] / "benchmarks" / "maxtext_step.py"
    runpy.run_path(str(script))["main"](["--quick", "--rounds", "3", "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "maxtext_step.json").read_text())["rows"]
    measured = {row["variant"]: row for row in rows if "seconds" in row}
    # MaxText's own layer needs `ragged_all_to_all` for experts on several devices, which CPUs do not have.
    assert set(measured) == {"MaxText, capacity 1.25, drops tokens", "jax_ep", "jax_ep, fp8"}, rows
    for name in ("loss", "raw_grad_norm"):
        of_maxtext, *others = (row[name] for row in measured.values())
        assert others == pytest.approx([of_maxtext] * 2, rel=0.01)
