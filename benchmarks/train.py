"""A whole training step: the same as `jax-ep bench train`, but the report goes to benchmarks/results."""

from jax_ep.tools.benchmark import harness, train

if __name__ == "__main__":
    harness.run(train.main)
