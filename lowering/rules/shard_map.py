"""The dim rule of `jax.shard_map`: only its specs say which axes shard which dims.

A dim that a spec shards is a factor of its own, pinned to the axes of the spec; all
other dims are whole.  A program runs inside a `shard_map` over the whole mesh already,
so the body is evaluated in place, on the parts, with its own collectives in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax
from jax.extend.core import JaxprEqn

from jhost._jax import (
    ClosedJaxpr,
    DimAxes,
    close,
    evaluate_by,
    inside_manual,
    shard_map_of,
    untyped_params,
    user_context,
    without_mesh,
    without_types,
)
from jhost.lowering.rules.building import Factors
from jhost.lowering.rules.dim_rule import (
    DimRule,
    Dims,
    FactorDim,
    Shard,
    bind,
    shape_of,
)
from jhost.lowering.rules.properties import CALLS, MARKS, called, keeps_its_barrier
from jhost.lowering.rules.registry import rule


@rule("shard_map")
def _shard_map(eqn: JaxprEqn) -> DimRule:
    mapped = shard_map_of(eqn)
    factors = Factors()
    pinned: list[tuple[str, ...]] = []

    def dims(atom: Any, spec: DimAxes) -> Dims:
        shape = shape_of(atom)
        entries = (*spec, *[()] * (len(shape) - len(spec)))
        return tuple(map(dim, shape, entries))

    def dim(size: int, entry: tuple[str, ...]) -> FactorDim | None:
        # An axis of one device shards nothing.
        axes = tuple(axis for axis in entry if mapped.mesh.shape[axis] > 1)
        if not axes:
            return None
        pinned.append(axes)
        return FactorDim(factors.new(size))

    operands = [dims(*pair) for pair in zip(eqn.invars, mapped.operands, strict=True)]
    results = [dims(*pair) for pair in zip(eqn.outvars, mapped.results, strict=True)]
    return factors.rule(operands, results, _in_place, pinned)


def _in_place(eqn: JaxprEqn, args: Sequence[Any], shard: Shard) -> Sequence[Any]:
    del shard
    mapped = shard_map_of(eqn)
    if not inside_manual(mapped.mesh):  # the function has no mesh
        return bind(eqn, args)
    return evaluate_in_place(mapped.body, list(map(without_mesh, args)))


def evaluate_in_place(body: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    """The results of a body where types do not say over which axes values vary."""
    return evaluate_by(
        body, body.consts, args, _equation, lambda literal: without_mesh(literal.val)
    )


def _equation(eqn: JaxprEqn, args: Sequence[Any]) -> Sequence[Any]:
    with user_context(eqn):
        plain = without_types(eqn, args)
        return _in_here(eqn, args) if plain is None else plain


def _in_here(eqn: JaxprEqn, args: Sequence[Any]) -> Sequence[Any]:
    name = eqn.primitive.name
    if name in MARKS or name == "reshard":
        # These speak of axes over which the user's body is not manual, and there each
        # device has all of the value.  JAX itself adds a `reshard` where the type of an
        # operand has automatic axes in it.
        return args
    if name in CALLS:
        args = lax.optimization_barrier(args) if keeps_its_barrier(eqn) else args
        body, args = called(eqn, args)
        return evaluate_in_place(close(body), args)
    return bind_in_place(eqn, args)


def bind_in_place(eqn: JaxprEqn, args: Sequence[Any]) -> Sequence[Any]:
    """Binds an equation whose own programs are traced for the types in here."""
    params = untyped_params(eqn.params, evaluate_in_place)
    return bind(eqn.replace(params=params), args)
