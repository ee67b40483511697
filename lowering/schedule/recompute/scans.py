"""Scans of a forward pass few bytes to scans of its backward, slice by slice.

In JAX the scan of a forward stacks all that its backward reads, such as the six inner
values of a SwiGLU.  The bodies of two such scans are a pair of programs too.  The body
that reads cheap values computes them again, from fewer slices.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from jax.extend.core import JaxprEqn, Literal, Var

from jhost._jax import (
    arg_names,
    aval_of,
    fresh_var,
    primitive_name,
    rewritten,
    scan_counts,
    scan_like,
    stacked_var,
    with_operand_names,
)
from jhost.lowering.frontend.inline_calls import FlatJaxpr, inline_plain_calls
from jhost.lowering.ir.layout import size_in_bytes
from jhost.lowering.rules.dim_rule import shape_of
from jhost.lowering.schedule.recompute.pair import Pair, on_others, renamed

LeastCut: TypeAlias = Callable[[Pair, Mapping[Var, int]], Pair]
"""A pair, and the bytes that handing on some of its values takes -> with the least."""


def with_least_stacked(pair: Pair, cost: Callable[[Var], int], least: LeastCut) -> Pair:
    """The two programs with the least between any two scans of theirs.

    Args:
        pair: the programs.
        cost: gives the bytes that passing a variable of the first takes.
        least: rewrites the bodies as a pair with the fewest bytes.
    """
    # By position, as the pair is a new one after each two scans that hand on less.
    for first in scans_in(pair.first.eqns):
        for second in scans_in(pair.second.eqns):
            pair = with_less_stacked(pair, first, second, cost, least)
    return pair


def with_less_stacked(
    pair: Pair, first: int, second: int, cost: Callable[[Var], int], least: LeastCut
) -> Pair:
    """The two programs with the least between two scans of theirs, by position."""
    if not (saved := _saved(pair, first, second)):
        return pair
    scans = _Scans(pair, (first, second), saved)
    bodies = scans.bodies()
    return scans.joined(least(bodies, scans.costs(bodies, cost)))


def scans_in(eqns: Sequence[JaxprEqn]) -> list[int]:
    """The positions of scans; a scan with effects stays as it is."""
    return [
        n
        for n, eqn in enumerate(eqns)
        if primitive_name(eqn) == "scan" and not eqn.effects
    ]


def _saved(pair: Pair, first: int, second: int) -> dict[int, int]:
    """The results of a first scan that are only for a second, by the second's operands.

    The first stacks them, and the second reads their slices once.  Nothing else in the
    second program reads them.
    """
    stacks, reads = pair.first.eqns[first], pair.second.eqns[second]
    # Slices of both are of the same iterations only if both run equally often.
    if stacks.params["length"] != reads.params["length"]:
        return {}
    _, count = scan_counts(stacks)
    ys = {y: n for n, y in enumerate(stacks.outvars) if n >= count}
    before = sum(scan_counts(reads))
    xs = {x: n for n, x in enumerate(reads.invars[before:], before)}
    # A stack that something else reads as a whole has to exist anyway.
    in_first, in_second = _reads(pair.first), _reads(pair.second)
    shared = {v for v, x in pair.saved if x not in xs or in_second[x] > 1}
    return {
        xs[x]: ys[value]
        for value, x in pair.saved
        if value in ys and value not in shared and not in_first[value]
    }


def _reads(program: Any) -> Counter[Any]:
    """How often each variable is read."""
    atoms: Iterable[Any] = (atom for eqn in program.eqns for atom in eqn.invars)
    read = Counter(atom for atom in atoms if not isinstance(atom, Literal))
    read.update(program.outvars)
    return read


@dataclasses.dataclass(frozen=True, slots=True)
class _Scans:
    """A scan of the first program that stacks values for a scan of the second.

    `places` says where they stand.  `saved` has, for operands of the second scan, the
    results of the first that they are; both by number.
    """

    pair: Pair
    places: tuple[int, int]
    saved: Mapping[int, int]

    @property
    def first(self) -> JaxprEqn:
        return self.pair.first.eqns[self.places[0]]

    @property
    def second(self) -> JaxprEqn:
        return self.pair.second.eqns[self.places[1]]

    @property
    def own_results(self) -> list[int]:
        """The results of the first scan that are not for the second alone."""
        saved = set(self.saved.values())
        return [n for n in range(len(self.first.outvars)) if n not in saved]

    @property
    def own_operands(self) -> list[int]:
        """The operands of the second scan that are not from the first."""
        return [n for n in range(len(self.second.invars)) if n not in self.saved]

    def bodies(self) -> Pair:
        first = inline_plain_calls(self.first.params["jaxpr"])
        second = inline_plain_calls(self.second.params["jaxpr"])
        results = tuple(first.outvars[n] for n in self.own_results)
        operands = tuple(second.invars[n] for n in self.own_operands)
        saved = ((first.outvars[y], second.invars[x]) for x, y in self.saved.items())
        return Pair(
            dataclasses.replace(first, outvars=results),
            dataclasses.replace(second, invars=operands),
            tuple(saved),
            self.pair.by_policy,
        )

    def costs(self, bodies: Pair, cost: Callable[[Var], int]) -> dict[Var, int]:
        """The bytes in an iteration that passing what the first scan has takes.

        Constants and slices exist outside, and so do stacks that others read.  A
        carried value would have to be stacked.
        """
        consts, count = scan_counts(self.first)
        # A scan of length 0 has bodies, too.
        length = max(1, self.first.params["length"])
        outside = [*self.first.invars]
        outside += [self.first.outvars[n] for n in self.own_results[count:]]
        inside = [*bodies.first.invars, *bodies.first.outvars[count:]]
        costs = {
            var: 0 if isinstance(atom, Literal) else math.ceil(cost(atom) / length)
            for var, atom in zip(inside, outside, strict=True)
        }
        # Nothing outside of a scan has the value that it carries in each iteration.
        carried = inside[consts : consts + count]
        return costs | {
            var: size_in_bytes(shape_of(var), aval_of(var).dtype) for var in carried
        }

    def joined(self, bodies: Pair) -> Pair:
        """The two programs with scans of these bodies."""
        stack = _Stack(self.first, self.own_results, bodies)
        taken = [stack.taken(value, inside) for value, inside in bodies.saved]
        read = self.read(bodies.second)
        same = {t.inside: read[t.place] for t in taken if t.place in read}
        taken = [t for t in taken if t.inside not in same]
        gone = {self.second.invars[n] for n in self.saved}
        saved = [each for each in self.pair.saved if each[1] not in gone]
        saved += [(t.whole, t.operand) for t in taken if isinstance(t.operand, Var)]
        second = self.with_operands(taken, bodies.second, same)
        return self.pair.with_eqns(
            _with(self.pair.first.eqns, self.places[0], stack.scan()),
            _with(self.pair.second.eqns, self.places[1], second),
            tuple(saved),
        )

    def read(self, body: FlatJaxpr) -> dict[tuple[Any, bool], Var]:
        """The constants and slices that the second's body reads, by what they are.

        A value of the first program, and whether it is a slice of it.
        """
        consts, count = scan_counts(self.second)
        values = {operand: value for value, operand in self.pair.saved}
        return {
            (values.get(atom, atom), n >= consts + count): var
            for n, var in zip(self.own_operands, body.invars, strict=True)
            if not consts <= n < consts + count
            and not isinstance(atom := self.second.invars[n], Literal)
        }

    def with_operands(
        self, taken: Sequence[_Taken], body: FlatJaxpr, same: Mapping[Var, Var]
    ) -> JaxprEqn:
        """The second scan, with a body that takes these values instead.

        It reads others instead of those that are the `same`.  New constants come before
        the old ones, and new slices behind the old ones.
        """
        # JAX's transpose of a scan (0.10 to 0.12) expects constants and slices that it
        # does not differentiate by at these ends.
        scan = self.second
        before, count = scan_counts(scan)
        old = dict(zip(self.own_operands, body.invars, strict=True))
        consts = [(t.operand, t.inside) for t in taken if not t.sliced]
        consts += [(scan.invars[n], var) for n, var in old.items() if n < before]
        carry = [var for n, var in old.items() if before <= n < before + count]
        xs = [(scan.invars[n], var) for n, var in old.items() if n >= before + count]
        xs += [(t.operand, t.inside) for t in taken if t.sliced]
        inside = [*(var for _, var in consts), *carry, *(var for _, var in xs)]
        new = rewritten(
            scan.params["jaxpr"],
            invars=inside,
            outvars=renamed(body.outvars, same),
            eqns=on_others(body.eqns, same),
        )
        names = arg_names(scan.params["jaxpr"])
        said = {old[n]: name for n, name in enumerate(names) if n in old}
        return scan_like(
            scan,
            with_operand_names(new, [said.get(var, "") for var in inside]),
            consts=[atom for atom, _ in consts],
            xs=[atom for atom, _ in xs],
            ys=scan.outvars[count:],
        )


def _with(eqns: Sequence[JaxprEqn], position: int, eqn: JaxprEqn) -> list[JaxprEqn]:
    return [*eqns[:position], eqn, *eqns[position + 1 :]]


@dataclasses.dataclass(frozen=True, slots=True)
class _Taken:
    """A value of the first program that a body reads, whole or a slice of it.

    It is `whole` in the first program, `operand` in the second, and `inside` in the
    body.
    """

    whole: Any
    operand: Any
    inside: Var
    sliced: bool

    @property
    def place(self) -> tuple[Any, bool]:
        """What it is outside; a literal is by itself."""
        return (
            id(self.whole) if isinstance(self.whole, Literal) else self.whole,
            self.sliced,
        )


class _Stack:
    """A first scan with a new body, which stacks what the second one's body reads."""

    def __init__(self, old: JaxprEqn, results: Sequence[int], bodies: Pair) -> None:
        first, (consts, count) = bodies.first, scan_counts(old)
        self.old, self.body, self.carried = old, first, first.outvars[:count]
        self.constants = dict(zip(first.invars, old.invars[:consts], strict=False))
        outside = [old.outvars[n] for n in results[count:]]
        self.ys = list(zip(first.outvars[count:], outside, strict=True))
        sliced = slice(consts + count, None)
        xs = zip(first.invars[sliced], old.invars[sliced], strict=True)
        self.wholes: dict[Var, Any] = {**dict(xs), **dict(self.ys)}

    def taken(self, value: Var, inside: Var) -> _Taken:
        sliced = value not in self.constants
        whole = self.stacked(value) if sliced else self.constants[value]
        # A literal stands where it is read, in either program.
        operand = whole if isinstance(whole, Literal) else fresh_var(whole.aval)
        return _Taken(whole, operand, inside, sliced)

    def stacked(self, value: Var) -> Any:
        """What has all slices of a value; the scan stacks it if nothing has."""
        if value not in self.wholes:
            self.wholes[value] = stacked_var(value, self.old.params["length"])
            self.ys.append((value, self.wholes[value]))
        return self.wholes[value]

    def scan(self) -> JaxprEqn:
        consts, count = scan_counts(self.old)
        body = rewritten(
            self.old.params["jaxpr"],
            invars=self.body.invars,
            outvars=[*self.carried, *(value for value, _ in self.ys)],
            eqns=self.body.eqns,
        )
        return scan_like(
            self.old,
            with_operand_names(body, arg_names(self.old.params["jaxpr"])),
            consts=self.old.invars[:consts],
            xs=self.old.invars[consts + count :],
            ys=[y for _, y in self.ys],
        )
