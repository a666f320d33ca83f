"""Order of independent launches in a program, by a data dependence that XLA cannot remove."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import BF16, F32
from jax_ep.core.mesh_axes import known_after
from jax_ep.ops.exchange import later
from jax_ep.types import Handle, Layout


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("first", [0.0, -0.0, 1.5, np.inf, np.nan])
def test_known_after_keeps_values(dtype, first):
    x, earlier = jnp.array([3, -1, 0], jnp.int32), jnp.full((2, 2), first, dtype)
    np.testing.assert_array_equal(jax.jit(known_after)(x, earlier), x)


def test_known_after_keeps_dependence():
    shapes = jax.ShapeDtypeStruct((64,), jnp.int32), jax.ShapeDtypeStruct((16, 8), BF16)
    text = jax.jit(known_after).lower(*shapes).compile().as_text()
    entry = text[text.index("ENTRY") :]
    parameters = re.findall(r"%?([\w.]+) = \S+ parameter\(", entry)
    assert len(parameters) == 2
    assert all(len(re.findall(rf"%{re.escape(name)}\b", entry)) > 1 for name in parameters), entry


def test_known_after_one_rank():
    layout = Layout(num_ranks=2, num_experts=4, num_tokens=3, top_k=1, capacity=6, axis=("expert",))
    arrays = {
        name: jnp.zeros(4, jnp.int32)
        for name in ("row_to_assignment", "assignment_to_row", "group_sizes", "topk_idx", "group")
    }
    handle = Handle(**arrays, num_invalid=jnp.zeros((), jnp.int32), num_dropped=jnp.zeros((), jnp.int32), layout=layout)
    earlier = jnp.ones((2, 2))
    assert later(dataclasses.replace(handle, group=None), earlier).row_to_assignment is handle.row_to_assignment
    alone = dataclasses.replace(handle, layout=dataclasses.replace(layout, num_ranks=1))
    assert later(alone, earlier) is alone
    changed = later(handle, earlier)
    assert changed.row_to_assignment is not handle.row_to_assignment and changed.group_sizes is not handle.group_sizes
    assert changed.group is handle.group, "another group would be another table, and a check between the launches"
