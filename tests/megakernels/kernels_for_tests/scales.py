import triton
import triton.language as tl

from jax_ep.megakernels.kernels.quantization import scales_for


@triton.jit
def invert(bits_ptr, scales_ptr, inverse_ptr, BLOCK: tl.constexpr):
    """Scales of groups, and their inverses, of the largest magnitudes."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    scales, inverse = scales_for(tl.load(bits_ptr + index))
    tl.store(scales_ptr + index, scales)
    tl.store(inverse_ptr + index, inverse)
