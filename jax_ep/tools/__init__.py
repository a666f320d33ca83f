"""The commands of `jax-ep`: checks of the machine, measurements, and recordings of kernels."""
