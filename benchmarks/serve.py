"""A whole decoder on one GPU: the same as `jax-ep bench serve`, but the report goes to benchmarks/results."""

from jax_ep.tools.benchmark import harness, serve

if __name__ == "__main__":
    harness.run(serve.main)
