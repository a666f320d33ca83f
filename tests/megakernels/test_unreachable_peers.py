"""Devices marked as two machines: kernels inside each, XLA's collectives between them, and no access across."""

import functools
import re

import jax
import pytest

import jax_ep
from cases import BASE
from harness import PATIENCE_S, make_mesh
from jax_ep import context
from jax_ep.heap import peer_access
from layers import Layer

pytest.importorskip("triton")
TOPOLOGY = jax_ep.Topology(node="node", local="expert")
REASON = "ranks of the axes {} span several of the 2 processes"


@pytest.fixture(scope="module")
def nodes():
    """Two nodes of two devices, whose tables lack the addresses of the other node."""
    if jax.default_backend() != "cpu" or jax.process_count() > 1:
        pytest.skip("marks CPU devices of one process")
    from jax_ep.interpreter import SharedMemory

    everyone = jax.devices()
    machine_of = {device: number // 2 for number, device in enumerate(everyone)}

    def domains(devices, of_processes):
        found = {}
        for place, device in enumerate(devices):
            found.setdefault(machine_of[device], []).append(place)
        return list(found.values())

    allocate = SharedMemory.allocate

    def allocate_near(self, num_bytes, function):
        found = allocate(self, num_bytes, function)
        near = {number: number // 2 for number in found}
        return {
            number: [at if near[number] == near[other] else 0 for other, at in enumerate(addresses)]
            for number, addresses in found.items()
        }

    jax_ep.finalize()
    mesh = make_mesh((2, 2), TOPOLOGY.axes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer_access, "domains", domains)
        patch.setattr(SharedMemory, "allocate", allocate_near)
        jax_ep.init(mesh, axis_name=TOPOLOGY, transport="shared_memory", timeout_s=PATIENCE_S)
        yield mesh
        jax_ep.finalize()


def layer(axis_name, implementation, *arguments):
    options = {"num_experts": BASE.num_experts, "axis_name": axis_name, "implementation": implementation}
    return jax_ep.moe(*arguments, **options)


@pytest.mark.parametrize(
    ("axis_name", "axes"),
    [(("node", "expert"), ("node", "expert")), (jax_ep.Topology(node="expert", local="node"), ("node",))],
    ids=["flat", "the wrong way round"],
)
@pytest.mark.slow(unless={"axes": [("node", "expert")]})
def test_unreachable_peers_exchange_unsupported(nodes, rng, axis_name, axes):
    """With only `triton`, an error with the reason; otherwise `xla` is used."""
    problem, reason = Layer(rng, "uniform", 4, BASE), REASON.format(axes)

    def lower(implementation):
        fn = jax.shard_map(
            functools.partial(layer, axis_name, implementation),
            mesh=nodes,
            in_specs=jax.P(TOPOLOGY.axes),
            out_specs=jax.P(TOPOLOGY.axes),
        )
        return jax.jit(fn).lower(*(a.reshape(-1, *a.shape[2:]) for a in problem.args)).as_text()

    with pytest.raises(NotImplementedError, match=f"triton: {re.escape(reason)}"):
        lower("triton")
    assert "all_to_all" in lower(None)


def test_unreachable_peers_other_mesh(nodes):
    """Peer access is not known for this mesh."""
    other = make_mesh((4,), ("expert",))
    assert context.unreachable_reason(("expert",)) is not None
    with jax.set_mesh(other):
        assert "the mesh here, {'expert': 4}, is not the mesh of init, {'node': 2, 'expert': 2}" in (
            context.unreachable_reason(("expert",)) or ""
        )
    with jax.set_mesh(nodes):
        assert context.unreachable_reason(("expert",)) is None
        assert REASON.format(("node",)) in (context.unreachable_reason(("node",)) or "")
        assert context.unreachable_reason(()) is None
