"""The memory that a training step takes on each device, by group, before it runs.

XLA plans the memory of a program when it compiles it, so its own plan is the measure: sizes of arguments, results and
temporaries are those of `compiled.memory_analysis()`. The text of the compiled program, which has the shapes of one
device, divides them. Names of parameters are those of the arguments. A value that an operation of the forward pass
makes and one of the backward pass reads is kept for the backward pass. JAX names the operations of the backward pass
`transpose(jvp(...))`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_ep import context
from jax_ep.ops import plan as plans
from jax_ep.values import cut, shown, type_name

_BACKWARD = "transpose(jvp("
_ALIASES = frozenset(("bitcast", "get-tuple-element", "opt-barrier", "parameter", "tuple", "while"))
"""Operations whose result is in the memory of their operands."""
_CALLS = frozenset(("async-start", "call", "conditional", "while"))
_MOST_ON_CPU = 2**36
"""Elements of an array on a CPU device with which XLA's tiled emitter ends the process: it divides by zero."""
NOT_TILED = "--xla_backend_extra_options=xla_cpu_disable_tiled_emitter"
"""XLA reads its flags when a process first uses a device."""


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes of a compiled step on each device. It prints as a table.

    Attributes:
      arguments: bytes of each argument of the step by its name: weights, optimizer state, a batch. Fields of a
        NamedTuple or a dataclass count separately, as "state.optimizer".
      results: results that are not in the memory of a donated argument.
      temporaries: values that end with the step: `kept`, copies of experts, gradients and work space.
      kept: what the forward pass makes and the backward pass reads: activations, and weights in the dtype of the
        computation. XLA can hold it in the memory of later results, too.
      spare_experts: weights of the copies of experts in one call with `Balance`, the largest.
      heap: symmetric memory that the context has reserved, for all programs traced so far; 0 without kernels.
      device: kind of the devices, such as "NVIDIA H100 80GB HBM3" or "cpu".
      compiled: the compiled step. Call it, to compile no second time.
    """

    arguments: Mapping[str, int]
    results: int
    temporaries: int
    kept: int
    spare_experts: int
    heap: int
    device: str
    compiled: Any = dataclasses.field(repr=False, compare=False)

    @property
    def total(self) -> int:
        """Bytes on a device."""
        return sum(self.arguments.values()) + self.results + self.temporaries + self.heap

    def rows(self) -> Iterator[tuple[str, int]]:
        """Yield a name and the bytes of each group, and of the total; indented groups are a part of others."""
        yield from self.arguments.items()
        yield "results that take new memory", self.results
        yield "temporaries", self.temporaries
        yield "  kept for the backward pass", self.kept
        yield "  copies of experts (Balance)", self.spare_experts
        yield "symmetric heap", self.heap
        yield "total", self.total

    def __str__(self) -> str:
        always = ("symmetric heap", "total")
        rows = [(name, f"{size / 1e6:,.1f}") for name, size in self.rows() if size or name in always]
        names, sizes = (max(map(len, column)) for column in zip(*rows, strict=True))
        lines = [f"{f'MB on each device ({self.device})':<{names}}  {'':>{sizes}}".rstrip()]
        return "\n".join([*lines, *(f"{name:<{names}}  {size:>{sizes}}" for name, size in rows)])


def plan_memory(step: Callable[..., Any], /, *args: Any, **kwargs: Any) -> MemoryPlan:
    """Compile a training step, and report the memory that it takes on each device, without running it.

    Sizes are those of XLA for the devices of this process: call it on the GPUs that will train. On CPU devices the
    sizes of arguments are the same, but XLA plans other temporaries and no kernel reserves a heap.

    The plan covers one program. It knows neither other programs and arrays of the process, nor what CUDA, NCCL and the
    allocator take: leave a tenth of the GPU's memory to them.

    Args:
      step: a function, jitted by `jax.jit` or `flax.nnx.jit` with its shardings and donated arguments. Other functions
        are jitted without.
      *args: its arguments: arrays, or `jax.ShapeDtypeStruct`s; their shardings apply if the step names no shardings.
      **kwargs: its keyword arguments.

    Returns:
      A `MemoryPlan`, which prints as a table.

    Raises:
      TypeError: `step` is not a function.
      ValueError: an argument is an integer or has a shape that XLA does not represent, or an array has 2^36 elements or
        more on each CPU device: XLA then ends a process that did not start with the flag of the message.
      NotImplementedError: XLA plans no memory on this platform.

    Example:
      >>> import jax, jax.numpy as jnp, jax_ep
      >>> def step(w, x):
      ...     return w - jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)
      >>> plan = jax_ep.plan_memory(jax.jit(step, donate_argnums=0), jnp.ones((128, 64)), jnp.ones((32, 128)))
      >>> plan.arguments
      {'w': 32768, 'x': 16384}
      >>> plan.kept == 4 * 32 * 64
      True
    """
    if not callable(step) or isinstance(step, jax.stages.Compiled):
        raise TypeError(
            f"plan_memory: step is {type_name(step)}, expected a function; pass the training step, jitted or not."
        )
    _check_shapes((args, kwargs))
    with plans.recording() as found:
        try:
            lowered = (step if hasattr(step, "lower") else jax.jit(step)).lower(*args, **kwargs)
        except OverflowError as error:
            _check_integers((args, kwargs), error)
            raise
    _check_sizes(getattr(lowered, "lowered", lowered))  # flax.nnx wraps that of JAX.
    return of_compiled(lowered.compile(), found)


def _arguments(arguments: Any) -> Iterator[tuple[str, Any]]:
    """Yield a name, such as `args[0]['w']`, and each value of `(args, kwargs)`."""
    for path, value in jax.tree_util.tree_leaves_with_path(arguments):
        yield ("args", "kwargs")[path[0].idx] + jax.tree_util.keystr(path[1:]), value


def _check_shapes(arguments: Any) -> None:
    """Check that XLA can represent the shapes of arguments."""
    for name, value in _arguments(arguments):
        shape = value.shape if isinstance(value, jax.ShapeDtypeStruct) else ()
        is_known = all(isinstance(size, int | np.integer) for size in shape)
        if not is_known or any(size < 0 for size in shape) or math.prod(size for size in shape if size) >= 1 << 60:
            raise ValueError(
                f"plan_memory: {cut(name, 100)} has shape {cut(shape, 100)}, expected integers of at least 0 and"
                " fewer than 2^60 elements; pass the shape of an array."
            )


def _check_integers(arguments: Any, error: OverflowError) -> None:
    """Raise a clear error if an argument is an integer that JAX's default dtype does not hold."""
    limits = np.iinfo(jax.dtypes.canonicalize_dtype(np.int64))
    for name, value in _arguments(arguments):
        if type(value) is int and not limits.min <= value <= limits.max:
            raise ValueError(
                f"plan_memory: {cut(name, 100)} is {shown(value)}, expected an {limits.dtype}, from {limits.min} to"
                f" {limits.max}; pass a smaller integer, or name it in static_argnums of jax.jit. A ShapeDtypeStruct"
                " describes an array."
            ) from error


