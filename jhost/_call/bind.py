"""One call of a user's function: what it runs, and that as a call of the primitive."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jhost._call.config import Call
from jhost._call.execute import check_has_no_options
from jhost._call.explicit import result_types
from jhost._call.failures import explaining_failures
from jhost._call.given_shardings import CallKey
from jhost._call.program import host_program
from jhost._call.source import Source
from jhost._call.tracing import inside
from jhost._call.whole import for_devices, note
from jhost._jax import TracedCall, is_linearized
from jhost._primitives import jhost_p
from jhost.lowering.emit.program import specs_of
from jhost.runtime.mesh import explicit_mesh, with_types


def call_of(source: Source, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """What a call of the function with these arguments runs, and on what."""
    leaves = source.leaves(args, kwargs)
    key = source.key(leaves)
    with explaining_failures(source, key, args, kwargs):
        key = source.with_mesh(key, args, kwargs)
        traced = source.trace(key, args, kwargs)
        whole = source.left_whole(key, traced)
        call_jaxpr = traced.jaxpr if whole else source.call_jaxpr(key, traced)
    return Call(call_jaxpr, source.config(key), (*traced.consts, *leaves))


def bind(
    source: Source,
    key: CallKey,
    args: Any,
    kwargs: Any,
    *,
    named: bool = False,
    embedded: bool = False,
    compared: bool = True,
) -> Any:
    """One call of the primitive, in whatever trace there is.

    `named`: what is around the call names the devices.
    """
    key = source.with_mesh(key, args, kwargs)
    traced = source.trace(key, args, kwargs)
    if whole := source.left_whole(key, traced):
        note(whole, source.config(key))
        return _whole(source, key, traced, embedded)(*args, **kwargs)
    config = dataclasses.replace(
        source.config(key), embedded=embedded, compared=compared
    )
    config = source.identified(config, traced, args, kwargs)
    operands = [*traced.consts, *source.leaves(args, kwargs)]
    explicit = explicit_mesh(operands)
    call_jaxpr = source.call_jaxpr(key, traced, named or explicit is not None)
    in_program = inside.get() and explicit is None  # the one around has it
    # What a gradient runs is lowered then, and refused for the same.
    split = is_linearized(operands) and explicit is None and not config.tunings
    config = dataclasses.replace(config, unchecked=split and not in_program)
    call: Callable[..., Sequence[Any]] = functools.partial(
        jhost_p.bind, call_jaxpr=call_jaxpr, config=config
    )
    if inside.get():  # it is inlined, and nobody lowers it by itself
        check_has_no_options(config)
    if not (in_program or config.unchecked):
        # Now, while the user's call is at hand: what JAX derives is lowered later.
        program = host_program(call_jaxpr, config)
        if explicit is not None:
            _, given = source.given.specs(traced)
            specs = result_types(traced, given, specs_of(program, program.results))
            call = with_types(call, explicit, specs)
    return jax.tree.unflatten(traced.out_tree, call(*operands))


def _whole(
    source: Source, key: CallKey, traced: TracedCall, embedded: bool
) -> Callable[..., Any]:
    """The function as `jax.jit` compiles it; `embedded` in another's program."""
    fun = for_devices(source.fun, traced.jaxpr, key[0])
    if not embedded:
        return fun
    # The program around has no shardings of this function.
    return jax.jit(fun, **source.settings.for_jax, **source.given.named(key[0]))
