"""`examples/own_triton_kernel.py`: its kernels run in Triton's interpreter, and compile for GPUs."""

import importlib.util
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import harness
import jax_ep
import own_triton_kernel as example
from jax_ep.core.kernel import Config, Kernel
from jax_ep.megakernels.compile import Parameter, compile_kernel

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="the example itself runs on GPUs")

learned_swish = pytest.importorskip("own_kernels.learned_swish")
ACTIVATE = Kernel(learned_swish.activate)


def test_kernels(two_ranks, rng):
    """Compare with NumPy in float64, at widths that are not multiples of a block, with padding rows of NaN."""
    rows, inner, local = 23, 150, 3
    hidden, d_out = rng.standard_normal((rows, 2 * inner)), rng.standard_normal((rows, inner))
    slopes, weights = rng.uniform(0.5, 2, local), rng.standard_normal(rows)
    experts = rng.integers(-1, local, rows)
    experts[:2] = -1, 0
    is_padding = experts < 0
    hidden[is_padding], d_out[is_padding] = np.nan, np.nan
    single = [jnp.asarray(a, jnp.float32) for a in (hidden, slopes, weights)]
    out, vjp = jax.vjp(lambda *args: example.activate(*args, jnp.asarray(experts, jnp.int32)), *single)
    got = [np.asarray(a, np.float64) for a in (out, *vjp(jnp.asarray(d_out, jnp.float32)))]

    exact = [np.nan_to_num(np.asarray(a, np.float64)) for a in (*single, jnp.asarray(d_out, jnp.float32))]
    hidden, slopes, weights, d_out = exact
    gate, up, slope = hidden[:, :inner], hidden[:, inner:], np.where(is_padding, 0, slopes[experts])[:, None]
    share, weight = 1 / (1 + np.exp(-slope * gate)), weights[:, None]
    by_slope = gate**2 * share * (1 - share)
    d_gate = d_out * weight * up * (share + slope * gate * share * (1 - share))
    d_slopes = np.zeros(local)
    np.add.at(d_slopes, experts[~is_padding], np.sum(d_out * weight * up * by_slope, axis=1)[~is_padding])
    want = [
        weight * gate * share * up,
        np.concatenate([d_gate, d_out * weight * gate * share], axis=1),
        d_slopes,
        np.sum(d_out * gate * share * up, axis=1),
    ]
    for a, b in zip(got, want, strict=True):
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b)
    assert not got[0][is_padding].any() and not got[1][is_padding].any()


@pytest.mark.slow
def test_layer(two_ranks, monkeypatch):
    """The whole layer and its gradients match plain JAX, and it learns."""
    monkeypatch.setattr(example, "TOKENS", 48)
    arguments = example.make_inputs(jax.random.key(0))
    layer = example.on_all_devices(two_ranks)
    assert example.compare(layer, arguments) < 1e-4
    losses = example.train(layer, arguments, 3)
    assert losses[2] < losses[1] < losses[0]


def test_triton_is_missing(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"not installed: triton; pip install"):
        example.main()


