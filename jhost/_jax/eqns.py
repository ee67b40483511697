"""New variables, equations and programs, made of those that JAX traced."""

# JAX's private functions are partly untyped; what leaves this module is typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
from jax import lax
from jax.core import AbstractValue, ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Primitive, Var, jaxprs_in_params
from jax.sharding import NamedSharding

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr as ClosedJaxpr  # one class, from 0.11 on
else:
    from jax.extend.core import ClosedJaxpr

Atom: TypeAlias = Var | Literal


def close(jaxpr: Any, consts: Sequence[Any] = ()) -> ClosedJaxpr:
    """The closed form of a jaxpr out of an equation's parameters, with its `consts`.

    A closed jaxpr has `eqns`, `invars`, `outvars`, `constvars`, `consts`, `in_avals`,
    `out_avals`, `effects` and `debug_info` on every JAX.  On 0.10 some parameters (of
    `remat`, of `shard_map`) are open, and have no `consts`.
    """
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, consts)


def fresh_var(aval: AbstractValue) -> Var:
    """A variable that is equal to no other."""
    return Var(aval)


def resized_var(var: Var, shape: Sequence[int]) -> Var:
    """A variable like `var` with another shape; `var` itself if it has that shape."""
    if not isinstance(var.aval, ShapedArray) or var.aval.shape == tuple(shape):
        return var
    return Var(var.aval.update(shape=tuple(shape)))


def with_own_operands(eqn: JaxprEqn) -> tuple[JaxprEqn, dict[Var, Var]]:
    """`eqn` with a variable for each operand, and what each of these stands for.

    An operand read twice gets two variables: it may be needed in two layouts.
    """
    reads = [(fresh_var(v.aval), v) for v in eqn.invars if isinstance(v, Var)]
    own = (var for var, _ in reads)
    invars = [v if isinstance(v, Literal) else next(own) for v in eqn.invars]
    return eqn.replace(invars=invars), dict(reads)


def new_eqn(
    primitive: Primitive,
    invars: Sequence[Atom],
    outvars: Sequence[Var],
    params: Mapping[str, Any],
    *,
    like: JaxprEqn,
) -> JaxprEqn:
    """An equation with the user's line, the context and the effects of another."""
    return like.replace(
        primitive=primitive,
        invars=list(invars),
        outvars=list(outvars),
        params=dict(params),
    )


def constraint(
    atom: Atom, out: Var, sharding: NamedSharding, like: JaxprEqn
) -> JaxprEqn:
    """The equation of `jax.lax.with_sharding_constraint`, at the line of another."""
    constrain = partial(lax.with_sharding_constraint, shardings=sharding)
    # Traced, so that JAX fills in the parameters, which differ by version.
    (eqn,) = jax.make_jaxpr(constrain)(atom.aval).jaxpr.eqns
    return eqn.replace(invars=[atom], outvars=[out], source_info=like.source_info)


def rewritten(
    jaxpr: ClosedJaxpr,
    *,
    invars: Sequence[Var] | None = None,
    outvars: Sequence[Atom] | None = None,
    eqns: Sequence[JaxprEqn] | None = None,
) -> ClosedJaxpr:
    """A program with other equations, operands or results, without the user's names."""
    parts = {"invars": invars, "outvars": outvars, "eqns": eqns}
    given = {name: list(part) for name, part in parts.items() if part is not None}
    names = jaxpr.debug_info.with_unknown_names()
    return like_closed(jaxpr.jaxpr.replace(**given, debug_info=names), jaxpr)


def with_operand_names(jaxpr: ClosedJaxpr, names: Sequence[str]) -> ClosedJaxpr:
    """A program with names for its operands; without any, if all names are empty."""
    info = jaxpr.debug_info._replace(arg_names=tuple(names) if any(names) else None)
    return like_closed(jaxpr.jaxpr.replace(debug_info=info), jaxpr)


def calls(jaxpr: Any, primitive: Primitive) -> bool:
    """Whether a primitive is in a program, or in one that it calls."""
    programs = programs_in(jaxpr)
    return any(eqn.primitive is primitive for each in programs for eqn in each.eqns)


def programs_in(jaxpr: Any) -> Iterator[Jaxpr]:
    """An open or closed program as an open one, and all programs in it."""
    yield jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
    for eqn in jaxpr.eqns:
        for inner in jaxprs_in_params(eqn.params):
            yield from programs_in(inner)


def with_each_eqn(jaxpr: Any, change: Callable[[JaxprEqn], JaxprEqn | None]) -> Any:
    """A jaxpr, open or closed, with equations changed, also in the programs it holds.

    If `change` returns None for an equation, the programs that it holds are changed.
    """
    closed = close(jaxpr)
    eqns = [change(eqn) or _with_each_inside(eqn, change) for eqn in closed.eqns]
    if all(new is old for new, old in zip(eqns, closed.eqns, strict=True)):
        return jaxpr
    new = closed.jaxpr.replace(eqns=eqns)
    return like_closed(new, closed) if isinstance(jaxpr, ClosedJaxpr) else new


def _with_each_inside(
    eqn: JaxprEqn, change: Callable[[JaxprEqn], JaxprEqn | None]
) -> JaxprEqn:
    def changed(value: Any) -> Any:
        is_program = isinstance(value, Jaxpr | ClosedJaxpr)
        return with_each_eqn(value, change) if is_program else value

    params = with_each_leaf(eqn.params, changed)
    return eqn if params is eqn.params else eqn.replace(params=params)


def with_each_leaf(value: Any, change: Callable[[Any], Any]) -> Any:
    """A parameter, or a dict of all, with each value in its tuples and lists changed.

    If nothing changes, it is the same object.  Some primitives have their programs in a
    named tuple, such as `custom_linear_solve`, and JAX asks for its fields.
    """
    match value:
        case dict():
            old, new = value, {n: with_each_leaf(v, change) for n, v in value.items()}
            pairs = [(new[name], old[name]) for name in old]
        case tuple() | list():
            found = [with_each_leaf(each, change) for each in value]
            pairs = list(zip(found, value, strict=True))
            new = (
                type(value)(*found) if hasattr(value, "_fields") else type(value)(found)
            )
        case _:
            return change(value)
    return value if all(one is other for one, other in pairs) else new


def primitive_name(eqn: JaxprEqn) -> str:
    """The name of the primitive that an equation applies."""
    # From 0.12 on a vjp wraps primitives that it will transpose into nodes.
    return getattr(eqn.primitive, "prim", eqn.primitive).name


def like_closed(new: Any, like: ClosedJaxpr) -> ClosedJaxpr:
    """`new` as a closed jaxpr; on 0.10 it takes the consts of `like` for that."""
    return new if isinstance(new, ClosedJaxpr) else ClosedJaxpr(new, like.consts)
