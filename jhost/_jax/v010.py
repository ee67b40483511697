"""The rules that make a primitive a call, for JAX 0.10, which does not register them.

From 0.11 `jax.extend.core.register_call_primitive_rules` registers the same set.  The
rules here come from `jax/_src/compute_on.py` (0.10.2), and pass any parameters through.
Goes away with the support of 0.10.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from importlib import import_module
from typing import Any

import jax
from jax import tree
from jax.errors import JaxprTypeError
from jax.extend.core import JaxprEqn, Primitive, jaxpr_as_fun
from jax.extend.core.primitives import closed_call_p
from jax.interpreters import ad, batching, partial_eval

from jhost._jax.caches import cached_by_jaxpr
from jhost._jax.eqns import close
from jhost._jax.split import keep, with_zeros

# By name, not by `import`: a type checker sees the newest JAX, where these differ.
_ad: Any = import_module("jax._src.interpreters.ad")
_batching: Any = import_module("jax._src.interpreters.batching")
_core: Any = import_module("jax._src.core")
_linear_util: Any = import_module("jax._src.linear_util")
_dce_rules: Any = partial_eval.dce_rules  # from 0.11 on, of other rules


def register_call_primitive_rules(prim: Primitive) -> None:
    """Gives `prim`, whose program is its parameter `call_jaxpr`, the rules of a call.

    The rules by which a call is split in two are the same on every JAX.

    Args:
        prim: a new primitive; its implementation evaluates the program.
    """
    prim.multiple_results = True
    prim.def_impl(_evaluate)
    prim.def_effectful_abstract_eval(_abstract_eval)
    _core.custom_typechecks[prim] = _typecheck
    ad.primitive_jvps[prim] = partial(_jvp, prim)
    _ad.fancy_transposes[prim] = partial(_transpose, prim)
    batching.fancy_primitive_batchers[prim] = partial(_batch, prim)
    _dce_rules[prim] = _without_dead_code


def _evaluate(*args: Any, call_jaxpr: Any, **_: Any) -> Sequence[Any]:
    return jaxpr_as_fun(call_jaxpr)(*args)


def _abstract_eval(*_: Any, call_jaxpr: Any, **__: Any) -> tuple[Any, Any]:
    return call_jaxpr.out_avals, _effects(call_jaxpr)


def _effects(call_jaxpr: Any) -> Any:
    """The effects of a call, without those on references that only its program has.

    JAX 0.10 asks each equation that has it for a rule by which it does without them,
    which private primitives have.  It makes them values where the program is lowered.
    """
    return _core.positional_effects(call_jaxpr) - _effects_of_a_reference()


def _without_dead_code(used: Any, eqn: JaxprEqn) -> tuple[Any, JaxprEqn | None]:
    used_operands, new = _dce_rules[closed_call_p](used, eqn)
    if new is None:
        return used_operands, None
    return used_operands, new.replace(effects=new.effects - _effects_of_a_reference())


@cache
def _effects_of_a_reference() -> Any:
    return jax.make_jaxpr(lambda x: jax.freeze(jax.new_ref(x)))(0.0).effects


def _typecheck(_: Any, *atoms: Any, call_jaxpr: Any, **__: Any) -> tuple[Any, Any]:
    pairs = zip(call_jaxpr.in_avals, atoms, strict=True)
    if not all(_core.typecompat(aval, atom.aval) for aval, atom in pairs):
        raise JaxprTypeError("call_jaxpr does not fit its operands")
    return call_jaxpr.out_avals, _effects(call_jaxpr)


def _jvp(
    prim: Primitive,
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    call_jaxpr: Any,
    **params: Any,
) -> tuple[list[Any], list[Any]]:
    nonzeros = [not isinstance(t, ad.Zero) for t in tangents]
    jvp_jaxpr, nonzeros_out = _ad.jvp_jaxpr(call_jaxpr, nonzeros, False)
    operands = [*primals, *keep(tangents, nonzeros)]
    results = prim.bind(*operands, call_jaxpr=jvp_jaxpr, **params)
    count = len(nonzeros_out)
    return results[:count], with_zeros(call_jaxpr, nonzeros_out, results[count:])


def _transpose(
    prim: Primitive,
    cotangents: Sequence[Any],
    *args: Any,
    call_jaxpr: Any,
    **params: Any,
) -> None:
    known, specs = _ad.project_accums(args)
    operands, in_tree = tree.flatten((known, cotangents))
    avals = tuple(jax.typeof(x) for x in operands)
    transposed, out_tree = _transpose_jaxpr(call_jaxpr, in_tree, avals, specs)
    results = prim.bind(*operands, call_jaxpr=transposed, **params)
    for arg, cotangent in zip(args, tree.unflatten(out_tree, results), strict=True):
        if isinstance(arg, _ad.ValAccum):
            arg.accum(cotangent)


def _transpose_jaxpr_uncached(
    jaxpr: Any, in_tree: Any, avals: tuple[Any, ...], specs: tuple[Any, ...]
) -> tuple[Any, Any]:
    out_trees: list[Any] = []

    def transposed(*operands: Any) -> list[Any]:
        known, cotangents = tree.unflatten(in_tree, operands)
        args = _ad.unproject_accums(specs, known)
        _ad.backward_pass3(jaxpr.jaxpr, False, jaxpr.consts, args, cotangents)
        results = [x.freeze() if isinstance(x, _ad.ValAccum) else None for x in args]
        leaves, out_tree = tree.flatten(results)
        out_trees.append(out_tree)
        return leaves

    debug_info = jaxpr.debug_info.with_unknown_names()
    fun = _linear_util.wrap_init(transposed, debug_info=debug_info)
    open_jaxpr, _, consts = partial_eval.trace_to_jaxpr_dynamic(fun, avals)
    return close(open_jaxpr, consts), out_trees[0]


# Cached, as JAX's own: the same program must transpose to the same object, because
# compilations are cached by it.
_transpose_jaxpr = cached_by_jaxpr(_transpose_jaxpr_uncached)


def _batch(
    prim: Primitive,
    axis_data: Any,
    args: Sequence[Any],
    dims: Sequence[int | None],
    *,
    call_jaxpr: Any,
    **params: Any,
) -> tuple[Sequence[Any], list[int | None]]:
    batched, dims_out = _batching.batch_jaxpr2(call_jaxpr, axis_data, tuple(dims))
    return prim.bind(*args, call_jaxpr=batched, **params), list(dims_out)
