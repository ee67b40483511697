"""`jhost.profile`: a function's calls recorded, and what of them overlapped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jhost import errors
from jhost._api import JitFunction, as_jhost_function
from jhost._calibration_holds import rates_here
from jhost._call.arguments import by_name
from jhost._call.stages import Compiled
from jhost.lowering.cost.choose_permutes import ranked_kinds
from jhost.lowering.explain import puts
from jhost.lowering.ir.display_names import displayed_statements
from jhost.lowering.ir.scopes import statement_texts
from jhost.runtime.devices import devices_of
from jhost.runtime.profile.hlo_text import parse_module
from jhost.runtime.profile.origins import Operations
from jhost.runtime.profile.report import OverlapReport, overlap_report
from jhost.runtime.profile.timeline import timeline
from jhost.runtime.profile.trace import read_trace, record

_WARM_UP, _CALLS = 2, 5


def profile(f: JitFunction[..., Any], /, *args: Any, **kwargs: Any) -> OverlapReport:
    """Runs a function a few times, and reports how much communication was hidden.

    It compiles the function, calls it twice to warm up, and then records five calls in
    a row with `jax.profiler`.  The calls are made as in a training loop: on GPUs the
    host does not wait for a call before it makes the next.  The report describes the
    call with the median time.  In a job of several processes each process has to call
    this function, and gets a report of its own devices.

    Args:
        f: a function made by `jhost.jit`.
        *args: arrays of the shapes and dtypes that `f` takes.  They are moved to the
            devices before anything is measured.  Donated arrays are copied, and stay
            valid.
        **kwargs: likewise.

    Returns:
        The report.  For each device it has the seconds of the call, of computation, of
        communication, of the hidden and the exposed communication, and of idle time.
        It also has the efficiency of the overlap, and the predicted times.  For each
        statement of the Host IR program it says how long its chunks took, and how much
        of that time was exposed.  `str` is a table, and `save` writes a picture, a page
        or a trace for Perfetto.

    Raises:
        ArgumentError: `f` is not a jhost function, or an argument is a type.
        ProfileError: another profile is being recorded, or the profiler saw nothing.

    Example:
        >>> import jax.numpy as jnp
        >>> import jhost
        >>> f = jhost.jit(lambda x: jhost.stream(x @ x, axis=0, chunks=2))
        >>> report = jhost.profile(f, jnp.ones((128, 128)))
        >>> report.mean.communication, report.mean.efficiency
        (0.0, None)
        >>> [s.times for s in report.statements if "dot_general" in s.text]
        [2]
    """
    f, args = as_jhost_function("profile", f, args)
    _check_arrays(by_name(f.__wrapped__, args, kwargs))
    compiled = f.lower(*args, **kwargs).compile()
    devices, program = devices_of(compiled.mesh), compiled.host_ir
    call = _caller(compiled, *f.__jhost_source__.static.without(args, kwargs))
    # XLA's CPU devices share their threads: two calls at once would hinder each other.
    wait = devices.platform == "cpu"
    _repeat(call, _WARM_UP, wait)
    trace = read_trace(record(lambda: _repeat(call, _CALLS, wait)))
    module = parse_module(compiled.as_text() or "")
    rates = rates_here(devices, puts(program))
    predicted = rates and ranked_kinds(program, rates)[0][1]
    return overlap_report(
        timeline(
            trace,
            Operations(module),
            calls=_CALLS,
            name=program.name,
            module=module.name,
            statements=statement_texts(program),
            values=displayed_statements(program),
        ),
        mesh=", ".join(f"{axis}={size}" for axis, size in program.mesh.shape.items()),
        device_kind=devices.kind,
        prediction=predicted,
    )


def _check_arrays(leaves: Mapping[str, Any]) -> None:
    """Refuse types: they are enough to lower a function, and not to run it."""
    types = [
        f"{name}: {leaf}"
        for name, leaf in leaves.items()
        if isinstance(leaf, jax.ShapeDtypeStruct)
    ]
    if types:
        raise errors.ArgumentError(
            "jhost.profile runs the function, and needs arrays; jnp.ones(x.shape, "
            "x.dtype) will do.",
            types,
        )


def _caller(
    compiled: Compiled, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Callable[[], Any]:
    """A call of the compiled function, with its arguments in place."""
    operands = tuple(args), dict(kwargs)
    # Else each call moves its operands, and the profile shows that.
    placed = jax.tree.map(_placed, operands, compiled.input_shardings)
    infos = compiled.args_info

    def call() -> Any:
        args, kwargs = jax.tree.map(_kept, placed, infos)
        return compiled(*args, **kwargs)

    return call


def _repeat(call: Callable[[], Any], times: int, wait: bool) -> Any:
    """Calls again and again, and waits for each or for the last; its results."""
    results: Any = None
    for _ in range(times):
        results = call()
        if wait:
            jax.block_until_ready(results)
    return jax.block_until_ready(results)


def _placed(leaf: Any, sharding: Any) -> Any:
    """The leaf on its devices; the program has no place for one that it never uses."""
    return leaf if sharding is None else jax.device_put(leaf, sharding)


def _kept(leaf: Any, info: Any) -> Any:
    """The leaf, or a copy where the call gives its memory away."""
    return jnp.copy(leaf) if info.donated else leaf
