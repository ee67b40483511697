"""The rules by which JAX splits a call in two, and what the one hands to the other.

Linearization, partial evaluation and rematerialization make two programs of one: what
runs first, and what needs the values that it leaves, the residuals.  These are JAX's
own rules for a call primitive (`jax/_src/lax/eval_jaxpr.py`), but that `refine` may
rewrite the pair before either is called.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module, util
from typing import Any, TypeAlias

from jax import tree
from jax.extend.core import Literal, Primitive

# By name, not by `import`: a type checker sees the newest JAX, where these differ.
_ad: Any = import_module("jax._src.interpreters.ad")
_core: Any = import_module("jax._src.core")
_effects: Any = import_module("jax._src.effects")
_partial_eval: Any = import_module("jax._src.interpreters.partial_eval")
_source_info_util: Any = import_module("jax._src.source_info_util")
_has_remat = util.find_spec("jax._src.interpreters.remat") is not None
_remat: Any = import_module("jax._src.interpreters.remat") if _has_remat else None

_JAX_CALL = getattr(_core, "eval_jaxpr_p", None) or _core.closed_call_p  # of 0.10
"""A call primitive of JAX's own, with the same name for its parameter."""


@dataclasses.dataclass(frozen=True, slots=True)
class Residual:
    """Where an operand of the second program comes from.

    Either the first makes it, and it is its `result` of that number, or the first was
    `given` it, as the operand of that number.
    """

    operand: int
    result: int | None = None
    given: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """A program in two: `first`, then `second`, with what it takes from `first`.

    Both are closed jaxprs.  The first `kept` results of `first` are the program's own;
    those after them are there for `second` alone.
    """

    first: Any
    second: Any
    residuals: tuple[Residual, ...]
    kept: int


Refine: TypeAlias = Callable[..., Split]
"""A split, and the call's other parameters by name -> one that computes the same.

It may leave out results of `first` that are not `kept`.
"""


def register_split_rules(prim: Primitive, refine: Refine) -> None:
    """Gives a call primitive its rules of linearization and partial evaluation.

    Args:
        prim: the primitive; its program is its parameter `call_jaxpr`.
        refine: is asked about every pair of programs, before they are called.
    """
    _ad.primitive_linearizations[prim] = partial(_linearize, prim, refine)
    _partial_eval.custom_partial_eval_rules[prim] = partial(
        _partially_eval, prim, refine
    )
    rules = _partial_eval.partial_eval_jaxpr_custom_rules
    rules[prim] = partial(_split_eqn, refine, rules[_JAX_CALL])
    if _remat and hasattr(_remat, "rules"):  # from 0.12 on
        _remat.rules[prim] = partial(_rematerialize, prim, refine)


# ---- Linearization ----


def _linearize(
    prim: Primitive,
    refine: Refine,
    is_vjp: bool,
    nonzeros: Sequence[bool],
    *primals: Any,
    call_jaxpr: Any,
    **params: Any,
) -> tuple[Any, ...]:
    first, extra, nonzeros_out, forwarded, second = _ad.linearize_jaxpr(
        call_jaxpr, nonzeros, is_vjp=is_vjp
    )
    # From 0.11 on rules may leave residuals in trees of their own, at the end.
    own: Any = () if isinstance(extra, int) else extra.unpack()[2]
    number_own = len(own)
    kept = len(call_jaxpr.out_avals)
    split, constants = _new_split(first, second, kept, forwarded, call_jaxpr)
    split = refine(split, **params)
    results = prim.bind(*primals, call_jaxpr=split.first, **params)
    residuals = _handed_over(split, constants, results, primals)
    structured = results[len(results) - number_own :]

    def tangents_out(
        residuals: Sequence[Any], structured: Any, tangents: Sequence[Any]
    ) -> list[Any]:
        given = [_ad.instantiate_zeros(t) for t in keep(tangents, nonzeros)]
        operands = [*residuals, *given, *tree.leaves(structured)]
        node = _ad.vjp_node(prim) if is_vjp and hasattr(_ad, "vjp_node") else prim
        results = node.bind(*operands, call_jaxpr=split.second, **params)
        return with_zeros(call_jaxpr, nonzeros_out, results)

    if isinstance(extra, int):  # before 0.11

        def tangent_fun(residuals: Any, *tangents: Any) -> list[Any]:
            return tangents_out(residuals, (), tangents)

        return results[:kept], nonzeros_out, residuals, tangent_fun

    def tangent_fun_of_trees(residuals: Any, trees: Any, *tangents: Any) -> list[Any]:
        return tangents_out(residuals, trees, tangents)

    trees = own.update(structured).unflatten()
    return results[:kept], nonzeros_out, residuals, trees, tangent_fun_of_trees


