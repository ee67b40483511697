"""Batched contractions of arrays as they lie, without transposes around them.

`jnp.einsum` gives `lax.dot_general` its last operand first, and puts the result in
order by a transpose.  Its gradient has a transpose before each product.  XLA needs no
data movement for transposes of matrices.  But it moves the data if another dim is
outside of the batch's dims, such as the groups of tokens outside of their experts.
DeepSeek-V2's experts, forward and backward on two H100s, took 10.3 ms with these
transposes, and take 9.5 ms without.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.core import JaxprEqn, Literal, Var

from jhost._jax import aval_of, resized_var
from jhost.lowering.frontend.inline_calls import FlatJaxpr, needed


def without_transposes(flat: FlatJaxpr) -> FlatJaxpr:
    """`flat`, less the transposes that its batched contractions can do without."""
    transposes = {
        eqn.outvars[0]: eqn
        for eqn in flat.eqns
        if eqn.primitive.name == "transpose" and isinstance(eqn.invars[0], Var)
    }
    eqns = [_of_what_was_transposed(eqn, transposes) for eqn in flat.eqns]
    eqns = _in_the_order_of_their_readers(eqns, flat.outvars)
    return dataclasses.replace(flat, eqns=needed(eqns, flat.outvars))


def _has_batch(eqn: JaxprEqn) -> bool:
    """Whether it multiplies batches of matrices."""
    if eqn.primitive.name != "dot_general":
        return False
    _, (batch, _) = eqn.params["dimension_numbers"]
    return len(batch) > 0


# --- Operands ----------------------------------------------------------------------- #


def _of_what_was_transposed(
    eqn: JaxprEqn, transposes: Mapping[Var, JaxprEqn]
) -> JaxprEqn:
    """A contraction of the arrays whose transposes its operands are."""
    if not _has_batch(eqn):
        return eqn
    contract, batch = eqn.params["dimension_numbers"]
    invars, contract, batch = [*eqn.invars], [*contract], [*batch]
    for side, operand in enumerate(invars):
        while isinstance(operand, Var) and operand in transposes:
            transpose = transposes[operand]
            order = transpose.params["permutation"]
            named = {*contract[side], *batch[side]}
            free = [place for dim, place in enumerate(order) if dim not in named]
            if free != sorted(free):
                break  # the result would have them in another order
            operand = invars[side] = transpose.invars[0]
            contract[side] = tuple(order[dim] for dim in contract[side])
            batch[side] = tuple(order[dim] for dim in batch[side])
    numbers = (tuple(contract), tuple(batch))
    return eqn.replace(
        invars=invars, params={**eqn.params, "dimension_numbers": numbers}
    )


# --- Results ------------------------------------------------------------------------ #


def _in_the_order_of_their_readers(
    eqns: Sequence[JaxprEqn], outvars: Sequence[Var]
) -> list[JaxprEqn]:
    """Contractions whose operands change places where that leaves the last dim last."""
    reads = Counter(v for eqn in eqns for v in eqn.invars if isinstance(v, Var))
    reads.update(outvars)
    readers_of = {
        eqn.invars[0]: place
        for place, eqn in enumerate(eqns)
        if eqn.primitive.name == "transpose" and not isinstance(eqn.invars[0], Literal)
    }
    changed: list[JaxprEqn | None] = [*eqns]
    for place, eqn in enumerate(eqns):
        if not _has_batch(eqn) or reads[eqn.outvars[0]] != 1:
            continue
        reader = readers_of.get(eqn.outvars[0])
        if reader is not None and _can_swap(eqn, eqns[reader]):
            changed[place], changed[reader] = _swapped(eqn, eqns[reader])
    return [eqn for eqn in changed if eqn is not None]


def _can_swap(eqn: JaxprEqn, transpose: JaxprEqn) -> bool:
    """Whether the last dim that is read is the last one that comes from the left."""
    precision = eqn.params["precision"]
    if precision is not None and not isinstance(precision, tuple):
        return False  # an algorithm, which may take its operands differently
    batch, left, right = _counts(eqn)
    return bool(right) and transpose.params["permutation"][-1:] == (batch + left - 1,)


def _counts(eqn: JaxprEqn) -> tuple[int, int, int]:
    """How many dims of the result are of the batch, of the left and of the right."""
    contract, batch = eqn.params["dimension_numbers"]
    left, right = (
        aval_of(operand).ndim - len(contract[side]) - len(batch[side])
        for side, operand in enumerate(eqn.invars)
    )
    return len(batch[0]), left, right


def _swapped(eqn: JaxprEqn, transpose: JaxprEqn) -> tuple[JaxprEqn, JaxprEqn | None]:
    """The contraction with its operands swapped, and the transpose that is left."""
    batch, left, right = _counts(eqn)
    rank = batch + left + right
    before = [*range(batch), *range(batch + left, rank), *range(batch, batch + left)]
    order = tuple(before.index(dim) for dim in transpose.params["permutation"])
    params: dict[str, Any] = dict(eqn.params)
    contracting, batches = params["dimension_numbers"]
    params["dimension_numbers"] = contracting[::-1], batches[::-1]
    params["precision"] = params["precision"] and params["precision"][::-1]
    swapped = eqn.replace(invars=eqn.invars[::-1], params=params)
    if order == tuple(range(rank)):
        return swapped.replace(outvars=transpose.outvars), None
    shape = aval_of(eqn.outvars[0]).shape
    out = resized_var(eqn.outvars[0], [shape[dim] for dim in before])
    params = {**transpose.params, "permutation": order}
    return swapped.replace(outvars=[out]), transpose.replace(
        invars=[out], params=params
    )
