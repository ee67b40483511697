"""Whether an arm computes what it should, by what it returned for three operand sets.

On integers its result equals the plain one, on random operands its error against a
float32 reference is at most 1.5 times the plain one's, and it repeats itself.  Where
the plain one does not, nobody has to: cuDNN's attention adds gradients up in any order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

WORSE_AT_MOST = 1.5


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one arm returned: for random operands, twice, and for integers."""

    random: Any
    again: Any
    integers: Any | None


@jax.jit
def _same(left: Any, right: Any) -> jax.Array:
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return jnp.stack([jnp.all(a == b) for a, b in pairs])


@jax.jit
def _errors(result: Any, reference: Any) -> jax.Array:
    def error(a: jax.Array, b: jax.Array) -> jax.Array:
        b = b.astype(jnp.float32)
        difference = a.astype(jnp.float32) - b
        return jnp.linalg.norm(difference.ravel()) / jnp.linalg.norm(b.ravel())

    pairs = zip(jax.tree.leaves(result), jax.tree.leaves(reference), strict=True)
    return jnp.stack([error(a, b) for a, b in pairs])


def same(left: Any, right: Any) -> bool:
    """Whether all values of two trees are equal; NaN equals nothing."""
    return bool(_same(left, right).all())


def errors(result: Any, reference: Any) -> list[float]:
    """The relative error of each array."""
    return [float(error) for error in _errors(result, reference)]


def check(
    outcome: Outcome, plain: Outcome | None, reference: Any | None
) -> dict[str, Any]:
    """The three answers; None where there is nothing to compare with."""
    found: dict[str, Any] = {"repeats": _repeats(outcome, plain)}
    found["integers_equal_plain"] = (
        None
        if plain is None or plain.integers is None
        else same(outcome.integers, plain.integers)
    )
    if reference is None:
        return found | {"errors": None, "no_worse": None}
    own = errors(outcome.random, reference)
    if plain is None:
        return found | {"errors": own, "no_worse": None}
    return found | {"errors": own, "no_worse": no_worse(own, plain, reference)}


def _repeats(outcome: Outcome, plain: Outcome | None) -> bool | None:
    if same(outcome.random, outcome.again):
        return True
    comparable = plain is None or same(plain.random, plain.again)
    return False if comparable else None


def no_worse(own: Sequence[float], plain: Outcome, reference: Any) -> bool:
    """Whether each error is at most 1.5 times the plain one."""
    theirs = errors(plain.random, reference)
    pairs = zip(own, theirs, strict=True)
    return all(mine <= WORSE_AT_MOST * its for mine, its in pairs)


def passed(found: dict[str, Any]) -> bool:
    """Whether the arm could be asked, and none of the answers is no."""
    answers = ("repeats", "integers_equal_plain", "no_worse")
    return "error" not in found and all(found[a] is not False for a in answers)
