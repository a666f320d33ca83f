"""Grouped GEMMs: the same as `jax-ep bench grouped-gemm`, but the report goes to benchmarks/results."""

from jax_ep.tools.benchmark import grouped_gemm, harness

if __name__ == "__main__":
    harness.run(grouped_gemm.main)
