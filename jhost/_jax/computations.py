"""Primitives that compute what a JAX function says, with derivatives of their own."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax import lax
from jax._src import core, dispatch
from jax._src.ad_util import Zero
from jax._src.interpreters import ad, batching, mlir
from jax.extend.core import Primitive


def define_primitive(
    name: str,
    fun: Callable[..., Sequence[Any]],
    types: Callable[..., Sequence[Any]],
) -> Primitive:
    """A primitive of several results, which are what a JAX function computes.

    `types` gives theirs from those of the operands, and `fun` may compute them in wider
    dtypes.  All have the same leading dims, to which `jax.vmap` adds one.  Derivatives
    are those of `fun`, where `def_jvp` says no other.
    """
    prim = Primitive(name)
    prim.multiple_results = True

    def computed(*args: Any, **params: Any) -> list[Any]:
        results = types(*map(core.typeof, args), **params)
        made = zip(fun(*args, **params), results, strict=True)
        return [lax.convert_element_type(x, result.dtype) for x, result in made]

    prim.def_impl(partial(dispatch.apply_primitive, prim))
    prim.def_abstract_eval(types)
    mlir.register_lowering(prim, mlir.lower_fun(computed, multiple_results=True))
    batching.primitive_batchers[prim] = partial(_batch_in_front, prim)
    def_jvp(prim, partial(_jvp_of, computed))
    return prim


def _batch_in_front(
    prim: Primitive, args: Sequence[Any], dims: Sequence[int | None], **params: Any
) -> tuple[Sequence[Any], list[int]]:
    pairs = list(zip(args, dims, strict=True))
    (size, *_) = (x.shape[dim] for x, dim in pairs if dim is not None)
    moved = [batching.bdim_at_front(x, dim, size) for x, dim in pairs]
    results = prim.bind(*moved, **params)
    return results, [0] * len(results)


def _jvp_of(
    fun: Callable[..., Any],
    primals: Sequence[Any],
    tangents: Sequence[Any | None],
    **params: Any,
) -> Any:
    moving = [n for n, tangent in enumerate(tangents) if tangent is not None]

    def of_moving(*values: Any) -> Any:
        args = dict(enumerate(primals)) | dict(zip(moving, values, strict=True))
        return fun(*args.values(), **params)

    return jax.jvp(
        of_moving, [primals[n] for n in moving], [tangents[n] for n in moving]
    )


def def_jvp(prim: Primitive, rule: Callable[..., Any]) -> None:
    """Sets what gives results and their tangents, from operands and theirs.

    The tangents of operands that do not change are None.
    """

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
        given = [None if isinstance(t, Zero) else t for t in tangents]
        return rule(primals, given, **params)

    ad.primitive_jvps[prim] = jvp


def def_transpose(prim: Primitive, rule: Callable[..., Sequence[Any]]) -> None:
    """Sets what gives the cotangents of some operands that a primitive is linear in.

    It takes the cotangents of all results, None for those of 0, and the operands, None
    for those of which cotangents are wanted.
    """

    def transpose(cotangents: Sequence[Any], *args: Any, **params: Any) -> list[Any]:
        unknown = [ad.is_undefined_primal(arg) for arg in args]
        known = [None if u else x for u, x in zip(unknown, args, strict=True)]
        given = [None if isinstance(ct, Zero) else ct for ct in cotangents]
        made = iter(rule(given, *known, **params))
        return [next(made) if each else None for each in unknown]

    ad.primitive_transposes[prim] = transpose


def without_last_dim(aval: Any, dtype: Any) -> Any:
    """The type of what there is of each of the vectors along the last dim."""
    sharding = aval.sharding.update(spec=aval.sharding.spec[:-1])
    shape = aval.shape[:-1]
    return aval.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)


def varying_alike(args: Sequence[Any]) -> Sequence[Any]:
    """Operands that vary along the same axes of a `jax.shard_map`: all of theirs."""
    return core.auto_insert_reshard(*args)