def _check_sizes(lowered: Any) -> None:
    """Check that XLA's compiler for CPU devices can handle all arrays of a program."""
    if jax.default_backend() != "cpu" or NOT_TILED in os.environ.get("XLA_FLAGS", "").split():
        return
    module = lowered.compiler_ir().operation
    names = [f"mhlo.num_{what}" for what in ("partitions", "replicas")]
    num_devices = math.prod(module.attributes[name].value for name in names if name in module.attributes)
    results = ((f"result{jax.tree_util.keystr(path)}", x) for path, x in jax.tree.leaves_with_path(lowered.out_info))
    shapes = ((name, tuple(value.shape)) for name, value in (*_arguments(lowered.args_info), *results))
    inside = ((f"a result of {operation}", shape) for operation, shape in _shapes_inside(module))
    for name, shape in itertools.chain(shapes, inside):
        if math.prod(shape) >= _MOST_ON_CPU * num_devices:
            raise ValueError(
                f"plan_memory: {cut(name, 100)} has shape {cut(shape, 100)} on {num_devices} CPU device(s),"
                f" expected fewer than {_MOST_ON_CPU} elements on each; shard it over more devices, plan smaller"
                f" layers, or start Python with {NOT_TILED} in XLA_FLAGS, with which XLA compiles any size."
            )


