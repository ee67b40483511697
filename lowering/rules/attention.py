"""Dim rules of cuDNN's attention: batches, groups of heads and queries are factors.

Loops cut keys as well, and combine the results of two parts of the keys
(`attention_parts.py`).  Features stay whole.

JAX binds wrappers, which XLA partitions, around the kernels.  jhost emits programs in
which all mesh axes are manual.  JAX lowers a wrapper there to its kernel for the shapes
that it is bound to, so both have one rule.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from jhost._jax import fresh_var
from jhost.lowering.rules.attention_kernels import (
    BIAS,
    LENGTHS,
    OFFSETS,
    STATISTICS,
    TABLE,
    KernelBlocks,
    has_lengths,
    is_causal,
    mask_of,
)
from jhost.lowering.rules.attention_maps import AttentionSizes, Maps
from jhost.lowering.rules.attention_parts import weighted
from jhost.lowering.rules.dim_rule import DimRule, Dims, shape_of
from jhost.lowering.rules.reducers import Reducer
from jhost.lowering.rules.registry import rule, without_factors

_BNTH = 1  # of JAX's two layouts; the other is BTNH


def forward_depth(sizes: AttentionSizes) -> int:
    """The terms a score: of queries times keys, and of weights times values."""
    return sum(sizes.features)


def backward_depth(sizes: AttentionSizes) -> int:
    """The terms a score in a backward, which is five products.

    Three of them contract or make the features of keys and queries (the scores, and the
    gradients of both), and two the features of values.  Kernels take 7 / 5 of the time
    of matmuls of that size: the backward of a causal sequence of 32,768 took 33.4 ms on
    two H100s, and 24.2 ms in a ring.
    """
    keys, values = sizes.features
    return 7 * (3 * keys + 2 * values) // 5


# --- In 16 bits ------------------------------------------------------------------- #

_FORWARDS = "dot_product_attention_fwd", "dot_product_attention_fwd_wrapper"


@rule(*_FORWARDS)
def attention(eqn: JaxprEqn) -> DimRule:
    """The results of the queries, and statistics of each row for a backward."""
    reason = _whole_reason(eqn)
    if reason:
        return without_factors(eqn, reason)
    # Without statistics parts of the keys cannot be combined.
    cut = len(eqn.outvars) == 2 and _cuts_sequences(eqn)
    maps = _maps(eqn, cut=(None, "softmax") if cut else None)
    results = (maps.of_queries(), _of_statistics(maps))[: len(eqn.outvars)]
    depth, combine = forward_depth(maps.sizes), weighted(maps.heads_first)
    return maps.rule(_operands(eqn, maps), results, depth, KernelBlocks, combine)


@rule("dot_product_attention_bwd", "dot_product_attention_bwd_wrapper")
def attention_gradients(eqn: JaxprEqn) -> DimRule:
    """The gradient of a bias is summed over the dims along which it was stretched."""
    reason = _whole_reason(eqn)
    if reason:
        return without_factors(eqn, reason)
    cut = ("sum", "sum") if _cuts_sequences(eqn) else None
    batch, heads = _bias_reducers(eqn)
    maps = _maps(eqn, batch, heads, cut)
    operands = _operands(eqn, maps)
    query, key = maps.of_queries(), maps.of_keys()
    operands[STATISTICS : STATISTICS + 3] = _of_statistics(maps), query, query
    results = (query, key, key, operands[BIAS])[: len(eqn.outvars)]
    return maps.rule(operands, results, backward_depth(maps.sizes), KernelBlocks)


def _maps(
    eqn: JaxprEqn,
    batch: Reducer | None = None,
    heads: Reducer | None = None,
    cut: tuple[Reducer | None, Reducer] | None = None,
) -> Maps:
    sizes = _sizes_of(eqn)
    window = eqn.params.get("sliding_window_length")
    return Maps(
        sizes,
        heads_first=_heads_first(eqn),
        batch=None if _is_paged(eqn) else (batch,),
        heads=heads,
        cut=cut,
        # cuDNN's window counts the query's own position as well.
        left=window - 1 if window and is_causal(eqn) else None,
        right=0 if is_causal(eqn) else None,
        counts=is_causal(eqn) or has_lengths(eqn),
    )


def _sizes_of(eqn: JaxprEqn) -> AttentionSizes:
    """The sizes of an equation, whichever its layout."""
    query, key, value = (shape_of(v) for v in eqn.invars[:3])
    features = query[3], value[3]
    if _heads_first(eqn):
        return AttentionSizes(query[:1], query[1], query[2], key[1], key[2], features)
    return AttentionSizes(query[:1], query[2], query[1], key[2], key[1], features)


def _heads_first(eqn: JaxprEqn) -> bool:
    return eqn.params["layout"] == _BNTH


def _is_paged(eqn: JaxprEqn) -> bool:
    """Whether keys and values lie in blocks; a table gives each sequence its blocks."""
    # Kernels in 8 bits have another operand at that position.
    return "fp8" not in eqn.primitive.name and len(shape_of(eqn.invars[TABLE])) == 4


def _operands(eqn: JaxprEqn, maps: Maps) -> list[Dims]:
    """The maps of the operands that all kernels take."""
    # JAX binds an empty array for an operand that is not there, so ranks tell.
    shapes = [shape_of(v) for v in eqn.invars]
    operands: list[Dims] = [(None,) * len(shape) for shape in shapes]
    operands[:3] = maps.of_queries(), maps.of_keys(), maps.of_keys()
    if len(shapes[BIAS]) == 4:
        operands[BIAS] = maps.of_scores(shapes[BIAS])
    for position in LENGTHS:
        if shapes[position] == maps.sizes.B:
            operands[position] = maps.batch
    return operands


def _of_statistics(maps: Maps) -> Dims:
    """The map of the statistics: the logarithm of each row's sum of exponentials."""
    return *maps.batch, maps.heads, maps.queries


