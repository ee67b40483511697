"""What cuDNN's kernels take, and how they work on parts of queries and keys.

A kernel counts queries and keys from the first ones that it gets.  So its own masks fit
a part only if the part's queries and keys begin at one position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from jhost.lowering.rules.attention_parts import AttentionBlocks
from jhost.lowering.rules.dim_rule import bind

# Operands, in the order in which JAX binds them; a result of `score_mod` comes last.
BIAS, LENGTHS, OFFSETS, TABLE, STATISTICS = 3, (4, 5), 6, 8, 10


def is_causal(eqn: JaxprEqn) -> bool:
    """Whether each query sees the keys up to its own position."""
    return mask_of(eqn) in ("CAUSAL", "PADDING_CAUSAL")


def has_lengths(eqn: JaxprEqn) -> bool:
    """Whether each sequence of queries has a length, and each of keys."""
    return mask_of(eqn) in ("PADDING", "PADDING_CAUSAL")


def mask_of(eqn: JaxprEqn) -> str:
    """JAX's name of the mask; "" for kernels in 8 bits, which have other parameters."""
    return eqn.params["mask_type"].name if "mask_type" in eqn.params else ""


class KernelBlocks(AttentionBlocks):
    """Binds the kernel; its own mask holds where queries and keys begin alike."""

    def whole(self, eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
        # The last two are positions of queries and keys, which no kernel takes.
        return bind(eqn, args[:-2])

    def as_it_is(self, eqn: JaxprEqn, args: Sequence[Any], **changed: Any) -> list[Any]:
        *operands, rows, columns = args
        if not has_lengths(eqn):
            return bind(eqn, operands, **changed)
        lengths = (operands[position][:, None] for position in LENGTHS)
        inside = [
            x < length for x, length in zip((rows, columns), lengths, strict=True)
        ]
        outs = bind(eqn, _with_lengths(operands, inside), **changed)
        return self.within(inside, outs)

    def unmasked(self, eqn: JaxprEqn, args: Sequence[Any], **changed: Any) -> list[Any]:
        masks: Any = type(eqn.params["mask_type"])
        mask = masks["PADDING" if has_lengths(eqn) else "NO_MASK"]
        changed |= {"mask_type": mask, "sliding_window_length": None}
        return self.as_it_is(eqn, args, **changed)

    def masked(self, eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
        """The kernel with a bias that hides keys."""
        dtype = args[0].dtype
        # As large as JAX's own for masks: cuDNN subtracts two such numbers.
        least = -(2 << 14) if dtype == np.float16 else -(2 << 40)
        bias = jnp.where(self.seen(args), 0, jnp.asarray(least, dtype))[None, None]
        has_bias, has_gradient = eqn.params["variadic_args"]
        args = [*args]
        args[BIAS] = args[BIAS] + bias if has_bias else bias
        return self.unmasked(eqn, args, variadic_args=(True, has_gradient))

    def within(self, inside: Sequence[Any], outs: Sequence[Any]) -> list[Any]:
        """The results of what is `inside` the lengths, and nothing for the rest.

        Of a part that has nothing inside on one side, there is nothing on the other.
        """
        some = [jnp.any(each, axis=1, keepdims=True) for each in inside]
        rows, columns = inside[0] & some[1], inside[1] & some[0]
        made: list[Any] = []
        for x, none, dims in zip(
            outs, self.nothing_like(outs), self.results, strict=True
        ):
            factors = [dim.factor if dim else None for dim in dims]
            is_row = self.queries in factors
            dim = factors.index(self.queries if is_row else self.keys)
            kept = jnp.expand_dims(
                rows if is_row else columns,
                [n for n in range(1, x.ndim) if n != dim],
            )
            made.append(jnp.where(kept, x, none))
        return made


def _with_lengths(operands: Sequence[Any], inside: Sequence[Any]) -> list[Any]:
    """The operands for a part, with the lengths that sequences have in the part.

    `inside` says which queries and which keys of the part are in their lengths.
    """
    operands = [*operands]
    # Positions ascend, so those inside a length come first, and their number is the
    # length in the part.  For a length of 0 cuDNN (9.19) gives 0 as the logarithm of
    # the sum, where -inf is right, and its documentation does not say what the result
    # is.  So a kernel gets a length of 1 there, and no -inf; `within` clears it later.
    for position, each in zip(LENGTHS, inside, strict=True):
        operands[position] = jnp.maximum(jnp.sum(each, axis=1, dtype=np.int32), 1)
    if len(operands) > STATISTICS:
        sums = operands[STATISTICS]
        operands[STATISTICS] = jnp.where(jnp.isneginf(sums), 0, sums)
    return operands
