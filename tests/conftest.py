"""Devices, strict settings, and the fixtures that all tests share.

`JAX_EP_TEST_DEVICES=gpu` runs the suite on the machine's GPUs; otherwise it runs on eight CPU devices. run_processes.py
runs it in several processes in step, with one GPU or some CPU devices each; with `JAX_EP_TEST_GPUS=N` they share N GPUs
and take turns.
"""

import collections
import gc
import os
import secrets
import zlib
from pathlib import Path

import numpy as np
import pytest

NUM_PROCESSES = int(os.environ.get("JAX_EP_TEST_PROCESSES", "1"))
NUM_GPUS = int(os.environ.get("JAX_EP_TEST_GPUS", NUM_PROCESSES))
NUM_CPU_DEVICES = int(os.environ.get("JAX_EP_TEST_CPU_DEVICES", "8"))  # Of each process.
ON_GPU = os.environ.get("JAX_EP_TEST_DEVICES", "cpu") == "gpu"
# Set before JAX is imported, because it reads both on first use.
if ON_GPU:
    os.environ.setdefault("JAX_PLATFORMS", "cuda,cpu")
else:
    os.environ["JAX_PLATFORMS"] = "cpu"
    # Compiling small programs that run once dominates the time.
    fast_compilation = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    # A device may wait long for a CPU core. By default XLA assumes that a collective hangs, and aborts the process.
    waits = "--xla_cpu_collective_timeout_seconds=1800 --xla_cpu_collective_call_terminate_timeout_seconds=1800"
    flags = f"{fast_compilation} {waits} --xla_force_host_platform_device_count={NUM_CPU_DEVICES}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()

os.environ["JAX_EP_TUNING"] = "off"  # Ignore tuned settings of this machine.

import jax

import harness

gc.set_threshold(200_000, 20, 20)  # Tracing creates many live objects; scanning them took a fifth of the time.
pytest_plugins = ["keep_results", "file_seconds"]  # --results, --seconds
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# The oracle is float64: without this, float32 matmuls on a GPU have 10 bits.
jax.config.update("jax_default_matmul_precision", "highest")


def pytest_addoption(parser):
    group = parser.getgroup("jax_ep")
    group.addoption("--implementation", help="comma-separated implementations to test; default: every available one")
    group.addoption("--launcher", help="see jax_ep.init; tests that call jax_ep.init themselves ignore it")
    group.addoption("--slow", action="store_true", help="on CPU devices, also the tests marked slow; on GPUs all run")
    group.addoption(
        "--only-slow",
        action="store_true",
        help="only tests marked slow, and about half of the cases of those with many",
    )
    group.addoption("--seed", type=int, help="seed of the random inputs; default: a fresh one, shown on failure")


def pytest_configure(config):
    """JAX must know of the other processes before it searches for devices."""
    config.add_cleanup(gc.unfreeze)  # See `pytest_sessionfinish`.
    for name in ON_KERNELS:
        file, _, test = name.partition("::")
        path = Path(__file__).parents[1] / file
        if not path.is_file() or f"def {test.split('[')[0]}" not in path.read_text():
            raise pytest.UsageError(f"ON_KERNELS in tests/conftest.py names {name}, which does not exist; remove it.")
    if NUM_PROCESSES > 1:
        process = int(os.environ["JAX_EP_TEST_PROCESS"])
        address = os.environ["JAX_EP_TEST_COORDINATOR"]
        if NUM_GPUS < NUM_PROCESSES:
            os.environ["NCCL_HOSTID"] = str(process)  # NCCL rejects processes of one host that share a GPU.
        # run_processes.py ends processes that wait for a hanging one.
        times = {"heartbeat_timeout_seconds": 300, "shutdown_timeout_seconds": 300}
        own = {"local_device_ids": [process % NUM_GPUS] if ON_GPU else None, "cluster_detection_method": "deactivate"}
        jax.distributed.initialize(address, NUM_PROCESSES, process, **own, **times)


