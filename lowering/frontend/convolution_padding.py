"""Zeros around what a convolution reads as padding of its own.

`jnp.pad(x, (3, 0))` and a convolution without padding, as Flax's causal ones, have 259
rows on the way from 256 to 256, and no mesh divides 259.  The gradient has as many, and
cuts them.  A concatenation with zeros is a pad by now (`shifts.py`).  XLA makes one
convolution of such a chain too, but only after layouts are decided.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import TypeAlias

from jax.extend.core import JaxprEqn, Var

from jhost.lowering.frontend.inline_calls import FlatJaxpr, needed
from jhost.lowering.frontend.known_scalars import KnownScalars
from jhost.lowering.rules.dim_rule import shape_of

_MoreElements: TypeAlias = Sequence[tuple[int, int]]
"""For each dim, so many elements more before the first, and behind the last."""


def with_own_padding(flat: FlatJaxpr) -> FlatJaxpr:
    """`flat`, with convolutions that pad what they read and leave out what is cut."""
    if not any(map(_is_convolution, flat.eqns)):
        return flat
    writer = _PaddingWriter(flat)
    eqns = [*map(writer.equation, flat.eqns)]
    return dataclasses.replace(flat, eqns=needed(eqns, flat.outvars))


def _is_convolution(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "conv_general_dilated"


class _PaddingWriter:
    def __init__(self, flat: FlatJaxpr) -> None:
        every = (v for eqn in flat.eqns for v in eqn.invars)
        self.reads = Counter(v for v in every if isinstance(v, Var))
        self.reads.update(flat.outvars)
        self.scalars = KnownScalars()
        self.pads: dict[Var, JaxprEqn] = {}
        self.convolutions: dict[Var, JaxprEqn] = {}

    def equation(self, eqn: JaxprEqn) -> JaxprEqn:
        name = eqn.primitive.name
        self.scalars.see(eqn)
        if name == "pad" and self.scalars.is_zero(eqn.invars[1]) and _only_adds(eqn):
            self.pads[eqn.outvars[0]] = eqn
        elif name == "slice" or _is_convolution(eqn):
            eqn = self.cut(eqn) if name == "slice" else self.padded(eqn)
            if _is_convolution(eqn):
                self.convolutions[eqn.outvars[0]] = eqn
        return eqn

    def padded(self, eqn: JaxprEqn) -> JaxprEqn:
        """A convolution, of what was padded for it if it can pad that itself."""
        source, *others = eqn.invars
        pad = self.pads.get(source) if isinstance(source, Var) else None
        if pad is None:
            return eqn
        config = pad.params["padding_config"]
        apart = eqn.params["lhs_dilation"]
        spec, _, _ = eqn.params["dimension_numbers"]
        widths = [(int(low), int(high)) for low, high, _ in config]
        # XLA leaves these apart, too: among gaps, it multiplies zeros by NaN in a
        # kernel, but no padding.
        if any(any(widths[d]) and n != 1 for d, n in zip(spec[2:], apart, strict=True)):
            return eqn
        inner = eqn.replace(invars=[pad.invars[0], *others])
        made = _with_more(inner, spec, widths, apart)
        return eqn if made is None else self.padded(made)

    def cut(self, eqn: JaxprEqn) -> JaxprEqn:
        """A slice, as a convolution of less if it cuts what nothing else reads."""
        source, params = eqn.invars[0], eqn.params
        if not isinstance(source, Var) or self.reads[source] > 1:
            return eqn
        made = self.convolutions.get(source)
        if made is None or any(n != 1 for n in params["strides"] or ()):
            return eqn
        starts, limits = params["start_indices"], params["limit_indices"]
        ends = [*zip(starts, limits, shape_of(source), strict=True)]
        # JAX refuses a convolution that has less than nothing to read.
        if any(start == limit for start, limit, _ in ends):
            return eqn
        widths = [(-int(start), int(limit) - size) for start, limit, size in ends]
        _, _, spec = made.params["dimension_numbers"]
        inner = made.replace(outvars=eqn.outvars)
        return _with_more(inner, spec, widths, made.params["window_strides"]) or eqn


def _only_adds(pad: JaxprEqn) -> bool:
    """Whether it adds elements at the ends of dims, and nowhere else."""
    return all(
        low >= 0 and high >= 0 and not inside
        for low, high, inside in pad.params["padding_config"]
    )


def _with_more(
    eqn: JaxprEqn, spec: Sequence[int], widths: _MoreElements, apart: Sequence[int]
) -> JaxprEqn | None:
    """A convolution with more padding, or with less; None if it can have none there.

    `widths` are those of an array with dims as in `spec`, whose elements are so many
    places `apart`.
    """
    batch, feature, *space = spec
    if any((*widths[batch], *widths[feature])):
        return None
    padding = [
        (low + more * n, high + behind * n)
        for (low, high), (more, behind), n in zip(
            eqn.params["padding"], [widths[dim] for dim in space], apart, strict=True
        )
    ]
    lhs, _, _ = eqn.params["dimension_numbers"]
    sizes = [shape_of(eqn.invars[0])[dim] for dim in lhs[2:]]
    # JAX refuses to cut more than there is.
    if any(min(ends) < -size for ends, size in zip(padding, sizes, strict=True)):
        return None
    return eqn.replace(params={**eqn.params, "padding": tuple(padding)})
