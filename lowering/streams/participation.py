"""How one statement takes part in a stream: the dims it reads and writes in chunks."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from fractions import Fraction

from jhost._text import counted
from jhost.lowering.ir.graph import Node
from jhost.lowering.ir.layout import axes_size
from jhost.lowering.ir.operation import operand_maps
from jhost.lowering.ir.statements import (
    Communicate,
    Compute,
    Cond,
    Reshard,
    Scan,
    Select,
    Set,
    While,
)
from jhost.lowering.rules.dim_rule import DimRule, Dims, shape_of
from jhost.lowering.rules.table import reason_of
from jhost.lowering.streams.halos import far_reads, fewest_steps

ONE = Fraction(1)


@dataclasses.dataclass(frozen=True, slots=True)
class Access:
    """A dim worked on in chunks: each is the same slice of `groups` equal stretches.

    While a plan is made, `groups` is relative to the mark's, and may be a fraction.
    In a finished plan it is a whole number.
    """

    dim: int
    groups: Fraction


# Plans need few fractions, but often, and making and comparing them is slow.  So most
# often equal fractions are one object.
@functools.lru_cache(maxsize=1024)
def _one_object(fraction: Fraction) -> Fraction:
    return fraction


@functools.lru_cache(maxsize=1024)
def _whole(number: int) -> Fraction:
    return divided(number, ONE)


@functools.lru_cache(maxsize=1024)
def times(fraction: Fraction, by: Fraction) -> Fraction:
    """A product of fractions."""
    return _one_object(fraction * by)


@functools.lru_cache(maxsize=1024)
def divided(number: Fraction | int, by: Fraction) -> Fraction:
    """A quotient of fractions."""
    quotient = number / by
    return ONE if quotient == 1 else _one_object(quotient)


@functools.lru_cache(maxsize=1024)
def largest_shared(fraction: Fraction, other: Fraction) -> Fraction:
    """The largest fraction that both are multiples of."""
    denominator = math.lcm(fraction.denominator, other.denominator)
    shared = math.gcd(int(fraction * denominator), int(other * denominator))
    return _one_object(Fraction(shared, denominator))


@dataclasses.dataclass(frozen=True, slots=True)
class Participation:
    """A node's part in a stream; operands and results without an access are whole.

    `factor` is the streamed factor of a computation, and `size` its steps on a device,
    or several of them together.  `groups` is the number of stretches that it consists
    of; a chunk takes equally many steps of each.
    """

    stream: str
    size: int
    groups: Fraction
    reads: Mapping[int, Access]
    writes: Mapping[int, Access]
    factor: int | None = None

    def of_stream(self, stream: str) -> Participation:
        """This part in a stream that may have another name by now."""
        same = stream == self.stream
        return self if same else dataclasses.replace(self, stream=stream)

    @property
    def steps(self) -> Fraction:
        """The steps in each group: what a loop can cut into chunks."""
        whole = self.groups is ONE  # most often
        return _whole(self.size) if whole else divided(self.size, self.groups)

    @property
    def ratio(self) -> Fraction:
        """How many times as many groups the node's results have as its operands."""
        if not self.reads or not self.writes:
            return ONE
        # All operands of a node have one number of groups, and so have all results.
        read, written = (
            next(iter(self.reads.values())),
            next(iter(self.writes.values())),
        )
        same = written.groups is read.groups or written.groups == read.groups
        return ONE if same else divided(written.groups, read.groups)

    def scaled(self, by: Fraction) -> Participation:
        """This part with `by` times as many groups."""
        if by is ONE or by == ONE:
            return self

        groups = times(self.groups, by)

        def scaled(access: Access) -> Access:
            same = access.groups is self.groups  # most often, and then it stays so
            return Access(access.dim, groups if same else times(access.groups, by))

        def scale(accesses: Mapping[int, Access]) -> dict[int, Access]:
            return {number: scaled(access) for number, access in accesses.items()}

        return dataclasses.replace(
            self,
            groups=groups,
            reads=scale(self.reads),
            writes=scale(self.writes),
        )


def participation_of(
    node: Node,
    stream: str,
    writes: bool,
    position: int,
    access: Access,
    mesh: Mapping[str, int],
) -> Participation | str:
    """The part of `node` in a stream that reaches one of its buffers by `access`.

    Returns:
        The part, or the reason why the node must work on the whole dim.
    """
    match node.stmt:
        case Compute() as stmt:
            return _compute_part(stmt, stream, writes, position, access, mesh)
        case Set(out=out) | Reshard(out=out):
            size = out.shape[access.dim]
            return Participation(stream, size, access.groups, {0: access}, {0: access})
        case Communicate() | Select() as stmt:
            return _communicate_part(stmt, stream, writes, access, mesh)
        case Scan() | While() | Cond() as stmt:
            kind = type(stmt).__name__.lower()
            return f"no stream goes through a {kind}; mark a value in its body"
        case _:
            return "it is not a computation"