def pytest_report_header():
    from jax_ep import context

    devices = f"{jax.device_count()} {jax.devices()[0].device_kind} device(s), {jax.process_count()} process(es)"
    return f"jax_ep: {devices}, kernels launched by {context.launcher()}"


_CONTRACT = "tests/contract/test_{}.py"
_WHOLE = (
    *("balance_plan_kernels", "dispatch_combine", "experts", "grouped_gemm", "grouped_gemm_fp8", "grouped_gemm_gluon"),
    *("low_latency", "low_latency_gemm_combine", "low_latency_moe", "masked", "quantized_gemm", "quantized_gemm_gluon"),
    "low_latency_gathered",
    *("reproducible", "result_dtype", "single_launch", "single_launch_gluon", "sorted_slots", "weight_gradient_gluon"),
    *("grouped_gemm16_gluon", "gemm_activation"),
)
_LAYERS = {
    "fused": (
        *(f"fused_forward_and_gradients[{case}]" for case in ("scatter-triton-2", "scatter-triton-2 others")),
        *("fused_forward_and_gradients[serial-triton-4]", "fused_capacity"),
        "fused_dispatch_modes[triton-2-serial]",
    ),
    "lora": ("lora_moe[triton-bfloat16]",),
    "balance": ("balance_bfloat16_copies_in_their_own_array[triton-scatter]",),
    "moe_recipe": ("moe_recipe_capacity", "moe_recipe_fused_moe", "moe_recipe_nan_stays_with_token"),
}
ON_KERNELS = {
    *map(_CONTRACT.format, _WHOLE),
    *(f"{_CONTRACT.format(name)}::test_{test}" for name, tests in _LAYERS.items() for test in tests),
    "tests/gpu/test_training.py::test_low_latency_decoding[fp8]",
    "tests/ops/test_launch_order.py",
}
"""Files, tests and cases that CPU devices also run with `triton`, in its interpreter."""


def is_on_kernels(nodeid):
    """Return whether `ON_KERNELS` contains this file, test or case, or a case of this test."""
    names = {nodeid, nodeid.split("[")[0], nodeid.split("::")[0]}
    return not names.isdisjoint(ON_KERNELS) or any(name.startswith(f"{nodeid}[") for name in ON_KERNELS)


def implementations(config, module=None, nodeid=""):
    """Return the requested implementations, or all that run here; on CPU `pallas` only for modules with `OPERATION`."""
    from jax_ep.ops import registry

    chosen = config.getoption("implementation")
    if chosen:
        return chosen.split(",")
    if ON_GPU:
        return list(registry.available())
    # Each at the same index in all tests: pytest groups tests with the same parameter of a session.
    interpreted = ["triton"] if NUM_PROCESSES == 1 and is_on_kernels(nodeid) else []
    return ["xla", *interpreted, *(["pallas"] if hasattr(module, "OPERATION") else [])]


def pytest_sessionstart(session):
    """Kernels run on CPU devices only on request: in Triton's interpreter, one process per device."""
    if "triton" in implementations(session.config):
        _begin(session.config)


_begun = None  # The context that `_begin` created.


def _begin(config):
    """Create the context of tests that do not create their own."""
    global _begun
    import jax_ep
    from jax_ep import context

    launcher = config.getoption("launcher")
    if NUM_PROCESSES > 1:  # An unsupported transport must not look like passing tests.
        mesh = harness.make_mesh((NUM_PROCESSES,), (harness.EXPERT,))
        jax_ep.init(mesh, transport="nvshmem", launcher=launcher)
    elif not ON_GPU:
        every = any(config.getoption(name) for name in ("slow", "only_slow", "implementation"))
        num_ranks = NUM_CPU_DEVICES if every else min(4, NUM_CPU_DEVICES)  # `make test` has no kernels of more.
        mesh = harness.make_mesh((num_ranks,), (harness.EXPERT,))
        jax_ep.init(mesh, transport="shared_memory", timeout_s=harness.PATIENCE_S, launcher=launcher)
    elif launcher is not None:
        jax_ep.init(launcher=launcher)
    _begun = context._current


def pytest_sessionfinish():
    import jax_ep

    jax_ep.finalize()
    gc.collect()
    gc.freeze()  # pytest collects five times more, which takes seconds with all compiled programs alive.


