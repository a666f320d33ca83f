"""The functions under JAX's transformations: scan, remat, vmap, donation, AOT, VMA checks, both kinds of mesh axes."""

import collections
import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_ep
import oracle
import oracle_serving
from cases import BASE, F32, Shape, assert_close, assert_same_bits, integers, probabilities, reals
from harness import EXPERT, compiled, make_mesh, per_rank, run, to_numpy
from oracle_experts import MoE
from routings import ROUTINGS

SHAPE = Shape(num_tokens=5, top_k=2, num_experts=4, hidden=6, intermediate=4)
NUM_LAYERS = 3
CHECKPOINT_NAMES = ("jax_ep.tokens", "jax_ep.hidden", "jax_ep.output")


def moe(implementation, **options):
    return functools.partial(jax_ep.moe, num_experts=SHAPE.num_experts, implementation=implementation, **options)


class Stack:
    """Inputs of one or more layers `x + moe(x)`; per-layer arrays are `[W, layers, ...]`, ready for `lax.scan`."""

    def __init__(self, rng, num_ranks, layers=NUM_LAYERS):
        experts, hidden, size = SHAPE.num_experts, SHAPE.hidden, SHAPE.intermediate
        self.x = reals(rng, num_ranks, SHAPE.num_tokens, hidden)
        self.d_out = reals(rng, *self.x.shape)
        routings = [ROUTINGS[name](rng, num_ranks, SHAPE) for name in ("uniform", "duplicates", "one_hot")]
        self.topk_idx = np.stack([routings[i % 3] for i in range(layers)], axis=1)
        self.topk_weights = probabilities(rng, *self.topk_idx.shape)
        self.w_gate_up = reals(rng, num_ranks, layers, experts // num_ranks, hidden, 2 * size) / F32.type(2)
        self.w_down = reals(rng, num_ranks, layers, experts // num_ranks, size, hidden) / F32.type(2)

    @property
    def layers(self):
        return self.topk_idx, self.topk_weights, self.w_gate_up, self.w_down

    def layer(self, i, x=None):
        lay = oracle.layout(self.topk_idx[:, i], SHAPE.num_experts)
        weights = (w[:, i].reshape(SHAPE.num_experts, *w.shape[3:]) for w in (self.w_gate_up, self.w_down))
        return MoE(self.x if x is None else x, self.topk_weights[:, i], *weights, lay)

    def expected(self):
        """Return the output, and gradients of x, topk_weights, w_gate_up, w_down, layer by layer."""
        x, visited = self.x.astype(np.float64), []
        for i in range(self.topk_idx.shape[1]):
            visited.append(self.layer(i, x))
            x = x + visited[-1].forward()
        cotangent, gradients = self.d_out.astype(np.float64), []
        for layer in reversed(visited):
            dx, *rest = layer.gradients(cotangent)
            cotangent = cotangent + dx
            gradients.insert(0, rest)
        stacked = [np.stack(g, axis=0) for g in zip(*gradients, strict=True)]
        return x, [cotangent, *stacked]

    def check(self, out, gradients):
        want, want_gradients = self.expected()
        assert_close(out, want, "out", tolerance=2e-5)
        names = ("dx", "d_topk_weights", "d_w_gate_up", "d_w_down")
        for name, got, expected in zip(names, gradients, want_gradients, strict=True):
            per_layer = got if name == "dx" else np.moveaxis(got, 1, 0)
            assert_close(per_layer.reshape(expected.shape), expected, name, tolerance=2e-5)


def scanned(implementation, remat=None):
    """Return the output and all gradients of the stack, by `lax.scan` over its layers."""

    def block(x, layer):
        topk_idx, topk_weights, w_gate_up, w_down = layer
        return x + moe(implementation)(x, topk_idx, topk_weights, w_gate_up, w_down), None

    body = block if remat is None else jax.checkpoint(block, policy=remat)

    def fn(x, topk_idx, topk_weights, w_gate_up, w_down, d_out):
        def forward(x, topk_weights, w_gate_up, w_down):
            return jax.lax.scan(body, x, (topk_idx, topk_weights, w_gate_up, w_down))[0]

        out, vjp = jax.vjp(forward, x, topk_weights, w_gate_up, w_down)
        return out, vjp(d_out)

    return fn


REMAT = {
    "no remat": None,
    "recompute everything": jax.checkpoint_policies.nothing_saveable,
    "save by name": jax.checkpoint_policies.save_only_these_names(*CHECKPOINT_NAMES),
}


@pytest.mark.parametrize("remat", REMAT)
@pytest.mark.slow(unless={"remat": ["save by name"]})
def test_transforms_scan_over_layers(implementation, remat, expert_mesh, rng):
    stack = Stack(rng, 2)
    fn = scanned(implementation, REMAT[remat])
    stack.check(*run(fn, expert_mesh(2), stack.x, *stack.layers, stack.d_out))


def test_transforms_checkpoint_names(implementation, expert_mesh, rng):
    """A policy finds each documented name: naming one adds only that array, and the routing, to the residuals."""
    stack = Stack(rng, 2, layers=1)
    topk_idx, *parameters = (a[:, 0] for a in stack.layers)

    def pulled(keep, policy):
        call = moe(implementation, schedule=jax_ep.Schedule(keep_tokens=keep))
        layer = per_rank(jax.checkpoint(call, policy=policy), expert_mesh(2))
        return lambda *args: jax.vjp(lambda x, *rest: layer(x, topk_idx, *rest), *args)[1]

    def kept(keep, policy):
        vjp = jax.eval_shape(pulled(keep, policy), stack.x, *parameters)
        return collections.Counter(leaf.size for leaf in jax.tree.leaves(vjp))

    nothing_saveable, these = jax.checkpoint_policies.nothing_saveable, jax.checkpoint_policies.save_only_these_names
    jaxpr = str(jax.make_jaxpr(pulled(True, these()))(stack.x, *parameters))
    assert all(f"name={name}" in jaxpr for name in CHECKPOINT_NAMES)
    rows = 2 * stack.layer(0).lay.source.shape[1]
    sizes = {"jax_ep.tokens": rows * SHAPE.hidden, "jax_ep.hidden": rows * 2 * SHAPE.intermediate}
    for keep in (True, None):
        nothing = kept(keep, nothing_saveable)
        for name, size in sizes.items():
            added = {} if name == "jax_ep.tokens" and not keep else {size: 1}
            found = kept(keep, these(name)) - nothing
            assert {size: found[size] for size in found if size >= min(sizes.values())} == added, (keep, name)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.slow(unless={"check_vma": [True]})
def test_transforms_mesh_axis_types_and_vma(implementation, axis_type, check_vma, rng):
    """Gradients are taken outside shard_map, on global arrays placed on the mesh."""
    mesh = make_mesh((2,), (EXPERT,), axis_type)
    stack = Stack(rng, 2, layers=1)
    layer = per_rank(moe(implementation), mesh, check_vma=check_vma)

    def fn(x, topk_weights, w_gate_up, w_down, topk_idx, d_out):
        out, vjp = jax.vjp(lambda *a: a[0] + layer(a[0], topk_idx, *a[1:]), x, topk_weights, w_gate_up, w_down)
        return out, vjp(d_out)

    topk_idx, *parameters = (a[:, 0] for a in stack.layers)
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, PartitionSpec(EXPERT))
        args = [jax.device_put(a, sharding) for a in (stack.x, *parameters, topk_idx, stack.d_out)]
        out, gradients = to_numpy(jax.jit(fn)(*args))
    stack.check(out, (gradients[0], *(g[:, None] for g in gradients[1:])))


def test_transforms_aot_and_donation(implementation, expert_mesh, rng):
    mesh = expert_mesh(2)
    stack = Stack(rng, 2, layers=1)
    args = stack.x, *(a[:, 0] for a in stack.layers)
    sharding = NamedSharding(mesh, PartitionSpec(EXPERT))
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in args]
    fn = per_rank(moe(implementation), mesh)
    out = jax.eval_shape(fn, *shapes)
    assert (out.shape, out.dtype) == (stack.x.shape, stack.x.dtype)
    x, *rest = (jax.device_put(a, sharding) for a in args)
    for donated in ((), (0,)):
        got = jax.jit(fn, donate_argnums=donated).lower(*shapes).compile()(x, *rest)
        assert_close(to_numpy(got), stack.layer(0).forward(), "moe")
        assert x.is_deleted() == bool(donated)


