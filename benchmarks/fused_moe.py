"""The expert layer on one GPU: the same as `jax-ep bench fused-moe`, but the report goes to benchmarks/results."""

from jax_ep.tools.benchmark import fused_moe, harness

if __name__ == "__main__":
    harness.run(fused_moe.main)
