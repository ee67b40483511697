"""A jaxpr without calls: the equations of `jit`, `remat` and custom rules in place.

Dim rules, streams and layouts then see through every call.  Control flow (`scan`,
`while`, `cond`) stays one equation, whose bodies are lowered by themselves.
This is the first step of lowering, after JAX's
own transforms have done their work on the calls.  A program that has still to be
transformed keeps the calls that mean something to them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import JaxprEqn, Literal, Var

from jhost._jax import (
    at_line_of,
    aval_of,
    evaluate_by,
    fresh_var,
    primitive_name,
    user_context,
    with_each_eqn,
)
from jhost.lowering.frontend.control_flow import asks_each, only_branch, while_any
from jhost.lowering.frontend.expansions import expansion, has_expansion
from jhost.lowering.frontend.idle import hands_on, of_use
from jhost.lowering.frontend.mapped_sums import reduces_dims, reduction
from jhost.lowering.rules.dim_rule import shape_of
from jhost.lowering.rules.properties import (
    CALLS,
    CONTROL_FLOW,
    IDENTITIES,
    PLAIN_CALLS,
    called,
    is_barrier,
    keeps_its_barrier,
)


@dataclasses.dataclass(frozen=True, slots=True)
class FlatJaxpr:
    """Equations in order, each variable defined once; every result is a variable.

    Arrays that a call closes over are variables too, each set by an equation that reads
    nothing but that literal; all other literals are scalars.  The equations of one of
    `barriers` are one barrier, with an equation for each operand.
    """

    invars: tuple[Var, ...]
    outvars: tuple[Var, ...]
    eqns: tuple[JaxprEqn, ...]
    barriers: tuple[tuple[JaxprEqn, ...], ...] = ()


def inline_calls(closed_jaxpr: Any, around: JaxprEqn | None = None) -> FlatJaxpr:
    """The equations of `closed_jaxpr` and of everything it calls, in order.

    `around` is the equation whose body it is, if it is one.  What comes of it is
    lowered: no transform of JAX's may follow.
    """
    return _inlined(closed_jaxpr, _Inliner(CALLS, for_programs=True), around)


def inline_plain_calls(closed_jaxpr: Any) -> FlatJaxpr:
    """The equations with no call inlined that JAX's transforms have to know of."""
    return _inlined(closed_jaxpr, _Inliner(PLAIN_CALLS))


def _inlined(
    closed_jaxpr: Any, inliner: _Inliner, around: JaxprEqn | None = None
) -> FlatJaxpr:
    jaxpr = closed_jaxpr.jaxpr
    invars = tuple(fresh_var(var.aval) for var in jaxpr.invars)
    outs = inliner.run(closed_jaxpr, closed_jaxpr.consts, invars, around)
    outvars = tuple(inliner.as_variable(out) for out in outs)
    eqns = needed(inliner.eqns, outvars)
    return FlatJaxpr(invars, outvars, eqns, tuple(inliner.barriers))


def needed(eqns: Sequence[JaxprEqn], outvars: Sequence[Var]) -> tuple[JaxprEqn, ...]:
    """The equations that a result or an effect depends on."""
    read = set(outvars)
    kept: list[JaxprEqn] = []
    for eqn in reversed(eqns):
        if eqn.effects or not read.isdisjoint(eqn.outvars):
            kept.append(eqn)
            read.update(v for v in eqn.invars if not isinstance(v, Literal))
    return tuple(reversed(kept))


