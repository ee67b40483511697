"""What a forward program hands to the backward one keeps its layout.

A value that was sharded stays so: it is marked where it leaves the one program and
where it enters the other, so that nothing moves between the two.  An operand of the
forward is not handed on as a copy but as it is, with the marks it got there; what the
forward gathered, the backward gathers again, in its own loops.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from jax.extend.core import JaxprEqn, Literal, Var
from jax.sharding import NamedSharding

from jhost._annotate import spec_entries
from jhost._jax import Split, fresh_var, new_eqn, rewritten
from jhost._primitives import Spec, shard_p
from jhost._program import Config, laid_out
from jhost.lowering.ir import Buffer

_MARKS = frozenset({"stream", "serial", "shard", "sharding_constraint"})

Chain: TypeAlias = tuple[JaxprEqn, ...]
"""Marks on one value, each on what the one before it gives."""


def keep_layouts(split: Split, *, config: Config) -> Split:
    """The same two programs, with residuals in the layouts that they have anyway."""
    if config.mesh is None or not split.residuals:
        return split
    return _settled(split, config)


@functools.lru_cache(maxsize=1024)
def _settled(split: Split, config: Config) -> Split:
    chains = _chains(split)
    split = _without_copies(split, chains)
    program = laid_out(split.first, config)
    made: dict[int, Spec] = {}
    taken: dict[int, Spec] = {}
    for residual in split.residuals:
        if residual.result is not None:
            taken[residual.operand] = spec_of(program.results[residual.result])
            made[residual.result] = taken[residual.operand]
        elif residual.given is not None:
            taken[residual.operand] = spec_of(program.params[residual.given])
    return dataclasses.replace(
        split,
        first=_with_marked_results(split.first, made),
        second=_with_marked_operands(split.second, taken, chains),
    )


def spec_of(buffer: Buffer) -> Spec:
    """The axes that shard each dim."""
    return tuple(dim.axes for dim in buffer.dims)


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


def _with_marked_results(closed_jaxpr: Any, specs: Mapping[int, Spec]) -> Any:
    """The program with results laid out by `specs`, where they are made."""
    outvars = closed_jaxpr.jaxpr.outvars
    wanted = {outvars[number]: spec for number, spec in specs.items()}
    eqns: list[JaxprEqn] = []
    for eqn in closed_jaxpr.eqns:
        marked = {var: fresh_var(var.aval) for var in eqn.outvars if var in wanted}
        eqns.append(eqn.replace(outvars=[marked.get(v, v) for v in eqn.outvars]))
        for var, before in marked.items():
            eqns.append(_shard(before, var, wanted[var], like=eqn))
    return rewritten(closed_jaxpr, eqns=eqns)


def _with_marked_operands(
    closed_jaxpr: Any, specs: Mapping[int, Spec], chains: Mapping[int, Chain]
) -> Any:
    """The program with operands laid out by `specs`, then marked as by `chains`."""
    jaxpr = closed_jaxpr.jaxpr
    readers = _first_readers(jaxpr.eqns)
    invars: list[Var] = list(jaxpr.invars)
    marks: list[JaxprEqn] = []
    for number, spec in specs.items():
        var = invars[number]
        if var not in readers:
            continue
        like = readers[var]
        chain = [eqn for eqn in chains[number] if not _is_met(eqn, spec)]
        steps = [fresh_var(var.aval) for _ in range(1 + len(chain))]
        invars[number], *_ = steps
        after = [*steps[1:], var]
        marks.append(_shard(steps[0], after[0], spec, like=like))
        for eqn, before, out in zip(chain, steps[1:], after[1:], strict=True):
            marks.append(eqn.replace(invars=[before], outvars=[out]))
    return rewritten(closed_jaxpr, invars=invars, eqns=[*marks, *jaxpr.eqns])


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


def _shard(before: Var, after: Var, spec: Spec, *, like: JaxprEqn) -> JaxprEqn:
    return new_eqn(shard_p, [before], [after], {"spec": spec}, like=like)


def _first_readers(eqns: Iterable[JaxprEqn]) -> dict[Any, JaxprEqn]:
    readers: dict[Any, JaxprEqn] = {}
    for eqn in eqns:
        for atom in eqn.invars:
            if not isinstance(atom, Literal):
                readers.setdefault(atom, eqn)
    return readers
