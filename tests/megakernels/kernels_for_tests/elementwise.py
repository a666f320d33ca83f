import triton
import triton.language as tl

from .scaling import scaled


@triton.jit
def scale(x_ptr, y_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr, FACTOR: tl.constexpr):
    """y = x * FACTOR, by blocks over the grid."""
    for block in range(tl.program_id(0), tl.cdiv(SIZE, BLOCK), tl.num_programs(0)):
        index = block * BLOCK + tl.arange(0, BLOCK)
        inside = index < SIZE
        tl.store(y_ptr + index, scaled(tl.load(x_ptr + index, mask=inside), FACTOR), mask=inside)


@triton.jit
def convert(x_ptr, y_ptr, SIZE: tl.constexpr):
    """y = x in y's type."""
    index = tl.arange(0, SIZE)
    tl.store(y_ptr + index, tl.load(x_ptr + index).to(y_ptr.dtype.element_ty))


@triton.jit
def widen_bytes(x_ptr, y_ptr, SIZE: tl.constexpr, ASM: tl.constexpr):
    """y = the bytes of x in 16 bits, four at a time by assembler."""
    index = tl.arange(0, SIZE)
    x = tl.load(x_ptr + index)
    y = tl.inline_asm_elementwise(ASM, "=r,=r,r", [x], dtype=tl.int16, is_pure=True, pack=4)
    tl.store(y_ptr + index, y)


@triton.jit
def write_half(x_ptr, y_ptr, SIZE: tl.constexpr):
    """Leaves the second half of y alone."""
    index = tl.arange(0, SIZE)
    tl.store(y_ptr + index, tl.load(x_ptr + index), mask=index < SIZE // 2)


@triton.jit
def fail(x_ptr, y_ptr, LIMIT: tl.constexpr):
    """Fails where x[0] has reached LIMIT, else y = x."""
    value = tl.load(x_ptr)
    tl.device_assert(value < LIMIT, "the limit is reached")
    tl.store(y_ptr, value)