def _new_split(
    first: Any,
    second: Any,
    kept: int,
    forwarded: Sequence[int | None],
    call_jaxpr: Any,
) -> tuple[Split, dict[int, Any]]:
    """The split that JAX made, and the residuals that are constants, by operand.

    `forwarded` has for each residual the operand it is, counted after the constants of
    `call_jaxpr`, or None for one that `first` makes.
    """
    consts = call_jaxpr.consts
    constants: dict[int, Any] = {}
    residuals: list[Residual] = []
    made = kept
    for operand, source in enumerate(forwarded):
        if source is None:
            residuals.append(Residual(operand, result=made))
            made += 1
        elif source < len(consts):
            constants[operand] = consts[source]
        else:
            residuals.append(Residual(operand, given=source - len(consts)))
    return Split(first, second, tuple(residuals), kept), constants


def _handed_over(
    split: Split,
    constants: dict[int, Any],
    results: Sequence[Any],
    operands: Sequence[Any],
) -> list[Any]:
    """The residuals, in the order in which the second program takes them."""
    values = dict(constants)
    for residual in split.residuals:
        if residual.given is not None:
            values[residual.operand] = operands[residual.given]
        elif residual.result is not None:
            values[residual.operand] = results[residual.result]
    return [values[operand] for operand in sorted(values)]


# ---- Partial evaluation ----


def _partially_eval(
    prim: Primitive,
    refine: Refine,
    trace: Any,
    *tracers: Any,
    call_jaxpr: Any,
    **params: Any,
) -> list[Any]:
    unknown = [not t.pval.is_known() for t in tracers]
    first, second, unknown_out, _, forwarded = (
        _partial_eval.partial_eval_jaxpr_nounits_fwd(
            call_jaxpr, unknown, instantiate=False
        )
    )
    made = sum(source is None for source in forwarded)
    kept = len(first.out_avals) - made
    split, constants = _new_split(first, second, kept, forwarded, call_jaxpr)
    split = refine(split, **params)
    known = [t.pval.get_known() for t in tracers if t.pval.is_known()]
    results = prim.bind(*known, call_jaxpr=split.first, **params)
    residuals = _handed_over(split, constants, results, known)
    operands = [
        *map(trace.new_instantiated_const, residuals),
        *keep(tracers, unknown),
    ]
    waiting = _stage(prim, trace, operands, dict(params, call_jaxpr=split.second))
    ready, later = iter(results[:kept]), iter(waiting)
    return [next(later) if waits else next(ready) for waits in unknown_out]


def _stage(
    prim: Primitive, trace: Any, tracers: list[Any], params: dict[str, Any]
) -> list[Any]:
    """One equation with unknown operands, as `JaxprTrace` keeps them."""
    jaxpr = params["call_jaxpr"]
    results = [
        _partial_eval.JaxprTracer(trace, _partial_eval.PartialVal.unknown(aval), None)
        for aval in jaxpr.out_avals
    ]
    effects = _core.positional_effects(jaxpr)
    source = _source_info_util.current()
    recipe = _partial_eval.new_eqn_recipe(
        trace, tracers, results, prim, params, effects, source
    )
    for tracer in results:
        tracer.recipe = recipe
    if _effects.partial_eval_kept_effects.filter_in(jaxpr.effects):
        handle = _partial_eval.EffectHandle(tracers, recipe)
        trace.effect_handles.append(handle)
    return results


