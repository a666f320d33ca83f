"""The `pallas` implementation: kernels for Hopper GPUs that need nothing but JAX itself."""