@pytest.mark.slow
def test_transforms_export(implementation, expert_mesh, rng):
    """Exported programs compute the same, including gradients."""
    if implementation != "xla":
        pytest.skip("kernels use the memory of the process that has compiled them")
    mesh, stack = expert_mesh(2), Stack(rng, 2, layers=1)
    sharding = NamedSharding(mesh, PartitionSpec(EXPERT))
    args = [jax.device_put(array, sharding) for array in (stack.x, *(array[:, 0] for array in stack.layers))]
    forward = jax.jit(per_rank(moe(implementation), mesh))
    backward = jax.jit(jax.grad(lambda *args: jnp.sum(forward(*args) ** 2), argnums=(0, 2, 3, 4)))
    for fn in (forward, backward):
        again = jax.jit(jax.export.export(fn)(*args).call)
        for got, want in zip(*(jax.tree.leaves(to_numpy(f(*args))) for f in (again, fn)), strict=True):
            assert_same_bits(got, want)


def test_transforms_no_effects(implementation, expert_mesh, rng):
    """An effect in the jaxpr would break jax.checkpoint."""
    stack = Stack(rng, 2, layers=1)
    args = stack.x, *(a[:, 0] for a in stack.layers)
    layer = per_rank(moe(implementation), expert_mesh(2))
    gradient = jax.grad(lambda x, *rest: jnp.sum(layer(x, *rest)))
    assert not jax.make_jaxpr(gradient)(*args).effects


