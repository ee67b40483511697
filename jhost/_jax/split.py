"""The rules by which JAX splits a call in two, and what the one hands to the other.

Linearization, partial evaluation and rematerialization make two programs of one: what
runs first, and what needs the values that it leaves, the residuals.  These are JAX's
own rules for a call primitive (`jax/_src/lax/eval_jaxpr.py`), but that `refine` may
rewrite the pair before either is called.
"""

from __future__ import annotations

import dataclasses
import itertools
import typing
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module, util
from typing import Any, TypeAlias

from jax import tree
from jax.extend.core import Literal, Primitive

from jhost._jax.eqns import rewritten

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
    """Where an operand of the second program comes from, by number.

    Either it is a `result` of the first, or what the first was `given` as an operand,
    or a `constant` of the program that both come from.
    """

    result: int | None = None
    given: int | None = None
    constant: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """A program in two: `first`, then `second`, with what it takes from `first`.

    Both are closed jaxprs.  The first `kept` results of `first` are the program's own;
    those after them are there for `second` alone.  The first operands of `second` are
    the `residuals`; a policy of the user's may have chosen them.  `names` are those of
    the operands of `first`, as far as they are known.
    """

    first: Any
    second: Any
    residuals: tuple[Residual, ...]
    kept: int
    by_policy: bool = False
    names: tuple[str, ...] = ()


Refine: TypeAlias = Callable[..., Split]
"""A split, and the call's other parameters by name -> one that computes the same.

It may have other residuals.  Results of `first` that are neither `kept` nor residuals
stay its last ones, and operands of `second` that are no residuals stay, in order.
"""


Derivation: TypeAlias = typing.Literal[
    "forward", "tangents", "recomputed", "known", "unknown", "backward", "batched"
]
"""What JAX made of a call's program.

`known` and `unknown` are what partial evaluation makes of a program of any kind: it
moves what a loop need not repeat before it, and parts what a checkpoint computes again
from its tangents.
"""

Rename: TypeAlias = Callable[..., dict[str, Any]]
"""The call's other parameters by name, and how -> those of a program derived from it.

The names of its operands follow, where its program does not have them.
"""


def register_split_rules(prim: Primitive, refine: Refine, rename: Rename) -> None:
    """Gives a call primitive its rules of linearization and partial evaluation.

    Args:
        prim: the primitive; its program is its parameter `call_jaxpr`.
        refine: is asked about every pair of programs, before they are called.
        rename: gives the parameters of each of the two.
    """
    _ad.primitive_linearizations[prim] = partial(_linearize, prim, refine, rename)
    _partial_eval.custom_partial_eval_rules[prim] = partial(
        _partially_eval, prim, refine, rename
    )
    rules = _partial_eval.partial_eval_jaxpr_custom_rules
    rules[prim] = partial(_split_eqn, refine, rename, rules[_JAX_CALL])
    if _remat and hasattr(_remat, "rules"):  # from 0.12 on
        _remat.rules[prim] = partial(_rematerialize, prim, refine, rename)


# ---- Linearization ----


def _linearize(
    prim: Primitive,
    refine: Refine,
    rename: Rename,
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
    split = _new_split(first, second, kept, forwarded, call_jaxpr)
    split = dataclasses.replace(split, names=operand_names(call_jaxpr))
    split = refine(split, **params)
    ahead, behind = rename(params, "forward"), rename(params, "tangents")
    results = prim.bind(*primals, call_jaxpr=split.first, **ahead)
    residuals = _handed_over(split, call_jaxpr.consts, results, primals)
    structured = results[len(results) - number_own :]

    def tangents_out(
        residuals: Sequence[Any], structured: Any, tangents: Sequence[Any]
    ) -> list[Any]:
        given = [_ad.instantiate_zeros(t) for t in keep(tangents, nonzeros)]
        operands = [*residuals, *given, *tree.leaves(structured)]
        node = _ad.vjp_node(prim) if is_vjp and hasattr(_ad, "vjp_node") else prim
        results = node.bind(*operands, call_jaxpr=split.second, **behind)
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
) -> Split:
    """The split that JAX made.

    `forwarded` has for each residual the operand it is, counted after the constants of
    `call_jaxpr`, or None for one that `first` makes.
    """
    constants = len(call_jaxpr.consts)
    residuals: list[Residual] = []
    made = itertools.count(kept)
    for source in forwarded:
        if source is None:
            residuals.append(Residual(result=next(made)))
        elif source < constants:
            residuals.append(Residual(constant=source))
        else:
            residuals.append(Residual(given=source - constants))
    return Split(first, second, tuple(residuals), kept)


