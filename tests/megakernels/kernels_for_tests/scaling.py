"""What the kernels of this folder share, by a relative import as in the package."""

import triton
import triton.language as tl


@triton.jit
def scaled(values, FACTOR: tl.constexpr):
    return (values.to(tl.float32) * FACTOR).to(values.dtype)
