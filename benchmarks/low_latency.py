"""Low-latency operations: the same as `jax-ep bench low-latency`, but the report goes to benchmarks/results."""

from jax_ep.tools.benchmark import harness, low_latency

if __name__ == "__main__":
    harness.run(low_latency.main)
