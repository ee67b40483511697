"""What a forward program hands to the backward one keeps its layout.

A value that was sharded stays so: it is marked where it leaves the one program and
where it enters the other, so that nothing moves between the two.  An operand of the
forward is not handed on as a copy but as it is, with the marks it got there; what the
forward gathered, the backward gathers again, in its own loops.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from jax.extend.core import JaxprEqn, Literal, Primitive, Var
from jax.sharding import NamedSharding

from jhost._annotate import spec_entries
from jhost._jax import Split, fresh_var, new_eqn, rewritten
from jhost._primitives import Spec, shard_p, stream_p
from jhost._program import Config, laid_out, streams_of
from jhost.lowering.ir import Buffer, StreamMark

_MARKS = frozenset({"stream", "serial", "shard", "sharding_constraint"})

Chain: TypeAlias = tuple[JaxprEqn, ...]
"""Marks on one value, each on what the one before it gives."""

Mark: TypeAlias = tuple[Primitive, Mapping[str, Any]]


def keep_layouts(split: Split, *, config: Config) -> Split:
    """The same two programs, with residuals in the layouts that they have anyway."""
    if config.mesh is None or not split.residuals:
        return split
    return _settled(split, config)


@functools.lru_cache(maxsize=1024)
def _settled(split: Split, config: Config) -> Split:
    chains = _chains(split)
    lean = _without_copies(split, chains)
    layouts = _layouts(split, lean, config)
    made = {r.result: r.operand for r in lean.residuals if r.result is not None}
    left, taken = _streams_to_mark(lean, config)
    specs = {result: layouts[operand] for result, operand in made.items()}
    first = _with_marked_results(lean.first, specs, left)
    second = _with_marked_operands(lean.second, layouts, chains, taken)
    return dataclasses.replace(lean, first=first, second=second)


def _layouts(split: Split, lean: Split, config: Config) -> dict[int, Spec]:
    """How each residual is laid out in the first program, by operand of the second.

    That of `split`: in `lean` nothing may be left of an operand that is handed on.
    """
    program = laid_out(split.first, config)
    invars = split.first.jaxpr.invars
    read = _first_readers(split.first.eqns)
    layouts: dict[int, Spec] = {}
    for before, residual in zip(split.residuals, lean.residuals, strict=True):
        if residual.given is None and before.result is not None:
            layouts[residual.operand] = spec_of(program.results[before.result])
        elif residual.given is not None and invars[residual.given] in read:
            layouts[residual.operand] = spec_of(program.params[residual.given])
    return layouts


def spec_of(buffer: Buffer) -> Spec:
    """The axes that shard each dim."""
    return tuple(dim.axes for dim in buffer.dims)


def _streams_to_mark(
    split: Split, config: Config
) -> tuple[dict[int, StreamMark], dict[int, StreamMark]]:
    """Marks for results of the first program, and for operands of the second.

    A program that keeps nothing but residuals, or that lost its marks on the way, is
    worked on in chunks as the other is.  One mark is enough for each stream.
    """
    _, here = streams_of(split.first, config)
    there, _ = streams_of(split.second, config)
    made = {r.result: r.operand for r in split.residuals if r.result is not None}
    lost = {result: here[result] for result in made if here[result]}
    lost = lost or {result: there[operand] for result, operand in made.items()}
    found = {} if any(there) else {op: here[result] for result, op in made.items()}
    return _one_of_each_stream(lost), _one_of_each_stream(found)


def _one_of_each_stream(
    marks: Mapping[int, StreamMark | None],
) -> dict[int, StreamMark]:
    streams = {mark.why: (number, mark) for number, mark in marks.items() if mark}
    return dict(streams.values())


# --- Operands of the forward -------------------------------------------------------- #


def _chains(split: Split) -> dict[int, Chain]:
    """The marks on each residual in the first program, by operand of the second."""
    makers = {eqn.outvars[0]: eqn for eqn in split.first.eqns if _is_mark(eqn)}
    chains: dict[int, Chain] = {}
    for residual in split.residuals:
        chain: list[JaxprEqn] = []
        if residual.result is not None:
            atom = split.first.jaxpr.outvars[residual.result]
            while (eqn := makers.get(atom)) is not None:
                chain.insert(0, eqn)
                atom = eqn.invars[0]
        chains[residual.operand] = tuple(chain)
    return chains


def _is_mark(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in _MARKS


def _without_copies(split: Split, chains: Mapping[int, Chain]) -> Split:
    """Residuals that are the first's operands, but for marks, taken from there."""
    jaxpr = split.first.jaxpr
    operands = {var: number for number, var in enumerate(jaxpr.invars)}
    residuals = list(split.residuals)
    copies: set[int] = set()
    for place, residual in enumerate(residuals):
        if residual.result is None or residual.result < split.kept:
            continue
        chain = chains[residual.operand]
        atom = chain[0].invars[0] if chain else jaxpr.outvars[residual.result]
        if not isinstance(atom, Literal) and atom in operands:
            copies.add(residual.result)
            residuals[place] = dataclasses.replace(
                residual, result=None, given=operands[atom]
            )
    left = [n for n in range(len(jaxpr.outvars)) if n not in copies]
    numbers = {number: new for new, number in enumerate(left)}
    return dataclasses.replace(
        split,
        first=rewritten(split.first, outvars=[jaxpr.outvars[n] for n in left]),
        residuals=tuple(
            r if r.result is None else dataclasses.replace(r, result=numbers[r.result])
            for r in residuals
        ),
    )


