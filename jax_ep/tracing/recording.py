"""Recording of the kernels that a block of Python code launches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax

from jax_ep import context
from jax_ep.core import check
from jax_ep.tracing import events
from jax_ep.tracing.trace import Trace

_EVENTS_PER_PROGRAM = 512
_PROGRAMS_PER_MULTIPROCESSOR, _PROGRAMS_IN_INTERPRETER = 8, 16


class Recording:
    """Result of `record`; its `trace` is available when the block has ended."""

    def __init__(self) -> None:
        self._trace: Trace | None = None

    @property
    def trace(self) -> Trace:
        """The recorded trace.

        Raises:
          RuntimeError: the block has not ended, or ended with an error.
        """
        if self._trace is None:
            raise RuntimeError(
                "Recording.trace: the block of `record` has not ended, or ended with an error; read it after the block."
            )
        return self._trace


@contextlib.contextmanager
def record(*, events_per_program: int = _EVENTS_PER_PROGRAM) -> Iterator[Recording]:
    """Record the events of the communicating kernels in a block.

    Functions that this thread calls in the block are compiled with kernels that record. This includes functions that
    `jax.jit` has already compiled: recording is part of its cache key. After the block the programs without recording
    are used again, whose code is the same as without tracing. Programs compiled ahead of time, outside of the block,
    are not recorded. Each replay of a program captured in a CUDA graph in the block is recorded.

    Compilation takes time, so first call the function once in a separate block, as in docs/tracing.md. Wait for the
    results in the block, by `jax.block_until_ready`. With several processes, each records the devices that it drives,
    and all must make the same calls; `merge` joins the parts.

    Args:
      events_per_program: maximum number of events of each program of a device's kernels, 40 bytes each. The others are
        counted in `Trace.num_dropped`.

    Yields:
      A `Recording`, whose `trace` is available when the block has ended.

    Raises:
      ValueError: `events_per_program` is less than 1, or the context has no kernels, as with transport "xla".
      TypeError: `events_per_program` is not an int.
      RuntimeError: the context is recording already, ends in the block, or has too little memory.

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
    remedy = "leave it out for 512"
    events_per_program = check.integer("record", "events_per_program", events_per_program, remedy=remedy)
    recording = Recording()
    header, num_words = events.area_header(_most_programs(), events_per_program)
    with context.record(header, num_words) as raw:
        yield recording
    ids = raw.device_ids
    written = {ids[number]: events.read(words, number, raw.kernels, ids) for number, words in raw.words.items()}
    recording._trace = Trace.of_devices(written, is_ordered_only=context.transport() == "shared_memory")


def _most_programs() -> int:
    """Return the maximum number of programs of a launch, on any device of this process."""
    if jax.default_backend() == "cpu":
        return _PROGRAMS_IN_INTERPRETER
    return int(max(device.core_count for device in jax.local_devices())) * _PROGRAMS_PER_MULTIPROCESSOR
