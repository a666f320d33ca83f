"""Traces of the kernels that communicate: what each program did when, on one time line for all devices.

`record` makes the kernels of what is called in its block write down when each task began and ended. The result is a
`Trace`: a table of events, a summary, and a file that Perfetto (https://ui.perfetto.dev) and chrome://tracing open.
"""

from jax_ep.megakernels.kernels.trace_structs import KINDS
from jax_ep.tracing.recording import Recording, record
from jax_ep.tracing.trace import Trace, merge

__all__ = ["KINDS", "Recording", "Trace", "merge", "record"]
