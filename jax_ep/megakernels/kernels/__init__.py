"""Kernel bodies in Triton. They import neither jax nor the rest of the package."""