# --- Marks -------------------------------------------------------------------------- #


def _with_marked_results(
    closed_jaxpr: Any, specs: Mapping[int, Spec], streams: Mapping[int, StreamMark]
) -> Any:
    """The program with results laid out by `specs`, and streamed, where they are made.

    There, and not where they leave, all that read them read what is marked.
    """
    outvars = closed_jaxpr.jaxpr.outvars
    numbers = {outvars[number]: number for number in specs}
    eqns: list[JaxprEqn] = []
    for eqn in closed_jaxpr.eqns:
        made = [var for var in eqn.outvars if var in numbers]
        before = {var: fresh_var(var.aval) for var in made}
        eqns.append(eqn.replace(outvars=[before.get(v, v) for v in eqn.outvars]))
        for var in made:
            number = numbers[var]
            marks = [_shard(specs[number]), *_stream(streams.get(number))]
            eqns += _chained(before[var], marks, var, like=eqn)
    return rewritten(closed_jaxpr, eqns=eqns)


def _with_marked_operands(
    closed_jaxpr: Any,
    specs: Mapping[int, Spec],
    chains: Mapping[int, Chain],
    streams: Mapping[int, StreamMark],
) -> Any:
    """The program with operands laid out by `specs`, then marked as by `chains`."""
    jaxpr = closed_jaxpr.jaxpr
    readers = _first_readers(jaxpr.eqns)
    invars: list[Var] = list(jaxpr.invars)
    eqns: list[JaxprEqn] = []
    for number, spec in specs.items():
        var = invars[number]
        if var in readers:
            again = [eqn for eqn in _lasting(chains[number]) if not _is_met(eqn, spec)]
            marks = [_shard(spec), *_stream(streams.get(number))]
            marks += [(eqn.primitive, eqn.params) for eqn in again]
            invars[number] = fresh_var(var.aval)
            eqns += _chained(invars[number], marks, var, like=readers[var])
    return rewritten(closed_jaxpr, invars=invars, eqns=[*eqns, *jaxpr.eqns])


def _chained(
    before: Var, marks: Sequence[Mark], after: Var, *, like: JaxprEqn
) -> list[JaxprEqn]:
    """`marks`, one on the other, from one variable to another."""
    between = [fresh_var(after.aval) for _ in marks[1:]]
    return [
        new_eqn(primitive, [source], [out], params, like=like)
        for (primitive, params), source, out in zip(
            marks, [before, *between], [*between, after], strict=True
        )
    ]


def _shard(spec: Spec) -> Mark:
    return shard_p, {"spec": spec}


def _stream(mark: StreamMark | None) -> list[Mark]:
    if mark is None:
        return []
    chunks, pipeline = mark.chunks or "auto", mark.pipeline or "auto"
    return [(stream_p, {"axis": mark.dim, "chunks": chunks, "pipeline": pipeline})]


def _lasting(chain: Chain) -> Chain:
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
