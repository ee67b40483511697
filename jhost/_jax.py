"""JAX's private parts and version differences, behind typed functions.

No other module of jhost imports `jax._src` or asks which JAX this is; new equations and
programs stand in `_jax_eqns.py`, the rules that split a call in two in `_jax_split.py`,
those that 0.10 lacks in `_jax_v010.py`, for this module alone.
"""

# JAX's private functions are partly untyped; what leaves this module is typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import jax
import jax.extend.core
from jax._src import (
    api_util,
    checkify,
    core,
    distributed,
    source_info_util,
    xla_bridge,
)
from jax._src.compute_on import extend_compute_type
from jax._src.core import ShapedArray
from jax._src.interpreters import ad, batching, mlir, partial_eval
from jax.experimental import jet
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import JaxprEqn, Literal, Primitive, Var

from jhost import errors
from jhost._jax_eqns import (
    close as close,
    fresh_var as fresh_var,
    new_eqn as new_eqn,
    new_jaxpr as new_jaxpr,
    resized_var as resized_var,
    rewritten as rewritten,
    without_dead_code as without_dead_code,
)
from jhost._jax_split import (
    Refine as Refine,
    Residual as Residual,
    Split as Split,
    register_split_rules,
)

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr as ClosedJaxpr  # one class, from 0.11 on
    from jaxlib._jax.pytree import PyTreeDef  # the public name has no type
else:
    from jax.extend.core import ClosedJaxpr
    from jax.tree_util import PyTreeDef

Atom: TypeAlias = Var | Literal
Nums: TypeAlias = int | Sequence[int] | None
Names: TypeAlias = str | Iterable[str] | None

# ---- Primitives ----


class BatchParams(Protocol):
    """What a marker's parameters become when its operand gets a batch dim at `dim`.

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
        from jhost import _jax_v010  # what it imports is gone from 0.11 on

        _jax_v010.register_call_primitive_rules(prim)
    register_split_rules(prim, _as_it_is)
    checkify.error_checks[prim] = partial(_checkify_call, prim)
    jet.jet_rules[prim] = _refuse_jet
    return prim


def _as_it_is(split: Split, **_: Any) -> Split:
    return split


def def_split(prim: Primitive, refine: Refine) -> None:
    """Sets what is made of the two programs that differentiation makes of a call."""
    register_split_rules(prim, refine)


def _refuse_jet(*_: Any, **__: Any) -> Any:
    raise errors.UnsupportedError(
        "jax.experimental.jet has no rule for shardings, nor for most of JAX. Nest "
        "jax.jvp for higher derivatives of a jhost function."
    )


def _checkify_call(
    prim: Primitive, *args: Any, call_jaxpr: ClosedJaxpr, **params: Any
) -> Any:
    """A call of the program with its checks, as checkify's rule for `jit` has it."""
    # From 0.11 on, a context that counts the checks comes first.
    count = 1 if hasattr(checkify, "CheckifyContext") else 0
    (*context, error, enabled), values = args[: count + 2], args[count + 2 :]
    error_values, error_tree = jax.tree.flatten(error)
    operands = (*error_values, *values)
    avals = map(core.typeof, operands)
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
    # The whole aval: a new one from shape and dtype would drop the varying manual
    # axes, and `shard_map` would accept wrong `out_specs`.
    prim.def_abstract_eval(_identity)
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
    """Sets what a call primitive does on concrete arrays, outside every trace."""
    prim.def_impl(_unless_empty(fun))


def register_lowering(prim: Primitive, fun: Callable[..., Sequence[Any]]) -> None:
    """Sets the JAX function that a call primitive is inside a compiled program."""
    lowering = mlir.lower_fun(_unless_empty(fun), multiple_results=True)
    mlir.register_lowering(prim, lowering)


