"""Attention as primitives: what is found, and its derivatives, with scores made again.

Tangents of attention are linear in those of its operands, and the transpose of that
makes the operands' cotangents: so JAX keeps operands and results for a backward, and no
scores.  Second derivatives come from the function that is written out in JAX.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jhost._attention.written_out import (
    AttentionSettings,
    attention,
    attention_jvp,
    attention_vjp,
    parted,
    width,
)
from jhost._jax import (
    def_jvp,
    def_transpose,
    define_primitive,
    without_last_dim,
)

# --- Types ------------------------------------------------------------------------- #


def _types(query: Any, *_: Any, settings: AttentionSettings) -> list[Any]:
    sums = without_last_dim(query, width(query.dtype))
    return [query.update(weak_type=False), sums]


def _jvp_types(*args: Any, settings: AttentionSettings, **_: Any) -> list[Any]:
    # Tangents have the types of the results, which are among the operands.
    return parted(args, settings)[1][:2]


def _vjp_types(*args: Any, argnums: Sequence[int], **_: Any) -> list[Any]:
    return [args[number].update(weak_type=False) for number in argnums]


attention_p = define_primitive("dot_product_attention", attention, _types)
"""Gives `[..., T, N, H]` as queries are, and `[..., T, N]`, float32 or wider."""

attention_jvp_p = define_primitive(
    "dot_product_attention_jvp", attention_jvp, _jvp_types
)
"""Linear in the tangents; gives those of both results."""

attention_vjp_p = define_primitive(
    "dot_product_attention_vjp", attention_vjp, _vjp_types
)
"""Its transpose; gives the cotangents of the operands `argnums`."""


# --- Derivatives ------------------------------------------------------------------- #


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any | None], settings: AttentionSettings
) -> tuple[list[Any], list[Any]]:
    results = attention_p.bind(*primals, settings=settings)
    argnums = tuple(n for n, tangent in enumerate(tangents) if tangent is not None)
    moving = [tangents[number] for number in argnums]
    made = attention_jvp_p.bind(
        *primals, *results, *moving, argnums=argnums, settings=settings
    )
    return results, made


def _transpose(
    cotangents: Sequence[Any | None],
    *args: Any | None,
    argnums: tuple[int, ...],
    settings: AttentionSettings,
) -> list[Any]:
    first = len(args) - len(argnums)
    pairs = zip(argnums, args[first:], strict=True)
    wanted = tuple(number for number, tangent in pairs if tangent is None)
    _, (found, *_) = parted(args, settings)
    of_found, of_sums = cotangents
    if of_found is None:
        of_found = jnp.zeros_like(found)
    # The function drops the sums, so its first derivative has none of theirs.
    given = [of_found] if of_sums is None else [of_found, of_sums]
    return attention_vjp_p.bind(
        *args[:first], *given, argnums=wanted, settings=settings
    )


def_jvp(attention_p, _jvp)
def_transpose(attention_jvp_p, _transpose)
