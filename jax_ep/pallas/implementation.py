"""The functions of the `pallas` implementation, see `backends.Implementation`."""

from jax_ep.pallas.gemm import grouped_gemm, grouped_gemm_weights

__all__ = ["grouped_gemm", "grouped_gemm_weights"]
