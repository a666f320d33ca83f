"""The registry of implementations: a name, the module with its functions, and what it can do.

An implementation is a module that has the functions of `Implementation`. It knows nothing of autodiff (vjp.py) and
nothing of argument checking (validation.py). To add one, write the module and register it here; the contract suite in
tests/contract then holds it to the same behaviour.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
from jax.typing import DTypeLike

from jax_ep import mesh_axes, reference
from jax_ep.types import Array, Handle, Layout, LowLatencyHandle, Quantized

Axis = tuple[str, ...]
_log = logging.getLogger("jax_ep")


class Implementation(Protocol):
    """Per-shard functions of one implementation; reference.py documents shapes and meaning.

    `after` is an array that must exist before the exchange begins, where the order of exchanges must be the same on
    all ranks; XLA's own collectives see to that themselves. Where `fuses` says no, an exchange and its product run one
    after the other, and the three functions after it may be missing, with the two behind them.
    """

    def plan(self, topk_idx: Array, layout: Layout, axis: Axis) -> Handle: ...
    def send_rows(self, x: Array, handle: Handle, axis: Axis) -> Array: ...
    def send_tokens(self, x: Array, handle: Handle, axis: Axis, wire_dtype: DTypeLike | None) -> Array: ...
    def send_quantized(self, x: Array, handle: Handle, axis: Axis) -> Quantized: ...
    def return_tokens(self, y: Array, handle: Handle, axis: Axis, wire_dtype: DTypeLike | None) -> Array: ...
    def send_weights(self, weights: Array, handle: Handle, axis: Axis, after: Array | None = None) -> Array: ...
    def return_weights(self, row_weights: Array, handle: Handle, axis: Axis, after: Array | None = None) -> Array: ...
    def grouped_gemm(
        self, lhs: Array, rhs: Array, group_sizes: Array, *, transpose_rhs: bool, out_dtype: DTypeLike
    ) -> Array: ...
    def grouped_gemm_fp8(
        self,
        lhs: Array,
        rhs: Array,
        group_sizes: Array,
        lhs_scales: Array,
        rhs_scales: Array,
        *,
        out_dtype: DTypeLike,
    ) -> Array: ...
    def grouped_gemm_weights(self, lhs: Array, rhs: Array, group_sizes: Array, *, out_dtype: DTypeLike) -> Array: ...
    def activate(self, hidden: Array, weights: Array, group_sizes: Array, *, activation: str, gated: bool) -> Array: ...
    def activate_gradient(
        self, hidden: Array, weights: Array, d_rows: Array, group_sizes: Array, *, activation: str, gated: bool
    ) -> tuple[Array, Array]: ...
    def quantize_rows(self, x: Array, group_sizes: Array) -> Quantized: ...
    def dequantize_rows(self, values: Array, scales: Array, group_sizes: Array, *, dtype: DTypeLike) -> Array: ...
    def quantize_matrices(self, w: Array) -> Quantized: ...
    def activate_quantized(
        self, hidden: Array, weights: Array, group_sizes: Array, *, activation: str, gated: bool, keep: bool
    ) -> tuple[Array, Array, Array | None]: ...
    def fuses(self, layout: Layout, dtype: DTypeLike, depth: int, columns: int) -> bool: ...
    def dispatch_gemm(
        self,
        x: Array,
        w: Array,
        handle: Handle,
        *,
        transpose_rhs: bool,
        keep: str | None,
        num_communicating: int | None,
        mode: str | None,
    ) -> tuple[Array, Array | None]: ...
    def gemm_combine(self, h: Array, w: Array, handle: Handle, *, transpose_rhs: bool, mode: str | None) -> Array: ...
    def token_products(self, kept: Array, rows: Array, handle: Handle, *, transpose: bool, kept_as: str) -> Array: ...
    def fuses_products(
        self,
        layout: Layout,
        dtype: DTypeLike,
        features: int,
        hidden: int,
        *,
        mode: str | None,
        wanted: bool | None,
    ) -> bool: ...
    def gemm_combine_products(
        self,
        h: Array,
        w: Array,
        kept: Array,
        handle: Handle,
        *,
        transpose_rhs: bool,
        mode: str | None,
        kept_as: str,
    ) -> tuple[Array, Array]: ...
    def low_latency_dispatch(
        self,
        x: Array | Quantized,
        topk_idx: Array,
        num_tokens: Array | None,
        layout: Layout,
        axis: Axis,
        group_size: int | None,
    ) -> tuple[Array, Array | None, Array, LowLatencyHandle]: ...
    def low_latency_combine(
        self, y: Array, topk_weights: Array, handle: LowLatencyHandle, axis: Axis, wire_dtype: DTypeLike | None
    ) -> Array: ...
    def fuses_low_latency(
        self, layout: Layout, lhs_dtype: DTypeLike, dtype: DTypeLike, depth: int, columns: int
    ) -> bool: ...
    def low_latency_gemm_combine(
        self,
        lhs: Array,
        rhs: Array,
        group_sizes: Array,
        topk_weights: Array,
        handle: LowLatencyHandle,
        lhs_scales: Array | None,
        rhs_scales: Array | None,
        axis: Axis,
        *,
        out_dtype: DTypeLike,
        expected_rows: int | None,
    ) -> Array: ...
    def masked_grouped_gemm(
        self,
        lhs: Array,
        rhs: Array,
        group_sizes: Array,
        lhs_scales: Array | None,
        rhs_scales: Array | None,
        *,
        out_dtype: DTypeLike,
        expected_rows: int | None,
    ) -> Array: ...
    def masked_gated_activation(
        self, hidden: Array, group_sizes: Array, *, activation: str, quantize: bool
    ) -> tuple[Array, Array | None]: ...


@dataclasses.dataclass(frozen=True)
class Request:
    """What a caller wants to run: enough for an implementation to accept it or to say why not.

    Attributes:
      function: public function, for messages.
      dtype: dtype of the tokens.
      hidden: H, or the length of the rows that a product contracts.
      operation: "exchange", "gemm", "gemm_weights", "activation", "low_latency", "masked_gemm" or "masked_activation".
      layout: sizes of the exchange, or None for operations without one.
      wire_dtype: FP8 on the wire, or of the activation's result, or None.
      mode: how a product and its combine must run, of `types.COMBINE_MODES`, or None.
      columns: of the matrices, where a product is part of the exchange.
      product: number of rows, their length, columns and number of the matrices, where the operation is a product.
      foreign_handle: the layout comes from a handle that has no device group, so from another implementation.
      platform: where it will run ("cpu", "gpu", ...).
      alone: the caller named one implementation, and none to fall back to.
      dispatch_mode: how a dispatch and its product must run, of `types.DISPATCH_MODES`, or None.
    """

    function: str
    dtype: jax.numpy.dtype
    hidden: int
    operation: str
    layout: Layout | None = None
    wire_dtype: DTypeLike | None = None
    mode: str | None = None
    columns: int | None = None
    product: tuple[int, int, int, int] | None = None
    foreign_handle: bool = False
    platform: str = dataclasses.field(default_factory=mesh_axes.platform)
    alone: bool = False
    dispatch_mode: str | None = None

    @property
    def empty(self) -> bool:
        """Whether there is nothing to exchange: then no kernel is needed, and `xla` serves all implementations."""
        return self.operation == "exchange" and self.layout is not None and self.layout.num_tokens == 0


@dataclasses.dataclass(frozen=True)
class Entry:
    """One registered implementation.

    Attributes:
      name: as users write it.
      load: returns the module; called on first use, so that optional packages stay optional.
      refusal: None where the implementation can serve the request, else the reason why it cannot.
      operations: all that it was made for; None: every one.
      dtypes: of tokens or rows, likewise.
      fastest: whether it can serve a request, and is preferred to those before it.
    """

    name: str
    load: Callable[[], Implementation]
    refusal: Callable[[Request], str | None]
    operations: tuple[str, ...] | None = None
    dtypes: tuple[str, ...] | None = None
    fastest: Callable[[Request], bool] = lambda _: False

    def foreign(self, request: Request) -> str | None:
        """Why no machine and no option could make it serve the request, or None."""
        if self.operations is not None and request.operation not in self.operations:
            return f"it was made for {self.operations}, not for {request.operation!r}"
        if self.dtypes is not None and jax.numpy.dtype(request.dtype).name not in self.dtypes:
            return f"it was made for {self.dtypes}, not for {jax.numpy.dtype(request.dtype).name}"
        return None


def _load_reference() -> Any:  # it fuses nothing
    return reference


def _load_triton() -> Any:  # not all of `Implementation`: its refusal keeps the rest away
    from jax_ep.megakernels import implementation

    return implementation


def _refusal_of_triton(request: Request) -> str | None:
    from jax_ep.megakernels import implementation

    return implementation.refusal(request)


def _load_pallas() -> Any:
    from jax_ep.pallas import implementation

    return implementation


def _refusal_of_pallas(request: Request) -> str | None:
    from jax_ep.pallas import requirements

    return requirements.refusal(request)


def _pallas_is_fastest(request: Request) -> bool:
    from jax_ep.pallas import requirements

    return requirements.fastest(request)


# In order of preference, behind those that are the fastest: the first one that accepts a request is the default.
_REGISTRY: dict[str, Entry] = {
    "triton": Entry("triton", load=_load_triton, refusal=_refusal_of_triton),
    "pallas": Entry(
        "pallas",
        load=_load_pallas,
        refusal=_refusal_of_pallas,
        operations=("gemm", "gemm_weights"),
        dtypes=("bfloat16", "float16"),
        fastest=_pallas_is_fastest,
    ),
    "xla": Entry("xla", load=_load_reference, refusal=reference.refusal),
}


def available(operation: str | None = None) -> tuple[str, ...]:
    """Names of the registered implementations, most preferred first; with `operation`, of those made for it."""
    if operation is None:
        return tuple(_REGISTRY)
    return tuple(name for name, entry in _REGISTRY.items() if operation in (entry.operations or (operation,)))


def get(name: str) -> Implementation:
    """The functions of implementation `name`, which must be registered."""
    return _REGISTRY[name].load()


@functools.cache
def _say_once(name: str, reason: str, platform: str) -> None:
    """On a GPU, falling back is worth a word; on the CPU the portable implementation is the expected one."""
    if platform == "gpu":
        _log.warning("implementation %s is not used: %s", name, reason)


def choose(implementation: str | Sequence[str] | None, request: Request) -> str:
    """The first of `implementation` (None: of all) that can serve `request`.

    Raises:
      ValueError: a name that is not registered.
      NotImplementedError: none can serve it; the message gives every reason.
    """
    names: Sequence[str] = sorted(_REGISTRY, key=lambda name: not _REGISTRY[name].fastest(request))
    if implementation is not None:
        names = (implementation,) if isinstance(implementation, str) else implementation
        if not isinstance(names, Sequence):
            raise TypeError(
                f"{request.function}: implementation={implementation!r} is a {type(implementation).__name__},"
                " expected a"
                f" name, a sequence of names, or None; choose from {available()}."
            )
    unknown = [name for name in names if not isinstance(name, str) or name not in _REGISTRY]
    if unknown or not names:
        raise ValueError(
            f"{request.function}: implementation={implementation!r} names {unknown or 'nothing'}; choose from"
            f" {available()}, or leave it None for the best one."
        )
    if implementation is not None:
        request = dataclasses.replace(request, alone=len(names) == 1)
    refusals = {}
    for name in names:
        reason = _REGISTRY[name].foreign(request)
        if reason is None:
            reason = _REGISTRY[name].refusal(request)
            if reason is None:
                return "xla" if request.empty else name
            _say_once(name, reason, request.platform)  # nobody waits for what it was not made for
        refusals[name] = reason
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
    raise NotImplementedError(
        f"{request.function}: no implementation of {tuple(names)} can serve this call: {reasons}. Leave"
        " implementation=None,"
        " or name one that can."
    )
