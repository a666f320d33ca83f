"""What all cases of `jax-ep tune` are made of: sizes of a layer, values of settings, and chains of calls.

A chain is a scan in which each call needs a number from the one before, so that XLA can neither merge calls nor start
one early. Settings come to it as they come to any program: by `jax_ep.tuning.override`, around its tracing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep import tuning
from jax_ep.core.expert_matrices import QuantizedExperts
from jax_ep.quantization import prepack_experts, quantize_experts
from jax_ep.settings.operations import Setting
from jax_ep.tools.benchmark import chains, harness
from jax_ep.tools.tune_search import Run, Settings
from jax_ep.types import Array

BF16 = jnp.dtype(jnp.bfloat16)
_SPEC = jax.P("expert")
Step = Callable[..., Any]
"""`(zero, *arrays) -> any arrays` of one rank; it must need the zero."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of an expert layer, and who shares it.

    Attributes:
      tokens: T, of a rank.
      hidden: H.
      intermediate: I.
      experts: E, of all ranks.
      top_k: K.
      ranks: W.
      routing: "uniform" or "zipf".
    """

    tokens: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    ranks: int
    routing: str

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.tokens} tokens x {self.hidden}, {self.ranks} ranks"


@partial(jax.jit, static_argnums=0)
def stored_as(expert_format: str, w: Array) -> QuantizedExperts:
    """Matrices in a format of `quantize_experts`, whose name may end with "_prepacked"."""
    found = quantize_experts(w, expert_format.removesuffix("_prepacked"))
    return prepack_experts(found) if expert_format.endswith("_prepacked") else found


def is_small() -> bool:
    """Whether kernels run in the interpreter, where a program takes the time of its elements."""
    return jax.default_backend() == "cpu"


def programs(per_multiprocessor: Sequence[int] = (1, 2)) -> tuple[int, ...]:
    """Numbers of programs that communicate, up to so many of a multiprocessor."""
    if is_small():
        return 1, 2
    count = jax.local_devices()[0].core_count
    return tuple(sorted({8, 16, 24, 32, 48, 64, 96, *(count * n for n in per_multiprocessor)}))


def few(*values: Setting) -> tuple[Setting, ...]:
    """All, or in the interpreter the first two."""
    return values[:2] if is_small() else values


def make_chain(
    operation: str, mesh: jax.sharding.Mesh, step: Step, arrays: tuple[Any, ...], graphs: bool = False
) -> Callable[[Settings], Callable[[int], Run]]:
    """See `Case.make_chain`; with `graphs` as CUDA graphs, for calls that take less time than their launch."""
    options = harness.GRAPHS if graphs and not is_small() else None

    def compile_chain(settings: Settings, n: int) -> Run:
        def body(*local: Any) -> Array:
            def once(zero: Array, _: None) -> tuple[Array, None]:
                zero, inputs = lax.optimization_barrier((zero, local))
                results = lax.optimization_barrier(jax.tree.leaves(step(zero, *inputs)))
                return chains.zero_after(results[0]), None

            return lax.scan(once, jnp.zeros((), jnp.int32), None, length=n)[0][None]

        specs = (_SPEC,) * len(arrays)
        mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=_SPEC, check_vma=False)
        with tuning.override(operation, **settings):
            return partial(jax.jit(mapped).lower(*arrays).compile(options), *arrays)

    return lambda settings: partial(compile_chain, settings)
