"""Primitives that a JAX function defines, which may have derivatives of their own."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax import lax
from jax._src import config, core, dispatch
from jax.extend.backend import get_default_device
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


@dataclasses.dataclass(frozen=True, slots=True)
class Kernels:
    """Kernels, compiled by Triton, that compute a primitive on NVIDIA GPUs.

    `fun` runs them.  `can_compute` says, by the types of operands and the params,
    whether it can.
    """

    fun: Callable[..., Sequence[Any]]
    can_compute: Callable[..., bool]


_DEFINED: set[Primitive] = set()


def is_own(primitive: Primitive) -> bool:
    """Whether `define_primitive` made it, and XLA knows nothing of its dims."""
    return primitive in _DEFINED


def define_primitive(
    name: str,
    fun: Callable[..., Sequence[Any]],
    types: Callable[..., Sequence[Any]] | None = None,
    kernels: Kernels | None = None,
) -> Primitive:
    """A primitive of several results that computes what a JAX function does.

    `types` gives the results' types from the operands' types.  `fun` may then compute
    in wider dtypes; without `types` the results are as `fun` returns them.  All
    operands and results have the same leading dims, and `jax.vmap` adds one.  It is
    differentiated as `fun`, unless `def_jvp` sets another rule.
    """
    prim = Primitive(name)
    _DEFINED.add(prim)
    prim.multiple_results = True
    computed = fun if types is None else partial(_in_dtypes, fun, types)
    prim.def_impl(partial(dispatch.apply_primitive, prim))
    prim.def_abstract_eval(types or partial(_types_of, fun))
    lowering = mlir.lower_fun(computed, multiple_results=True)
    mlir.register_lowering(prim, lowering)
    if kernels is not None:
        # Only for CUDA: all other platforms keep the lowering without a platform.
        by_kernels = partial(_lower_to_kernels, kernels, lowering)
        mlir.register_lowering(prim, by_kernels, platform="cuda")
    batching.primitive_batchers[prim] = partial(_batch_in_front, prim)
    def_jvp(prim, partial(_jvp_of, computed))
    return prim


def _in_dtypes(
    fun: Callable[..., Sequence[Any]],
    types: Callable[..., Sequence[Any]],
    *args: Any,
    **params: Any,
) -> list[Any]:
    results = types(*map(jax.typeof, args), **params)
    made = zip(fun(*args, **params), results, strict=True)
    return [lax.convert_element_type(x, result.dtype) for x, result in made]


def _types_of(
    fun: Callable[..., Sequence[Any]], *args: Any, **params: Any
) -> Sequence[Any]:
    return jax.make_jaxpr(partial(fun, **params))(*args).out_avals


def _lower_to_kernels(
    kernels: Kernels,
    otherwise: Callable[..., Any],
    ctx: mlir.LoweringRuleContext,
    *args: Any,
    **params: Any,
) -> Any:
    """Lowers to kernels where they can run, and XLA need not partition them."""
    # An exported program must run on later versions of JAX, which may not know the
    # kernels' calls.
    exported = ctx.module_context.lowering_parameters.for_export
    here = _has_tensor_cores() and _is_on_one_device(ctx) and not exported
    if not (here and kernels.can_compute(*ctx.avals_in, **params)):
        return otherwise(ctx, *args, **params)
    # Types were checked when the primitive was traced.  A kernel's own types do not say
    # over which axes values vary, so JAX would refuse them here.
    with config._check_vma(False), warnings.catch_warnings():
        # A later JAX will drop this backend of Pallas, and warns about it now.
        warnings.simplefilter("ignore", DeprecationWarning)
        return mlir.lower_fun(kernels.fun, multiple_results=True)(ctx, *args, **params)


def _has_tensor_cores() -> bool:
    """Whether Pallas compiles for a GPU with compute capability 8.0 at least."""
    device = get_default_device()
    return device.platform == "gpu" and float(device.compute_capability) >= 8


def _is_on_one_device(ctx: mlir.LoweringRuleContext) -> bool:
    """Whether a device has the whole operands: there is one, or all axes are manual."""
    context = ctx.module_context.axis_context
    if isinstance(context, mlir.SPMDAxisContext):
        split = set(context.mesh.axis_names) - context.manual_axes
        return all(context.mesh.shape[axis] == 1 for axis in split)
    return context.num_devices == 1


def _batch_in_front(
    prim: Primitive, args: Sequence[Any], dims: Sequence[int | None], **params: Any
) -> tuple[Sequence[Any], list[int]]:
    pairs = list(zip(args, dims, strict=True))
    (size, *_) = (x.shape[dim] for x, dim in pairs if dim is not None)
    # All operands share their leading dims, so those without the new dim get it too.
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
    """Sets the rule that gives results and tangents, from operands and their tangents.

    The tangents of operands that do not change are None.
    """

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
        given = [None if isinstance(t, ad.Zero) else t for t in tangents]
        return rule(primals, given, **params)

    ad.primitive_jvps[prim] = jvp


def def_transpose(prim: Primitive, rule: Callable[..., Sequence[Any]]) -> None:
    """Sets the rule that gives cotangents of operands that a primitive is linear in.

    The rule takes the cotangents of all results, with None for zeros, and the operands,
    with None for those whose cotangents are wanted.  It may return wider dtypes.
    """

    def transpose(cotangents: Sequence[Any], *args: Any, **params: Any) -> list[Any]:
        unknown = [ad.is_undefined_primal(arg) for arg in args]
        known = [None if u else x for u, x in zip(unknown, args, strict=True)]
        given = [None if isinstance(ct, ad.Zero) else ct for ct in cotangents]
        if all(ct is None for ct in given):
            pairs = zip(unknown, args, strict=True)
            return [ad.Zero(x.aval) if wanted else None for wanted, x in pairs]
        made = iter(rule(given, *known, **params))
        return [
            lax.convert_element_type(next(made), x.aval.dtype) if wanted else None
            for wanted, x in zip(unknown, args, strict=True)
        ]

    ad.primitive_transposes[prim] = transpose


def without_last_dim(aval: Any, dtype: Any) -> Any:
    """The type of an array with one element for each vector along the last dim."""
    # A type's spec has an entry for each dim.
    sharding = aval.sharding.update(spec=aval.sharding.spec[:-1])
    shape = aval.shape[:-1]
    return aval.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)


def varying_alike(args: Sequence[Any]) -> Sequence[Any]:
    """The operands, cast to vary along all axes along which any of them varies."""
    return core.auto_insert_reshard(*args)
