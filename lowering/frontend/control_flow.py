"""Control flow as statements, each of whose bodies is a program of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, jaxpr_as_fun, jaxprs_in_params

from jhost._jax import arg_names, close, is_array, scan_counts, source_line
from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.border import split
from jhost.lowering.ir.display_names import display_name
from jhost.lowering.ir.program import Program
from jhost.lowering.rules.properties import CONTROL_FLOW

_Buffers: TypeAlias = tuple[ir.Buffer, ...]

BuildBody: TypeAlias = Callable[[Any, str, Sequence[ir.Buffer]], Program]
"""Gives a body's program, from its jaxpr, its kind, and its params' values outside."""


def has_programs(eqn: JaxprEqn) -> bool:
    """Whether it is control flow whose bodies can be programs."""
    if eqn.primitive.name not in CONTROL_FLOW:
        return False
    # Of the branches for several platforms (`lax.platform_dependent`) XLA compiles one,
    # and no other need compile.
    return not (eqn.params.get("branches_platforms") or _has_references(eqn))


def only_branch(eqn: JaxprEqn) -> Any:
    """The branch that every platform of a mesh takes, if there is one such branch.

    `jnp.diagonal` has another one for Mosaic (JAX 0.10 to 0.12), in which Pallas writes
    kernels.
    """
    platforms = eqn.params.get("branches_platforms")
    if not platforms:
        return None
    pairs = zip(platforms, eqn.params["branches"], strict=True)
    branches = [branch for names, branch in pairs if names != ("mosaic",)]
    return branches[0] if len(branches) == 1 else None


def _has_references(eqn: JaxprEqn) -> bool:
    """Whether something in it is changed where it is."""
    if not all(map(is_array, (*eqn.invars, *eqn.outvars))):
        return True
    bodies = jaxprs_in_params(eqn.params)
    return any(_has_references(inner) for body in bodies for inner in body.eqns)


def asks_each(eqn: JaxprEqn) -> bool:
    """Whether it is a `while` with a condition for each of a batch, as `vmap` makes."""
    if eqn.primitive.name != "while":
        return False
    (condition,) = eqn.params["cond_jaxpr"].out_avals
    return bool(condition.shape)


def while_any(eqn: JaxprEqn) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A `while` that `asks_each`, with one condition: does any of the batch go on?"""
    counts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    condition, body = (
        jaxpr_as_fun(close(eqn.params[name])) for name in ("cond_jaxpr", "body_jaxpr")
    )

    def run(args: Sequence[Any]) -> Sequence[Any]:
        consts, body_consts, start = split(args, *counts)

        def go_on(carry: Sequence[Any]) -> Any:
            (each,) = condition(*consts, *carry)
            return jnp.any(each)

        def step(carry: Sequence[Any]) -> Sequence[Any]:
            (each,) = condition(*consts, *carry)
            new = body(*body_consts, *carry)
            # Elements that are done keep their values, as in JAX's own lowering.
            return [_chosen(each, *pair) for pair in zip(new, carry, strict=True)]

        return lax.while_loop(go_on, step, [*start])

    return run


def _chosen(each: Any, new: Any, old: Any) -> Any:
    """The new values where `each` is true in a batch, and else the old ones."""
    # JAX has the batch in front of all that is carried, where a condition has one.
    wide = lax.broadcast_in_dim(each, new.shape, range(each.ndim))
    return lax.select(wide, new, old)


def out_names(eqn: JaxprEqn) -> list[str]:
    """Names for its results: a carried value's own name in the body, or `y`."""
    match eqn.primitive.name:
        case "scan":
            body, counts = eqn.params["jaxpr"], scan_counts(eqn)
        case "while":
            body = eqn.params["body_jaxpr"]
            counts = eqn.params["body_nconsts"], len(eqn.outvars)
        case _:
            return ["y"] * len(eqn.outvars)
    # To the user a carried value is one, outside and in the body.
    _, carried, _ = split(param_names(close(body)), *counts)
    return [*carried, *["y"] * (len(eqn.outvars) - len(carried))]


def param_names(body: Any) -> list[str]:
    """The user's names of the params of a body, or `x`."""
    names = arg_names(body)
    return [name or "x" for name in names] or ["x"] * len(body.in_avals)


def carried_params(eqn: JaxprEqn, what: str) -> range:
    """The numbers of a body's params that are other values in each iteration."""
    match what:
        case "scan":
            first, count = scan_counts(eqn)
            return range(first, first + count)
        case "while" | "while_condition":
            name = "cond" if what == "while_condition" else "body"
            first = eqn.params[f"{name}_nconsts"]
            return range(first, first + len(eqn.outvars))
        case _:
            return range(0)


def names_of_results(stmt: ir.ControlFlow) -> list[str]:
    """What a message calls each result: as the body that makes it does."""
    *_, body = stmt.bodies
    return [display_name(body, result.name) for result in body.results]


def control_flow(
    eqn: JaxprEqn,
    ins: Sequence[ir.Buffer],
    outs: Sequence[ir.Buffer],
    build_body: BuildBody,
) -> ir.ControlFlow:
    """The statement of an equation, on the buffers of its operands and results."""
    match eqn.primitive.name:
        case "scan":
            return _scan(eqn, tuple(ins), tuple(outs), build_body)
        case "while":
            return _while(eqn, tuple(ins), tuple(outs), build_body)
        case _:
            return _cond(eqn, tuple(ins), tuple(outs), build_body)


def _scan(
    eqn: JaxprEqn, ins: _Buffers, outs: _Buffers, build_body: BuildBody
) -> ir.Scan:
    consts, carry, xs = split(ins, *scan_counts(eqn))
    carried, ys = split(outs, len(carry))
    return ir.Scan(
        body=build_body(close(eqn.params["jaxpr"]), "scan", ins),
        consts=consts,
        carry=carry,
        xs=xs,
        carried=carried,
        ys=ys,
        length=eqn.params["length"],
        reverse=eqn.params["reverse"],
        unroll=eqn.params["unroll"],
        where=source_line(eqn),
    )


def _while(
    eqn: JaxprEqn, ins: _Buffers, outs: _Buffers, build_body: BuildBody
) -> ir.While:
    params = eqn.params
    asked, consts, carry = split(ins, params["cond_nconsts"], params["body_nconsts"])
    condition, body = close(params["cond_jaxpr"]), close(params["body_jaxpr"])
    return ir.While(
        condition=build_body(condition, "while_condition", (*asked, *carry)),
        body=build_body(body, "while", (*consts, *carry)),
        condition_consts=asked,
        consts=consts,
        carry=carry,
        carried=outs,
        where=source_line(eqn),
    )


def _cond(
    eqn: JaxprEqn, ins: _Buffers, outs: _Buffers, build_body: BuildBody
) -> ir.Cond:
    index, *operands = ins
    branches = map(close, eqn.params["branches"])
    return ir.Cond(
        index=index,
        branches=tuple(build_body(each, "branch", operands) for each in branches),
        operands=tuple(operands),
        outs=outs,
        where=source_line(eqn),
    )
