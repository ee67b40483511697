"""Residuals keep their layouts between the forward program and the backward one.

A sharded value stays sharded.  It is marked where it leaves the forward program and
where it enters the backward one, so nothing moves between the two.  If the forward
gathered a value, the backward gathers it again, in its own loops.

Within one `jax.jit` XLA may find both gathers equal and keep the first one's result.
`jax.checkpoint` keeps it from that.  To keep a gathered value, name it in a policy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from jax.extend.core import JaxprEqn, Literal, Primitive, Var, jaxprs_in_params
from jax.sharding import NamedSharding

from jhost import errors
from jhost._annotate import spec_entries
from jhost._call.config import Config, derived_params, program_config
from jhost._call.program import host_program, laid_out, lower_as, streams_of
from jhost._call.residual_names import with_names
from jhost._jax import (
    Split,
    cached_by_jaxpr,
    calls,
    fresh_var,
    is_wide,
    new_eqn,
    rewritten,
    with_width,
)
from jhost._primitives import Spec, shard_p, stream_p
from jhost.lowering.frontend.inline_calls import inline_plain_calls
from jhost.lowering.ir.axis_parts import given_entries
from jhost.lowering.ir.marks import StreamChoice
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import Buffer
from jhost.lowering.rules.properties import MARKS
from jhost.lowering.schedule.recompute.programs import hand_over_least

MarkerChain: TypeAlias = tuple[JaxprEqn, ...]
"""Marks on one value, each on what the one before it gives."""

MarkerCall: TypeAlias = tuple[Primitive, Mapping[str, Any]]

Reached: TypeAlias = Mapping[int, tuple[str, StreamChoice]]
"""The streams that reach values by number, and the marks that would say so of them."""


def lay_out_residuals(split: Split, *, config: Config) -> Split:
    """The two programs with few bytes between them, laid out as they are made.

    Raises:
        JhostError: whatever the program that both come from is refused for.
    """
    params = derived_params({"config": config}, split.how)
    ahead = program_config(params["config"])
    if not config.unchecked:
        return _laid_out(split, ahead)
    try:
        laid_out = _laid_out(split, ahead)
        host_program(laid_out.first, ahead)
    except errors.JhostError:
        # Lowering the user's own program raises an error about it.  If it is in order,
        # lowering the first program says more.  With references, `jax.jit` compiles it.
        host_program(split.whole, config)
    return _laid_out(split, ahead)


def _laid_out(split: Split, config: Config) -> Split:
    if not split.residuals:
        return split
    parts = split.second, split.residuals, split.kept, split.by_policy
    return _laid_out_by_first(split.first, (*parts, split.names), config)


@cached_by_jaxpr
def _laid_out_by_first(first: Any, rest: tuple[Any, ...], config: Config) -> Split:
    split = Split(first, *rest)
    with with_width(is_wide(first) or is_wide(split.second)):
        lean = with_names(hand_over_least(split))
    # On one device there is nothing to lay out.
    if config.mesh is None:
        return lean
    of_results = _streams_of_results(lean, config)
    of_operands = {} if of_results else _streams_of_operands(lean, config)
    layouts = _layouts(split, lean, config)
    # If one program lost its marks on the way, the other's streams reach residuals of
    # it, and it works in the same chunks.
    taken = {} if calls(lean.second, stream_p) else _by_operand(of_results, lean)
    reached = of_results or of_operands
    first = _with_marked_results(lean, layouts, _one_of_each_stream(reached))
    second = _with_marked_operands(lean, layouts, _one_of_each_stream(taken))
    marked = with_names(dataclasses.replace(lean, first=first, second=second))
    if not of_operands:  # the other marks say what holds in `lean.first` without them
        lower_as(marked.first, lean.first)
    return marked


def _layouts(split: Split, lean: Split, config: Config) -> dict[int, Spec]:
    """How each residual is laid out in the first program, by operand of the second.

    A residual that is an operand has its layout in the whole first program: `lean` may
    lack marks that influence it.
    """
    made = laid_out(lean.first, config)
    whole = _marks_needed(lean.first) == _marks_needed(split.first)
    given = made if whole else laid_out(split.first, config)
    read = _first_readers(split.first.eqns)
    invars = split.first.jaxpr.invars
    layouts: dict[int, Spec] = {}
    for operand, residual in enumerate(lean.residuals):
        if residual.result is not None:
            layouts[operand] = _spec(made, made.results[residual.result])
        elif residual.given is not None and invars[residual.given] in read:
            layouts[operand] = _spec(given, given.params[residual.given])
    return layouts


def _spec(program: Program, buffer: Buffer) -> Spec:
    return given_entries(buffer, program.mesh.shape)


def _marks_needed(program: Any) -> int:
    """How many marks there are in a program, and in all programs that it holds."""
    return _marks(inline_plain_calls(program).eqns)


def _marks(eqns: Iterable[JaxprEqn]) -> int:
    held = (body for eqn in eqns for body in jaxprs_in_params(eqn.params))
    inside = sum(_marks(body.eqns) for body in held)
    return inside + sum(map(_is_mark, eqns))


def _streams_of_results(split: Split, config: Config) -> Reached:
    """The streams that reach residuals in the first program, by result of that."""
    _, streams = streams_of(split.first, config)
    return {n: at for n in _made(split) if (at := streams[n])}


def _streams_of_operands(split: Split, config: Config) -> Reached:
    """The streams that reach residuals in the second program, by result of the first.

    They matter because dead-code elimination may have removed the marked value from the
    first: a program that a checkpoint computes again has only residuals as results.
    """
    streams, _ = streams_of(split.second, config)
    return {n: at for n, operand in _made(split).items() if (at := streams[operand])}


def _by_operand(reached: Reached, split: Split) -> Reached:
    """The marks of results, by the operands of the second program that take them."""
    made = _made(split)
    return {made[result]: at for result, at in reached.items()}


def _one_of_each_stream(reached: Reached) -> dict[int, StreamChoice]:
    """One mark is enough for each stream."""
    streams = {stream: (number, mark) for number, (stream, mark) in reached.items()}
    return dict(streams.values())


def _made(split: Split) -> dict[int, int]:
    """The operand of the second that each result of the first is."""
    residuals = enumerate(split.residuals)
    return {r.result: operand for operand, r in residuals if r.result is not None}


# --- Marks -------------------------------------------------------------------------- #


def _with_marked_results(
    split: Split, specs: Mapping[int, Spec], streams: Mapping[int, StreamChoice]
) -> Any:
    """The first, with residuals laid out by `specs`, and streamed, where it makes them.

    Marked where it is made, a residual is marked for its readers in `first` as well.
    """
    outvars = split.first.jaxpr.outvars
    results = {outvars[number]: (number, op) for number, op in _made(split).items()}
    eqns: list[JaxprEqn] = []
    for eqn in split.first.eqns:
        made = [var for var in eqn.outvars if var in results]
        before = {var: fresh_var(var.aval) for var in made}
        eqns.append(eqn.replace(outvars=[before.get(v, v) for v in eqn.outvars]))
        for var in made:
            number, operand = results[var]
            marks = [_shard(specs[operand]), *_stream(streams.get(number))]
            eqns += _chained(before[var], marks, var, like=eqn)
    return rewritten(split.first, eqns=eqns)


def _with_marked_operands(
    split: Split, specs: Mapping[int, Spec], streams: Mapping[int, StreamChoice]
) -> Any:
    """The second, with operands laid out by `specs`, and marked as in the first."""
    jaxpr = split.second.jaxpr
    readers = _first_readers(jaxpr.eqns)
    chains = _chains(split)
    invars: list[Var] = list(jaxpr.invars)
    eqns: list[JaxprEqn] = []
    for number, spec in specs.items():
        var = invars[number]
        if var in readers:
            chain = _lasting(chains.get(number, ()))
            again = [eqn for eqn in chain if not _is_met(eqn, spec)]
            marks = [_shard(spec), *_stream(streams.get(number))]
            marks += [(eqn.primitive, eqn.params) for eqn in again]
            invars[number] = fresh_var(var.aval)
            eqns += _chained(invars[number], marks, var, like=readers[var])
    return rewritten(split.second, invars=invars, eqns=[*eqns, *jaxpr.eqns])


def _chains(split: Split) -> dict[int, MarkerChain]:
    """The marks on each residual where the first makes it, by operand of the second."""
    makers = {eqn.outvars[0]: eqn for eqn in split.first.eqns if _is_mark(eqn)}
    chains: dict[int, MarkerChain] = {}
    for result, operand in _made(split).items():
        chain: list[JaxprEqn] = []
        atom = split.first.jaxpr.outvars[result]
        while (eqn := makers.get(atom)) is not None:
            # Results are found from their end, and marks apply from the value on.
            chain.insert(0, eqn)
            atom = eqn.invars[0]
        chains[operand] = tuple(chain)
    return chains


def _is_mark(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in MARKS


def _chained(
    before: Var, marks: Sequence[MarkerCall], after: Var, *, like: JaxprEqn
) -> list[JaxprEqn]:
    """`marks`, one on the other, from one variable to another."""
    between = [fresh_var(after.aval) for _ in marks[1:]]
    return [
        new_eqn(primitive, [source], [out], params, like=like)
        for (primitive, params), source, out in zip(
            marks, [before, *between], [*between, after], strict=True
        )
    ]


def _shard(spec: Spec) -> MarkerCall:
    return shard_p, {"spec": spec}


def _stream(mark: StreamChoice | None) -> list[MarkerCall]:
    if mark is None:
        return []
    chunks, pipeline = mark.spec.chunks or "auto", mark.spec.pipeline or "auto"
    return [(stream_p, {"axis": mark.dim, "chunks": chunks, "pipeline": pipeline})]


def _lasting(chain: MarkerChain) -> MarkerChain:
    """`chain` without the streams that a `serial` further on keeps from its readers."""
    serials = [
        place for place, eqn in enumerate(chain) if eqn.primitive.name == "serial"
    ]
    last = max(serials, default=0)
    return tuple(
        eqn
        for place, eqn in enumerate(chain)
        if place >= last or eqn.primitive.name != "stream"
    )


def _is_met(eqn: JaxprEqn, spec: Spec) -> bool:
    """Whether a mark asks for nothing but what `spec` gives."""
    match eqn.primitive.name:
        case "shard":
            entries = eqn.params["spec"]
        case "sharding_constraint" if isinstance(eqn.params["sharding"], NamedSharding):
            entries = spec_entries(eqn.params["sharding"])
        case _:
            return False
    rest = ((),) * (len(spec) - len(entries))
    pairs = zip((*entries, *rest), spec, strict=True)
    return all(wanted in (None, axes) for wanted, axes in pairs)


def _first_readers(eqns: Iterable[JaxprEqn]) -> dict[Any, JaxprEqn]:
    readers: dict[Any, JaxprEqn] = {}
    for eqn in eqns:
        for atom in eqn.invars:
            if not isinstance(atom, Literal):
                readers.setdefault(atom, eqn)
    return readers
