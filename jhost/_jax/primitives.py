"""jhost's call and marker primitives, with JAX's rules for them."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import jax
import jax.extend.core
from jax._src import checkify
from jax._src.interpreters import ad as private_ad
from jax.experimental import jet
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, partial_eval

from jhost import errors
from jhost._garbage import no_garbage_collection
from jhost._jax.eqns import ClosedJaxpr
from jhost._jax.linearization import register_linearization
from jhost._jax.partial_evaluation import register_partial_evaluation
from jhost._jax.split import Derivation, Refine, Rename, Split, operand_names


class BatchParams(Protocol):
    """Gives a marker's parameters when its operand gets a batch dim at `dim`.

    `names` is the `spmd_axis_name` of the `jax.vmap`, if it has one.
    """

    def __call__(
        self, params: dict[str, Any], dim: int, names: tuple[str, ...] | None
    ) -> dict[str, Any]: ...


def define_call_primitive(name: str) -> Primitive:
    """A primitive that calls its parameter `call_jaxpr`, with every rule of `jit`'s.

    `call_jaxpr` is a closed jaxpr.  Other parameters are hashable and pass through
    every transform unchanged, so they must fit the derived programs too, which have
    other operands and results.  The implementation evaluates the program until
    `def_impl` is called; there is no lowering before `register_lowering`.
    """
    prim = Primitive(name)
    if hasattr(jax.extend.core, "register_call_primitive_rules"):  # from 0.11 on
        jax.extend.core.register_call_primitive_rules(prim, name=None)
    else:
        from jhost._jax import v010  # what it imports is gone from 0.11 on

        v010.register_call_primitive_rules(prim)
    _register_split(prim, _as_it_is, _same_params)
    rule = partial_eval.dce_rules[prim]
    partial_eval.dce_rules[prim] = partial(_without_dead_code, rule)
    checkify.error_checks[prim] = partial(_checkify_call, prim)
    jet.jet_rules[prim] = _refuse_jet
    return prim


def _without_dead_code(
    rule: Callable[..., Any], used: list[bool], *rest: Any
) -> tuple[list[bool], Any]:
    """By JAX's rule, but a call without dead code stays itself, and is lowered once."""
    read, live = rule(used, *rest)
    *_, eqn = rest  # from JAX 0.12 on, live operands come before it
    if live is None or not all(used):
        return read, live
    before, after = (each.params["call_jaxpr"] for each in (eqn, live))
    if len(before.eqns) != len(after.eqns):
        return read, live
    if all(read):
        return read, eqn
    _with_all_operands[after] = before, tuple(read)
    return read, live


_with_all_operands: WeakKeyDictionary[Any, tuple[Any, tuple[bool, ...]]] = (
    WeakKeyDictionary()
)


def with_all_operands(call_jaxpr: Any) -> tuple[Any, tuple[bool, ...]] | None:
    """The jaxpr that JAX took operands from that nothing reads, and which it left.

    None where it took no operands, or more than these.
    """
    return _with_all_operands.get(call_jaxpr)


def _as_it_is(split: Split, **_: Any) -> Split:
    return split


def _same_params(params: Mapping[str, Any], *_: Any) -> dict[str, Any]:
    return dict(params)


def _register_split(prim: Primitive, refine: Refine, rename: Rename) -> None:
    register_linearization(prim, refine, rename)
    register_partial_evaluation(prim, refine, rename)


def def_split(prim: Primitive, refine: Refine, rename: Rename) -> None:
    """Sets how the two programs are rewritten that differentiation makes of a call.

    `rename` gives the other parameters of these, and of all programs that JAX derives.
    """
    _register_split(prim, refine, rename)
    derived: list[tuple[dict[Any, Any], Derivation]] = [
        (private_ad.fancy_transposes, "backward"),
        (batching.fancy_primitive_batchers, "batched"),
    ]
    for rules, how in derived:
        rules[prim] = partial(_renamed, rules[prim], rename, how)


def _renamed(
    rule: Callable[..., Any],
    rename: Rename,
    how: Derivation,
    *args: Any,
    call_jaxpr: ClosedJaxpr,
    **params: Any,
) -> Any:
    # JAX's rule for transposes makes a program that knows no names.
    names = _names_of_transposed(call_jaxpr, *args) if how == "backward" else ()
    return rule(*args, call_jaxpr=call_jaxpr, **rename(params, how, names))