def test_transforms_vmap(implementation, expert_mesh, rng):
    """A batch of problems shares the experts."""
    mesh = expert_mesh(2)
    batch = [Stack(rng, 2, layers=1) for _ in range(2)]
    for problem in batch[1:]:
        problem.w_gate_up, problem.w_down = batch[0].w_gate_up, batch[0].w_down
    stacked = [np.stack(a, axis=1) for a in zip(*((b.x, b.topk_idx[:, 0], b.topk_weights[:, 0]) for b in batch),
                                                strict=True)]  # fmt: skip
    weights = batch[0].w_gate_up[:, 0], batch[0].w_down[:, 0]
    fn = jax.vmap(moe(implementation), in_axes=(0, 0, 0, None, None))
    got = run(fn, mesh, *stacked, *weights)
    for i, problem in enumerate(batch):
        assert_close(got[:, i], problem.layer(0).forward(), f"problem {i}")


@pytest.mark.parametrize("batch", [(2,), (2, 2)], ids=["vmap", "vmap of vmap"])
def test_transforms_vmap_handles(implementation, batch, expert_mesh, rng):
    """One vmap returns the handles that another takes; gradients inside a vmap and around one."""
    options = {"num_experts": BASE.num_experts, "implementation": implementation}

    def every(fn):
        return functools.reduce(lambda f, _: jax.vmap(f), batch, fn)

    def dispatch(x, topk_idx, topk_weights):
        return jax_ep.dispatch(x, topk_idx, topk_weights, **options)

    def combine(rows, weights, handle):
        return jax_ep.combine(rows * weights[:, None], handle, implementation=implementation)

    def twice(x, topk_idx, topk_weights):
        sent = every(dispatch)(x, topk_idx, topk_weights)
        return every(combine)(sent.tokens, sent.weights, sent.handle)

    def fn(x, topk_idx, topk_weights, d_out):
        def inside(x, topk_idx, topk_weights, d_out):
            def once(x, topk_weights):
                sent = dispatch(x, topk_idx, topk_weights)
                return jnp.vdot(combine(sent.tokens, sent.weights, sent.handle), d_out)

            return jax.grad(once, argnums=(0, 1))(x, topk_weights)

        out, vjp = jax.vjp(lambda x, weights: twice(x, topk_idx, weights), x, topk_weights)
        return out, vjp(d_out), every(inside)(x, topk_idx, topk_weights, d_out)

    problems = list(np.ndindex(batch))
    topk_idx = _batch([ROUTINGS["duplicates"](rng, 2, BASE) for _ in problems], batch)
    topk_weights = probabilities(rng, *topk_idx.shape)
    x, d_out = (reals(rng, *topk_idx.shape[:-1], BASE.hidden) for _ in range(2))
    out, *gradients = run(fn, expert_mesh(2), x, topk_idx, topk_weights, d_out)
    for i in problems:
        at = (slice(None), *i)
        lay = oracle.layout(topk_idx[at], BASE.num_experts)
        row_weights = oracle.gather_weights(topk_weights[at], lay)[..., None]
        rows, d_rows = (oracle.gather(a[at].astype(np.float64), lay) for a in (x, d_out))
        assert_close(out[at], oracle.combine(rows * row_weights, lay), f"problem {i}")
        for which, (dx, d_weights) in zip(("around", "inside"), gradients, strict=True):
            assert_close(dx[at], oracle.combine(d_rows * row_weights, lay), f"dx of problem {i}, {which}")
            want = oracle.scatter_weights((rows * d_rows).sum(-1), lay)
            assert_close(d_weights[at], want, f"d_topk_weights of problem {i}, {which}")


