"""JAX's private parts and version differences, behind typed functions.

Nothing else of jhost imports `jax._src` or asks which JAX this is, and it imports from
here alone: primitives stand in `primitives.py`, the rules that split a call in two in
`split.py`, new equations and programs in `eqns.py`, those of scans in `scans.py`, the
user's lines in `lines.py`, bodies of `jax.shard_map` in `manual.py`, this process among
others in `processes.py`, and what 0.10 lacks in `v010.py`.
"""

# JAX's private functions are partly untyped; what leaves this module is typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import (
    TYPE_CHECKING,
    Any,
    ParamSpec,
    TypeAlias,
    TypeVar,
)

import jax
from jax import lax
from jax._src import (
    api_util,
    core,
    util,
)
from jax._src.core import ShapedArray
from jax._src.interpreters import ad, batching, partial_eval
from jax.extend.core import JaxprEqn
from jax.extend.random import threefry_prng_impl
from jax.sharding import PartitionSpec

from jhost._jax.computations import (
    def_jvp as def_jvp,
    def_transpose as def_transpose,
    define_primitive as define_primitive,
    varying_alike as varying_alike,
    without_last_dim as without_last_dim,
)
from jhost._jax.eqns import (
    Atom as Atom,
    ClosedJaxpr as ClosedJaxpr,
    calls as calls,
    close as close,
    fresh_var as fresh_var,
    new_eqn as new_eqn,
    new_jaxpr as new_jaxpr,
    resized_var as resized_var,
    rewritten as rewritten,
    with_each_eqn as with_each_eqn,
    with_operand_names as with_operand_names,
    without_dead_code as without_dead_code,
)
from jhost._jax.lines import (
    NO_LINE as NO_LINE,
    Position as Position,
    at_line_of as at_line_of,
    file_title as file_title,
    is_transposed as is_transposed,
    source_line as source_line,
    user_context as user_context,
    user_position as user_position,
)
from jhost._jax.manual import (
    DimAxes as DimAxes,
    ShardMap as ShardMap,
    inside_manual as inside_manual,
    shard_map_of as shard_map_of,
    untyped_params as untyped_params,
    without_mesh as without_mesh,
    without_types as without_types,
)
from jhost._jax.primitives import (
    BatchParams as BatchParams,
    def_impl as def_impl,
    def_split as def_split,
    define_call_primitive as define_call_primitive,
    define_marker_primitive as define_marker_primitive,
    register_lowering as register_lowering,
)
from jhost._jax.processes import (
    Coordination as Coordination,
    backend_is_up as backend_is_up,
    coordination as coordination,
    process_number as process_number,
)
from jhost._jax.scans import (
    is_scan as is_scan,
    scan_counts as scan_counts,
    scan_like as scan_like,
    stacked_var as stacked_var,
)
from jhost._jax.split import (
    Derivation as Derivation,
    Refine as Refine,
    Rename as Rename,
    Residual as Residual,
    Split as Split,
)
from jhost._jax.typed import untyped as untyped

if TYPE_CHECKING:
    from jaxlib._jax.pytree import PyTreeDef  # the public name has no type
else:
    from jax.tree_util import PyTreeDef

Nums: TypeAlias = int | Sequence[int] | None
Names: TypeAlias = str | Iterable[str] | None

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
    out_types: tuple[PartitionSpec, ...] | None = None  # the specs in results' types


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
    static = static_arguments(fun, static_argnums, static_argnames)
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
    leaves, in_tree = jax.tree.flatten(static.without(args, kwargs))
    return Traced(
        jaxpr=jaxpr,
        consts=(*consts, *traced._consts),
        args=tuple(leaves),
        donated=tuple(info.donated for info in jax.tree.leaves(traced.args_info)),
        in_tree=in_tree,
        out_tree=traced.out_tree,
    )


@dataclass(frozen=True, slots=True)
class StaticArguments:
    """Which arguments are static, by position and by name, each given or inferred.

    A negative position counts from the last argument of a call.
    """

    nums: tuple[int, ...]
    names: tuple[str, ...]

    def positions(self, count: int) -> frozenset[int]:
        """The static ones of `count` positional arguments."""
        return frozenset(num % count for num in self.nums if -count <= num < count)

    def without(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments that are not static."""
        static = self.positions(len(args))
        return (
            tuple(arg for i, arg in enumerate(args) if i not in static),
            {name: arg for name, arg in kwargs.items() if name not in self.names},
        )


def static_arguments(
    fun: Callable[..., Any], static_argnums: Nums, static_argnames: Names
) -> StaticArguments:
    """What `jax.jit` makes of the two, and refuses of them."""
    signature = api_util.fun_signature(fun)
    *_, nums, names = api_util.resolve_argnums(
        fun, signature, None, None, static_argnums, static_argnames
    )
    return StaticArguments(tuple(nums), tuple(names))


def forget_traces(fun: Callable[..., Any]) -> None:
    """Drops what `trace` keeps of a function."""
    jitted: Any = jax.jit(_weakly_referable(fun))
    jitted.clear_cache()


def _weakly_referable(fun: Callable[..., Any]) -> Callable[..., Any]:
    """JAX caches traces by a weak reference, which not every callable can have."""
    try:
        weakref.ref(fun)
        hash(fun)
    except TypeError:
        return partial(fun)
    return fun


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


def as_weak(values: Iterable[Any], avals: Iterable[Any]) -> tuple[Any, ...]:
    """Arrays with the weak types of `avals`, of which a memory in between knows none.

    A value of weak type takes on the dtype of what it is combined with.
    """
    return tuple(
        lax.convert_element_type_p.bind(
            value, new_dtype=value.dtype, weak_type=True, sharding=None
        )
        if aval.weak_type and not core.typeof(value).weak_type
        else value
        for value, aval in zip(values, avals, strict=True)
    )


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


# ---- Random numbers ----


def makes_threefry_keys(keys: Atom) -> bool:
    """Whether keys are those of JAX's own generator, each of which stands for itself.

    Of a batch of other keys, JAX may draw all that it wants with the first.
    """
    return aval_of(keys).dtype._impl is threefry_prng_impl


def hashes_positions(eqn: JaxprEqn) -> bool:
    """Whether each number drawn by an equation depends on its key and place alone."""
    partitionable = bool(eqn.ctx.threefry_partitionable)
    return partitionable and makes_threefry_keys(eqn.invars[0])


# ---- Caches ----

_P = ParamSpec("_P")
_R = TypeVar("_R")


def cached_by_jaxpr(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Remembers what a function makes of its first argument, while that lives.

    That is a jaxpr, or what else is equal to itself alone; what is made of it must not
    refer to it.  `jax.clear_caches` forgets it too.
    """
    return util.weakref_lru_cache(function, trace_context_in_key=False)


def cached(size: int) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """`functools.lru_cache` of that size that `jax.clear_caches` empties."""
    return util.cache(size, trace_context_in_key=False)
