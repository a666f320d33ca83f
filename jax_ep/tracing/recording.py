"""Recording: the kernels of what is called in a block write down what they do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
import numpy as np

from jax_ep import context
from jax_ep.tracing import events
from jax_ep.tracing.trace import Trace
from jax_ep.types import type_name

_EVENTS_PER_PROGRAM = 512
_PROGRAMS_PER_MULTIPROCESSOR, _PROGRAMS_IN_INTERPRETER = 8, 16


class Recording:
    """What `record` gives to its block; its `trace` is there when the block has ended."""

    def __init__(self) -> None:
        self._trace: Trace | None = None

    @property
    def trace(self) -> Trace:
        """What was recorded.

        Raises:
          RuntimeError: the block has not ended.
        """
        if self._trace is None:
            raise RuntimeError("Recording.trace: kernels still record; read it after the block of `record`.")
        return self._trace


@contextlib.contextmanager
def record(*, events_per_program: int = _EVENTS_PER_PROGRAM) -> Iterator[Recording]:
    """Records what the kernels that communicate do, from the beginning of a block to its end.

    What this thread calls in the block is compiled with kernels that record, jitted functions that were compiled before
    included: whether kernels record is part of the key under which `jax.jit` keeps programs. After the block the
    programs without it are used again. They are the same code as if there were no traces at all. What was compiled
    outside of the block, ahead of time, runs without being recorded; in a program captured in a CUDA graph each replay
    is recorded.

    Call the function once in the block before the calls that count if the time of compilation is to stay out of the
    trace. Wait for the results in the block, by `jax.block_until_ready`. With several processes each records the
    devices that it drives, all of them the same calls; `merge` joins the parts.

    Args:
      events_per_program: how many events of each program of a device's kernels are kept, 40 bytes each. Those without
        room are counted, `Trace.num_dropped`.

    Yields:
      A `Recording`, whose `trace` is there when the block has ended.

    Raises:
      ValueError: `events_per_program` is less than 1, or the context has no kernels, as with transport "xla".
      TypeError: it is no int.
      RuntimeError: the context is recording already, ends in the block, or there is not so much memory.

    Example:
      >>> import jax, jax_ep
      >>> from jax_ep import tracing
      >>> mesh = jax.make_mesh((2,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> _ = jax_ep.init(mesh, transport="shared_memory")  # kernels in Triton's interpreter; on GPUs leave it out
      >>> per_expert = jax.P("expert")
      >>> @jax.jit
      ... @jax.shard_map(mesh=mesh, in_specs=per_expert, out_specs=per_expert)
      ... def exchange(x, ids):
      ...     sent = jax_ep.dispatch(x, ids, num_experts=4, implementation="triton")
      ...     return jax_ep.combine(sent.tokens, sent.handle, implementation="triton")
      >>> x, ids = jax.numpy.ones((8, 16)), jax.numpy.arange(16).reshape(8, 2) % 4
      >>> with tracing.record() as recording:
      ...     _ = jax.block_until_ready(exchange(x, ids))
      >>> sorted(recording.trace.summary()["kernels"])
      ['combine', 'dispatch', 'plan']
      >>> jax_ep.finalize()
    """
    _check(events_per_program)
    recording = Recording()
    header, num_words = events.area_header(_most_programs(), events_per_program)
    with context.record(header, num_words) as raw:
        yield recording
    ids = raw.device_ids
    written = {ids[number]: events.read(words, number, raw.kernels, ids) for number, words in raw.words.items()}
    recording._trace = Trace.of_devices(written, is_ordered_only=context.transport() == "shared_memory")


def _check(events_per_program: object) -> None:
    if isinstance(events_per_program, bool) or not isinstance(events_per_program, int | np.integer):
        raise TypeError(
            f"record: events_per_program is {type_name(events_per_program)}, expected an int; pass how many"
            " events of a program are kept."
        )
    if events_per_program < 1:
        raise ValueError(f"record: events_per_program={events_per_program}, expected at least 1; leave it out for 512.")


def _most_programs() -> int:
    """As many as a launch has, on any device of this process."""
    if jax.default_backend() == "cpu":
        return _PROGRAMS_IN_INTERPRETER
    return int(max(device.core_count for device in jax.local_devices())) * _PROGRAMS_PER_MULTIPROCESSOR