def _names_of_transposed(
    jaxpr: ClosedJaxpr, cotangents: Sequence[Any], *args: Any
) -> tuple[str, ...]:
    """The names of a transposed program's operands: residuals, then cotangents."""
    pairs = zip(args, operand_names(jaxpr), strict=True)
    kept = [name for arg, name in pairs if not isinstance(arg, private_ad.GradAccum)]
    one = len(cotangents) == 1
    given = [
        f"the cotangent of {'the result' if one else f'result {number}'}"
        for number, cotangent in enumerate(cotangents)
        if not isinstance(cotangent, ad.Zero)
    ]
    return (*kept, *given)


def _refuse_jet(*_: Any, **__: Any) -> Any:
    raise errors.UnsupportedError(
        "jax.experimental.jet has no rule for shardings, nor for most of JAX. Nest "
        "jax.jvp for higher derivatives of a jhost function."
    )


def _checkify_call(
    prim: Primitive, *args: Any, call_jaxpr: ClosedJaxpr, **params: Any
) -> Any:
    """A call of the program with its checks, as in checkify's rule for `jit`."""
    # From 0.11 on, a context that counts the checks comes first.
    count = 1 if hasattr(checkify, "CheckifyContext") else 0
    (*context, error, enabled), values = args[: count + 2], args[count + 2 :]
    error_values, error_tree = jax.tree.flatten(error)
    operands = (*error_values, *values)
    avals = map(jax.typeof, operands)
    checked, out_tree, _ = checkify.jaxpr_to_checkify_jaxpr(
        *context, call_jaxpr, enabled, error_tree, *avals
    )
    results = prim.bind(*operands, call_jaxpr=checked, **params)
    return jax.tree.unflatten(out_tree, results)


def define_marker_primitive(
    name: str,
    batch_params: BatchParams,
    transposed_params: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> Primitive:
    """A primitive that is the identity, and carries parameters in a jaxpr.

    It is linear and its own transpose, with `transposed_params`, so that derived
    programs keep their marks.
    """
    prim = Primitive(name)
    prim.def_impl(_identity)
    # The type is returned as it is: a new one from shape and dtype would drop the
    # varying manual axes, and `shard_map` would accept wrong `out_specs`.
    prim.def_abstract_eval(_identity)
    # Linear, so that tangents and cotangents carry the mark too.
    ad.deflinear2(prim, partial(_marker_transpose, prim, transposed_params or dict))
    batching.fancy_primitive_batchers[prim] = partial(_marker_batch, prim, batch_params)
    mlir.register_lowering(prim, _marker_lowering)
    return prim


def _identity(x: Any, **_: Any) -> Any:
    return x


def _marker_transpose(
    prim: Primitive,
    transposed_params: Callable[[dict[str, Any]], dict[str, Any]],
    ct: Any,
    _: Any,
    **params: Any,
) -> list[Any]:
    return [prim.bind(ct, **transposed_params(params))]


def _marker_batch(
    prim: Primitive,
    batch_params: BatchParams,
    axis_data: Any,
    args: Sequence[Any],
    dims: Sequence[int | None],
    **params: Any,
) -> tuple[Any, int | None]:
    (x,), (dim,) = args, dims
    if dim is not None:  # a "fancy" rule is asked about unmapped operands too
        params = batch_params(params, dim, axis_data.spmd_name)
    return prim.bind(x, **params), dim


def _marker_lowering(_: Any, x: Any, **__: Any) -> list[Any]:
    return [x]


def def_impl(prim: Primitive, fun: Callable[..., Sequence[Any]]) -> None:
    """Sets the function that a call primitive runs on arrays, outside of any trace."""
    prim.def_impl(_unless_empty(fun))


def register_lowering(prim: Primitive, fun: Callable[..., Sequence[Any]]) -> None:
    """Sets the JAX function that a call primitive runs inside of a compiled program.

    It gets the number of that program's devices as `devices`.
    """

    def lowering(ctx: mlir.LoweringRuleContext, *args: Any, **params: Any) -> Any:
        # Contexts without the number are of bodies with manual axes: one device's part.
        devices = getattr(ctx.module_context.axis_context, "num_devices", 1)
        told = partial(_unless_empty(fun), devices=devices)
        with no_garbage_collection():
            return mlir.lower_fun(told, multiple_results=True)(ctx, *args, **params)

    mlir.register_lowering(prim, lowering)


def _unless_empty(fun: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
    """`fun`, but not for empty calls, which partial evaluation leaves beside a scan."""

    @wraps(fun)
    def call(*args: Any, call_jaxpr: ClosedJaxpr, **params: Any) -> Sequence[Any]:
        if not call_jaxpr.outvars and not call_jaxpr.effects:
            return []
        return fun(*args, call_jaxpr=call_jaxpr, **params)

    return call
