"""The type of expert weights that are stored in another way than as one array `[E, K, N]`."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Protocol, TypeGuard, cast, runtime_checkable

import jax.numpy as jnp
import numpy as np

from jax_ep.types import Array, result_type


class _Summarized:
    """Base of dataclasses of large arrays: `repr` shows dtypes and shapes, since values are on many devices."""

    def __repr__(self) -> str:
        parts = []
        for field in dataclasses.fields(cast(Any, self)):
            value = getattr(self, field.name)
            if hasattr(value, "dtype"):
                parts.append(f"{field.name}={value.dtype}{list(value.shape)}")
            elif value is not None and not (isinstance(value, str | float) and value == field.default):
                parts.append(f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(parts)})"


@result_type
@dataclasses.dataclass(frozen=True, repr=False)
class QuantizedWeights(_Summarized):
    """Expert weights `[..., E, K, N]` in 8 or 4 bits, with their scales. Every layer and GEMM takes them.

    A pytree: it passes `jit`, `scan` over stacked layers and `shard_map`, and every array has the leading axes.
    `jax_ep.quantization.quantize` makes it and describes the formats.

    Attributes:
      values: `[..., E, N, K]` float8_e4m3fn or int8, transposed, because tensor cores read 8-bit operands along K. With
        4 bits `[..., E, N, K / 2]` uint8, the first element in the low half, or prepacked `[..., E, N, K / 8]` uint32.
        Without a format, in the dtype of the tokens.
      scales: float32 `[..., E, ceil(N / 128), K / 128]` ("fp8"), `[..., E, N]` ("fp8_channel", "int8") or
        `[..., E, N, K / block_size]` ("int4"); uint8 exponents `[..., E, N, K / 32]` ("mxfp4"). For prepacked values
        float32 `[..., E, K / block_size, N]`, or uint32 `[..., E, ceil(K / 128), N]` of four exponents each. None
        without a format.
      format: name of the format; None: the values are not quantized.
      layout: "transposed" or "prepacked", see `jax_ep.quantization.with_layout`.
      master: the weights `[..., E, K, N]` that these were quantized from, for training with `recipe="fp8"`. Gradients
        go to the master; GEMMs do not read it. Or `[..., E, K, 2, N]`, as a tensor axis splits columns, with 2 or 1
        kinds: then values are `[..., E, 2, N, K]` and scales `[..., E, 2, N / 128, K / 128]`. None: for inference.
      values_kn: with a master, the same values in the layout of the master, for the gradients of tokens.
      smooth: `[..., E, K]` float32, divides the columns of tokens; the weights were multiplied by it. None: 1. Only
        with `activations="int8"`.
      activations: the dtype in which tokens are multiplied: "int8", with one scale per token; "fp8", with one scale
        per 128 columns of a token; None: their own dtype.

    Example:
      >>> import jax.numpy as jnp, jax_ep
      >>> w = jax_ep.quantize(jnp.ones((4, 128, 256)), "fp8")
      >>> w.shape
      (4, 128, 256)
      >>> w
      QuantizedWeights(values=float8_e4m3fn[4, 256, 128], scales=float32[4, 2, 1], format='fp8')
    """

    values: Array
    scales: Array | None = None
    format: str | None = dataclasses.field(default=None, metadata={"static": True})
    layout: str = dataclasses.field(default="transposed", metadata={"static": True})
    master: Array | None = None
    values_kn: Array | None = None
    smooth: Array | None = None
    activations: str | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weights that these stand for: `[..., E, K, N]`, or that of the master."""
        if self.master is not None:
            return self.master.shape
        *leading, columns, depth = self.values.shape
        return (*leading, depth * {"uint8": 2, "uint32": 8}.get(self.values.dtype.name, 1), columns)

    @property
    def is_prepacked(self) -> bool:
        """Whether the layout is "prepacked"."""
        return self.layout == "prepacked"


