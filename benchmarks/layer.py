"""The expert layer on several GPUs: the same as `jax-ep bench moe`, but the report goes to benchmarks/results."""

from jax_ep.tools.benchmark import harness, layer

if __name__ == "__main__":
    harness.run(layer.main)
