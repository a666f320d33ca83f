"""Scaling over the GPUs of a machine: the same as `jax-ep scale`, but the report goes to benchmarks/results."""

from jax_ep.tools.benchmark import harness, scaling

if __name__ == "__main__":
    harness.run(scaling.main)
