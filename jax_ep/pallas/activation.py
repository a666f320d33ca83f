"""What comes between the two products: XLA fuses it as it is, so that layers of kernels alone are whole."""

from jax_ep.xla.activation import (
    activate,
    activate_columns,
    activate_gradient,
    activate_quantized,
    dequantize_rows,
    quantize_both_ways,
    quantize_columns,
    quantize_masters,
    quantize_matrices,
    quantize_rows,
)

__all__ = [
    "activate",
    "activate_columns",
    "activate_gradient",
    "activate_quantized",
    "dequantize_rows",
    "quantize_both_ways",
    "quantize_columns",
    "quantize_masters",
    "quantize_matrices",
    "quantize_rows",
]
