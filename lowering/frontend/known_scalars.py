"""Scalars whose values the program itself has, such as those that pads fill in."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from jhost._jax import aval_of

Scalar: TypeAlias = Var | Literal


class KnownScalars:
    """The values of literals and of their casts."""

    def __init__(self) -> None:
        self.cast: dict[Var, Scalar] = {}

    def see(self, eqn: JaxprEqn) -> None:
        """Note an equation that comes before those that read its result."""
        if eqn.primitive.name == "convert_element_type":
            self.cast[eqn.outvars[0]] = eqn.invars[0]

    def is_zero(self, scalar: Scalar | None) -> bool:
        """Whether a scalar is known to be 0, and not -0.0."""
        known = self.known(scalar)
        return isinstance(known, tuple) and not any(known[1])

    def same(self, scalar: Scalar | None, other: Scalar | None) -> bool:
        """Whether two scalars are known to be one, of one dtype."""
        return scalar is other or self.known(scalar) == self.known(other)

    def known(self, scalar: Scalar | None) -> tuple[str, bytes] | Var | None:
        """The dtype of a scalar and its value, or the variable that it is."""
        value = None if scalar is None else self._value(scalar)
        if value is None:
            return scalar if isinstance(scalar, Var) else None
        # By bits: 0.0 and -0.0 are equal numbers, and a NaN equals nothing.
        return str(value.dtype), value.tobytes()

    def _value(self, scalar: Scalar) -> np.ndarray | None:
        if isinstance(scalar, Literal):
            return np.asarray(scalar.val, aval_of(scalar).dtype)
        source = self.cast.get(scalar)
        value = None if source is None else self._value(source)
        return None if value is None else value.astype(aval_of(scalar).dtype)
