"""Functions traced as `jax.jit` does it, and questions about the current trace."""

# JAX's private functions are partly untyped; what leaves this module is typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
from jax._src import api_util, core
from jax._src.interpreters import ad, batching, partial_eval
from jax.core import ShapedArray, Tracer
from jax.experimental.layout import Format
from jax.interpreters.ad import JVPTrace, JVPTracer, Zero
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from jhost._jax.eqns import ClosedJaxpr

if TYPE_CHECKING:
    from jaxlib._jax.pytree import PyTreeDef  # the public name has no type
else:
    from jax.tree_util import PyTreeDef

ArgNums: TypeAlias = int | Sequence[int] | None
ArgNames: TypeAlias = str | Iterable[str] | None
Inline: TypeAlias = "bool | jax.Inline"  # the class is there from JAX 0.12 on


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedCall:
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
    static_argnums: ArgNums = None,
    static_argnames: ArgNames = None,
    donate_argnums: ArgNums = None,
    donate_argnames: ArgNames = None,
) -> TracedCall:
    """Traces a function as `jax.jit` does, with what it closes over as operands.

    Arguments are arrays, tracers or `jax.ShapeDtypeStruct`s.  JAX's cache of traces is
    used: the same function on the same types gives the same jaxpr object.

    >>> import jax.numpy as jnp
    >>> from jhost._jax import arg_names, result_paths
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
    # `jit`'s own trace gives its cache, its static arguments and its messages.
    traced = jitted.trace(*args, **kwargs)
    # `jit` keeps arrays as consts of the jaxpr.  But if one of them is a tracer, all of
    # them are operands already, and their values are in `_consts`.
    jaxpr, consts = partial_eval.separate_consts(traced.jaxpr)
    leaves, in_tree = jax.tree.flatten(static.without(args, kwargs))
    return TracedCall(
        jaxpr=jaxpr,
        consts=(*consts, *traced._consts),
        args=tuple(leaves),
        # Not from `args_info`: it puts its own objects into the user's pytree classes,
        # and not every class may hold them.
        donated=tuple(traced._params["donated_invars"][len(traced._consts) :]),
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
    fun: Callable[..., Any], static_argnums: ArgNums, static_argnames: ArgNames
) -> StaticArguments:
    """The static arguments as `jax.jit` resolves them, with its errors."""
    try:
        signature = inspect.signature(fun)
    except (ValueError, TypeError):
        signature = None  # some builtin functions have none
    # `jit` infers names from positions, and positions from names.
    *_, nums, names = api_util.resolve_argnums(
        fun, signature, None, None, static_argnums, static_argnames
    )
    return StaticArguments(tuple(nums), tuple(names))


_SHARDINGS = (Sharding, PartitionSpec, Format)
"""The classes of shardings; any other object stands for none."""


def shardings_given(jitted: Any) -> dict[str, Any]:
    """The shardings that a function of `jax.jit` was made with; None for no wish.

    >>> shardings_given(jax.jit(lambda x: x, out_shardings=jax.P("tp")))
    {'in_shardings': None, 'out_shardings': P('tp',)}
    """
    info = jitted._jit_info
    return {
        name: getattr(info, f"{name}_treedef").unflatten(
            sharding if isinstance(sharding, _SHARDINGS) else None
            for sharding in getattr(info, f"{name}_leaves")
        )
        for name in ("in_shardings", "out_shardings")
    }


def forget_traces(fun: Callable[..., Any]) -> None:
    """Drops the traces that JAX's cache keeps of a function."""
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
    # By types and not by values: every call asks this, and a tree may have thousands of
    # leaves of few types.
    return any(issubclass(kind, Tracer) for kind in set(map(type, values)))


def is_reference(value: Any) -> bool:
    """Whether a value is a reference to an array, or stands for one."""
    may_be = isinstance(value, jax.Ref | Tracer | jax.ShapeDtypeStruct)
    return may_be and not isinstance(jax.typeof(value), ShapedArray)


def mesh_of_tracer(value: Any) -> Mesh | AbstractMesh | None:
    """The mesh of the array that a tracer stands for, if any is known.

    From JAX 0.10 on its type has the axes, automatic ones too.  `grad` and `vmap`
    outside of other traces have the array itself, and so its devices.

    >>> mesh = jax.make_mesh((1,), ("tp",))
    >>> x = jax.device_put(1.0, jax.NamedSharding(mesh, PartitionSpec()))
    >>> seen = []
    >>> def f(x):
    ...     seen.append(mesh_of_tracer(x))
    ...     return x
    >>> _ = jax.grad(f)(x), jax.jit(f)(x)
    >>> seen == [mesh, mesh.abstract_mesh]
    True
    """
    array = _below(value)
    sharding = getattr(array, "sharding", None)
    if isinstance(sharding, NamedSharding):
        return sharding.mesh
    mesh = jax.typeof(value).sharding.mesh
    return None if mesh.empty else mesh


def _below(value: Any) -> Any:
    """The value below all transforms that compute at once (`grad`, `vmap`)."""
    while isinstance(value, JVPTracer | ad.LinearizeTracer | batching.BatchTracer):
        value = value.val if isinstance(value, batching.BatchTracer) else value.primal
    return value


def is_linearized(values: Sequence[Any]) -> bool:
    """Whether a call on values is now split in two, for a gradient.

    False where other transforms come first, and where JAX stages the call.
    """
    trace = core.trace_ctx.trace
    return isinstance(trace, ad.LinearizeTrace) and any(
        isinstance(value, ad.LinearizeTracer) and not isinstance(value.tangent, Zero)
        for value in values
    )


def jit_is_disabled() -> bool:
    """Whether this is inside of `jax.disable_jit`."""
    return jax.config.jax_disable_jit


# These traces pass the primal computation on to the trace below at once.
_TRANSPARENT = (core.EvalTrace, JVPTrace, ad.LinearizeTrace, batching.BatchTrace)


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
