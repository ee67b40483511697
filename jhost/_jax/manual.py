"""The parts of a `jax.shard_map`, and its body without types of varying axes.

With `check_vma=True` the types in a body say along which axes values vary.  Collectives
and casts then have primitives of their own.  A jhost program runs without such types,
so each of these primitives is bound as the plain one that computes the same.
"""

# JAX's private functions are partly untyped; what leaves this module is typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jhost._jax.eqns import ClosedJaxpr, close, with_each_leaf

DimAxes: TypeAlias = tuple[tuple[str, ...], ...]
"""The mesh axes that shard each dim; the dims behind the last are whole."""


@dataclass(frozen=True, slots=True)
class ShardMap:
    """An equation of `jax.shard_map`.

    Each device has its part along the `manual` axes; the others are automatic.
    `summed` says whether a spec has sums that are still to be made.
    """

    mesh: Mesh | AbstractMesh
    manual: frozenset[str]
    body: ClosedJaxpr
    operands: tuple[DimAxes, ...]
    results: tuple[DimAxes, ...]
    summed: bool


def shard_map_of(eqn: JaxprEqn) -> ShardMap:
    """The parts of an equation whose primitive is `shard_map`."""
    ins, outs = eqn.params["in_specs"], eqn.params["out_specs"]
    return ShardMap(
        mesh=eqn.params["mesh"],
        manual=frozenset(eqn.params["newly_manual_axes"]),
        body=close(eqn.params["jaxpr"]),
        operands=tuple(map(_dim_axes, ins)),
        results=tuple(map(_dim_axes, outs)),
        summed=any(spec.unreduced or spec.reduced for spec in (*ins, *outs)),
    )


def _dim_axes(spec: PartitionSpec) -> DimAxes:
    return tuple(
        () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        for entry in spec
    )


def inside_manual(mesh: Mesh | AbstractMesh) -> bool:
    """Whether this is the body of a `shard_map` over all axes of a mesh."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return set(mesh.axis_names).issubset(manual)


def traced_on_mesh(eqn: JaxprEqn) -> bool:
    """Whether an equation holds programs that were traced under `jax.set_mesh`."""
    # While JAX lowers some of these, it binds their equations again, and refuses them
    # under another mesh.
    if eqn.ctx.cur_abstract_mesh.empty:
        return False
    return next(iter(jaxprs_in_params(eqn.params)), None) is not None


def without_mesh(value: Any) -> Any:
    """A constant of a jaxpr without the mesh that its type may have."""
    # A view of one of JAX's literals is still of weak type, but JAX finds its type
    # again.
    return value.view() if isinstance(value, np.ndarray) else value


# ---- Primitives that exist for types of varying axes ----

# Names of JAX 0.10 to 0.12; up to 0.11 two of them end in the `_p` of their variables.
_CASTS = frozenset(
    {
        "preduced",
        "pvary",
        "reduced_vary_cast",
        "reduced_vary_cast_p",
        "vary_unreduced_cast",
        "vary_unreduced_cast_p",
    }
)


def _gathered(x: Any, params: Mapping[str, Any]) -> Any:
    dim = params["all_gather_dimension"]
    return lax.all_gather(x, params["axis_name"], axis=dim, tiled=params["tiled"])


def _scattered(x: Any, params: Mapping[str, Any]) -> Any:
    return lax.psum_scatter(
        x,
        params["axis_name"],
        scatter_dimension=params["scatter_dimension"],
        tiled=params["tiled"],
    )


_COLLECTIVES: Mapping[str, Callable[[Any, Mapping[str, Any]], Any]] = {
    "all_gather_invariant": _gathered,
    "all_gather_reduced": _gathered,
    "psum_invariant": lambda x, params: lax.psum(x, params["axes"]),
    "unreduced_pmax": lambda x, params: lax.pmax(x, params["axes"]),
    "unreduced_pmin": lambda x, params: lax.pmin(x, params["axes"]),
    "unreduced_psum": lambda x, params: lax.psum(x, params["axes"]),
    "unreduced_reduce_scatter": _scattered,
}


def without_types(eqn: JaxprEqn, args: Sequence[Any]) -> list[Any] | None:
    """The results of a primitive that exists for types only; None for any other."""
    name = eqn.primitive.name
    if name in _CASTS:
        return list(args)
    collective = _COLLECTIVES.get(name)
    return None if collective is None else [collective(args[0], eqn.params)]


# ---- Parameters with types in them ----

Evaluate: TypeAlias = Callable[[ClosedJaxpr, Sequence[Any]], Sequence[Any]]


def untyped_params(params: Mapping[str, Any], evaluate: Evaluate) -> dict[str, Any]:
    """The parameters of an equation without axes in their types.

    Programs among them are traced again, with the results that `evaluate` gives.
    """

    def changed(value: Any) -> Any:
        match value:
            case ClosedJaxpr() | Jaxpr():
                return _retraced(value, evaluate)
            case ShapedArray():
                return _plain(value)
            case _:
                return value

    return with_each_leaf(dict(params), changed)


def _retraced(jaxpr: Any, evaluate: Evaluate) -> Any:
    """The program, traced again; a kernel, which works on references, stays."""
    closed = close(jaxpr)
    ins: list[Any] = list(closed.in_avals)
    outs: list[Any] = list(closed.out_avals)
    if not all(isinstance(aval, ShapedArray) for aval in (*ins, *outs)):
        return jaxpr

    def evaluated(*args: Any) -> list[Any]:
        pairs = zip(evaluate(closed, args), outs, strict=True)
        return [_of_weak_type(value, aval.weak_type) for value, aval in pairs]

    again = jax.make_jaxpr(evaluated)(*map(_plain, ins))
    return again if isinstance(jaxpr, ClosedJaxpr) else again.jaxpr


def _plain(aval: ShapedArray) -> ShapedArray:
    return ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _of_weak_type(value: Any, weak: bool) -> Any:
    """A value with the weak type that a body must return."""
    # A collective may have dropped it.
    if jax.typeof(value).weak_type == weak:
        return value
    return lax.convert_element_type_p.bind(
        value, new_dtype=value.dtype, weak_type=weak, sharding=None
    )
