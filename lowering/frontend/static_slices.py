"""Static slices and concatenations that JAX writes under other names.

Splits, pads that only cut, and slices at known places are slices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jax import lax
from jax.extend.core import JaxprEqn, Literal, Var

from jhost._jax import Atom, new_eqn, resized_var
from jhost.lowering.rules.dim_rule import shape_of


def as_slices(eqn: JaxprEqn) -> list[JaxprEqn]:
    """An equation as static slices or a concatenation, if it makes nothing else."""
    if eqn.primitive.name == "split":
        return [*_pieces(eqn)]
    if eqn.primitive.name == "tile":
        return [*_tilings(eqn)]
    if eqn.primitive.name == "pad" and _only_cuts(eqn):
        return [_without_ends(eqn)]
    places = eqn.invars[1:]
    known = all(isinstance(place, Literal) for place in places)
    if eqn.primitive.name == "dynamic_slice" and known:
        return [_at_known_place(eqn)]
    return [eqn]


def _tilings(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    """A tiling along one dim for each dim that is repeated."""
    source, reps = eqn.invars[0], eqn.params["reps"]
    shape = [*shape_of(source)]
    repeated = [dim for dim, n in enumerate(reps) if n != 1]
    if len(repeated) < 2:
        yield eqn
        return
    for dim in repeated:
        shape[dim] *= reps[dim]
        (out,) = eqn.outvars
        if dim != repeated[-1]:
            out = resized_var(out, shape)
        alone = tuple(n if d == dim else 1 for d, n in enumerate(reps))
        yield eqn.replace(invars=[source], outvars=[out], params={"reps": alone})
        source = out


def _only_cuts(eqn: JaxprEqn) -> bool:
    """Whether a pad adds nothing, as the transpose of a pad."""
    widths = eqn.params["padding_config"]
    return any(map(any, widths)) and all(
        low <= 0 and high <= 0 and not inside for low, high, inside in widths
    )


def _without_ends(eqn: JaxprEqn) -> JaxprEqn:
    """A pad that only cuts, as the slice that it is."""
    ends = [(int(low), int(high)) for low, high, _ in eqn.params["padding_config"]]
    shape = shape_of(eqn.invars[0])
    limits = [size + high for size, (_, high) in zip(shape, ends, strict=True)]
    return slice_of(
        eqn, eqn.invars[0], eqn.outvars[0], [-low for low, _ in ends], limits
    )


def _pieces(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    """A slice for each result of a split."""
    dim, shape = eqn.params["axis"], shape_of(eqn.invars[0])
    start = 0
    for out, size in zip(eqn.outvars, eqn.params["sizes"], strict=True):
        starts, limits = [0] * len(shape), list(shape)
        starts[dim], limits[dim] = start, start + size
        start += size
        yield slice_of(eqn, eqn.invars[0], out, starts, limits)


def _at_known_place(eqn: JaxprEqn) -> JaxprEqn:
    """A slice at places that are numbers, as the static slice that it is."""
    places = eqn.invars[1:]
    shape, sizes = shape_of(eqn.invars[0]), eqn.params["slice_sizes"]
    # What begins too late begins as late as it can.
    starts = [
        min(max(int(place.val), 0), size - cut)
        for place, size, cut in zip(places, shape, sizes, strict=True)
        if isinstance(place, Literal)
    ]
    limits = [start + cut for start, cut in zip(starts, sizes, strict=True)]
    return slice_of(eqn, eqn.invars[0], eqn.outvars[0], starts, limits)


def slice_of(
    eqn: JaxprEqn, source: Atom, out: Var, starts: Sequence[int], limits: Sequence[int]
) -> JaxprEqn:
    """A static slice that makes `out`, in place of `eqn`."""
    params = {
        "start_indices": tuple(starts),
        "limit_indices": tuple(limits),
        "strides": None,
    }
    return new_eqn(lax.slice_p, [source], [out], params, like=eqn)
