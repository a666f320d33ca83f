"""Triton kernels to machine code, by Triton's own compiler and assembler, in threads.

Compilation releases Python's lock for most of its time, a second or two for dispatch and combine. So the kernels of a
program compile in parallel while tracing goes on (pending.py).
"""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_ep.core.files import sources_digest
from jax_ep.core.kernel import Config, Constants, Kernel, element_type
from jax_ep.core.structs import flat

ALIGNMENT = 16
"""Bytes that all addresses are a multiple of, as the widest accesses of a thread need it."""
_DECODERS = Path(__file__).parents[1] / "formats" / "kernels"
_MOST_THREADS = 16  # each takes some hundred megabytes


@dataclasses.dataclass(frozen=True)
class Parameter:
    """An array that a kernel takes: its dtype, and the block of its descriptor, or None for an address."""

    dtype: np.dtype
    block_shape: tuple[int, ...] | None = None

    @property
    def type_name(self) -> str:
        """Triton's name of the type."""
        name = element_type(self.dtype)
        return f"*{name}" if self.block_shape is None else f"tensordesc<{name}{list(self.block_shape)}>"


class Copies(NamedTuple):
    """How a kernel's copies by a descriptor lie in memory: the driver's numbers, and what one copy moves."""

    element_type: int
    element_bytes: int
    swizzle: int
    box: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A kernel that can be launched."""

    name: str  # of the function in the code
    code: bytes  # cubin
    num_threads: int  # of a program; more than the config's with warp specialization
    shared_bytes: int  # dynamic shared memory of a program
    copies: tuple[Copies, ...]  # of each descriptor


def device_capability() -> int:
    """Compute capability of this process's GPUs, 90 for an H200."""
    return round(10 * float(jax.local_devices()[0].compute_capability))


@dataclasses.dataclass(frozen=True)
class Compilation:
    """A kernel to compile. Equal ones are compiled once, in one thread, and again if that failed."""

    kernel: Kernel  # what to compile
    # A `Parameter`, or a NamedTuple of some, for each of the kernel's that `constants` does not name.
    parameters: tuple[Parameter | tuple[Parameter, ...], ...]
    config: Config  # its options count, the number of programs does not
    # `tl.constexpr` parameters by their names, each hashable, and None for arrays that the kernel does without.
    constants: tuple[tuple[str, object], ...]
    capability: int  # compute capability of the devices
    exact: str  # the constants as text, in which 1, 1.0 and True differ, and 0.0 and -0.0

    def result(self) -> Compiled:
        """Wait for the result, or raise the error of the compiler."""
        return self.begin().result()

    def begin(self) -> Future[Compiled]:
        """Has a thread compile it, unless one does or has done so."""
        with _lock:
            begun = _begun.get(self)
            if begun is None or (begun.done() and begun.exception() is not None):
                begun = _begun[self] = _threads().submit(_compile, self)
            return begun


def compile_kernel(
    kernel: Kernel,
    parameters: tuple[Parameter | tuple[Parameter, ...], ...],
    config: Config,
    constants: Constants,
    capability: int,
) -> Compilation:
    """Begins to compile a kernel; the arguments are those of a `Compilation`."""
    config = dataclasses.replace(config, num_programs=0)
    values = tuple(sorted(constants.items()))
    compilation = Compilation(kernel, parameters, config, values, capability, repr(values))
    compilation.begin()
    return compilation


_begun: dict[Compilation, Future[Compiled]] = {}
_lock = threading.Lock()


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), _MOST_THREADS), thread_name_prefix="jax_ep_compile")