def _bias_reducers(eqn: JaxprEqn) -> tuple[Reducer | None, Reducer | None]:
    """The reducers over batch and heads, for dims that a bias's gradient lacks."""
    if len(eqn.outvars) < 4:
        return None, None
    batch, heads, *_ = shape_of(eqn.invars[BIAS])
    sizes = _sizes_of(eqn)
    return (
        None if (batch,) == sizes.B else "sum",
        None if heads == sizes.N else "sum",
    )


def _cuts_sequences(eqn: JaxprEqn) -> bool:
    """Whether the kernel can work on parts of sequences.

    Not on a bias with gradient and lengths: the gradient would have in it what parts
    make of positions behind a length.  Nor on a window with lengths: a query may have
    all keys of its window behind the length.
    """
    if _is_paged(eqn) or (has_lengths(eqn) and eqn.params["variadic_args"][1]):
        return False
    whole = mask_of(eqn) in ("NO_MASK", "PADDING", "PADDING_CAUSAL")
    windowed = eqn.params["sliding_window_length"]
    return mask_of(eqn) == "CAUSAL" or (whole and not windowed)


def for_parts(eqn: JaxprEqn) -> JaxprEqn:
    """`eqn`, and for a forward its statistics too: they say how parts are combined."""
    if eqn.primitive.name not in _FORWARDS or eqn.params["is_training"]:
        return eqn
    if _whole_reason(eqn) or not _cuts_sequences(eqn):
        return eqn
    sizes, (found,) = _sizes_of(eqn), eqn.outvars
    statistics = found.aval.update(
        shape=(*sizes.B, sizes.N, sizes.T), dtype=np.dtype(np.float32)
    )
    return eqn.replace(
        outvars=[found, fresh_var(statistics)],
        params={**eqn.params, "is_training": True},
    )


def _whole_reason(eqn: JaxprEqn) -> str:
    """Why a kernel cannot work on parts; empty where it can."""
    if eqn.params["dropout_rate"] > 0:
        return "the kernel draws its dropout for the whole array, and not for parts"
    # The wrapper has the function, the kernel its jaxpr.
    if eqn.params.get("score_mod") or eqn.params.get("score_mod_jaxpr"):
        return "`score_mod` was written for the scores of the whole array"
    if len(shape_of(eqn.invars[OFFSETS])) == 2:
        return "sequences are packed, and their offsets count in the whole array"
    return ""


# --- In 8 bits ---------------------------------------------------------------------- #

# The kernels also return the largest magnitudes of their results, by which the next
# call is scaled.  They are over all batches and heads, so those dims reduce by "max".


@rule("dot_product_attention_fp8_fwd", "dot_product_attention_fp8_fwd_wrapper")
def attention_fp8(eqn: JaxprEqn) -> DimRule:
    """Two largest magnitudes, of scores and results, come before the statistics."""
    maps = _maps(eqn, "max", "max")
    query, key = maps.of_queries(), maps.of_keys()
    results = [query, *map(_whole, eqn.outvars[1:3]), _of_statistics(maps)]
    return maps.rule(
        [query, key, key, *map(_whole, eqn.invars[3:])],
        results[: len(eqn.outvars)],
        forward_depth(maps.sizes),
        KernelBlocks,
    )


@rule("dot_product_attention_fp8_bwd", "dot_product_attention_fp8_bwd_wrapper")
def attention_fp8_gradients(eqn: JaxprEqn) -> DimRule:
    """The largest magnitudes of all gradients, the scores' too, come last."""
    maps = _maps(eqn, "max", "max")
    query, key = maps.of_queries(), maps.of_keys()
    operands = [query, key, key, query, query, _of_statistics(maps)]
    return maps.rule(
        [*operands, *map(_whole, eqn.invars[6:])],
        [query, key, key, *map(_whole, eqn.outvars[3:])],
        backward_depth(maps.sizes),
        KernelBlocks,
    )


def _whole(atom: Any) -> Dims:
    return (None,) * len(shape_of(atom))
