"""A check of `custom_partitioning` that JAX makes while XLA partitions a program.

jhost's programs are partitioned already, so JAX's own check never runs for them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import jax
from jax.experimental.custom_partitioning import SdyShardingRule
from jax.extend.core import JaxprEqn
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jhost._jax import aval_of
from jhost.lowering.rules.dim_rule import shape_of
from jhost.lowering.rules.partitioning import FactorNames, Named, shard_types


def broken_promise(eqn: JaxprEqn, mesh: AbstractMesh) -> str | None:
    """The error of a `partition` whose shards never have the shapes that it promises.

    None if they have these shapes in some layout.
    """
    found: list[str | None] = []
    for operands, results in _layouts(eqn, mesh):
        try:
            found.append(_mismatch(eqn, mesh, operands, results))
        except Exception:  # it may not take shards of these sizes
            continue
    # A `partition` may be written for some layouts only, and nobody knows here which
    # layout XLA would take.  So one that is right is enough.
    return found[0] if found and all(found) else None


_Specs: TypeAlias = list[PartitionSpec]


def _layouts(eqn: JaxprEqn, mesh: AbstractMesh) -> Iterator[tuple[_Specs, _Specs]]:
    """Layouts to try: all whole, then each named factor over each axis."""
    yield [PartitionSpec()] * len(eqn.invars), [PartitionSpec()] * len(eqn.outvars)
    notation = eqn.params["sharding_rule"]
    if not isinstance(notation, SdyShardingRule):
        return
    named = Named(eqn, notation)

    def specs(values: Sequence[FactorNames], name: str, axis: str) -> _Specs:
        entries = [
            [axis if n[:1] == (name,) else None for n in dims] for dims in values
        ]
        return [PartitionSpec(*dims) for dims in entries]

    for name, axis in itertools.product(named.sizes, mesh.axis_names):
        yield specs(named.operands, name, axis), specs(named.results, name, axis)


def _mismatch(
    eqn: JaxprEqn, mesh: AbstractMesh, in_specs: _Specs, out_specs: _Specs
) -> str | None:
    """How the results on shards differ from the shards that `partition` promises."""
    operands, results = (
        [
            jax.ShapeDtypeStruct(
                shape_of(v), aval_of(v).dtype, sharding=NamedSharding(mesh, spec)
            )
            for v, spec in zip(atoms, specs, strict=True)
        ]
        for atoms, specs in ((eqn.invars, in_specs), (eqn.outvars, out_specs))
    )
    in_tree, out_tree = eqn.params["in_tree"], eqn.params["out_tree"]
    _, function, makes, takes = eqn.params["partition"](
        *eqn.params["static_args"],
        mesh,
        in_tree.unflatten(operands),
        out_tree.unflatten(results),
    )
    given = shard_types(operands, in_tree.flatten_up_to(takes))
    promised = shard_types(results, out_tree.flatten_up_to(makes))
    axes = list(mesh.shape.items())
    traced = jax.make_jaxpr(function, axis_env=axes)(*in_tree.unflatten(given))
    found = [aval_of(var) for var in traced.jaxpr.outvars]
    made = [(aval.shape, aval.dtype) for aval in found]
    if made == [(part.shape, part.dtype) for part in promised]:
        return None
    return f"made {_shapes_text(found)} but promised {_shapes_text(promised)}"


def _shapes_text(arrays: Sequence[Any]) -> str:
    return ", ".join(f"{x.dtype}{list(x.shape)}" for x in arrays)