MEASURED_CAPABILITY = 90  # Of the GPUs that the kernels are written for.


SLOW_GROUPS = (
    *("tests/benchmarks/*", "*ptx.py"),  # The latter are machine code of kernels.
    *("tests/ffi/test_ffi_driver.py", "tests/ffi/test_ffi_launch.py", "tests/megakernels/test_activation.py"),
    *("tests/megakernels/test_combine_modes.py", "tests/megakernels/test_decode_kernels.py"),
    *("tests/megakernels/test_failed_launches.py", "tests/megakernels/test_fp8_operands.py"),
    "tests/megakernels/test_growth.py",
    "tests/megakernels/test_jax_triton.py",
    *("tests/megakernels/test_low_latency_*kernels.py", "tests/megakernels/test_plan.py"),
    *("tests/megakernels/test_schedule.py", "tests/pallas/test_pallas_kernels.py", "tests/test_command.py"),
    *("tests/test_export.py", "tests/test_global_arrays.py", "tests/test_public_examples.py"),
    *("tests/tracing/test_recording.py", "tests/tuning/test_effect.py"),
    "tests/contract/test_exchange_in_rounds.py",
    "tests/test_packaging.py",
)
"""Files whose tests all run in `make test-rest`."""


def _implementation(item):
    return item.callspec.params.get("implementation") if hasattr(item, "callspec") else None


def is_slow(item):
    """Return whether `make test` leaves this test to `make test-rest`."""
    if any(item.path.match(group) for group in SLOW_GROUPS):
        return True
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    if parameters.get("capability", MEASURED_CAPABILITY) != MEASURED_CAPABILITY:
        return True  # A kernel compiled for other GPUs.
    interpreted = parameters.get("implementation") in ("triton", "pallas")
    names = ("slow", "slow_interpreted") if interpreted else ("slow",)
    marks = [mark for name in names for mark in item.iter_markers(name)]
    return not all(_is_exempt(mark, parameters) for mark in marks)


def _is_exempt(mark, parameters):
    """Return whether this is one of the cases that a mark exempts with `unless={parameter: values}`."""
    unless = mark.kwargs.get("unless", {})
    return bool(unless) and all(parameters[name] in values for name, values in unless.items())


MANY_CASES = 6


def half_of_many_cases(items):
    """Leave out about half of the cases of tests with many, by a hash: the same ones in each run, of all parameters."""
    tests = collections.defaultdict(list)
    for item in items:
        tests[item.nodeid.split("[")[0]].append(item)
    left_out = set()
    for cases in tests.values():
        if len(cases) >= MANY_CASES:
            left_out.update(case for case in cases[1:] if zlib.crc32(case.nodeid.encode()) % 2)
    return [item for item in items if item not in left_out]


def pytest_collection_modifyitems(config, items):
    only_slow = config.getoption("only_slow")
    every_speed = not only_slow and (ON_GPU or config.getoption("slow"))
    every_case = ON_GPU or config.getoption("implementation")
    chosen, others = [], []
    for item in items:
        fits = every_case or _implementation(item) != "triton" or is_on_kernels(item.nodeid)
        (chosen if fits and (every_speed or is_slow(item) == only_slow) else others).append(item)
    items[:] = half_of_many_cases(chosen) if only_slow and not every_case else chosen
    config.hook.pytest_deselected(items=[*others, *set(chosen).difference(items)])


