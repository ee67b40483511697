"""Dim rules of cuDNN's attention: batches and groups of heads are worked on apart.

So are queries, and, in loops, keys: what was found in some of them is combined with
what is in others (`attention_parts.py`).  Features stay whole.

JAX binds wrappers, which XLA partitions, around the kernels.  Where all mesh axes are
manual, as in what jhost emits, a wrapper is lowered to its kernel for the shapes that
it is bound to, so both have one rule.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from jhost._jax import fresh_var
from jhost.lowering.rules.attention_maps import (
    Maps,
    Sizes,
    heads_first,
    is_paged,
    sizes_of,
)
from jhost.lowering.rules.attention_parts import BIAS, is_causal, weighted
from jhost.lowering.rules.dim_rule import (
    DimRule,
    Dims,
    Reducer,
    rule,
    shape_of,
    without_factors,
)


def _forward_depth(sizes: Sizes) -> int:
    """Queries times keys, and weights times values."""
    return sum(sizes.features)


def _backward_depth(sizes: Sizes) -> int:
    """The scores and three gradients, two of them by what keys and queries have."""
    keys, values = sizes.features
    return 3 * keys + 2 * values


# --- In 16 bits ------------------------------------------------------------------- #

# Operands, in the order in which JAX binds them; a result of `score_mod` comes last.
_LENGTHS, _OFFSETS, _STATISTICS = (4, 5), 6, 10

_FORWARDS = "dot_product_attention_fwd", "dot_product_attention_fwd_wrapper"


@rule(*_FORWARDS)
def attention(eqn: JaxprEqn) -> DimRule:
    """What the queries find, and, for a backward, statistics of each row of scores."""
    reason = _whole_reason(eqn)
    if reason:
        return without_factors(eqn, reason)
    # Without statistics parts of the keys cannot be combined.
    cut = len(eqn.outvars) == 2 and _cuts_sequences(eqn)
    maps = Maps(eqn, cut=(None, "softmax") if cut else None)
    results = (maps.of_queries(), maps.of_statistics())[: len(eqn.outvars)]
    combine = weighted(heads_first(eqn))
    return maps.rule(_operands(maps), results, _forward_depth(maps.sizes), combine)


@rule("dot_product_attention_bwd", "dot_product_attention_bwd_wrapper")
def attention_gradients(eqn: JaxprEqn) -> DimRule:
    """The gradient of a bias is summed over all that it was stretched over."""
    reason = _whole_reason(eqn)
    if reason:
        return without_factors(eqn, reason)
    cut = ("sum", "sum") if _cuts_sequences(eqn) else None
    maps = Maps(eqn, *_bias_reducers(eqn), cut)
    operands = _operands(maps)
    query, key = maps.of_queries(), maps.of_keys()
    operands[_STATISTICS : _STATISTICS + 3] = maps.of_statistics(), query, query
    results = (query, key, key, operands[BIAS])[: len(eqn.outvars)]
    return maps.rule(operands, results, _backward_depth(maps.sizes))


def _operands(maps: Maps) -> list[Dims]:
    shapes = [shape_of(v) for v in maps.eqn.invars]
    operands: list[Dims] = [(None,) * len(shape) for shape in shapes]
    operands[:3] = maps.of_queries(), maps.of_keys(), maps.of_keys()
    operands[BIAS] = maps.of_bias(shapes[BIAS])
    for position in _LENGTHS:
        operands[position] = maps.of_lengths(shapes[position])
    return operands


def _bias_reducers(eqn: JaxprEqn) -> tuple[Reducer | None, Reducer | None]:
    """Over the batch, and over heads: where the gradient of a bias lacks them."""
    if len(eqn.outvars) < 4:
        return None, None
    batch, heads, *_ = shape_of(eqn.invars[BIAS])
    sizes = sizes_of(eqn)
    return (
        None if batch == sizes.B else "sum",
        None if heads == sizes.N else "sum",
    )


def _cuts_sequences(eqn: JaxprEqn) -> bool:
    """Whether parts of sequences can be worked on: not where their lengths count."""
    unmasked = eqn.params["mask_type"].name == "NO_MASK"
    seen_whole = unmasked and not eqn.params["sliding_window_length"]
    return (seen_whole or is_causal(eqn)) and not is_paged(eqn)


def for_parts(eqn: JaxprEqn) -> JaxprEqn:
    """`eqn`; a forward with its statistics as well, by which parts are combined."""
    if eqn.primitive.name not in _FORWARDS or eqn.params["is_training"]:
        return eqn
    if _whole_reason(eqn) or not _cuts_sequences(eqn):
        return eqn
    sizes, (found,) = sizes_of(eqn), eqn.outvars
    statistics = found.aval.update(
        shape=(sizes.B, sizes.N, sizes.T), dtype=np.dtype(np.float32)
    )
    return eqn.replace(
        outvars=[found, fresh_var(statistics)],
        params={**eqn.params, "is_training": True},
    )


def _whole_reason(eqn: JaxprEqn) -> str:
    """Why a kernel cannot work on parts; empty where it can."""
    if eqn.params["dropout_rate"] > 0:
        return "what attention drops is drawn for the whole"
    # The wrapper has the function, the kernel its jaxpr.
    if eqn.params.get("score_mod") or eqn.params.get("score_mod_jaxpr"):
        return "the function of the scores was written for all of them"
    if len(shape_of(eqn.invars[_OFFSETS])) == 2:
        return "sequences are packed, and their offsets are those in the whole"
    return ""


# --- In 8 bits ---------------------------------------------------------------------- #

# The largest magnitudes, which results are scaled by next time, are of all heads.


@rule("dot_product_attention_fp8_fwd", "dot_product_attention_fp8_fwd_wrapper")
def attention_fp8(eqn: JaxprEqn) -> DimRule:
    """The largest magnitudes of scores and results come between the two others."""
    maps = Maps(eqn, "max", "max")
    query, key = maps.of_queries(), maps.of_keys()
    results = [query, *map(_whole, eqn.outvars[1:3]), maps.of_statistics()]
    return maps.rule(
        [query, key, key, *map(_whole, eqn.invars[3:])],
        results[: len(eqn.outvars)],
        _forward_depth(maps.sizes),
    )


@rule("dot_product_attention_fp8_bwd", "dot_product_attention_fp8_bwd_wrapper")
def attention_fp8_gradients(eqn: JaxprEqn) -> DimRule:
    """The largest magnitudes of all gradients, and of the scores', come last."""
    maps = Maps(eqn, "max", "max")
    query, key = maps.of_queries(), maps.of_keys()
    operands = [query, key, key, query, query, maps.of_statistics()]
    return maps.rule(
        [*operands, *map(_whole, eqn.invars[6:])],
        [query, key, key, *map(_whole, eqn.outvars[3:])],
        _backward_depth(maps.sizes),
    )


def _whole(atom: Any) -> Dims:
    return (None,) * len(shape_of(atom))
