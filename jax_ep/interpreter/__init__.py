"""Triton kernels on CPU devices, for tests: Triton's interpreter runs them, in one process per device."""

from jax_ep.interpreter.call import SharedMemory, call, current_pool, set_pool
from jax_ep.interpreter.pool import Pool
from jax_ep.interpreter.process import Launch

__all__ = ["Launch", "Pool", "SharedMemory", "call", "current_pool", "set_pool"]