def _handed_over(
    split: Split, constants: Sequence[Any], results: Sequence[Any], given: Sequence[Any]
) -> list[Any]:
    """The residuals, in the order in which the second program takes them."""
    return [
        results[residual.result]
        if residual.result is not None
        else given[residual.given]
        if residual.given is not None
        else constants[residual.constant or 0]
        for residual in split.residuals
    ]


# ---- Partial evaluation ----


def _partially_eval(
    prim: Primitive,
    refine: Refine,
    rename: Rename,
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
    split = _new_split(first, second, kept, forwarded, call_jaxpr)
    names = keep(operand_names(call_jaxpr), [not u for u in unknown])
    split = refine(dataclasses.replace(split, names=tuple(names)), **params)
    known = [t.pval.get_known() for t in tracers if t.pval.is_known()]
    ahead, behind = rename(params, "known"), rename(params, "unknown")
    results = prim.bind(*known, call_jaxpr=split.first, **ahead)
    residuals = _handed_over(split, call_jaxpr.consts, results, known)
    operands = [
        *map(trace.new_instantiated_const, residuals),
        *keep(tracers, unknown),
    ]
    waiting = _stage(prim, trace, operands, dict(behind, call_jaxpr=split.second))
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
    rename: Rename,
    rule: Callable[..., Any],
    saveable: Any,
    unknown: Sequence[bool],
    instantiated: Sequence[bool],
    eqn: Any,
) -> tuple[Any, ...]:
    """JAX's rule for a call, which names residuals by variables, refined."""
    known, staged, *out, needed = rule(saveable, unknown, instantiated, eqn)
    params = dict(eqn.params)
    own_names = operand_names(params.pop("call_jaxpr"))
    names = dict(zip(map(id, eqn.invars), own_names, strict=True))
    own = set(map(id, eqn.outvars))
    atoms, residuals, second = _residuals_first(known, staged)
    split = Split(
        first=known.params["call_jaxpr"],
        second=second,
        residuals=residuals,
        kept=sum(id(var) in own for var in known.outvars),
        by_policy=True,
        names=tuple(names.get(id(var), "") for var in known.invars),
    )
    split = refine(split, **params)
    made = map(_core.Var, split.first.out_avals[split.kept :])
    results = [*known.outvars[: split.kept], *made]
    taken = _handed_over(split, (), results, known.invars)
    known = known.replace(
        outvars=results, params=dict(rename(params, "forward"), call_jaxpr=split.first)
    )
    staged = staged.replace(
        invars=[*taken, *atoms[len(residuals) :]],
        params=dict(rename(params, "tangents"), call_jaxpr=split.second),
    )
    gone = set(map(id, atoms[: len(residuals)]))
    there = {
        id(v) for v, is_there in zip(eqn.invars, instantiated, strict=True) if is_there
    }
    needed = [var for var in needed if id(var) not in gone]
    needed += [var for var in taken if id(var) not in there]
    return known, staged, *out, [v for v in needed if not isinstance(v, Literal)]


def _residuals_first(
    known: Any, staged: Any
) -> tuple[list[Any], tuple[Residual, ...], Any]:
    """Operands of the second equation, what the first of them are, and its program.

    The ones that the first equation makes or takes too come first.
    """
    sources = {id(var): Residual(given=n) for n, var in enumerate(known.invars)}
    sources |= {id(var): Residual(result=n) for n, var in enumerate(known.outvars)}
    jaxpr = staged.params["call_jaxpr"]
    pairs = list(zip(staged.invars, jaxpr.jaxpr.invars, strict=True))
    pairs.sort(key=lambda pair: id(pair[0]) not in sources)
    residuals = [sources[id(atom)] for atom, _ in pairs if id(atom) in sources]
    second = rewritten(jaxpr, invars=[var for _, var in pairs])
    return [atom for atom, _ in pairs], tuple(residuals), second


def _rematerialize(
    prim: Primitive,
    refine: Refine,
    rename: Rename,
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
        Residual(result=next(made) if number is None else number)
        for number in forwarded
    )
    names = operand_names(call_jaxpr)
    split = Split(first, second, residuals, kept, by_policy=True, names=names)
    split = refine(split, **params)
    ahead, again = rename(params, "forward"), rename(params, "recomputed")
    results = prim.bind(*args, call_jaxpr=split.first, **ahead)
    saved = _handed_over(split, (), results, args)

    def rematerialize(saved: Sequence[Any], *args: Any) -> list[Any]:
        return prim.bind(*saved, *args, call_jaxpr=split.second, **again)

    return results[:kept], saved, rematerialize


# ---- Names ----


def operand_names(jaxpr: Any) -> tuple[str, ...]:
    """The name of each operand of a program, empty where there is none."""
    names = jaxpr.debug_info.safe_arg_names(len(jaxpr.in_avals))
    return tuple(name or "" for name in names) or ("",) * len(jaxpr.in_avals)


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
