"""JAX's rule that linearizes a call, in which `refine` may rewrite the two programs.

The rule is the one of a call primitive in `jax/_src/lax/eval_jaxpr.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any

from jax import tree
from jax.extend.core import Primitive
from jax.interpreters.ad import instantiate_zeros

from jhost._jax.split import (
    Refine,
    Rename,
    keep,
    new_split,
    operand_names,
    residual_values,
    with_zeros,
)

# By name, not by `import`: a type checker sees the newest JAX, where these differ.
_ad: Any = import_module("jax._src.interpreters.ad")


def register_linearization(prim: Primitive, refine: Refine, rename: Rename) -> None:
    """Gives a call primitive its rule of linearization.

    Args:
        prim: the primitive; its program is its parameter `call_jaxpr`.
        refine: rewrites every pair of programs before they are called.
        rename: gives the parameters of each of the two.
    """
    _ad.primitive_linearizations[prim] = partial(_linearize, prim, refine, rename)


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
    split = new_split(first, second, kept, forwarded, call_jaxpr)
    names = operand_names(call_jaxpr)
    split = dataclasses.replace(split, names=names, whole=call_jaxpr)
    split = refine(split, **params)
    ahead, behind = rename(params, "forward"), rename(params, "tangents")
    results = prim.bind(*primals, call_jaxpr=split.first, **ahead)
    residuals = residual_values(split, call_jaxpr.consts, results, primals)
    structured = results[len(results) - number_own :]

    def tangents_out(
        residuals: Sequence[Any], structured: Any, tangents: Sequence[Any]
    ) -> list[Any]:
        given = [instantiate_zeros(t) for t in keep(tangents, nonzeros)]
        operands = [*residuals, *given, *tree.leaves(structured)]
        # From 0.12 on a vjp binds a node around the primitive, to transpose later.
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