def _compute_part(
    stmt: Compute,
    stream: str,
    writes: bool,
    position: int,
    access: Access,
    mesh: Mapping[str, int],
) -> Participation | str:
    (unit_eqn,) = stmt.unit.eqns
    rule, operands = unit_eqn.rule, operand_maps(stmt)
    entered = (rule.results if writes else operands)[position][access.dim]
    if entered is None or entered.factor in rule.inner or rule.pinned is not None:
        return whole_reason(stmt, access.dim)
    factor = entered.factor
    if factor in rule.windowed and (reason := far_reads(stmt, factor)):
        return reason
    # Each chunk would take as long as the whole: see `DimRule.unstreamed`.
    if factor in rule.unstreamed:
        return f"{unit_eqn.eqn.primitive.name} takes all of dim {access.dim} at once"

    def accesses(maps: tuple[Dims, ...]) -> dict[int, Access]:
        return {
            index: Access(dim, access.groups)
            for index, dims in enumerate(maps)
            for dim, mapped in enumerate(dims)
            if mapped is not None and mapped.factor == factor
        }

    size = rule.sizes[factor] // axes_size(unit_eqn.axes[factor], mesh)
    if factor in rule.windowed:  # between elements there may be gaps
        size //= fewest_steps(stmt, factor)
    # When groups are scaled up to whole numbers, they become a multiple of the
    # numerator, so that has to divide the size.
    if size % access.groups.numerator:
        return undivided(size)
    reads, written = accesses(operands), accesses(rule.results)
    # Each chunk would make a result without the dim again.
    if rule.reducers[factor] is None and len(written) < len(rule.results):
        return f"{unit_eqn.eqn.primitive.name} has results without that dim"
    return Participation(stream, size, access.groups, reads, written, factor)


def rule_of(node: Node) -> DimRule | None:
    """The rule of a computation."""
    if not isinstance(node.stmt, Compute):
        return None
    (unit_eqn,) = node.stmt.unit.eqns
    return unit_eqn.rule


def undivided(size: int) -> str:
    """Why so many steps cannot be cut where the dim is gathered or scattered."""
    return f"{counted(size, 'step')} do not divide into the shards of a gathered dim"


def whole_reason(stmt: Compute, dim: int) -> str:
    """Why a computation cannot work on `dim` in chunks."""
    (unit_eqn,) = stmt.unit.eqns
    primitive = unit_eqn.eqn.primitive.name
    if unit_eqn.rule.opaque:
        reason = reason_of(unit_eqn.eqn, unit_eqn.rule)
        return f"{primitive} works on whole arrays ({reason})"
    if unit_eqn.rule.pinned is not None:
        return f"{primitive} takes and gives whole parts, as its specs say"
    if primitive == "reshape":
        operand, result = unit_eqn.eqn.invars[0], unit_eqn.eqn.outvars[0]
        return (
            f"the reshape {shape_of(operand)} -> {shape_of(result)} neither splits "
            f"nor merges dim {dim} at its outermost"
        )
    because = f" ({unit_eqn.rule.reason})" if unit_eqn.rule.reason else ""
    return f"{primitive} needs dim {dim} whole{because}"


def _communicate_part(
    stmt: Communicate | Select,
    stream: str,
    writes: bool,
    access: Access,
    mesh: Mapping[str, int],
) -> Participation | str:
    """A communication keeps its dims; only the moved dim changes its groups.

    A gathered dim consists of D stretches, one from each device, and so did a scattered
    one.  Chunk s of the whole is the s-th slice of every shard, so the user need not
    reshape anything.
    """
    # 1: equally many groups behind the communication and before it.
    ratio = ONE
    if isinstance(stmt, Select) and access.dim == stmt.dim:
        return "a device keeps only its part of the dim"
    if isinstance(stmt, Communicate):
        devices = axes_size(stmt.axes, mesh)
        if access.dim == (stmt.dim if stmt.kind == "AllGather" else stmt.source_dim):
            ratio = Fraction(devices)
        elif access.dim == stmt.dim:
            ratio = Fraction(1, devices)
    size = stmt.source.shape[access.dim]
    if ratio is ONE:
        return Participation(stream, size, access.groups, {0: access}, {0: access})
    groups = divided(access.groups, ratio) if writes else access.groups
    read, written = Access(access.dim, groups), Access(access.dim, times(groups, ratio))
    return Participation(stream, size, groups, {0: read}, {0: written})
