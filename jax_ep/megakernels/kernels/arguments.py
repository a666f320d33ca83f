"""Types of the fields of kernel arguments, which hold other things on the host than in a kernel."""

from __future__ import annotations

from typing import Any, TypeAlias

Pointer: TypeAlias = Any  # noqa: UP040
"""A Triton pointer or descriptor; on the host an array, the shape and dtype of a result, or a `Descriptor`."""

Value: TypeAlias = Any  # noqa: UP040
"""A Triton scalar or block of values."""
