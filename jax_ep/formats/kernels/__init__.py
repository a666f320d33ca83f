"""Triton functions that decode quantized weights, for the kernels of every implementation. Nothing here imports jax."""
