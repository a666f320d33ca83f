"""Which implementation runs each part of a program, in which mode, and why not a faster one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_ep.core import check
from jax_ep.core.facts import Part
from jax_ep.ops import plan as plans
from jax_ep.ops import plan_lora
from jax_ep.ops import plan_serving as serving

_HEADER = ("part", "implementation", "mode", "why not a faster one")


class Row(NamedTuple):
    """One part of a call.

    Attributes:
      part: what it does; parts of the backward pass say so.
      implementation: its name.
      mode: "fused" or "scatter" in one kernel with the all-to-all, "serial" in separate kernels; of `Balance`, rows
        and copies of experts per rank; else empty.
      reason: why no implementation or mode that comes first runs it; else empty.
    """

    part: str
    implementation: str
    mode: str = ""
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The result of `explain`: a row per part of each call of the package, in trace order. It prints as a table."""

    rows: tuple[Row, ...]

    def __str__(self) -> str:
        if not self.rows:
            return "the function calls no layer or part of jax_ep"
        seen: set[str] = set()
        lines = [_HEADER]
        for row in self.rows:
            lines.append((*row[:3], "as above" if row.reason in seen else row.reason))
            seen |= {row.reason} - {""}
        widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADER) - 1)]
        return "\n".join(
            "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[-1]]).rstrip()
            for line in lines
        )