def pytest_generate_tests(metafunc):
    """Add the implementations that exist only for the `OPERATION` of a module, unless it names `IMPLEMENTATIONS`.

    A module about `xla` alone runs with it, whatever is asked for.
    """
    from jax_ep.ops import registry

    if "implementation" in metafunc.fixturenames:
        made_for = registry.available(getattr(metafunc.module, "OPERATION", None))
        made_for = getattr(metafunc.module, "IMPLEMENTATIONS", made_for)
        names = implementations(metafunc.config, metafunc.module, metafunc.definition.nodeid)
        names = made_for if made_for == ("xla",) else [name for name in names if name in made_for]
        metafunc.parametrize("implementation", names, scope="session")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    """Give tests on kernels the session's context, or a new one after a test with its own; give others none."""
    import jax_ep
    from jax_ep import context

    asked = ON_GPU or item.config.getoption("implementation")
    if _kept is not None and context._current is _kept[1] and "kept_context" not in item.fixturenames:
        jax_ep.finalize()
    needed = _implementation(item) == "triton" or (not asked and item.nodeid in ON_KERNELS)
    if needed and NUM_PROCESSES == 1 and context.transport() is None:
        _begin(item.config)
    elif not needed and not asked and _begun is not None and context._current is _begun:
        jax_ep.finalize()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Skip tests of an implementation that does not support them; see `harness.REFUSALS`."""
    harness.tested = _implementation(item)
    try:
        with harness.refusals_skip():
            return (yield)
    finally:
        harness.tested = None


@pytest.fixture(autouse=True)
def _interpreters_of_several_devices(monkeypatch):
    """Fix Mosaic's interpreter, which treats the first device that finishes a block as the only one.

    It then reports barriers as unused that other devices still use, and numbers accumulators from the first again, so
    that two accumulators of different devices share a number.
    """
    if not ON_GPU:
        from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

        def finished(*, token):
            is_alone = gpu_callbacks._get_shared_memory().num_devices == 1
            return of_one_device(token=token) if is_alone else token

        of_one_device = gpu_callbacks.cluster_finished
        monkeypatch.setattr(gpu_callbacks, "cluster_finished", finished)
        monkeypatch.setattr(gpu_callbacks, "call_assert_no_barriers_allocated", lambda token: token)


@pytest.fixture
def rng(request):
    """A generator of new random inputs; pytest shows its seed with a failure, and `--seed` reproduces it."""
    seed = request.config.getoption("seed")
    if seed is None:
        seed = 0 if os.environ.get("CI") else secrets.randbits(32)
    print(f"--seed {seed}")
    return np.random.default_rng([seed, zlib.crc32(request.node.name.encode())])


@pytest.fixture
def expert_mesh():
    """Return `expert_mesh(W)`, which creates a mesh of W devices on the axis "expert", or skips the test."""
    return lambda num_ranks: harness.make_mesh((num_ranks,), (harness.EXPERT,))


_kept = None  # The arguments of `kept_context`, and the context that they made.


@pytest.fixture
def kept_context():
    """Return `kept_context(mesh, **options)`: `jax_ep.init`, whose context consecutive tests share.

    On machines without GPUs the kernels run in the interpreter. Tests may run in any order: between two with this
    fixture may be one that ends the context.
    """
    import jax_ep
    from jax_ep import context

    pytest.importorskip("triton")
    if jax.process_count() > 1:
        pytest.skip("a context of several processes is not made anew")

    def init(mesh, **options):
        global _kept
        options.setdefault("transport", None if ON_GPU else "shared_memory")
        options.setdefault("timeout_s", harness.PATIENCE_S)
        if _kept is None or _kept[0] != (mesh, options) or context._current is not _kept[1]:
            jax_ep.finalize()
            jax_ep.init(mesh, **options)
            _kept = (mesh, options), context._current
        return mesh

    yield init
    if context._heap is None or context._heap.failure() is not None:
        jax_ep.finalize()


@pytest.fixture
def two_ranks(kept_context):
    """Two ranks of the kernels, in the interpreter on machines without GPUs."""
    return kept_context(harness.make_mesh((2,), (harness.EXPERT,)))


RANKS = [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 8))]


@pytest.fixture(params=RANKS, ids="ranks{}".format)
def every_mesh(request, expert_mesh):
    """A mesh of 1, 2 and 8 ranks; `mesh` has 4."""
    return expert_mesh(request.param)


@pytest.fixture
def mesh(expert_mesh):
    """A mesh of four ranks, or as many as the machine has, for tests that are not about the number of ranks."""
    return expert_mesh(min(4, jax.device_count()))


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def implicit_promotion():
    """Enable implicit promotion, which Optax needs."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
