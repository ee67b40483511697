"""Subclasses of stages of `jax.stages`, which take over all that JAX's own has."""

from __future__ import annotations

from typing import Any


def take_over(stage: Any, of: Any) -> None:
    """Gives `stage`, of a subclass of `of`'s class, all that `of` holds.

    JAX makes its stages by constructors that are private and change.  JAX's modules,
    such as `jax.experimental.serialize_executable`, ask stages for private attributes,
    and find all of them in the subclass too.

    >>> import jax
    >>> class Named(jax.stages.Lowered):
    ...     def __init__(self, lowered, name):
    ...         take_over(self, lowered)
    ...         self.name = name
    >>> named = Named(jax.jit(lambda x: x + 1).lower(1.0), "plus one")
    >>> named.compile()(2.0).item()
    3.0
    """
    for name in _slots(type(of)):
        if hasattr(of, name):
            setattr(stage, name, getattr(of, name))
    vars(stage).update(vars(of))


def _slots(kind: type) -> set[str]:
    return {slot for base in kind.__mro__ for slot in getattr(base, "__slots__", ())}
