"""What the iterations of a cycle carry."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jhost.lowering.ir import statements as ir


@dataclasses.dataclass(frozen=True, slots=True)
class Carried:
    """The values that one iteration carries to the next.

    `came` has the values gathered for it.  `terms` have the values that are still to be
    added up or multiplied, by their names in the scan's body.  `stacks` have everything
    stacked so far.
    """

    carry: tuple[ir.Buffer, ...]
    came: tuple[ir.Buffer, ...]
    terms: Mapping[str, ir.Buffer]
    stacks: Mapping[str, ir.Buffer]

    @property
    def all(self) -> tuple[ir.Buffer, ...]:
        terms, stacks = self.terms.values(), self.stacks.values()
        return (*self.carry, *self.came, *terms, *stacks)

    def like(self, buffers: Sequence[ir.Buffer]) -> Carried:
        """The same with other `buffers`, in the order of `all`."""
        left = iter(buffers)
        carry, came = (
            tuple(next(left) for _ in part) for part in (self.carry, self.came)
        )
        terms, stacks = (
            {name: next(left) for name in part} for part in (self.terms, self.stacks)
        )
        return Carried(carry, came, terms, stacks)
