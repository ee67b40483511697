"""Index expressions: integers that depend on loop indices and on a device's rank.

Host IR keeps offsets symbolic, as nvFuser does, so that one printed loop stands for
every iteration and every device.  `evaluate` gives the value at one place, where a
rank may be an integer or a traced array.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

IndexLike: TypeAlias = "Index | int"


@dataclasses.dataclass(frozen=True, slots=True)
class Index:
    """An integer expression; arithmetic on it builds a larger one."""

    def __add__(self, other: IndexLike) -> Index:
        return _binary("+", self, other)

    def __radd__(self, other: IndexLike) -> Index:
        return _binary("+", other, self)

    def __sub__(self, other: IndexLike) -> Index:
        return _binary("-", self, other)

    def __rsub__(self, other: IndexLike) -> Index:
        return _binary("-", other, self)

    def __mul__(self, other: IndexLike) -> Index:
        return _binary("*", self, other)

    def __rmul__(self, other: IndexLike) -> Index:
        return _binary("*", other, self)

    def __floordiv__(self, other: IndexLike) -> Index:
        return _binary("//", self, other)

    def __mod__(self, other: IndexLike) -> Index:
        return _binary("mod", self, other)


@dataclasses.dataclass(frozen=True, slots=True)
class Constant(Index):
    """A known integer."""

    value: int

    def __str__(self) -> str:
        return str(self.value)


@dataclasses.dataclass(frozen=True, slots=True)
class LoopIndex(Index):
    """The index of an enclosing `For`, by name."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True, slots=True)
class Rank(Index):
    """This device's position along one mesh axis."""

    axis: str

    def __str__(self) -> str:
        return f"rank({self.axis})"


@dataclasses.dataclass(frozen=True, slots=True)
class Binary(Index):
    """`left op right`, with Python's meaning of `//` and `%`."""

    op: str
    left: Index
    right: Index

    def __str__(self) -> str:
        if self.op == "min":
            return f"min({self.left}, {self.right})"
        left, right = _operand_text(self, self.left), _operand_text(self, self.right)
        return f"{left} {self.op} {right}"


@dataclasses.dataclass(frozen=True, slots=True)
class Listed(Index):
    """One of several numbers: the one at a place, as `[3, 1, 2][rank(x)]`."""

    values: tuple[int, ...]
    place: Index

    def __str__(self) -> str:
        return f"{list(self.values)}[{self.place}]"


def _least(left: Any, right: Any) -> Any:
    # Of two ints NumPy would make an int64, and shapes have plain ints.
    both_known = isinstance(left, int) and isinstance(right, int)
    return min(left, right) if both_known else np.minimum(left, right)


_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "//": 2, "mod": 2}
_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "mod": operator.mod,
    "min": _least,
}


def as_index(value: IndexLike) -> Index:
    """An integer as an expression; an expression as it is."""
    return value if isinstance(value, Index) else Constant(int(value))


def minimum(left: IndexLike, right: IndexLike) -> Index:
    """The smaller of two expressions: the size of a ragged last chunk."""
    return _binary("min", left, right)


def linear_rank(axes: Sequence[str], mesh: Mapping[str, int]) -> Index:
    """This device's position along several axes together, the first one major."""
    rank: Index = Constant(0)
    for axis in axes:
        rank = rank * mesh[axis] + Rank(axis)
    return rank


def evaluate(index: Index, values: Mapping[Index, Any]) -> Any:
    """The value of `index` where `values` gives each `LoopIndex` and `Rank`.

    Values are integers, arrays, or traced arrays for the ranks of an SPMD program;
    `min` and lists are of no traced ones: they stand for sizes and partners, which are
    static.
    """
    match index:
        case Constant(value=value):
            return value
        case Binary(op=op, left=left, right=right):
            return _OPERATORS[op](evaluate(left, values), evaluate(right, values))
        case Listed(values=numbers, place=place):
            return np.asarray(numbers)[evaluate(place, values)]
        case _:
            return values[index]


def substituted(index: Index, values: Mapping[Index, Index]) -> Index:
    """`index` with other expressions for some of its loop indices and ranks."""
    match index:
        # Built anew, so that what the new operands make constant is folded.
        case Binary(op=op, left=left, right=right):
            return _binary(op, substituted(left, values), substituted(right, values))
        case Listed(values=numbers, place=place):
            return Listed(numbers, substituted(place, values))
        case _:
            return values.get(index, index)


def without_mods(index: Index, extents: Mapping[str, int]) -> Index:
    """`index` in loops of so many iterations, without a `mod` that changes nothing."""
    match index:
        case Binary(op="mod", left=left, right=Constant(value=most)) if all(
            0 <= value < most for value in _values(left, extents)
        ):
            return without_mods(left, extents)
        case Binary(op=op, left=left, right=right):
            return _binary(op, *(without_mods(i, extents) for i in (left, right)))
        case _:
            return index


def _values(index: Index, extents: Mapping[str, int]) -> Iterator[int]:
    """The values of an expression without ranks, in each iteration of some loops."""
    loops = [LoopIndex(name) for name in extents]
    for numbers in itertools.product(*map(range, extents.values())):
        yield evaluate(index, dict(zip(loops, numbers, strict=True)))


def leaves(index: Index) -> frozenset[Index]:
    """The loop indices and ranks that `index` depends on."""
    match index:
        case Constant():
            return frozenset()
        case Binary(left=left, right=right):
            return leaves(left) | leaves(right)
        case Listed(place=place):
            return leaves(place)
        case _:
            return frozenset({index})


def ranks(index: Index) -> frozenset[Rank]:
    """The ranks that `index` depends on; without any it is the same on all devices."""
    return frozenset(leaf for leaf in leaves(index) if isinstance(leaf, Rank))


def _binary(op: str, left: IndexLike, right: IndexLike) -> Index:
    left, right = as_index(left), as_index(right)
    # Folded while it is built, so that texts have no `* 1`.  Expressions of one value
    # are then equal more often, and `schedule/stages.py` compares places by equality.
    if isinstance(left, Constant) and isinstance(right, Constant):
        return Constant(int(_OPERATORS[op](left.value, right.value)))
    match op, left, right:
        case "+", _, Constant(value=0):
            return left
        case "+", Constant(value=0), _:
            return right
        case ("*", _, Constant(value=1)) | ("-", _, Constant(value=0)):
            return left
        case "*", Constant(value=1), _:
            return right
        case ("*", Constant(value=0), _) | ("*", _, Constant(value=0)):
            return Constant(0)
        case "//", _, Constant(value=1):
            return left
        # Sums lean to the left, so that the same terms in the same order are equal.
        case "+", _, Binary(op="+", left=first, right=second):
            return left + first + second
        case "-", Constant(value=a), Binary(op="+", left=x, right=Constant(value=b)):
            return Constant(a - b) - x
        case _:
            return Binary(op, left, right)


def _operand_text(parent: Binary, child: Index) -> str:
    if not isinstance(child, Binary) or child.op == "min":
        return str(child)
    # A right operand of equal precedence needs brackets: a - (b - c).
    tight = _PRECEDENCE[child.op] - (child is parent.right)
    return f"({child})" if tight < _PRECEDENCE[parent.op] else str(child)