class _Inliner:
    """Appends equations to `eqns`; those `for_programs` have a form of their own.

    There a barrier is an equation for each operand, and what takes buffers takes
    variables.
    """

    def __init__(self, calls: Collection[str], for_programs: bool = False) -> None:
        self.calls = calls
        self.for_programs = for_programs
        self.eqns: list[JaxprEqn] = []
        self.constants: dict[int, Var] = {}
        self.barriers: list[tuple[JaxprEqn, ...]] = []

    def run(
        self,
        closed_jaxpr: Any,
        consts: Sequence[Any],
        args: Sequence[Any],
        call: JaxprEqn | None = None,
    ) -> Any:
        """Append the equations of `closed_jaxpr` on `args`; its results."""
        jaxpr = getattr(closed_jaxpr, "jaxpr", closed_jaxpr)
        pairs = zip(consts, jaxpr.constvars, strict=True)
        literals = [Literal(const, var.aval) for const, var in pairs]

        def equation(eqn: JaxprEqn, args: Sequence[Any]) -> Sequence[Any]:
            # JAX traces a called function once, for all lines that call it.
            return self.equation(at_line_of(eqn, call) if call else eqn, args)

        return evaluate_by(
            jaxpr, [*map(self.constant, literals)], args, equation, self.constant
        )

    def equation(self, eqn: JaxprEqn, args: Sequence[Any]) -> Sequence[Any]:
        if self.for_programs:
            args = of_use(eqn, args)
            if hands_on(eqn, args):
                return args
        if self.for_programs and asks_each(eqn):
            return self.traced(while_any(eqn), args, eqn)
        if self.for_programs and reduces_dims(eqn):
            return self.traced(reduction(eqn), args, eqn)
        if self.for_programs and has_expansion(eqn):
            return self.traced(expansion(eqn), args, eqn)
        branch = only_branch(eqn) if self.for_programs else None
        if branch is not None:
            return self.run(branch, branch.consts, args[1:], eqn)
        takes_buffers = self.for_programs and eqn.primitive.name in CONTROL_FLOW
        if takes_buffers or eqn.primitive.name in IDENTITIES:
            args = [self.as_variable(atom) for atom in args]
        if self.for_programs and _comes_apart(eqn):
            return self.barrier(eqn, args)
        name = primitive_name(eqn)
        if name not in self.calls:
            outs = [fresh_var(var.aval) for var in eqn.outvars]
            self.eqns.append(eqn.replace(invars=list(args), outvars=outs))
            return outs
        # Without it XLA finds what `jax.checkpoint` computes again in the forward's
        # values.
        if keeps_its_barrier(eqn):
            args = self.traced(lax.optimization_barrier, args, eqn)
        body, args = called(eqn, args)
        # Now: later its marks look like those of the function around.
        if name == "jhost":
            body = _with_own_settings(body, eqn.params["config"])
        return self.run(body, getattr(body, "consts", ()), args, eqn)

    def constant(self, literal: Literal) -> Any:
        """`literal`, or one variable for it wherever it is read if it has dims."""
        if not shape_of(literal):
            return literal
        # By identity, as arrays have no hash.
        if id(literal.val) not in self.constants:
            self.constants[id(literal.val)] = self.as_variable(literal)
        return self.constants[id(literal.val)]

    def as_variable(self, atom: Any) -> Var:
        """`atom`, or a variable that an equation sets to it where it is a literal."""
        if not isinstance(atom, Literal):
            return atom
        # Of the primitives that can do nothing, JAX traces away most, but not this one.
        aval = aval_of(atom)
        identity = jax.make_jaxpr(
            lambda x: lax.transpose_p.bind(x, permutation=tuple(range(x.ndim)))
        )(jax.ShapeDtypeStruct(aval.shape, aval.dtype))
        (eqn,) = identity.jaxpr.eqns
        out = fresh_var(aval)
        self.eqns.append(eqn.replace(invars=[atom], outvars=[out]))
        return out

    def barrier(self, eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
        """An equation for each operand, for one's layout and stream bind no other.

        A literal is there before all else, and stays a literal.
        """
        pieces = {
            k: eqn.replace(invars=[arg], outvars=[fresh_var(arg.aval)])
            for k, arg in enumerate(args)
            if not isinstance(arg, Literal)
        }
        self.eqns += pieces.values()
        self.barriers.append(tuple(pieces.values()))
        return [pieces[k].outvars[0] if k in pieces else a for k, a in enumerate(args)]

    def traced(
        self,
        function: Callable[[list[Any]], Sequence[Any]],
        args: Sequence[Any],
        where: JaxprEqn,
    ) -> list[Any]:
        """Append the equations that `function` makes of `args`, at another's line."""
        avals = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in args]
        with user_context(where):
            closed_jaxpr = jax.make_jaxpr(function)(avals)
        return self.run(closed_jaxpr, closed_jaxpr.consts, args)


def _with_own_settings(body: Any, config: Any) -> Any:
    """The body of a jhost function, whose marks keep what that function was given."""
    own = {"chunks": config.chunks, "pipeline": config.pipeline}

    def with_settings(eqn: JaxprEqn) -> JaxprEqn | None:
        if eqn.primitive.name == "jhost":
            return eqn  # has settings of its own
        if eqn.primitive.name != "stream":
            return None
        given = {name: eqn.params[name] or value for name, value in own.items()}
        open_ones = {name for name in own if eqn.params[name] is None}
        wished = (*sorted(open_ones), *eqn.params.get("wished", ()))
        return eqn.replace(params={**eqn.params, **given, "wished": wished})

    return with_each_eqn(body, with_settings)


def _comes_apart(eqn: JaxprEqn) -> bool:
    """Whether it is a barrier of several operands, with a result for each."""
    if not is_barrier(eqn):
        return False
    return len(eqn.invars) == len(eqn.outvars) > 1  # references have no results