# ---- Partial evaluation of an equation, for `checkpoint` and `scan` ----


def _split_eqn(
    refine: Refine,
    rule: Callable[..., Any],
    saveable: Any,
    unknown: Sequence[bool],
    instantiated: Sequence[bool],
    eqn: Any,
) -> tuple[Any, ...]:
    """JAX's rule for a call, which names residuals by variables, refined."""
    known, staged, *out, needed = rule(saveable, unknown, instantiated, eqn)
    params = dict(eqn.params)
    del params["call_jaxpr"]
    own = set(map(id, eqn.outvars))
    split = Split(
        first=known.params["call_jaxpr"],
        second=staged.params["call_jaxpr"],
        residuals=tuple(_residuals_of(known, staged)),
        kept=sum(id(var) in own for var in known.outvars),
    )
    split = refine(split, **params)
    made = {r.result: staged.invars[r.operand] for r in split.residuals}
    results = [
        var if number < split.kept else made[number]
        for number, var in enumerate(known.outvars[: len(split.first.out_avals)])
    ]
    atoms = list(staged.invars)
    for residual in split.residuals:
        if residual.given is not None:
            atoms[residual.operand] = known.invars[residual.given]
    instead = dict(zip(map(id, staged.invars), atoms, strict=True))
    needed = [instead.get(id(var), var) for var in needed]
    known = known.replace(
        outvars=results, params=dict(known.params, call_jaxpr=split.first)
    )
    staged = staged.replace(
        invars=atoms, params=dict(staged.params, call_jaxpr=split.second)
    )
    return known, staged, *out, [v for v in needed if not isinstance(v, Literal)]


def _residuals_of(known: Any, staged: Any) -> Iterator[Residual]:
    results = {id(var): number for number, var in enumerate(known.outvars)}
    given = {id(var): number for number, var in enumerate(known.invars)}
    for operand, atom in enumerate(staged.invars):
        if id(atom) in results:
            yield Residual(operand, result=results[id(atom)])
        elif id(atom) in given and not isinstance(atom, Literal):
            yield Residual(operand, given=given[id(atom)])


def _rematerialize(
    prim: Primitive,
    refine: Refine,
    trace: Any,
    *args: Any,
    call_jaxpr: Any,
    **params: Any,
) -> tuple[Any, ...]:
    first, second, forwarded = _remat.remat_jaxpr(
        call_jaxpr, trace.policy, trace.custom_vjp_rules, allow_fwds=True
    )
    kept = len(call_jaxpr.outvars)
    made = itertools.count(kept)
    residuals = tuple(
        Residual(operand, result=next(made) if number is None else number)
        for operand, number in enumerate(forwarded)
    )
    split = refine(Split(first, second, residuals, kept), **params)
    results = prim.bind(*args, call_jaxpr=split.first, **params)
    saved = _handed_over(split, {}, results, args)

    def rematerialize(saved: Sequence[Any], *args: Any) -> list[Any]:
        return prim.bind(*saved, *args, call_jaxpr=split.second, **params)

    return results[:kept], saved, rematerialize


# ---- Tangents ----


def keep(values: Sequence[Any], kept: Sequence[bool]) -> list[Any]:
    """The values that are kept."""
    return [value for value, wanted in zip(values, kept, strict=True) if wanted]


def with_zeros(
    jaxpr: Any, nonzeros: Sequence[bool], tangents: Sequence[Any]
) -> list[Any]:
    """Fills in the symbolic zero tangents that a call neither takes nor returns."""
    given = iter(tangents)
    return [
        next(given) if nonzero else _ad.Zero(aval.to_tangent_aval())
        for nonzero, aval in zip(nonzeros, jaxpr.out_avals, strict=True)
    ]