def call(x, **options):
    """Run the kernel `activate` on rows `x [R, 2 * I]` of one expert, with weights of 1."""
    rows = x.shape[0]
    arrays = x, jnp.ones(1), jnp.ones(rows), jnp.zeros(rows, jnp.int32)
    shape = jax.ShapeDtypeStruct((rows, x.shape[1] // 2), x.dtype)
    given = {"out_shape": shape, "grid": rows, "INNER": x.shape[1] // 2, "BLOCK": 16} | options
    return jax_ep.triton_call(learned_swish.activate, *arrays, **given)


def test_triton_call_under_transformations(two_ranks, rng):
    x = jnp.asarray(rng.standard_normal((4, 2, 12)), jnp.float32)
    want = jax.nn.silu(x[..., :6]) * x[..., 6:]
    spec = jax.P("expert")

    def per_rank(x):
        scanned = jax.lax.scan(lambda carry, row: (carry, call(row)), 0, x)[1]
        return scanned, jax.vmap(call)(x)

    for got in jax.jit(jax.shard_map(per_rank, mesh=two_ranks, in_specs=spec, out_specs=spec))(x):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    (pair,) = jax.tree.leaves(call(x[0], out_shape={"a": jax.ShapeDtypeStruct((2, 6), jnp.float32)}))
    np.testing.assert_allclose(pair, want[0], rtol=1e-5, atol=1e-6)
    with jax.disable_jit():
        np.testing.assert_allclose(call(x[0]), want[0], rtol=1e-5, atol=1e-6)


def test_triton_call_on_one_device(two_ranks, rng):
    """A kernel without the heap waits for no other device, as on GPUs."""
    x = jnp.asarray(rng.standard_normal((4, 12)), jnp.float32)

    def per_rank(x):
        return jax.lax.cond(jax.lax.axis_index("expert") == 0, call, lambda x: x[:, :6], x)

    got = jax.jit(jax.shard_map(per_rank, mesh=two_ranks, in_specs=jax.P("expert"), out_specs=jax.P("expert")))(x)
    want = np.concatenate([jax.nn.silu(x[:2, :6]) * x[:2, 6:], x[2:, :6]])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_triton_call_mistakes(two_ranks, subtests):
    x, shape = jnp.ones((2, 4)), jax.ShapeDtypeStruct((2, 2), jnp.float32)
    mistakes = [
        (lambda: call(x, out_shape=(shape, shape)), ValueError, "takes the pointers .* 4 operands and 2 results"),
        (lambda: call(x, out_shape=()), ValueError, "4 operands and 0 results; .* at least one result"),
        (
            lambda: jax_ep.triton_call(learned_swish.activate, x, out_shape=shape, grid=1),
            ValueError,
            "INNER.* without values",
        ),
        (lambda: call(x, out_shape=3), TypeError, "out_shape contains an int, expected jax.ShapeDtypeStruct"),
        (lambda: call(x, out_shape=jax.ShapeDtypeStruct((-1,), jnp.float32)), ValueError, "size in out_shape=-1, exp"),
        (lambda: call(x, out_shape=jax.ShapeDtypeStruct((1,), np.float64)), TypeError, "dtype float64, .* 32 bits"),
        (lambda: call(x, BLOCK=jnp.int32(16)), TypeError, "constant BLOCK is an array, expected a static value"),
        (lambda: call(x, num_warps=3), ValueError, "num_warps=3, expected a power of two"),
        (lambda: call(x, num_warps=64), ValueError, "num_warps=64, expected a number from 1 to 32"),
        (lambda: call(x, max_registers=256), ValueError, "max_registers=256, expected a number from 16 to 255"),
        (
            lambda: call(jax.random.split(jax.random.key(0), (2, 4))),
            TypeError,
            "ys of key<fry>, expected .*; convert it",
        ),
        (lambda: call(x, out_shape=jax.ShapeDtypeStruct((2**61,), jnp.float32)), ValueError, "fewer than 2..63 bytes"),
        (lambda: call(x, grid=0), ValueError, "grid=0, expected"),
        (lambda: call(x, WIDTH=3), TypeError, r"no parameters \['WIDTH'\], only"),
        (lambda: call(x.astype(jnp.complex64)), TypeError, "operand 0: kernels do not support arrays of complex64"),
        (lambda: jax_ep.triton_call(lambda x: x, x, out_shape=shape, grid=1), TypeError, "kernel is a function, exp"),
        (lambda: jax_ep.triton_call(learned_swish.activate, 3, out_shape=shape, grid=1), TypeError, "operand 0 is an"),
        (lambda: jax.grad(lambda x: call(x).sum())(x), TypeError, "triton_call has no gradient: combine activate"),
        (lambda: jax.grad(lambda x: jax.grad(lambda x: call(x).sum())(x).sum())(x), TypeError, "call has no gradient"),
        (lambda: jax.hessian(lambda x: call(x).sum())(x), TypeError, "^triton_call: .* forward-mode"),
        (lambda: call(np.ones((2, 4), ">f4")), TypeError, "triton_call: operand 0 has dtype >f4, expected numbers"),
        (lambda: call(np.ma.masked_array(np.ones((2, 4)), mask=True)), TypeError, "operand 0 is a MaskedArray, not an"),
        (lambda: call(x, BLOCK=jax.export.symbolic_shape("n")[0]), TypeError, "constant BLOCK is n, a symbolic numb"),
    ]
    for mistake, kind, words in mistakes:
        with subtests.test(words), pytest.raises(kind, match=words):
            mistake()


def test_page_runs_from_an_empty_folder(tmp_path):
    page = (harness.ROOT / "docs" / "own_kernels.md").read_text()
    files = zip(
        ("kernels.py", "layer.py"), re.findall(r"^```text\n(.*?)^```", page, re.DOTALL | re.MULTILINE), strict=True
    )
    for name, text in files:
        (tmp_path / name).write_text(text)
    flags = "--xla_force_host_platform_device_count=2"
    done = harness.run_command(*harness.STRICT_PYTHON, "layer.py", cwd=tmp_path, XLA_FLAGS=flags)
    assert done.returncode == 0, done.stderr


def test_triton_call_wrapped_kernels(two_ranks):
    """The interpreter finds a kernel by its name: another kernel of that name would run instead."""
    import triton

    body, shape = learned_swish.activate, jax.ShapeDtypeStruct((1,), jnp.float32)
    with pytest.raises(ValueError, match=r"activate of .* is another object than this kernel"):
        jax_ep.triton_call(triton.jit(body.fn), *(jnp.ones(1),) * 4, out_shape=shape, grid=1, INNER=1, BLOCK=16)
    tuned = triton.autotune([triton.Config({"BLOCK": 16})], key=["INNER"])(body)
    with pytest.raises(TypeError, match=r"kernel is an Autotuner, expected a function decorated by triton.jit"):
        jax_ep.triton_call(tuned, jnp.ones(1), out_shape=shape, grid=1)


def test_triton_call_parameters_that_are_taken():
    """`grid=1` cannot also be a constant of the kernel, and Triton's interpreter has its own `warmup`."""
    import triton

    @triton.jit
    def fill(out_ptr, grid, warmup):
        pass

    shape = jax.ShapeDtypeStruct((1,), jnp.float32)
    with pytest.raises(TypeError, match=r"fill has parameters \['grid', 'warmup'\], expected other names.*; rename"):
        jax_ep.triton_call(fill, out_shape=shape, grid=1)


def test_triton_call_result_of_another_byte_order(two_ranks, rng):
    x = jnp.asarray(rng.standard_normal((2, 12)), jnp.float32)
    np.testing.assert_array_equal(call(x, out_shape=jax.ShapeDtypeStruct((2, 6), np.dtype(">f4"))), call(x))


def test_triton_call_without_docstrings(tmp_path):
    """Workers have the optimization of their process, or the kernels would have another code there."""
    (tmp_path / "kernels.py").write_text(
        "import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef fill(out_ptr):\n"
        '    """Fill."""\n    tl.store(out_ptr, 7)\n'
    )
    code = (
        "import jax, jax_ep, kernels\n"
        "jax_ep.init(jax.make_mesh((1,), ('expert',)), transport='shared_memory')\n"
        "shape = jax.ShapeDtypeStruct((1,), jax.numpy.int32)\n"
        "print(jax_ep.triton_call(kernels.fill, out_shape=shape, grid=1))"
    )
    done = harness.run_command(sys.executable, "-OO", "-c", code, cwd=tmp_path)
    assert done.stdout == "[7]\n", done.stderr


def test_triton_call_kernel_in_the_program(tmp_path):
    """Workers cannot import a program that calls the package where it is imported."""
    (tmp_path / "program.py").write_text(
        "import jax\nimport jax_ep\nimport triton\nimport triton.language as tl\n\n\n@triton.jit\ndef fill(out_ptr):\n"
        "    tl.store(out_ptr, 7)\n\n\njax_ep.init(jax.make_mesh((1,), ('expert',)), transport='shared_memory')\n"
        "jax_ep.triton_call(fill, out_shape=jax.ShapeDtypeStruct((1,), jax.numpy.int32), grid=1).block_until_ready()"
    )
    done = harness.run_command(sys.executable, "program.py", cwd=tmp_path)
    wanted = (
        r"ImportError: cannot import .*program.py, .* expected a module that does not run the program; move the kern"
    )
    assert done.returncode == 1 and re.search(wanted, done.stderr), done.stderr


def test_triton_call_reloaded_kernel(tmp_path, monkeypatch):
    """The interpreter does not run the code that a file had when its workers loaded it."""
    text = (
        "import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef fill(out_ptr):\n    tl.store(out_ptr, {})\n"
    )
    (tmp_path / "filling.py").write_text(text.format(2))
    monkeypatch.syspath_prepend(tmp_path)
    kernels = importlib.import_module("filling")
    mesh, shape = harness.make_mesh((1,), ("expert",)), jax.ShapeDtypeStruct((1,), jnp.int32)

    def run():
        return int(jax_ep.triton_call(kernels.fill, out_shape=shape, grid=1)[0])

    jax_ep.finalize()
    jax_ep.init(mesh, transport="shared_memory")
    assert run() == 2
    (tmp_path / "filling.py").write_text(text.format(345))
    importlib.reload(kernels)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"fill of .* has another code here than in the parent"):
        run()
    jax_ep.finalize()
    jax_ep.init(mesh, transport="shared_memory")
    assert run() == 345
    jax_ep.finalize()


def test_triton_call_numpy_constants(two_ranks, rng):
    x = jnp.asarray(rng.standard_normal((2, 12)), jnp.float32)
    np.testing.assert_array_equal(call(x, INNER=np.int64(6), BLOCK=np.int32(16)), call(x))


def compilation(x=np.float32, **constants):
    """Begin to compile the kernel for Hopper, without a GPU."""
    parameters = tuple(Parameter(np.dtype(dtype)) for dtype in (x, np.float32, np.float32, np.int32, x))
    return compile_kernel(ACTIVATE, parameters, Config(1, 4), constants, 90)


def test_compilations_of_equal_constants():
    """Constants of different types or signs are different kernels, although Python counts them as equal."""
    one, *others, again = (compilation(INNER=96, BLOCK=value) for value in (0.0, -0.0, 0, False, 0.0))
    assert len({one, *others}) == 4 and again == one


def test_triton_call_without_interpreter():
    jax_ep.finalize()
    with pytest.raises(NotImplementedError, match=r"the platform is cpu.*jax_ep.init\(mesh, transport="):
        call(jnp.ones((2, 4)))


def test_compilation_without_a_place_for_files(tmp_path, monkeypatch):
    """As in a container whose file system is read-only."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    begun = compilation(jnp.bfloat16, INNER=48, BLOCK=64)
    text = rf"^activate: Triton could not compile this kernel \(.*{tmp_path}.*\), .* set TRITON_CACHE_DIR, which is"
    with pytest.raises(OSError, match=text):
        begun.result()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    compiled = begun.result()
    assert compiled.name == "activate" and len(compiled.code) > 1000
