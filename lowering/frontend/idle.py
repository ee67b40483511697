"""Operations that change nothing: what they would keep apart is one value.

`jnp.roll(x, 0)` joins `x` and an empty slice of it, and `jax.device_put` without a
place hands on its operands, which would need layouts together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from jax.extend.core import JaxprEqn

from jhost._jax import Atom
from jhost.lowering.rules.dim_rule import shape_of


def of_use(eqn: JaxprEqn, args: Sequence[Atom]) -> Sequence[Atom]:
    """The operands, without empty pieces of a concatenation."""
    if eqn.primitive.name != "concatenate":
        return args
    return [arg for arg in args if math.prod(shape_of(arg))] or args[:1]


def hands_on(eqn: JaxprEqn, args: Sequence[Atom]) -> bool:
    """Whether the results are the operands that are of use."""
    match eqn.primitive.name:
        case "concatenate":
            return len(args) == 1
        case "device_put":
            return all(place is None for place in eqn.params["devices"])
        case _:
            return False
