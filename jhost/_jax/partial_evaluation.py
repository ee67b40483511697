"""JAX's rules that evaluate a call partially, or again, with its two programs refined.

They are the rules of a call primitive in `jax/_src/lax/eval_jaxpr.py`: partial
evaluation of a trace, of an equation (for `checkpoint` and `scan`), and, from 0.12 on,
rematerialization.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module, util
from typing import Any

from jax.extend import source_info_util
from jax.extend.core import Literal, Primitive, Var
from jax.extend.core.primitives import closed_call_p
from jax.interpreters import partial_eval

from jhost._jax.eqns import rewritten
from jhost._jax.split import (
    Refine,
    Rename,
    Residual,
    Split,
    keep,
    new_split,
    operand_names,
    residual_values,
)

# By name, not by `import`: a type checker sees the newest JAX, where these differ.
_core: Any = import_module("jax._src.core")
_effects: Any = import_module("jax._src.effects")
_partial_eval: Any = import_module("jax._src.interpreters.partial_eval")
_has_remat = util.find_spec("jax._src.interpreters.remat") is not None
_remat: Any = import_module("jax._src.interpreters.remat") if _has_remat else None


_JAX_CALL = getattr(_core, "eval_jaxpr_p", None) or closed_call_p  # of 0.10
"""A call primitive of JAX's own whose program is its parameter `call_jaxpr` too."""


def register_partial_evaluation(
    prim: Primitive, refine: Refine, rename: Rename
) -> None:
    """Gives a call primitive its rules of partial evaluation.

    Args:
        prim: the primitive; its program is its parameter `call_jaxpr`.
        refine: rewrites every pair of programs before they are called.
        rename: gives the parameters of each of the two.
    """
    partial_eval.custom_partial_eval_rules[prim] = partial(
        _partially_eval, prim, refine, rename
    )
    rules = partial_eval.partial_eval_jaxpr_custom_rules
    rules[prim] = partial(_split_eqn, refine, rename, rules[_JAX_CALL])
    if _remat and hasattr(_remat, "rules"):  # from 0.12 on
        _remat.rules[prim] = partial(_rematerialize, prim, refine, rename)


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
    # A residual that is no operand of the call is a result of `first`.
    made = sum(source is None for source in forwarded)
    kept = len(first.out_avals) - made
    split = new_split(first, second, kept, forwarded, call_jaxpr)
    names = keep(operand_names(call_jaxpr), [not u for u in unknown])
    split = dataclasses.replace(split, names=tuple(names), how="known")
    split = refine(split, **params)
    known = [t.pval.get_known() for t in tracers if t.pval.is_known()]
    ahead, behind = rename(params, "known"), rename(params, "unknown")
    results = prim.bind(*known, call_jaxpr=split.first, **ahead)
    residuals = residual_values(split, call_jaxpr.consts, results, known)
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
        partial_eval.JaxprTracer(trace, partial_eval.PartialVal.unknown(aval), None)
        for aval in jaxpr.out_avals
    ]
    effects = _core.positional_effects(jaxpr)
    source = source_info_util.current()
    recipe = _partial_eval.new_eqn_recipe(
        trace, tracers, results, prim, params, effects, source
    )
    for tracer in results:
        tracer.recipe = recipe
    # As in JAX's own rule: a handle keeps equations with effects alive.
    if _effects.partial_eval_kept_effects.filter_in(jaxpr.effects):
        handle = _partial_eval.EffectHandle(tracers, recipe)
        trace.effect_handles.append(handle)
    return results


# ---- Of an equation, for `checkpoint` and `scan` ----


def _split_eqn(
    refine: Refine,
    rename: Rename,
    rule: Callable[..., Any],
    saveable: Any,
    unknown: Sequence[bool],
    instantiated: Sequence[bool],
    eqn: Any,
) -> tuple[Any, ...]:
    """JAX's rule for a call, refined; JAX's rule names residuals by variables."""
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
    made = map(Var, split.first.out_avals[split.kept :])
    results = [*known.outvars[: split.kept], *made]
    taken = residual_values(split, (), results, known.invars)
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
    # The caller saves the variables in `needed`.  Residuals that `refine` left out go,
    # and those that it took instead come.
    needed = [var for var in needed if id(var) not in gone]
    needed += [var for var in taken if id(var) not in there]
    return known, staged, *out, [v for v in needed if not isinstance(v, Literal)]


def _residuals_first(
    known: Any, staged: Any
) -> tuple[list[Any], tuple[Residual, ...], Any]:
    """The second equation's operands and program, with its residuals first.

    Residuals are operands that the first equation makes, or takes too.
    """
    sources = {id(var): Residual(given=n) for n, var in enumerate(known.invars)}
    sources |= {id(var): Residual(result=n) for n, var in enumerate(known.outvars)}
    jaxpr = staged.params["call_jaxpr"]
    pairs = list(zip(staged.invars, jaxpr.jaxpr.invars, strict=True))
    # A stable sort, so that all others keep their order.
    pairs.sort(key=lambda pair: id(pair[0]) not in sources)
    residuals = [sources[id(atom)] for atom, _ in pairs if id(atom) in sources]
    second = rewritten(jaxpr, invars=[var for _, var in pairs])
    return [atom for atom, _ in pairs], tuple(residuals), second


# ---- Rematerialization ----


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
    saved = residual_values(split, (), results, args)

    def rematerialize(saved: Sequence[Any], *args: Any) -> list[Any]:
        return prim.bind(*saved, *args, call_jaxpr=split.second, **again)

    return results[:kept], saved, rematerialize
