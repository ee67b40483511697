"""Control flow of the user's: statements that hold programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from jhost.lowering.ir.buffer import Buffer, node

# A body is a program, and a program has statements: only types go both ways.
if TYPE_CHECKING:
    from jhost.lowering.ir.program import Program


@node
class Scan:
    """Run `body` `length` times (`lax.scan`).

    The body takes the `consts`, the carried values, and a slice of each of `xs`.  It
    gives the carried values, and a slice of each of `ys`.  Carried values begin as
    `carry`, and end as `carried`.  `xs` and `ys` have a leading dim that the body's
    values lack.
    """

    body: Program
    consts: tuple[Buffer, ...]
    carry: tuple[Buffer, ...]
    xs: tuple[Buffer, ...]
    carried: tuple[Buffer, ...]
    ys: tuple[Buffer, ...]
    length: int
    reverse: bool = False
    unroll: int = 1
    where: str = ""

    @property
    def ins(self) -> tuple[Buffer, ...]:
        """What stands for each param of the body."""
        return (*self.consts, *self.carry, *self.xs)

    @property
    def outs(self) -> tuple[Buffer, ...]:
        """What stands for each result of the body."""
        return (*self.carried, *self.ys)

    @property
    def bodies(self) -> tuple[Program, ...]:
        return (self.body,)


@node
class While:
    """Run `body` as long as `condition` gives true (`lax.while_loop`).

    The condition takes `condition_consts` and the carried values.  The body takes the
    `consts` and the carried values, and gives the carried values.  They begin as
    `carry`, and end as `carried`.
    """

    condition: Program
    body: Program
    condition_consts: tuple[Buffer, ...]
    consts: tuple[Buffer, ...]
    carry: tuple[Buffer, ...]
    carried: tuple[Buffer, ...]
    where: str = ""

    @property
    def ins(self) -> tuple[Buffer, ...]:
        return (*self.condition_consts, *self.consts, *self.carry)

    @property
    def outs(self) -> tuple[Buffer, ...]:
        return self.carried

    @property
    def bodies(self) -> tuple[Program, ...]:
        return self.condition, self.body


@node
class Cond:
    """Run one of `branches`, by `index`, on `operands` (`lax.switch`)."""

    index: Buffer
    branches: tuple[Program, ...]
    operands: tuple[Buffer, ...]
    outs: tuple[Buffer, ...]
    where: str = ""

    @property
    def ins(self) -> tuple[Buffer, ...]:
        return (self.index, *self.operands)

    @property
    def bodies(self) -> tuple[Program, ...]:
        return self.branches


ControlFlow: TypeAlias = Scan | While | Cond