def _unless_empty(fun: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
    """Keeps from `fun` the empty calls that partial evaluation leaves beside a scan."""

    @wraps(fun)
    def call(*args: Any, call_jaxpr: ClosedJaxpr, **params: Any) -> Sequence[Any]:
        if not call_jaxpr.outvars and not call_jaxpr.effects:
            return []
        return fun(*args, call_jaxpr=call_jaxpr, **params)

    return call


# ---- Tracing ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A function traced on one set of arguments; the trees leave static ones out."""

    jaxpr: ClosedJaxpr  # its operands are `consts`, then `args`; it has no consts
    consts: tuple[Any, ...]  # may hold tracers of outer transforms
    args: tuple[Any, ...]  # the leaves of `in_tree`
    donated: tuple[bool, ...]  # for each of `args`
    in_tree: PyTreeDef  # of the pair of positional and keyword arguments
    out_tree: PyTreeDef


def trace(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    static_argnums: Nums = None,
    static_argnames: Names = None,
    donate_argnums: Nums = None,
    donate_argnames: Names = None,
) -> Traced:
    """Traces a function as `jax.jit` does, with what it closes over as operands.

    Arguments are arrays, tracers or `jax.ShapeDtypeStruct`s.  JAX's cache of traces is
    used: the same function on the same types gives the same jaxpr object.

    >>> import jax.numpy as jnp
    >>> traced = trace(lambda x, y: {"sum": x + y}, (1.0, jnp.ones(2)), {})
    >>> arg_names(traced.jaxpr), result_paths(traced.jaxpr)
    (('x', 'y'), ("result['sum']",))
    """
    fun = _weakly_referable(fun)
    jitted = jax.jit(
        fun,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        donate_argnums=donate_argnums,
        donate_argnames=donate_argnames,
    )
    traced = jitted.trace(*args, **kwargs)
    # `jit` keeps arrays as consts of the jaxpr, but if one of them is a tracer, all
    # are operands already and their values stand aside, in `_consts`.
    jaxpr, consts = partial_eval.separate_consts(traced.jaxpr)
    *_, nums, names = api_util.resolve_argnums(
        fun, api_util.fun_signature(fun), None, None, static_argnums, static_argnames
    )
    leaves, in_tree = jax.tree.flatten(_without_static(args, kwargs, nums, names))
    return Traced(
        jaxpr=jaxpr,
        consts=(*consts, *traced._consts),
        args=tuple(leaves),
        donated=tuple(info.donated for info in jax.tree.leaves(traced.args_info)),
        in_tree=in_tree,
        out_tree=traced.out_tree,
    )


def _weakly_referable(fun: Callable[..., Any]) -> Callable[..., Any]:
    """JAX caches traces by a weak reference, which not every callable can have."""
    try:
        weakref.ref(fun)
        hash(fun)
    except TypeError:
        return partial(fun)
    return fun


def _without_static(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    nums: Sequence[int],
    names: Sequence[str],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    static = {num % len(args) for num in nums if -len(args) <= num < len(args)}
    return (
        tuple(arg for i, arg in enumerate(args) if i not in static),
        {name: arg for name, arg in kwargs.items() if name not in names},
    )


def is_tracing(*values: Any) -> bool:
    """Whether any of the values is a tracer, of whatever transform."""
    # By type: every call asks this, and a tree may have thousands of leaves.
    return any(issubclass(kind, core.Tracer) for kind in set(map(type, values)))


def is_reference(value: Any) -> bool:
    """Whether a value is a reference to an array, that can be written to."""
    may_be = isinstance(value, core.Ref | core.Tracer)
    return may_be and not isinstance(core.typeof(value), ShapedArray)


# These hand the primal computation on to the trace below them as it happens.
_TRANSPARENT = (core.EvalTrace, ad.JVPTrace, ad.LinearizeTrace, batching.BatchTrace)


def under_outer_trace() -> bool:
    """Whether a call made now becomes part of a program that is compiled as a whole.

    True inside `jit`, `scan`, `shard_map`, `make_jaxpr` and `checkpoint`, where XLA
    takes no options for a part.  False at top level, and inside `jvp`, `grad`,
    `linearize` and `vmap` called there.  A `jax.jit` with `compiler_options` fails in
    `linearize`, and up to 0.11 in `grad`, all the same: its tangent program is staged.
    A call primitive does not: its implementation runs both programs, on arrays.

    >>> seen = []
    >>> def f(x):
    ...     seen.append(under_outer_trace())
    ...     return x
    >>> _ = f(1.0), jax.grad(f)(1.0), jax.jit(f)(1.0)
    >>> seen
    [False, False, True]
    """
    stack = core.unsafe_get_trace_stack(core.trace_ctx.trace)
    return not all(isinstance(trace, _TRANSPARENT) for trace in stack)


# ---- Jaxprs ----


def evaluate(jaxpr: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    """Evaluates a program, equation by equation."""
    return core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *args)


def arg_names(jaxpr: ClosedJaxpr) -> tuple[str, ...]:
    """The user's name of each operand, as `params['w']`; empty if there is none."""
    return jaxpr.debug_info.safe_arg_names(len(jaxpr.invars))


def result_paths(jaxpr: ClosedJaxpr) -> tuple[str, ...]:
    """The tree path of each result, as `result[0]`; empty if it is not known."""
    return jaxpr.debug_info.safe_result_paths(len(jaxpr.outvars))


def function_name(jaxpr: ClosedJaxpr) -> str:
    """The name of the function that a program was traced from."""
    return jaxpr.debug_info.func_name


def aval_of(atom: Atom) -> ShapedArray:
    """The type of an operand or result that is an array; `TypeError` if it is not."""
    aval = atom.aval
    if not isinstance(aval, ShapedArray):
        raise TypeError(f"expected an array, got {aval}")
    return aval


def is_array(atom: Atom) -> bool:
    """Whether an operand or result is an array; it may be a reference to one."""
    return isinstance(atom.aval, ShapedArray)


# ---- The user's line ----

# The user's line must never be one of ours, but in the demo, which is a user itself.
# `jhost/lowering` is a link, and an editable install imports what is behind it.
for _entry in os.scandir(os.path.dirname(__file__)):
    for _path in {_entry.path, os.path.realpath(_entry.path)}:
        if _entry.name != "_block.py":
            _end = os.sep if _entry.is_dir() else ""
            source_info_util.register_exclusion(_path + _end)


NO_LINE = "an unknown line"
"""What `source_line` says of an equation that comes from no line of the user's."""


def source_line(eqn: JaxprEqn) -> str:
    """The user's line that an equation comes from, as `model.py:12 (mlp)`."""
    frame = source_info_util.user_frame(eqn.source_info.traceback)
    if frame is None:
        return NO_LINE
    file = os.path.basename(frame.file_name)
    return f"{file}:{frame.start_line} ({frame.function_name})"


@contextmanager
def user_context(eqn: JaxprEqn) -> Generator[None]:
    """Gives what is bound inside an equation's line, name stack and metadata.

    Not the equation's whole context: its abstract mesh is the one outside the
    `shard_map` that the equation is bound in again.
    """
    source = eqn.source_info
    names = source_info_util.current_name_stack() + source.name_stack
    with ExitStack() as stack:
        stack.enter_context(
            source_info_util.user_context(source.traceback, name_stack=names)
        )
        if eqn.ctx.compute_type:
            stack.enter_context(extend_compute_type(eqn.ctx.compute_type))
        if eqn.ctx.xla_metadata:
            stack.enter_context(set_xla_metadata(**eqn.ctx.xla_metadata))
        yield


# ---- Processes ----


class Coordination(Protocol):
    """The store of keys and values that all processes of `jax.distributed` share."""

    def key_value_set(
        self, key: str, value: str, allow_overwrite: bool = False
    ) -> None: ...

    def key_value_set_bytes(
        self, key: str, value: bytes, allow_overwrite: bool = False
    ) -> None: ...

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]: ...

    def key_value_dir_get_bytes(self, key: str) -> list[tuple[str, bytes]]: ...

    def wait_at_barrier(
        self, barrier_id: str, timeout_in_ms: int, process_ids: Sequence[int]
    ) -> None: ...


def coordination() -> Coordination | None:
    """This process's client of the coordination service; None without one."""
    return distributed.global_state.client


def backend_is_up() -> bool:
    """Whether JAX has asked for devices, after which no setting reaches XLA."""
    return xla_bridge.backends_are_initialized()
