"""Dispatch and combine by XLA's collectives, with a kernel for sums that are quantised before they travel.

So they need no access to peers' memory, and exchange nothing on one GPU. Handles are those of `xla`.
"""

from __future__ import annotations

from functools import partial

from jax_ep.pallas.local_steps import unpermute
from jax_ep.xla import exchange as xla

plan = xla.plan
dispatch_rows = xla.dispatch_rows
dispatch_tokens = xla.dispatch_tokens
dispatch_quantized = xla.dispatch_quantized
combine_tokens = partial(xla.combine_tokens, unpermute=unpermute)
