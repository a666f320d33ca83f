"""Triton kernels and their launches: the `triton` implementation.

`kernels/` holds the kernel bodies and imports neither jax nor this package; `launch.py` runs them, on GPUs through a
custom call (jax_ep.ffi), on CPU devices through Triton's interpreter in one process per device (jax_ep.interpreter).
"""