def explain(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
    """Trace a function without running it, and list what runs each part of its jax_ep calls.

    Args:
      function: any function that JAX can trace: a layer, a loss, its gradient, a training step, jitted or not.
      *args: its arguments: pytrees of arrays or `jax.ShapeDtypeStruct`s, or static values.
      **kwargs: its keyword arguments.

    Returns:
      An `Explanation`, which prints as a table with a row per part: its implementation, its mode, and why not a faster
      one. Rows of the backward pass are there with and without a gradient.

    Raises:
      TypeError: `function` is not a function.
      NotImplementedError: no requested implementation supports a call.

    Example:
      >>> import jax.numpy as jnp, jax_ep
      >>> x, idx, w = jnp.ones((2, 4)), jnp.array([[0], [1]]), jnp.ones((2, 4, 3))
      >>> print(jax_ep.explain(jax_ep.grouped_gemm, jnp.ones((2, 4)), w, jnp.array([1, 1]), implementation="xla"))
      part                        implementation  mode  why not a faster one
      GEMM                        xla
      GEMM transposed (backward)  xla
      weight gradient (backward)  xla
    """
    check.instance("explain", "function", function, Callable, "a function")
    with plans.recording() as found:
        if hasattr(function, "eval_shape"):  # a jitted function, which knows its static arguments
            function.eval_shape(*args, **kwargs)
        else:
            positional = len(jax.tree.leaves(args))  # whose arrays are traced, too
            leaves, tree = jax.tree.flatten((args, kwargs))
            traced = {
                i: leaf
                for i, leaf in enumerate(leaves)
                if isinstance(leaf, jax.ShapeDtypeStruct)
                or (i < positional and isinstance(leaf, jax.Array | np.ndarray))
            }

            def run(arrays: dict[int, Any]) -> None:
                args, kwargs = jax.tree.unflatten(tree, [arrays.get(i, leaf) for i, leaf in enumerate(leaves)])
                function(*args, **kwargs)

            jax.eval_shape(run, traced)
    return Explanation(tuple(row for plan in found for row in _rows(plan)))


@functools.singledispatch
def _rows(plan: object) -> Iterator[Row]:
    raise TypeError(f"explain: {type(plan).__name__} is no plan; register its rows.")


def _row(name: str, part: Part, mode: str = "", reason: str = "") -> Row:
    return Row(name, part.implementation, mode, "; ".join(filter(None, (part.reason, reason))))


@_rows.register
def _of_balanced(plan: plans.BalancedPlan) -> Iterator[Row]:
    yield _row("balance: passes and copies of experts", plan.part, f"{plan.rows} rows and {plan.spare} copies per rank")


@_rows.register
def _of_part(plan: Part) -> Iterator[Row]:
    yield _row({"fused_moe": "layer in one launch"}.get(plan.operation, plan.operation), plan)


@_rows.register
def _of_one_part(plan: serving.PartPlan) -> Iterator[Row]:
    yield _row(plan.options.function.replace("_", " "), plan.part)


@_rows.register
def _of_exchange(plan: plans.ExchangePlan) -> Iterator[Row]:
    yield _row("row plan", plan.handle)
    yield _row("dispatch", plan.dispatch)
    yield _row("combine", plan.combine)


@_rows.register
def _of_gemm(plan: plans.GemmPlan) -> Iterator[Row]:
    yield _row("GEMM", plan.forward)
    yield _row("GEMM transposed (backward)", plan.backward)
    yield _row("weight gradient (backward)", plan.backward)


def _mode_reason(mode: str, given: str | None) -> str:
    """Return why an all-to-all and its GEMM are not one kernel."""
    if mode != "serial":
        return ""
    return "the schedule asks for this mode" if given else "the cost model expects separate launches to be faster"


def _dispatch_gemm(
    plan: plans.ExchangeGemmPlan, name: str, save_as: str | None, suffix: str = "", gemm: Part | None = None
) -> Iterator[Row]:
    gemm = gemm or plan.gemm.forward
    if plan.fused is None:
        yield _row(f"dispatch{suffix}", plan.exchange.dispatch, reason=plan.reason)
        yield _row(f"{name}{suffix}", gemm)
        return
    mode = plan.mode(save_as)
    reason = _mode_reason(mode, plan.options.schedule.dispatch_mode)
    yield _row(f"dispatch + {name}{suffix}", plan.fused, mode, reason)
    if mode == "serial":
        yield _row(f"{name}{suffix}", gemm)


def _gemm_combine(plan: plans.ExchangeGemmPlan, name: str, suffix: str = "") -> Iterator[Row]:
    if plan.fused is None:
        yield _row(f"{name}{suffix}", plan.gemm.forward)
        yield _row(f"combine{suffix}", plan.exchange.combine, reason=plan.reason)
        return
    mode = plan.combine_mode
    reason = _mode_reason(mode, plan.options.schedule.combine_mode)
    yield _row(f"{name} + combine{suffix}", plan.fused, mode, reason)
    if mode == "serial":
        yield _row(f"{name}{suffix}", plan.gemm.forward)
        yield _row(f"combine{suffix}", plan.exchange.combine)


def _first_backward(plan: plans.ExchangeGemmPlan, name: str) -> Iterator[Row]:
    """Yield the rows of the backward pass of dispatch + GEMM."""
    yield from _gemm_combine(plan, f"{name} transposed", " (backward)")
    yield _row(f"{name}: weight gradient (backward)", plan.gemm.backward)


def _second_backward(plan: plans.ExchangeGemmPlan, name: str) -> Iterator[Row]:
    """Yield the rows of the backward pass of GEMM + combine."""
    yield from _dispatch_gemm(plan, f"{name} transposed", "rows", " (backward)")
    yield _row(f"{name}: weight gradient (backward)", plan.gemm.backward)


@_rows.register
def _of_exchange_gemm(plan: plans.ExchangeGemmPlan) -> Iterator[Row]:
    if plan.options.sum_dtype is None:
        yield _row("row plan", plan.exchange.handle)
        yield from _dispatch_gemm(plan, "GEMM", None)
        yield from _first_backward(plan, "GEMM")
    else:
        yield from _gemm_combine(plan, "GEMM")
        yield from _second_backward(plan, "GEMM")


@_rows.register
def _of_layer(plan: plans.LayerPlan) -> Iterator[Row]:
    yield _row("row plan", plan.exchange.handle)
    if plan.activated is not None:
        yield from _dispatch_gemm(plan.first, "first GEMM with activation", None, " (no gradient)", plan.activated)
    yield from _dispatch_gemm(plan.first, "first GEMM", None)
    yield _row("activation", plan.activation.part)
    yield from _gemm_combine(plan.second, "second GEMM")
    yield from _second_backward(plan.second, "second GEMM")
    yield _row("activation (backward)", plan.activation.part)
    yield from _first_backward(plan.first, "first GEMM")


@_rows.register(tuple)
def _of_fp8_layers(plan: tuple[plans.Fp8LayerPlan, plans.Fp8LayerPlan]) -> Iterator[Row]:
    first, second = plan
    yield _row("row plan", first.exchange.handle)
    yield _row("dispatch", first.exchange.dispatch)
    for name, half in (("first", first), ("second", second)):
        yield _row(f"{name} GEMM in FP8", half.gemm.forward)
        yield _row(f"{name} GEMM: FP8 operands", half.gemm.operands)
    yield _row("combine", first.exchange.combine)
    yield _row("activation (backward)", first.activation.part)
    for name, half in (("second", second), ("first", first)):
        yield _row(f"{name} GEMM in FP8: weight gradient (backward)", half.gemm.gradient)


def _separate(
    plan: serving.QuantizedLayerPlan | plan_lora.LoraLayerPlan, gemm: Callable[..., Iterator[Row]]
) -> Iterator[Row]:
    """Rows of a layer of separate operations, with those of its GEMMs by `gemm(plan, name)`."""
    yield _row("row plan", plan.exchange.handle)
    yield _row("dispatch", plan.exchange.dispatch)
    yield from gemm(plan.first, "first GEMM")
    yield _row("activation", plan.activation.part)
    yield from gemm(plan.second, "second GEMM")
    yield _row("combine", plan.back.combine)


def _quantized(plan: serving.QuantizedGemmPlan, name: str) -> Iterator[Row]:
    if plan.operands is not None:
        yield _row(f"{name}: FP8 rows", plan.operands)
    yield _row(f"{name} of dequantized weights" if plan.dequantizes else name, plan.gemm)


def _lora(plan: plan_lora.LoraGemmPlan, name: str) -> Iterator[Row]:
    base = plan.base
    yield from [_row(name, base.forward)] if isinstance(base, plans.GemmPlan) else _quantized(base, name)
    for part, thin in zip("ab", plan.thin or (), strict=False):
        yield _row(f"{name}: adapter {part}", thin.forward)
    yield _row(f"{name} transposed (backward)", plan.transposed.backward)
    for part, thin in zip("ab", plan.thin or (), strict=False):
        yield _row(f"{name}: gradient of adapter {part} (backward)", thin.backward)


_rows.register(serving.QuantizedGemmPlan, functools.partial(_quantized, name="GEMM"))
_rows.register(serving.QuantizedLayerPlan, functools.partial(_separate, gemm=_quantized))
_rows.register(plan_lora.LoraGemmPlan, functools.partial(_lora, name="GEMM"))
_rows.register(plan_lora.LoraLayerPlan, functools.partial(_separate, gemm=_lora))


@_rows.register
def _of_low_latency_gemm(plan: serving.LowLatencyGemmPlan) -> Iterator[Row]:
    if plan.fused is not None:
        yield _row("second GEMM + combine", plan.fused)
        return
    yield from _quantized(plan.gemm, "second GEMM")
    yield _row("combine", plan.combine.part)


@_rows.register
def _of_gathered_layer(plan: serving.GatheredLayerPlan) -> Iterator[Row]:
    if plan.dispatch is not None:
        yield _row("dispatch of all tokens to all ranks", plan.dispatch.part)
    yield from _of_part(plan.layer)
    if plan.combine is not None:
        yield _row("combine", plan.combine.part)


@_rows.register
def _of_low_latency_layer(plan: serving.LowLatencyLayerPlan) -> Iterator[Row]:
    yield _row("dispatch", plan.dispatch.part)
    yield from _quantized(plan.first, "first GEMM")
    yield _row("activation", plan.activation.part)
    yield from _of_low_latency_gemm(plan.second)
