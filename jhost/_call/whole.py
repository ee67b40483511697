"""Functions that no Host IR program can hold: `jax.jit` compiles them as a whole."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn, TypeVar

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jhost import errors
from jhost._call.config import Config
from jhost._jax import arg_names, cached_by_jaxpr, calls, is_array
from jhost._primitives import stream_p
from jhost.lowering.frontend.inline_calls import inline_calls
from jhost.lowering.frontend.unsupported import (
    exported_over_devices,
    left_to_jit,
    walk,
    with_references,
)
from jhost.runtime.mesh import AnyMesh, auto_mesh

R = TypeVar("R")


@cached_by_jaxpr
def stays_whole(jaxpr: Any, has_mesh: bool) -> bool:
    """Whether a traced function is left to `jax.jit`, with its shardings.

    References are changed where they are, and an exported program over several devices
    is one of them all.  Not with a stream, which has to be followed, or be refused.
    """
    # Asked of the jaxpr as it is first, as inlining all calls costs more, and few
    # functions hold such things.
    if not _may_stay(jaxpr) or calls(jaxpr, stream_p):
        return False
    flat = inline_calls(jaxpr)
    if not all(map(is_array, flat.invars)) or with_references(flat.eqns):
        return True
    return has_mesh and bool(exported_over_devices(flat.eqns))


def _may_stay(jaxpr: Any) -> bool:
    """Whether a jaxpr has such an equation, even in a body that handles it itself."""
    eqns = list(walk(jaxpr.eqns))
    if not all(map(is_array, jaxpr.jaxpr.invars)) or with_references(eqns):
        return True
    return any(eqn.primitive.name == "call_exported" for eqn in eqns)


@dataclasses.dataclass(frozen=True, slots=True)
class Whole:
    """Stands for a program where there is none; `reasons` say why."""

    name: str
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{self.name} is compiled by jax.jit as a whole, with its shardings, "
            f"because something in it cannot be part of a jhost program."
        )

    def refuse(self, what: str) -> NoReturn:
        """Says that there is no such thing.

        Raises:
            UnsupportedError: always.
        """
        raise errors.UnsupportedError(
            f"{self} So it has no {what}, but it has what the stages of jax.jit have.",
            self.reasons,
        )


_noted: ContextVar[list[tuple[Whole, Config]] | None] = ContextVar(
    "_noted", default=None
)


@contextmanager
def noted() -> Generator[list[tuple[Whole, Config]]]:
    """Notes the functions that stay whole where they are called inside.

    They leave no call of jhost's in what is traced.
    """
    found: list[tuple[Whole, Config]] = []
    token = _noted.set(found)
    try:
        yield found
    finally:
        _noted.reset(token)


def note(whole: Whole, config: Config) -> None:
    """Says that a function stays whole, where somebody asks."""
    found = _noted.get()
    if found is not None and (whole, config) not in found:
        found.append((whole, config))


def left_whole(jaxpr: Any, config: Config) -> Whole | None:
    """The reasons why a function stays whole; None if it does not."""
    has_mesh = config.mesh is not None
    if not stays_whole(jaxpr, has_mesh):
        return None
    eqns = inline_calls(jaxpr).eqns
    params = dict(zip(_operand_names(jaxpr), jaxpr.jaxpr.invars, strict=True))
    return Whole(config.name, tuple(left_to_jit(params, eqns, has_mesh)))


def for_devices(
    fun: Callable[..., R], jaxpr: Any, mesh: AnyMesh | None
) -> Callable[..., R]:
    """A function that stays whole, for the devices of the mesh, as jhost's are.

    JAX looks for devices in the shardings inside.  It has to know them for exported
    programs; references are where they are, and say so themselves.
    """
    if mesh is None or not exported_over_devices(jaxpr.eqns):
        return fun

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> R:
        args, kwargs = jax.tree.map(functools.partial(_anywhere, mesh), (args, kwargs))
        return fun(*args, **kwargs)

    return call


def _anywhere(mesh: AnyMesh, value: Any) -> Any:
    """An array, wherever it is on the mesh."""
    if not isinstance(value, jax.Array):
        return value
    # Constrains the devices and nothing else.
    free = PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * value.ndim)
    return jax.lax.with_sharding_constraint(value, NamedSharding(auto_mesh(mesh), free))


def check_takes_arrays(name: str, jaxpr: Any) -> None:
    """Refuses references among the operands of a program.

    Raises:
        UnsupportedError: there are some.
    """
    pairs = zip(_operand_names(jaxpr), jaxpr.jaxpr.invars, strict=True)
    found = [f"{operand}: {var.aval}" for operand, var in pairs if not is_array(var)]
    if found:
        raise errors.UnsupportedError(
            f"jhost.jit of {name} cannot take references (jax.new_ref) into a program "
            f"with a stream, or into one to be interpreted, because they are changed "
            f"in place. Pass their values, ref[...], and write the results back to "
            f"them.",
            found,
        )


def _operand_names(jaxpr: Any) -> list[str]:
    """The user's names of the operands, and numbers of those closed over."""
    names = arg_names(jaxpr) or ("",) * len(jaxpr.jaxpr.invars)
    return [name or f"closed-over array {number}" for number, name in enumerate(names)]
