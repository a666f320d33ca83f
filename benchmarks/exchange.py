"""Dispatch and combine on GPUs: the same as `jax-ep bench exchange`, but the report goes to benchmarks/results."""

from jax_ep.tools.benchmark import exchange, harness

if __name__ == "__main__":
    harness.run(exchange.main)
