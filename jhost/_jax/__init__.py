"""JAX's private parts and version differences, behind typed functions.

Nothing else of jhost imports `jax._src` or asks which JAX this is, and it imports from
here alone: primitives stand in `primitives.py`, the rules that split a call in two in
`split.py`, new equations and programs in `eqns.py`, bodies of `jax.shard_map` in
`manual.py`, and what 0.10 lacks in `v010.py`.
"""

# JAX's private functions are partly untyped; what leaves this module is typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import (
    TYPE_CHECKING,
    Any,
    NamedTuple,
    ParamSpec,
    Protocol,
    TypeAlias,
    TypeVar,
)

import jax
from jax import lax
from jax._src import (
    api_util,
    config,
    core,
    distributed,
    source_info_util,
    util,
    xla_bridge,
)
from jax._src.compute_on import extend_compute_type
from jax._src.core import ShapedArray
from jax._src.interpreters import ad, batching, partial_eval
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import JaxprEqn
from jax.extend.random import threefry_prng_impl
from jax.sharding import PartitionSpec

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
    scan_counts as scan_counts,
    with_each_eqn as with_each_eqn,
    with_operand_names as with_operand_names,
    without_dead_code as without_dead_code,
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


# ---- The user's line ----

# The user's line must never be one of ours, but in the demo, which is a user itself.
# `jhost/lowering` is a link, and an editable install imports what is behind it.
_HERE = os.path.dirname(os.path.dirname(__file__))
for _folder in (_HERE, *(os.path.join(_HERE, n) for n in ("lowering", "runtime"))):
    source_info_util.register_exclusion(os.path.realpath(_folder) + os.sep)
    source_info_util.register_exclusion(_folder + os.sep)
source_info_util.register_inclusion(os.path.join(_HERE, "_commands", "block.py"))


NO_LINE = "an unknown line"
"""What `source_line` says of an equation that comes from no line of the user's."""


def source_line(eqn: JaxprEqn) -> str:
    """The user's line that an equation comes from, as `model.py:12 (mlp)`.

    A line of a library is followed by the user's own: `linear.py:7 (call) from
    model.py:12 (mlp)`.
    """
    first = source_info_util.user_frame(eqn.source_info.traceback)
    if first is None:
        return NO_LINE
    own = _own_frame(eqn)
    frames = (first,) if first is own else (first, own)
    return " from ".join(_line_text(frame) for frame in frames if frame)


class Position(NamedTuple):
    """Where an expression stands: a file, its first line, last line, and columns."""

    file: str
    span: tuple[int, int, int, int]


def is_transposed(eqn: JaxprEqn) -> bool:
    """Whether JAX made an equation by transposing another, as for a gradient."""
    return "transpose(" in str(eqn.source_info.name_stack)


def user_position(eqn: JaxprEqn) -> Position | None:
    """Where the user's own expression stands that an equation comes from."""
    frame = _own_frame(eqn)
    if frame is None:
        return None
    lines, columns = (
        (frame.start_line, frame.end_line),
        (frame.start_column, frame.end_column),
    )
    return Position(frame.file_name, (*lines, *columns))


def at_line_of(eqn: JaxprEqn, call: JaxprEqn) -> JaxprEqn:
    """An equation of what a call runs, at the call's line if it has none of its own.

    JAX keeps no lines outside of what it traces once for all calls, as `jnp.linalg.qr`.
    """
    if source_info_util.user_frame(eqn.source_info.traceback) is not None:
        return eqn
    traceback = call.source_info.traceback
    return eqn.replace(source_info=eqn.source_info.replace(traceback=traceback))


def _own_frame(eqn: JaxprEqn) -> source_info_util.Frame | None:
    """The innermost frame of the user's that is no library's."""
    traceback = eqn.source_info.traceback
    frame = source_info_util.user_frame(traceback)
    if frame is None or not _is_library(frame.file_name):
        return frame
    # Only here: the first frame is in a cache of JAX's, the others are not.
    frames = source_info_util.user_frames(traceback)
    return next((each for each in frames if not _is_library(each.file_name)), None)


def _is_library(file: str) -> bool:
    return any(f"{os.sep}{name}-packages{os.sep}" in file for name in ("site", "dist"))


def _line_text(frame: source_info_util.Frame) -> str:
    file = file_title(frame.file_name)
    return f"{file}:{frame.start_line} ({frame.function_name})"


def file_title(path: str) -> str:
    """The name of a file, or of a notebook's cell as its reader sees it: `In[3]`."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython and ipython.get_ipython()
    cell = shell and shell.compile.format_code_name(path)
    return cell[1] if cell else os.path.basename(path)


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
        by_place = eqn.ctx.threefry_partitionable
        if by_place != config.threefry_partitionable.value:
            stack.enter_context(config.threefry_partitionable(by_place))
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

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str: ...

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]: ...

    def key_value_dir_get_bytes(self, key: str) -> list[tuple[str, bytes]]: ...

    def wait_at_barrier(
        self, barrier_id: str, timeout_in_ms: int, process_ids: Sequence[int]
    ) -> None: ...


def coordination() -> Coordination | None:
    """This process's client of the coordination service; None without one."""
    return distributed.global_state.client


def process_number() -> int:
    """This process's number in its job, which asks for no device."""
    return distributed.global_state.process_id


def backend_is_up() -> bool:
    """Whether JAX has asked for devices, after which no setting reaches XLA."""
    return xla_bridge.backends_are_initialized()