def _compile(asked: Compilation) -> Compiled:
    kernel, constants = asked.kernel, dict(asked.constants)
    arrays = [name for name in kernel.body.arg_names if name not in constants]
    types = {name: _type_names(parameter) for name, parameter in zip(arrays, asked.parameters, strict=True)}
    built = build(kernel, types, asked.config, constants, asked.capability)
    if built.metadata.global_scratch_size:
        raise NotImplementedError(
            f"{kernel.name}: kernels have no scratch memory, which descriptors made in a kernel need"
        )
    copies = tuple(_copies(found) for found in built.metadata.tensordesc_meta or ())
    if len(copies) != sum(parameter.block_shape is not None for parameter in flat(asked.parameters)):
        raise NotImplementedError(f"{kernel.name}: Triton describes {len(copies)} of its descriptors")
    metadata = built.metadata
    return Compiled(metadata.name, built.asm["cubin"], 32 * metadata.num_warps, metadata.shared, copies)


def build(
    kernel: Kernel, types: Mapping[str, Any], config: Config, constants: Mapping[str, object], capability: int
) -> Any:
    """Compile a kernel with Triton, and keep its intermediate forms.

    `types` has Triton's name of the type of each array, or a NamedTuple of names. Gluon's descriptors get the widest
    swizzle that fits.

    Raises:
      OSError: Triton cannot write its files.
      RuntimeError: Triton fails, as it does if files in its cache are damaged.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon import GluonASTSource

    function = kernel.body
    source_type: Any = GluonASTSource if function.is_gluon() else ASTSource
    if function.is_gluon():
        types = jax.tree.map(_with_layout, dict(types))
    names = list(function.arg_names)
    values = {(names.index(name),): value for name, value in constants.items()}
    signature = {name: types.get(name, "constexpr") for name in names}
    aligned = {path: [["tt.divisibility", ALIGNMENT]] for path in _pointers(signature.values())}

    class Source(source_type):
        """Its hash covers decoders, which a constant chooses, so that Triton does not see them."""

        def hash(self) -> str:
            return f"{super().hash()}-{sources_digest(_DECODERS)}"

    source = Source(function, signature, values, aligned)
    options: dict[str, object] = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    options["maxnreg"] = config.max_registers
    options["enable_fp_fusion"] = True  # Triton 3.9 warns if it is not set
    options["ptx_options"] = "--suppress-debug-info"  # each call carries its code, which that makes three times as long
    try:
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise RuntimeError(
            f"{kernel.name}: Triton could not compile this kernel ({type(error).__name__}: {error}). If a file in its"
            f" cache is damaged, delete the folder {triton.knobs.cache.dir} and try again."
        ) from error
    except OSError as error:
        raise OSError(
            f"{kernel.name}: Triton could not compile this kernel ({error}), expected a cache and a folder for"
            f" temporary files that it can write; set TRITON_CACHE_DIR, which is {triton.knobs.cache.dir}, or TMPDIR."
        ) from error


def _type_names(parameter: Any) -> Any:
    """Triton's name of the type, in the same NamedTuple."""
    if isinstance(parameter, tuple):
        return type(parameter)(*map(_type_names, parameter))
    return parameter.type_name


def _with_layout(name: str) -> str:
    """Return Gluon's name of a type, which has a layout if it is a descriptor."""
    import triton.language as tl
    from triton.experimental.gluon.language import NVMMASharedLayout

    if not name.startswith("tensordesc"):
        return name
    block = tl.str_to_ty(name, None).block_type
    return f"{name[:-1]},{NVMMASharedLayout.get_default_for(block.shape, block.element_ty)!r}>"


def _pointers(types: Iterable[str | tuple[str, ...]]) -> list[tuple[int, ...]]:
    """Return the path of each pointer: the index of its parameter, and its index in a NamedTuple."""
    found: list[tuple[int, ...]] = []
    for i, names in enumerate(types):
        if isinstance(names, tuple):
            found += [(i, j) for j, name in enumerate(names) if name.startswith("*")]
        elif names.startswith("*"):
            found.append((i,))
    return found


def _copies(found: dict[str, Any]) -> Copies:
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    element_type = TMA_DTYPE_DEVICE_TO_HOST[found["elem_type"]]
    return Copies(element_type, found["elem_size"], found["swizzle"], tuple(found["block_size"]))
