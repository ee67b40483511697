"""What stands in a function that no program of jhost's can hold, and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax
from jax.extend.core import JaxprEqn, Var, jaxprs_in_params

from jhost import errors
from jhost._jax import is_array, source_line
from jhost.lowering.rules.dim_rule import shape_of


def check_supported(
    name: str,
    mesh: Mapping[str, int],
    params: Mapping[str, Var],
    eqns: Sequence[JaxprEqn],
) -> None:
    """Refuse what cannot be part of a program, all at once.

    Raises:
        UnsupportedError: a `shard_map` where there is a mesh, a reference, or a size
            that is not known.
    """
    found = [f"{n}: {_REFERENCE}" for n, var in params.items() if not is_array(var)]
    found += [f"{n}: {_SYMBOLIC}" for n, var in params.items() if _is_symbolic(var)]
    found += [f"{_REFERENCE}, at {source_line(eqn)}" for eqn in _with_references(eqns)]
    if mesh:
        inner = [eqn for eqn in _walk(eqns) if eqn.primitive.name == "shard_map"]
        found += [f"{_SHARD_MAP}, at {source_line(eqn)}" for eqn in inner]
    if found:
        raise errors.UnsupportedError(
            f"jhost.jit of {name} cannot take this into its program. Leave it to "
            "jax.jit, around the jhost function.",
            list(dict.fromkeys(found)),
        )


_REFERENCE = "a reference (jax.new_ref), which is changed where it is"
_SHARD_MAP = "jax.shard_map, whose body would divide the mesh a second time"


_SYMBOLIC = "a size that is a symbol; chunks and shards are counted while lowering"


def _is_symbolic(var: Var) -> bool:
    return any(map(jax.export.is_symbolic_dim, shape_of(var)))


def _with_references(eqns: Iterable[JaxprEqn]) -> list[JaxprEqn]:
    """The equations with references, less those in bodies, whose business they are."""
    return [e for e in eqns if not all(map(is_array, (*e.invars, *e.outvars)))]


def _walk(eqns: Iterable[JaxprEqn]) -> Iterator[JaxprEqn]:
    for eqn in eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from _walk(inner.eqns)
