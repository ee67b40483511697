"""The collectives in the body of a `jax.shard_map`, which stay as they were written."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, TypeAlias

from jax.extend.core import JaxprEqn, Literal as LiteralValue, Var, jaxprs_in_params

from jhost._jax import shard_map_of

WrittenKind: TypeAlias = Literal[
    "AllGather",
    "AllReduce",
    "ReduceScatter",
    "AllToAll",
    "CollectivePermute",
    "RaggedAllToAll",
]

_KINDS: Mapping[str, WrittenKind] = {
    "all_gather": "AllGather",
    "all_gather_invariant": "AllGather",
    "psum": "AllReduce",
    "psum_invariant": "AllReduce",
    "pmax": "AllReduce",
    "pmin": "AllReduce",
    "reduce_scatter": "ReduceScatter",
    "all_to_all": "AllToAll",
    "ppermute": "CollectivePermute",
    "ragged_all_to_all": "RaggedAllToAll",
}


@dataclasses.dataclass(frozen=True, slots=True)
class WrittenCollective:
    """A collective that the user wrote.

    Attributes:
        kind: what it does.
        axes: the mesh axes that it communicates over.
        source: what each device sends.
        room: for a ragged all-to-all, the array that it writes to.  How much of it is
            written is known only when the program runs.
        times: how often it runs, as far as the lengths of scans say.
    """

    kind: WrittenKind
    axes: tuple[str, ...]
    source: Var | LiteralValue
    room: Var | LiteralValue | None
    times: int


def written_in(eqn: JaxprEqn) -> Iterator[WrittenCollective]:
    """The collectives that the user wrote in an equation, if it is a `shard_map`."""
    if eqn.primitive.name == "shard_map":
        yield from _in_body(shard_map_of(eqn).body.jaxpr.eqns, 1)


def _in_body(eqns: Sequence[JaxprEqn], times: int) -> Iterator[WrittenCollective]:
    """The collectives in a body, in all branches of it, though one of them runs."""
    for eqn in eqns:
        if eqn.primitive.name in _KINDS:
            yield _written(eqn, times)
        bodies = list(jaxprs_in_params(eqn.params))
        # `lax.platform_dependent` has a branch for each platform, and runs one of them;
        # the last is the default.
        if eqn.params.get("branches_platforms"):
            bodies = bodies[-1:]
        length = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for body in bodies:
            yield from _in_body(body.eqns, times * length)


def _written(eqn: JaxprEqn, times: int) -> WrittenCollective:
    kind = _KINDS[eqn.primitive.name]
    # JAX (0.10 to 0.12) calls the axes `axes` in psum, pmax and pmin, and `axis_name`
    # in the other collectives.
    axes = eqn.params.get("axis_name", eqn.params.get("axes"))
    source, *rest = eqn.invars
    return WrittenCollective(
        kind=kind,
        axes=tuple(axes) if isinstance(axes, tuple | list) else (str(axes),),
        source=source,
        room=rest[0] if kind == "RaggedAllToAll" else None,
        times=times,
    )