def _batch(arrays, batch):
    """Convert `[W, ...]` of each problem to `[W, *batch, ...]`."""
    return np.stack(arrays, axis=1).reshape(len(arrays[0]), *batch, *arrays[0].shape[1:])


def test_transforms_vmap_low_latency_handles(implementation, expert_mesh, rng):
    options = {"num_experts": SHAPE.num_experts, "max_tokens_per_rank": 6, "quantize": False}

    def fn(x, topk_idx, topk_weights):
        send = functools.partial(jax_ep.low_latency_dispatch, **options, implementation=implementation)
        sent = jax.vmap(send)(x, topk_idx)
        back = functools.partial(jax_ep.low_latency_combine, implementation=implementation)
        return jax.vmap(back)(sent.tokens, topk_idx, topk_weights, sent.handle)

    topk_idx = _batch([ROUTINGS["uniform"](rng, 2, SHAPE) for _ in range(2)], (2,))
    topk_weights = probabilities(rng, *topk_idx.shape)
    x = reals(rng, *topk_idx.shape[:-1], 8)
    got = run(fn, expert_mesh(2), x, topk_idx, topk_weights)
    for i in range(2):
        lay = oracle_serving.low_latency_layout(topk_idx[:, i], SHAPE.num_experts, 6)
        rows = oracle.gather(x[:, i].astype(np.float64), lay)
        want = oracle_serving.low_latency_combine(rows, topk_idx[:, i], topk_weights[:, i], lay)
        assert_close(got[:, i], want, f"problem {i}")


def test_transforms_two_layers_separate_handles(implementation, mesh, rng):
    """Two dispatches are in flight, combined in the other order, with crosswise gradients."""
    options = {"num_experts": BASE.num_experts, "implementation": implementation}

    def fn(x1, idx1, x2, idx2, y1, y2, d_out):
        first = jax_ep.dispatch(x1, idx1, **options)
        second = jax_ep.dispatch(x2, idx2, **options)
        (back2, vjp2), (back1, vjp1) = (
            jax.vjp(lambda y, h=h: jax_ep.combine(y, h, implementation=implementation), y)
            for y, h in ((y2, second.handle), (y1, first.handle))
        )
        return first.tokens, second.tokens, back1, back2, *vjp1(d_out), *vjp2(d_out)

    idx1, idx2 = ROUTINGS["uniform"](rng, mesh.size, BASE), ROUTINGS["zipf"](rng, mesh.size, BASE)
    lay1, lay2 = (oracle.layout(i, BASE.num_experts) for i in (idx1, idx2))
    x1, x2, d_out = (integers(rng, mesh.size, BASE.num_tokens, BASE.hidden) for _ in range(3))
    y1, y2 = (integers(rng, *lay1.source.shape, BASE.hidden) for _ in range(2))
    got = run(fn, mesh, x1, idx1, x2, idx2, y1, y2, d_out)
    want = (oracle.gather(x1, lay1), oracle.gather(x2, lay2), oracle.combine(y1, lay1), oracle.combine(y2, lay2),
            oracle.gather(d_out, lay1), oracle.gather(d_out, lay2))  # fmt: skip
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        np.testing.assert_array_equal(g, w, f"result {i}")


def test_transforms_handle_crosses_jit_and_scan(implementation, expert_mesh, rng):
    """A handle is a value: one compiled function returns it, and every step of a scan in another uses it."""
    mesh = expert_mesh(2)
    options = {"num_experts": BASE.num_experts, "implementation": implementation}

    def scan(handle, xs):
        def step(total, x):
            tokens = jax_ep.dispatch(x, None, handle=handle, **options).tokens
            return total + jax_ep.combine(tokens, handle, implementation=implementation), tokens

        return jax.lax.scan(step, xs[0] - xs[0], xs)

    topk_idx = ROUTINGS["some_without_expert"](rng, 2, BASE)
    lay = oracle.layout(topk_idx, BASE.num_experts)
    xs = integers(rng, 2, 3, BASE.num_tokens, BASE.hidden)
    handle = jax.jit(per_rank(lambda x, i: jax_ep.dispatch(x, i, **options).handle, mesh))(xs[:, 0], topk_idx)
    total, tokens = run(scan, mesh, handle, xs)
    rows = [oracle.gather(xs[:, i], lay) for i in range(3)]
    for i in range(3):
        assert_same_bits(tokens[:, i], rows[i], f"step {i}")
    np.testing.assert_array_equal(total, sum(oracle.combine(r, lay) for r in rows))


