"""Shared experts of a layer, which every token passes."""

from __future__ import annotations

import dataclasses

from jax_ep.types import type_name


@dataclasses.dataclass(frozen=True)
class SharedExperts:
    """Experts that every token passes, computed as one dense MLP with the activation of the routed experts.

    Attributes:
      num: how many there are; their intermediate sizes add up.
      intermediate_size: I of one shared expert, if it differs from that of a routed expert, as in Qwen2-MoE; None: the
        same I.
      gate: scale their output by `sigmoid(x @ shared_gate [H, 1])`, as in Qwen2-MoE.

    Raises:
      ValueError: a number below 1.
      TypeError: a value of another type.

    Example:
      >>> from jax_ep.flax import SharedExperts
      >>> SharedExperts(2).gate
      False

    Source: DeepSeekMoE (arXiv:2401.06066).
    """

    num: int = 1
    _: dataclasses.KW_ONLY
    intermediate_size: int | None = None
    gate: bool = False

    def __post_init__(self) -> None:
        for name in ("num", "intermediate_size"):
            value = getattr(self, name)
            if value is None and name == "intermediate_size":
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"SharedExperts: {name}={value!r} is {type_name(value)}, expected an int; pass one.")
            if value < 1:
                raise ValueError(
                    f"SharedExperts: {name}={value}, expected at least 1; pass such a number, or shared_experts=None"
                    " for a layer without shared experts."
                )
        if not isinstance(self.gate, bool):
            raise TypeError(
                f"SharedExperts: gate={self.gate!r} is {type_name(self.gate)}, expected True or False; pass one."
            )