@result_type
@dataclasses.dataclass(frozen=True, repr=False)
class LoraWeights(_Summarized):
    """Frozen expert weights with LoRA adapters: they stand for `base + scale * a @ b` of each expert.

    `moe`, `fused_moe`, `sharded_moe` and `grouped_gemm` take them, and compute `x @ base + scale * (x @ a) @ b` with
    two thin grouped GEMMs. A pytree. Gradients go to the adapters; that of the base is zero, and is not computed.

    Attributes:
      base: `[..., E, K, N]` weights in the dtype of the tokens, a `qwix.QArray`, or `QuantizedWeights` without a
        master. Rounding of tokens, as their `activations` say, is differentiated as the identity.
      a: `[..., E, K, r]`, in the dtype of the tokens. None, with b: no adapters, but quantized weights with a gradient
        of the tokens.
      b: `[..., E, r, N]` in the dtype of the tokens; `[..., E, r, 2, N]` if gate and up columns have a separate axis.
      scale: factor of the adapters, such as alpha / r; static.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_ep.lora import LoraWeights
      >>> LoraWeights(jnp.ones((4, 128, 256)), jnp.ones((4, 128, 8)), jnp.ones((4, 8, 256)), scale=2.0)
      LoraWeights(base=float32[4, 128, 256], a=float32[4, 128, 8], b=float32[4, 8, 256], scale=2.0)

    Source: LoRA (arXiv:2106.09685), QLoRA (arXiv:2305.14314).
    """

    base: Any  # Array, QuantizedWeights, QArray, or SplitWeights inside a balanced layer
    a: Any = None
    b: Any = None
    scale: float = dataclasses.field(default=1.0, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weights: that of the base."""
        return self.base.shape


@runtime_checkable
class QArray(Protocol):
    """A `qwix.QArray`, known by its fields so that nothing imports qwix: `qvalue` times `scale` of each tile."""

    @property
    def qvalue(self) -> Any:
        """`[..., E, K, N]` values."""

    @property
    def scale(self) -> Any:
        """Scales, with as many axes as the values; the size of each axis divides theirs."""

    @property
    def zero_point(self) -> Any:
        """The array that is subtracted from the values; None: nothing."""

    @property
    def qtype(self) -> Any:
        """Dtype of the values, or a name such as "mxfp4"."""


class SplitWeights(NamedTuple):
    """Expert weights `[L + S, K, N]` in two arrays: those of this rank, and copies of other ranks'; see `Balance`."""

    home: Array
    spare: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of both as one array."""
        return (self.home.shape[0] + self.spare.shape[0], *self.home.shape[1:])

    @property
    def dtype(self) -> np.dtype:
        return self.home.dtype


type GemmWeights = Array | SplitWeights
"""Weights of a GEMM in the dtype of the tokens."""


def joined(w: GemmWeights) -> Array:
    """Return weights as one array, which copies those in two."""
    return jnp.concatenate(w) if isinstance(w, SplitWeights) else w


def split(w: Array, num_home: int) -> SplitWeights:
    """Return weights as two arrays, of the first `num_home` experts and of the others, which copies them."""
    return SplitWeights(w[:num_home], w[num_home:])


def num_home(w: GemmWeights) -> int:
    """Return the number of experts in the first of two arrays; 0: there is one array."""
    return w.home.shape[0] if isinstance(w, SplitWeights) else 0


@result_type
class ExpertWeights(NamedTuple):
    """The weights and biases of an expert layer, or of stacked ones, in any form that layers take; see `moe`."""

    w_gate_up: Any  # Array, QuantizedWeights, qwix.QArray or LoraWeights, as w_down
    w_down: Any
    b_gate_up: Array | None = None
    b_down: Array | None = None


def has_kinds(shape: tuple[int, ...]) -> bool:
    """Return whether weights of this shape are `[..., E, K, 2, N]` or `[..., E, K, 1, N]`, not `[..., E, K, N]`."""
    return len(shape) > 3 and shape[-2] in (1, 2)


def base_of(w: Any) -> Any:
    """Return the weights under the adapters."""
    return w.base if isinstance(w, LoraWeights) else w


def is_stored_transposed(w: Any) -> TypeGuard[QuantizedWeights]:
    """Return whether these are weights without a format that are no array, as `quantize(w, None)` returns."""
    return isinstance(w, QuantizedWeights) and w.format is None


def as_array(w: Array | QuantizedWeights) -> Array | QuantizedWeights:
    """Return weights without a format as an array `[..., K, N]`, and others unchanged."""
    return jnp.swapaxes(w.values, -1, -2) if is_stored_transposed(w) else w


def as_transposed(w: Array | QuantizedWeights) -> QuantizedWeights:
    """Return an array `[..., K, N]` as `QuantizedWeights` without a format, which copies it, and others unchanged."""
    return w if isinstance(w, QuantizedWeights) else QuantizedWeights(jnp.swapaxes(w, -1, -2))


def merge_columns(w: Any) -> Any:
    """Reshape weights in any form from `[..., K, 2, N]` to `[..., K, 2 * N]`: the columns of one kind, then others."""
    if isinstance(w, LoraWeights):
        return dataclasses.replace(w, base=merge_columns(w.base), b=None if w.b is None else merge_columns(w.b))
    if not isinstance(w, QuantizedWeights):
        return w.reshape(*w.shape[:-2], -1)
    parts = {name: merge_columns(part) for name in ("master", "values_kn") if (part := getattr(w, name)) is not None}
    for name in ("values", "scales"):
        part = getattr(w, name)
        parts[name] = part.reshape(*part.shape[:-3], -1, part.shape[-1])
    return dataclasses.replace(w, **parts)
