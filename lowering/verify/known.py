"""What the verifier knows of buffers: their memory, and which part of it they are."""

from __future__ import annotations

import dataclasses

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.regions import Region, is_empty, overlap


@dataclasses.dataclass(slots=True, kw_only=True)
class Root:
    """Memory of a parameter, of an allocation, or of a value that a statement makes.

    It has a result if one of the program's results lies there.
    """

    name: str
    is_param: bool = False
    has_result: bool = False
    allocated_in_loop: bool = False
    freed: bool = False
    writes: list[Region] = dataclasses.field(default_factory=list[Region])

    def holds(self, region: Region) -> bool:
        """Whether something of `region` has contents, or it has no elements."""
        return (
            self.is_param
            # Most often a written region is read again whole: it was made once.
            or any(region is write or overlap(region, write) for write in self.writes)
            or is_empty(region)
        )


@dataclasses.dataclass(slots=True, kw_only=True)
class KnownBuffer:
    """A buffer or alias that exists; in a ragged last chunk `shape` is smaller."""

    buffer: ir.Buffer
    root: Root
    region: Region
    shape: tuple[int, ...]
    aliases: tuple[str, ...] = ()

    @property
    def is_alias(self) -> bool:
        """Whether it was made by a Select; `aliases` has the names it came through."""
        return bool(self.aliases)


@dataclasses.dataclass(frozen=True, slots=True)
class InFlight:
    """What a communication that nobody has waited for reads and writes."""

    reads: tuple[KnownBuffer, ...]
    writes: tuple[KnownBuffer, ...]
    row: tuple[str, ...] = ()
    """The axes of a collective that runs in order with others over them, outside of
    loops."""


@dataclasses.dataclass(slots=True)
class Scope:
    """One run of a loop's body: the roots it made, and its writes through aliases."""

    names: list[str] = dataclasses.field(default_factory=list[str])
    alias_writes: list[KnownBuffer] = dataclasses.field(
        default_factory=list[KnownBuffer]
    )


def clash(a: KnownBuffer, b: KnownBuffer) -> bool:
    return a.root is b.root and overlap(a.region, b.region)


def related(a: tuple[str, ...], b: tuple[str, ...]) -> bool:
    """Whether one is the other, or an alias of it."""
    return a[: len(b)] == b or b[: len(a)] == a