def _shapes_inside(operation: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name of each operation of a program and the shapes of its results, which tokens do not have."""
    for region in operation.regions:
        for block in region:
            for inner in block:
                yield from ((inner.operation.name, tuple(getattr(value.type, "shape", ()))) for value in inner.results)
                yield from _shapes_inside(inner.operation)


def of_compiled(compiled: Any, found: Sequence[object]) -> MemoryPlan:
    """Return the plan of a compiled step; `found` are the plans of `jax_ep` that its trace resolved."""
    sizes, text = compiled.memory_analysis(), compiled.as_text()
    placed = jax.tree.leaves(compiled.input_shardings)  # the devices may be those of a topology, which is not here
    device = min(placed[0].device_set, key=lambda d: d.id) if placed else jax.devices()[0]
    if sizes is None or not text:
        raise NotImplementedError(
            f"plan_memory: XLA reports no memory on {device.platform}; call it on GPUs or CPU devices."
        )
    computations = _computations(text)
    arguments: Counter[str] = Counter()
    for value in _instructions(computations["ENTRY"]):
        if value.opcode == "parameter" and (size := sum(value.sizes)):
            name = re.match(r"[^\W\d]\w*(\.[^\W\d]\w*)?", _unescaped(value.op_name))
            arguments[name[0] if name else "captured arrays"] += size
    spare = (part.num_bytes for part in found if isinstance(part, plans.BalancedPlan))
    return MemoryPlan(
        arguments=dict(arguments.most_common()),
        results=sizes.output_size_in_bytes - sizes.alias_size_in_bytes,
        temporaries=sizes.temp_size_in_bytes,
        kept=_kept(computations, "ENTRY"),
        spare_experts=max(spare, default=0),
        heap=context.heap_bytes(),
        device=device.device_kind,
        compiled=compiled,
    )


class _Instruction(NamedTuple):
    """One line of the text of a program."""

    name: str
    opcode: str
    sizes: list[int]  # bytes of the result, or of each element of a tuple
    operands: list[str]  # names of instructions
    op_name: str  # JAX's name of the operation, or empty
    element: int  # index of a get-tuple-element
    called: list[str]  # computations whose instructions run one after another; not those of a fusion


def _computations(text: str) -> dict[str, list[str]]:
    """Return the lines of each computation by its name; the program's is "ENTRY"."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if header := re.match(r"(ENTRY )?%([\w.-]+) .*\{$", line):
            current = found.setdefault("ENTRY" if header[1] else header[2], [])
        elif line.startswith("  "):
            current.append(line)
    return found


def _instructions(lines: Sequence[str]) -> Iterator[_Instruction]:
    """Parse the lines of a computation."""
    for line in lines:
        line = re.sub(r"/\*.*?\*/", "", line)
        if match := re.match(r"\s+(?:ROOT )?%([\w.-]+) = (\(.*?\)|\S+) ([a-z][\w-]*)\(([^)]*)\)(.*)", line):
            name, shape, opcode, operands, attributes = match.groups()
            op_name = re.search(r'op_name="((?:[^"\\]|\\.)*)"', attributes)
            element = re.search(r"\bindex=(\d+)", attributes)
            called = re.findall(r"%([\w.-]+)", attributes) if opcode in _CALLS else []
            sizes, names = _sizes(shape), re.findall(r"%([\w.-]+)", operands)
            number = int(element[1]) if element else 0
            yield _Instruction(name, opcode, sizes, names, op_name[1] if op_name else "", number, called)


def _unescaped(text: str) -> str:
    """Replace the octal escapes in which XLA prints UTF-8."""
    data = re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), text.encode())
    return data.decode(errors="replace")


def _sizes(shape: str) -> list[int]:
    """Return the bytes of each array on the device; memory space 5 is that of the host."""
    found = []
    for name, sizes, layout in re.findall(r"\b([a-z]\w*)\[([\d,<=]*)\](\{[^}]*\})?", shape):
        bits = re.search(r"\d+", name)  # none in "pred"
        count = math.prod(int(size) for size in re.findall(r"\d+", sizes))
        is_here = name not in ("token", "opaque") and "S(5)" not in layout
        found.append(-(-count * (int(bits[0]) if bits else 8) // 8) if is_here else 0)
    return found


def _kept(computations: Mapping[str, list[str]], name: str) -> int:
    """Return the bytes that operations of the forward pass make and those of the backward pass read.

    Both passes are in one computation: the program's, or the body of a loop over microbatches.
    """
    buffers: dict[str, list[frozenset[tuple[str, int]]]] = {}  # of each value: those of its elements
    sizes: dict[tuple[str, int], int] = {}
    backward: set[str] = set()
    constants: set[str] = set()  # such as the zeros that a loop fills
    kept: set[tuple[str, int]] = set()
    inside = 0
    for value in _instructions(computations.get(name, ())):
        inside = max([inside, *(_kept(computations, callee) for callee in value.called)])
        lines = [line for callee in value.called for line in computations.get(callee, ())]
        names = [value.op_name] if value.op_name else lines
        if any(_BACKWARD in n for n in names) or (not value.op_name and backward & set(value.operands)):
            backward.add(value.name)
        operands = [buffers.get(operand, []) for operand in value.operands]
        if value.opcode == "get-tuple-element":
            buffers[value.name] = operands[0][value.element : value.element + 1]
        elif value.opcode == "tuple":
            buffers[value.name] = [frozenset().union(*elements) for elements in operands]
        elif value.opcode == "while":  # It fills what it gets as constants.
            own = [(value.name, i) for i in range(len(value.sizes))]
            buffers[value.name] = [
                frozenset({mine}) if part and all(buffer[0] in constants for buffer in part) else part
                for part, mine in zip(operands[0], own, strict=False)
            ]
            sizes |= dict(zip(own, value.sizes, strict=True))
        elif value.opcode in _ALIASES:
            buffers[value.name] = operands[0] if operands else [frozenset()] * len(value.sizes)
        else:
            own = [(value.name, i) for i in range(len(value.sizes))]
            buffers[value.name] = [frozenset({buffer}) for buffer in own]
            sizes |= dict(zip(own, value.sizes, strict=True))
            if value.opcode not in _CALLS | {"custom-call"} and constants.issuperset(value.operands):
                constants.add(value.name)
        if value.name in backward and (value.opcode not in _ALIASES or value.opcode == "while"):
            read = frozenset[tuple[str, int]]().union(*(part for elements in operands for part in elements))
            kept |= {buffer for buffer in read if buffer[0] not in backward | constants}
    return max(inside, sum(sizes[buffer] for buffer in kept))
