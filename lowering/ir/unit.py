"""Units: equations that run together on the current stream."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn, Var

from jhost.lowering.ir.buffer import node
from jhost.lowering.rules.dim_rule import DimRule


@node
class UnitEqn:
    """One equation and how its factors are spread over the mesh and the loop.

    `axes` has the mesh axes of each factor of `rule`; `stream` is the factor that the
    enclosing loop works on in chunks.  `accumulators` has an entry for each result: the
    dtype in which its chunks are added up if it lacks this factor (float32 for a sum of
    bfloat16), and None if it has the factor.  The factors that `rule` counts stand in
    zigzag order over `zigzag` devices (see `ir/zigzag.py`), if those are more than one.
    """

    eqn: JaxprEqn
    rule: DimRule
    axes: tuple[tuple[str, ...], ...]
    stream: int | None = None
    accumulators: tuple[np.dtype | None, ...] = ()
    zigzag: int = 1


@node
class Unit:
    """Equations that run together (nvFuser's HostUnit).

    `pads` says that it hands a value of the user's on, padded.
    `derived` has facts that were found out about its equations (`ir/derived.py`).
    """

    name: str
    eqns: tuple[UnitEqn, ...]
    invars: tuple[Var, ...]
    outvars: tuple[Var, ...]
    pads: bool = False
    derived: dict[object, Any] = dataclasses.field(
        default_factory=dict[object, Any], init=False, compare=False, repr=False
    )

    def named(self, name: str) -> Unit:
        """The same equations under another name, with all that is known of them."""
        unit = dataclasses.replace(self, name=name)
        # Shared: a fact that is found for one of them later holds for both.
        object.__setattr__(unit, "derived", self.derived)
        return unit
