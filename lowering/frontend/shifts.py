"""Shifts along a dim as one equation each, where JAX has a chain of slices and pads.

`jnp.pad(x, (1, 0))[:-1]` has 257 rows on the way from 256 to 256, and no mesh divides
257.  Here it becomes one `pad` by 1 and by -1, and `jnp.roll` becomes one `rotate`.
XLA simplifies such chains too, but only after layouts are decided.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Sequence
from typing import Any

from jax import lax
from jax.extend.core import JaxprEqn, Literal, Var

from jhost._jax import aval_of, fresh_var, new_eqn
from jhost.lowering.frontend.inline_calls import FlatJaxpr, needed
from jhost.lowering.frontend.known_scalars import KnownScalars, Scalar
from jhost.lowering.frontend.static_slices import as_slices, slice_of
from jhost.lowering.rules.dim_rule import shape_of
from jhost.lowering.rules.rotate import plus_zero_p, rotate_p
from jhost.lowering.rules.windows import has_windows


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Shifted:
    """`source[start:stop]` along a dim, with so many `fill` before and after it."""

    source: Var
    dim: int
    start: int
    stop: int
    before: int = 0
    after: int = 0
    fill: Scalar | None = None

    @property
    def is_cut(self) -> bool:
        """Whether it is a slice of its source."""
        return not (self.before or self.after)


def with_shifts(flat: FlatJaxpr) -> FlatJaxpr:
    """`flat`, with one equation for each chain of slices and pads that can be one."""
    writer = _ShiftWriter()
    slices = itertools.chain.from_iterable(map(as_slices, flat.eqns))
    eqns = [made for eqn in slices for made in writer.equations(eqn)]
    if len(eqns) == len(flat.eqns) and all(map(operator.is_, eqns, flat.eqns)):
        return flat
    return dataclasses.replace(flat, eqns=needed(eqns, flat.outvars))


class _ShiftWriter:
    def __init__(self) -> None:
        self.shifted: dict[Var, _Shifted] = {}
        self.fills: dict[Var, Scalar] = {}
        self.scalars = KnownScalars()

    def equations(self, eqn: JaxprEqn) -> list[JaxprEqn]:
        """An equation, or the one or two that do what it and those before it do."""
        if eqn.primitive.name in ("add", "add_any"):
            return self.sum(eqn)
        return [self.equation(eqn)]

    def equation(self, eqn: JaxprEqn) -> JaxprEqn:
        name = eqn.primitive.name
        self.scalars.see(eqn)
        if name == "broadcast_in_dim" and not shape_of(eqn.invars[0]):
            self.fills[eqn.outvars[0]] = eqn.invars[0]
        elif name in ("concatenate", "slice", "pad") and has_windows(eqn):
            moves = name != "concatenate"
            return self.moved(eqn) if moves else self.concatenation(eqn)
        return eqn

    def moved(self, eqn: JaxprEqn) -> JaxprEqn:
        """A slice or a pad, in one with earlier shifts of its operand if it can be."""
        operand, out = eqn.invars[0], eqn.outvars[0]
        if isinstance(operand, Literal):
            return eqn
        shift = _shift_of(eqn, operand)
        if shift is None:
            return eqn
        self.shifted[out] = shift
        before = self.shifted.get(operand)
        if before is None or before.dim != shift.dim:
            return eqn
        joined = self.after(before, shift)
        return eqn if joined is None else self.written(joined, eqn)

    def after(self, before: _Shifted, then: _Shifted) -> _Shifted | None:
        """One shift for both, one behind the other; None where one is not enough."""
        size = before.stop - before.start
        first = max(then.start - before.before, 0)
        last = min(then.stop - before.before, size)
        # Nothing of the array is left: a fill, which no slice and no pad makes.
        if first >= last:
            return None
        kept_before = max(before.before - then.start, 0)
        kept_after = max(then.stop - before.before - size, 0)
        fill = before.fill if kept_before or kept_after else then.fill
        if not then.is_cut and not self.scalars.same(fill, then.fill):
            return None
        return dataclasses.replace(
            before,
            start=before.start + first,
            stop=before.start + last,
            before=then.before + kept_before,
            after=then.after + kept_after,
            fill=fill,
        )

    def concatenation(self, eqn: JaxprEqn) -> JaxprEqn:
        dim, parts = eqn.params["dimension"], list(eqn.invars)
        cuts = [self.cut(part, dim) for part in parts]
        if len(cuts) == 2 and (start := _seam(*cuts)) is not None:
            source = cuts[0].source if cuts[0] else None
            assert source is not None
            return _rotated(source, dim, start, eqn.outvars[0], eqn)
        shifted = self.filled(eqn, cuts)
        if shifted is None:
            return eqn
        self.shifted[eqn.outvars[0]] = shifted
        return self.written(shifted, eqn)

    def sum(self, eqn: JaxprEqn) -> list[JaxprEqn]:
        """Two slices among zeros, added as a `rotate`: the gradient of `jnp.roll`."""
        pieces = [self.shifted.get(v) for v in eqn.invars if isinstance(v, Var)]
        for first, second in (pieces, pieces[::-1]) if len(pieces) == 2 else ():
            start = _seam(first, second)
            if first and second and start and self.come_round(first, second, start):
                turned = fresh_var(aval_of(eqn.outvars[0]))
                return [
                    _rotated(first.source, first.dim, start, turned, eqn),
                    new_eqn(plus_zero_p, [turned], eqn.outvars, {}, like=eqn),
                ]
        return [eqn]

    def come_round(self, first: _Shifted, second: _Shifted, start: int) -> bool:
        """Whether each has zeros where the other one has its slice."""
        left = shape_of(first.source)[first.dim] - start
        places = (first.before, first.after, second.before, second.after)
        return (
            first.dim == second.dim
            and places == (0, start, left, 0)
            and self.scalars.is_zero(first.fill)
            and self.scalars.is_zero(second.fill)
        )

    def cut(self, part: Any, dim: int) -> _Shifted | None:
        """A part of a concatenation as a slice of something, if it is no fill."""
        if isinstance(part, Literal) or part in self.fills:
            return None
        shifted = self.shifted.get(part)
        if shifted and shifted.is_cut and shifted.dim == dim:
            return shifted
        return _Shifted(source=part, dim=dim, start=0, stop=shape_of(part)[dim])

    def filled(self, eqn: JaxprEqn, cuts: Sequence[_Shifted | None]) -> _Shifted | None:
        """A concatenation of one slice and of one value in many places."""
        dim, parts = eqn.params["dimension"], eqn.invars
        places = [n for n, cut in enumerate(cuts) if cut is not None]
        others = (part for n, part in enumerate(parts) if n not in places)
        fills = [self.fills.get(p) if isinstance(p, Var) else None for p in others]
        if len(places) != 1 or not fills or None in fills:
            return None
        if not all(self.scalars.same(fill, fills[0]) for fill in fills):
            return None
        (place,) = places
        cut = cuts[place]
        assert cut is not None
        sizes = [shape_of(part)[dim] for part in parts]
        return dataclasses.replace(
            cut,
            before=sum(sizes[:place]),
            after=sum(sizes[place + 1 :]),
            fill=fills[0],
        )

    def written(self, shifted: _Shifted, eqn: JaxprEqn) -> JaxprEqn:
        """The equation that makes `shifted`, if it is one slice or one pad."""
        source, dim = shifted.source, shifted.dim
        shape = shape_of(source)
        left = shape[dim] - shifted.stop
        if shifted.is_cut:
            starts = [shifted.start if d == dim else 0 for d in range(len(shape))]
            limits = [shifted.stop if d == dim else n for d, n in enumerate(shape)]
            made = slice_of(eqn, source, eqn.outvars[0], starts, limits)
        elif (shifted.before and shifted.start) or (shifted.after and left):
            return eqn  # a pad cuts at an end, or adds there
        else:
            widths = shifted.before - shifted.start, shifted.after - left, 0
            config = [widths if d == dim else (0, 0, 0) for d in range(len(shape))]
            params = {"padding_config": tuple(config)}
            assert shifted.fill is not None
            ins = [source, shifted.fill]
            made = new_eqn(lax.pad_p, ins, eqn.outvars, params, like=eqn)
        self.shifted[eqn.outvars[0]] = shifted
        return made


def _shift_of(eqn: JaxprEqn, source: Var) -> _Shifted | None:
    """A slice or a pad along one dim, step by step."""
    shape = shape_of(source)
    if eqn.primitive.name == "slice":
        if any(n != 1 for n in eqn.params["strides"] or ()):
            return None
        starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
        ends = [*zip(starts, limits, strict=True)]
        cut = [d for d, end in enumerate(ends) if end != (0, shape[d])]
        if len(cut) != 1:
            return None
        (dim,) = cut
        start, stop = ends[dim]
        return _Shifted(source=source, dim=dim, start=int(start), stop=int(stop))
    config = eqn.params["padding_config"]
    padded = [d for d, widths in enumerate(config) if any(widths)]
    if len(padded) != 1 or config[padded[0]][2]:
        return None
    (dim,) = padded
    low, high, _ = map(int, config[dim])
    return _Shifted(
        source=source,
        dim=dim,
        start=max(-low, 0),
        stop=shape[dim] - max(-high, 0),
        before=max(low, 0),
        after=max(high, 0),
        fill=eqn.invars[1],
    )


def _rotated(source: Var, dim: int, start: int, out: Var, eqn: JaxprEqn) -> JaxprEqn:
    params = {"dim": dim, "start": start}
    return new_eqn(rotate_p, [source], [out], params, like=eqn)


def _seam(first: _Shifted | None, second: _Shifted | None) -> int | None:
    """Where an array begins that two slices of it are, put together the other way."""
    if first is None or second is None or first.source is not second.source:
        return None
    size = shape_of(first.source)[first.dim]
    if not size:  # all of an array that is empty is any part of it
        return None
    # Both together have each element once: so `jnp.roll` by a known number is traced
    # (JAX 0.10 to 0.12).
    if second.start or first.stop != size or second.stop != first.start:
        return None
    return first.start