def test_transforms_compiled_once_for_routings(implementation, expert_mesh, rng):
    """Routing is data: new ids never cause a new compilation."""
    jitted = jax.jit(per_rank(moe(implementation), expert_mesh(2)))
    for _ in range(3):
        stack = Stack(rng, 2, layers=1)
        got = jitted(stack.x, *(a[:, 0] for a in stack.layers))
        assert_close(to_numpy(got), stack.layer(0).forward(), "moe")
    assert jitted._cache_size() == 1


@pytest.mark.slow
def test_transforms_vmap_shared_arguments(implementation, expert_mesh, rng, subtests):
    """Gradients of arguments that the elements of a batch share are the sums of theirs."""

    def gradients(call, x, topk_idx, *rest):
        return jax.grad(lambda x, *rest: jnp.sum(call(x, topk_idx, *rest) ** 2), (0, 1, 2, 3))(x, *rest)

    fn = moe(implementation)
    one_element = compiled(functools.partial(gradients, fn), expert_mesh(2))
    for batched, place in {"x": 0, "topk_weights": 2, "w_gate_up": 3}.items():
        with subtests.test(batched):
            stack = Stack(rng, 2, layers=1)
            arguments = [stack.x, *(array[:, 0] for array in stack.layers)]
            elements = arguments[place], 2 * arguments[place]
            each = [one_element(*arguments[:place], a, *arguments[place + 1 :]) for a in elements]
            arguments[place] = np.stack(elements, axis=1)
            call = jax.vmap(fn, in_axes=[0 if i == place else None for i in range(5)])
            got = run(functools.partial(gradients, call), expert_mesh(2), *arguments)
            for i, (one, first, second) in enumerate(zip(got, *each, strict=True)):
                want = np.stack([first, second], 1) if i == max(place - 1, 0) else first.astype(np.float64) + second
                assert_close(one, want)


@pytest.mark.parametrize("derivative", ["none", "outside", "inside"])
def test_moe_in_shard_map_without_jit(two_ranks, rng, derivative):
    """JAX then runs `shard_map` step by step, without the kind of VJP that the fused kernels have."""
    x, w_gate_up, w_down = (
        jnp.asarray(rng.standard_normal(shape) / 4, jnp.bfloat16) for shape in ((12, 16), (4, 16, 32), (4, 16, 16))
    )
    idx, weights = jnp.asarray(rng.integers(0, 4, (12, 2)), jnp.int32), jnp.ones((12, 2), jnp.float32)

    def layer(implementation, *arrays):
        return jax_ep.moe(*arrays, num_experts=4, implementation=implementation)

    def loss(function, *arrays):
        return jnp.sum(function(*arrays).astype(jnp.float32))

    def run(implementation):
        function, spec = functools.partial(layer, implementation), PartitionSpec(EXPERT)
        if derivative == "inside":
            function = jax.grad(functools.partial(loss, function), argnums=3)
        function = jax.shard_map(function, mesh=two_ranks, in_specs=spec, out_specs=spec)
        return jax.grad(functools.partial(loss, function), argnums=3) if derivative == "outside" else function

    arrays = x, idx, weights, w_gate_up, w_down
    got, want = run("triton")(*arrays), jax.jit(run("xla"))(*arrays)
    np.testing.assert_allclose(*(np.asarray(a, np.float32) for a in (got, want)), rtol=0.05, atol=0.05)


def test_operation_error_of_user_under_jit():
    """An error of the user's own function ends the call, whatever it says."""
    calls = []

    def activation(rows):
        calls.append(rows)
        raise NotImplementedError("no symbolic_zeros support with shard_map")

    x, weights = jnp.ones((2, 8)), jnp.ones((2, 1))
    experts = jax_ep.Experts(activation, gated=False)
    layer = functools.partial(jax_ep.fused_moe, experts=experts, implementation="xla")
    arguments = x, jnp.zeros((2, 1), jnp.int32), weights, jnp.ones((1, 8, 8)), jnp.ones((1, 8, 8))
    for function in (layer, jax.jit(layer)):
        calls.clear()
        with pytest.raises(NotImplementedError, match="no symbolic_zeros support"):
            function(*arguments)
        assert len(calls) == 1
