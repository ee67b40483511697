"""The dim rule of `custom_partitioning`: what its author says in Shardy's notation.

`b s d, d f -> b s f` names factors as dim rules do.  A part runs the function that the
author's `partition` returns for shards of that size.  A factor counts only if this
works on trial: shards stay where they are, the function communicates nothing but the
sums that the notation names, and it is the same for any number of shards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.experimental.custom_partitioning import BATCHING, SdyShardingRule
from jax.extend.core import JaxprEqn
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jhost._jax import ClosedJaxpr, aval_of, evaluate, rewritten
from jhost.lowering.rules.building import Factors
from jhost.lowering.rules.dim_rule import (
    DimRule,
    Dims,
    FactorDim,
    Shard,
    part_shape,
    shape_of,
)
from jhost.lowering.rules.registry import rule, without_factors


@rule("custom_partitioning")
def custom_partitioning(eqn: JaxprEqn) -> DimRule:
    """The factors that the notation names, as far as their parts can be worked on."""
    notation = eqn.params["sharding_rule"]
    if not isinstance(notation, SdyShardingRule) or eqn.params["partition"] is None:
        return without_factors(eqn, "it has no `sharding_rule` that names factors")
    named = Named(eqn, notation)
    if not named.candidates():
        return without_factors(eqn, "its `sharding_rule` names no factor to cut")
    working = [n for n in named.candidates() if _works(eqn, named.rule([n]))]
    made = named.rule(working)
    if not working or not _works(eqn, made):
        return without_factors(eqn, "its `partition` cannot work on a part by itself")
    return made


# --- The notation ------------------------------------------------------------------- #

FactorNames: TypeAlias = list[tuple[str, ...]]
"""Per dim of a value, the names of its factors, major first."""


class Named:
    """The factors of an equation by the names that a notation gives them."""

    def __init__(self, eqn: JaxprEqn, notation: SdyShardingRule) -> None:
        self.sizes = dict(notation.factor_sizes)
        self.reduced = frozenset(notation.reduction_factors)
        self.whole = {*notation.need_replication_factors, *notation.permutation_factors}
        self.operands = self.values(notation.operand_mappings, eqn.invars)
        self.results = self.values(notation.result_mappings, eqn.outvars)

    def values(
        self, mappings: Sequence[Any], atoms: Sequence[Any]
    ) -> list[FactorNames]:
        pairs = zip(mappings, map(shape_of, atoms), strict=True)
        return [self.value(mapping, shape) for mapping, shape in pairs]

    def value(self, mapping: Sequence[Any], shape: Sequence[int]) -> FactorNames:
        dims = list(_spelled(mapping, len(shape)))
        for names, size in zip(dims, shape, strict=True):
            # A part of a minor factor is not a stretch of the dim.
            self.whole.update(names[1:])
            if len(names) == 1 and self.sizes.setdefault(names[0], size) != size:
                self.whole.add(names[0])
        return dims

    def candidates(self) -> list[str]:
        """The factors of operands that all results follow, or no result if reduced."""
        given = {names[0] for dims in self.operands for names in dims}
        made = [{names[0] for names in dims} for dims in self.results]
        return [
            name
            for name in self.sizes
            if name in given - self.whole
            and all((name in names) != (name in self.reduced) for names in made)
        ]

    def rule(self, names: Sequence[str]) -> DimRule:
        """The rule that has the factors of those names."""
        factors = Factors()
        found = {
            name: factors.new(self.sizes[name], "sum" if name in self.reduced else None)
            for name in names
        }

        def dims(value: FactorNames) -> Dims:
            return tuple(
                FactorDim(found[major], math.prod(self.sizes[n] for n in minor))
                if major in found
                else None
                for major, *minor in value
            )

        def rebind(eqn: JaxprEqn, args: Sequence[Any], shard: Shard) -> list[Any]:
            return _run(eqn, made, args, shard)

        operands, results = map(dims, self.operands), map(dims, self.results)
        made = factors.rule([*operands], [*results], rebind)
        return made


def _spelled(mapping: Sequence[Any], rank: int) -> Iterator[tuple[str, ...]]:
    """The names of each dim; the dims of a `...` are numbered."""
    for names in mapping:
        if isinstance(names, str) and names.startswith(BATCHING):
            group = names.removeprefix(BATCHING) or "0"
            for number in range(rank - len(mapping) + 1):
                yield (f"{BATCHING}{group}_{number}",)
        else:
            yield (names,) if isinstance(names, str) else tuple(names)


# --- Parts -------------------------------------------------------------------------- #

_AXIS = "jhost_shards_of_factor_"
# JAX (0.10 to 0.12) binds the second where types say over which axes values vary.
_SUMS = ("psum", "psum_invariant")


class _WholeAsShard:
    """A `Shard` that is the whole array, taken for one shard of a larger array."""

    accumulator, zigzag = None, 1

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes

    def size(self, factor: int) -> int:
        return self.sizes[factor]

    def varies(self, factor: int) -> bool:
        del factor
        return False

    def parts(self, factor: int) -> int:
        del factor
        return 1

    def positions(self, factor: int) -> Any:
        raise NotImplementedError("no factor is counted")

    def starts(self, factor: int) -> Sequence[Any]:
        raise NotImplementedError("no factor is counted")

    def grain(self, factor: int) -> int:
        raise NotImplementedError("no factor is counted")


def _works(eqn: JaxprEqn, made: DimRule) -> bool:
    """Whether `partition` works on the parts of all factors at once."""
    shard = _WholeAsShard(made.sizes)
    try:
        # Two counts: a function that depends on the number of shards differs in them.
        two, three = (_program(eqn, made, shard, shards) for shards in (2, 3))
    except Exception:  # the author's code may raise anything for shards it cannot take
        return False
    if two is None or three is None:
        return False
    shapes = [*map(shape_of, two.jaxpr.outvars)]
    # Compared as text: variables of two jaxprs are never equal, but their printed names
    # begin anew in each.
    same = str(two) == str(three) and all(map(_equal, two.consts, three.consts))
    return same and _AXIS not in str(two) and shapes == [*map(shape_of, eqn.outvars)]


def _equal(value: Any, other: Any) -> bool:
    return bool(np.array_equal(np.asarray(value), np.asarray(other)))


def _run(eqn: JaxprEqn, made: DimRule, args: Sequence[Any], shard: Shard) -> list[Any]:
    # Two shards, as on trial: the program is the same for any number of them.
    program = _program(eqn, made, shard, 2)
    assert program is not None, "it worked on trial"
    return evaluate(program, args)


def _program(
    eqn: JaxprEqn, made: DimRule, shard: Shard, shards: int
) -> ClosedJaxpr | None:
    """What `partition` makes a device run, without the sums of its results.

    None where it wants other shards, or does not sum all that the rule sums.
    """
    names = [f"{_AXIS}{factor}" for factor in range(len(made.sizes))]
    mesh = AbstractMesh((shards,) * len(names), tuple(names))
    operands = _shards(eqn.invars, made.operands, shard, mesh)
    results = _shards(eqn.outvars, made.results, shard, mesh)
    in_tree, out_tree = eqn.params["in_tree"], eqn.params["out_tree"]
    _, function, makes, takes = eqn.params["partition"](
        *eqn.params["static_args"],
        mesh,
        in_tree.unflatten(operands),
        out_tree.unflatten(results),
    )
    wanted = [*in_tree.flatten_up_to(takes), *out_tree.flatten_up_to(makes)]
    given = [shard.sharding for shard in (*operands, *results)]
    if [*map(_spec, wanted)] != [*map(_spec, given)]:
        return None
    parts = shard_types(operands, given[: len(operands)])
    # A `partition` may communicate by name, as in a `shard_map`.
    axes = [(name, shards) for name in names]
    traced = jax.make_jaxpr(function, axis_env=axes)(*in_tree.unflatten(parts))
    summed = {n for n, reducer in zip(names, made.reducers, strict=True) if reducer}
    return _without_sums(traced, summed) if summed else traced


def _shards(
    atoms: Sequence[Any], maps: Sequence[Dims], shard: Shard, mesh: AbstractMesh
) -> list[Any]:
    """Whole arrays whose shards are the parts at `shard`."""
    found: list[Any] = []
    for atom, dims in zip(atoms, maps, strict=True):
        local = part_shape(dims, shape_of(atom), shard)
        spec = [None if dim is None else f"{_AXIS}{dim.factor}" for dim in dims]
        shards = [1 if name is None else mesh.shape[name] for name in spec]
        whole = [size * count for size, count in zip(local, shards, strict=True)]
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        dtype = aval_of(atom).dtype
        found.append(jax.ShapeDtypeStruct(whole, dtype, sharding=sharding))
    return found


def shard_types(wholes: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
    """The shard of each array."""
    return [
        jax.ShapeDtypeStruct(sharding.shard_shape(whole.shape), whole.dtype)
        for whole, sharding in zip(wholes, shardings, strict=True)
    ]


def _spec(sharding: Any) -> list[tuple[str, ...]]:
    """The axes of each dim, without empty ones at the end, so that specs compare."""
    axes = [
        () if names is None else (names,) if isinstance(names, str) else tuple(names)
        for names in sharding.spec
    ]
    while axes and not axes[-1]:
        axes.pop()
    return axes


def _without_sums(traced: ClosedJaxpr, axes: set[str]) -> ClosedJaxpr | None:
    """The program up to the sums of its results; None where a result is not a sum."""
    sums = [
        eqn
        for eqn in traced.eqns
        if eqn.primitive.name in _SUMS and set(eqn.params["axes"]) == axes
    ]
    terms = {
        id(out): term
        for eqn in sums
        for out, term in zip(eqn.outvars, eqn.invars, strict=True)
    }
    if not all(id(out) in terms for out in traced.jaxpr.outvars):
        return None
    gone = set(map(id, sums))
    return rewritten(
        traced,
        outvars=[terms[id(out)] for out in traced.jaxpr.outvars],
        eqns=[eqn for eqn in traced.eqns if id(eqn) not in gone],
    )
