"""What the verifier knows between two statements: buffers, transfers, streams."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import NoReturn, TypeAlias

from jhost import errors
from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.index import Index, LoopIndex, leaves
from jhost.lowering.ir.machine import (
    DEFAULT_STREAM,
    Machine,
    StreamKey,
    stream_key_text,
)
from jhost.lowering.ir.printer import statement_text, stream_text
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.ranks import AtRanks
from jhost.lowering.ir.regions import Region, whole_region
from jhost.lowering.ir.unit_printer import type_text
from jhost.lowering.units.evaluate import ChunkAt, UnitTypes
from jhost.lowering.verify.known import (
    InFlight,
    KnownBuffer,
    Root,
    Scope,
    clash,
    related,
)

TypesOfUnits: TypeAlias = dict[tuple[int, ChunkAt | None], tuple[ir.Unit, UnitTypes]]
"""What units take and give, by a unit's identity and the chunk that it works on."""


Ahead: TypeAlias = Callable[[KnownBuffer, bool], Sequence[int]]
"""Notes that a loop in stages reads or writes there; the iterations it must follow."""


class State(Machine):
    """The program so far; `fail` raises with the statement and iteration at hand."""

    def __init__(self, program: Program, after: str, types: TypesOfUnits) -> None:
        super().__init__(program.mesh.shape)
        self.program = program
        self.after = after
        self.known: dict[str, KnownBuffer] = {}
        self.scopes = [Scope()]
        self.in_flight: dict[str, InFlight] = {}
        self.stmt: ir.Stmt | None = None
        self.results = {buffer.name for buffer in program.results}
        self.frees = any(
            isinstance(stmt, ir.Deallocate) for stmt in ir.walk(program.body)
        )
        self.used_streams = {DEFAULT_STREAM}
        self.types = types
        self.staged: list[Ahead] = []

    # --- Errors --------------------------------------------------------------- #

    def fail(self, expected: str, got: str, rule: str) -> NoReturn:
        """Raise a `VerifyError` about the current statement."""
        raise errors.VerifyError(
            f"{self.where()}expected {expected}, got {got}: {rule}"
        )

    def where(self) -> str:
        """The pass, the statement and the iteration, to begin a message with."""
        after = f"after {self.after}: " if self.after else ""
        text = f"{statement_text(self.stmt, self.known)}: " if self.stmt else ""
        at = ", ".join(f"{name} = {value}" for name, value in self.loops.items())
        return f"{after}{text}" + (f"at {at}: " if at else "")

    # --- Indices -------------------------------------------------------------- #

    def value(self, index: Index) -> AtRanks:
        """The value of `index` here, at every rank."""
        unknown = leaves(index) - self.ranks.leaves.keys()
        if unknown := unknown - set(map(LoopIndex, self.loops)):
            self.fail(
                "loop indices and axes in scope",
                ", ".join(sorted(map(str, unknown))),
                "an index depends on enclosing loops and on axes of the mesh",
            )
        return super().value(index)

    def static(self, index: Index, what: str = "index") -> int:
        """The value of an index that must not depend on the rank; `what` it is."""
        value = self.value(index)
        if isinstance(value, int):
            return value
        self.fail(
            f"one {what} for all devices",
            f"{index}",
            f"a {what} is static, so it has no rank",
        )

    # --- Buffers -------------------------------------------------------------- #

    def define(self, buffer: ir.Buffer, shape: tuple[int, ...], root: Root) -> None:
        """Make `buffer` exist with memory of its own."""
        self.check_new(buffer)
        root.has_result |= buffer.name in self.results
        region = whole_region(shape, len(self.ranks.sizes))
        known = KnownBuffer(buffer=buffer, root=root, region=region, shape=shape)
        self.known[buffer.name] = known
        self.scopes[-1].names.append(buffer.name)

    def define_alias(
        self,
        buffer: ir.Buffer,
        source: KnownBuffer,
        region: Region,
        shape: tuple[int, ...],
    ) -> None:
        """Make `buffer` exist as a part of `source`."""
        self.check_new(buffer)
        source.root.has_result |= buffer.name in self.results
        self.known[buffer.name] = KnownBuffer(
            buffer=buffer,
            root=source.root,
            region=region,
            shape=shape,
            aliases=(*source.aliases, buffer.name),
        )
        self.scopes[-1].names.append(buffer.name)

    def check_new(self, buffer: ir.Buffer) -> None:
        """The name is not taken."""
        if buffer.name in self.known:
            self.fail("a new name", buffer.name, "no buffer is defined twice")

    def check_shape(self, buffer: ir.Buffer, shape: tuple[int, ...]) -> None:
        """The declared shape is the first iteration's; a last chunk may be smaller."""
        if shape == buffer.shape:  # most often
            return
        pairs = list(zip(buffer.shape, shape, strict=False))
        # In the first iteration all indices are 0, and no chunk is the ragged last one.
        smaller = any(self.loops.values()) and all(n <= full for full, n in pairs)
        if len(shape) != len(buffer.shape) or not smaller:
            self.fail(
                f"{buffer.name} of shape {shape}",
                type_text(buffer),
                "a buffer has the shape of the value written to it",
            )

    def look_up(self, buffer: ir.Buffer) -> KnownBuffer:
        """The buffer as it was defined, still alive."""
        known = self.known.get(buffer.name)
        if known is None:
            self.fail(
                "a buffer that exists",
                buffer.name,
                "a buffer is defined before it is used",
            )
        # Most often it is the same object, and fields need no comparison.
        if known.buffer is not buffer and known.buffer != buffer:
            self.fail(
                f"{buffer.name}: {type_text(known.buffer)}",
                type_text(buffer),
                "one name is one buffer",
            )
        if known.root.freed:
            self.fail(
                "a live buffer",
                f"{buffer.name}, which is deallocated",
                "nothing uses a buffer after its Deallocate",
            )
        return known

    def read(self, buffer: ir.Buffer) -> KnownBuffer:
        """Check a read of `buffer`."""
        known = self.look_up(buffer)
        self.touch(known, writes=False)
        for name, flight in self.in_flight.items():
            if any(clash(known, other) for other in flight.writes):
                self.fail(
                    f"a Wait({name}) before",
                    f"a read of {buffer.name} while {name} is in flight",
                    "the result of a communication is read after its Wait",
                )
        if not known.root.holds(known.region):
            self.fail(
                "contents",
                f"{buffer.name}, to which nothing has been written",
                "a buffer is written before it is read",
            )
        return known

    def write(self, buffer: ir.Buffer, shape: tuple[int, ...]) -> KnownBuffer:
        """Check a write to `buffer`, which makes it exist where it does not."""
        is_new = buffer.name not in self.known
        if is_new:
            self.check_shape(buffer, shape)
            self.define(buffer, shape, Root(name=buffer.name))
        known = self.look_up(buffer)
        self.touch(known, writes=True)
        if not is_new:  # nothing else can touch new memory, and its shape is checked
            self._check_writable(known)
            self._check_written_shape(known, shape)
            self._check_single_write(known)
        known.root.writes.append(known.region)
        return known

    def _check_writable(self, known: KnownBuffer) -> None:
        name = known.buffer.name
        if known.root.is_param:
            self.fail(
                "a buffer of the program's own",
                f"{name}, a part of parameter {known.root.name}",
                "parameters and their aliases are only read",
            )
        for communication, flight in self.in_flight.items():
            if any(clash(known, other) for other in (*flight.reads, *flight.writes)):
                self.fail(
                    f"a Wait({communication}) before",
                    f"a write to {name} while {communication} is in flight",
                    "the buffers of a communication are written after its Wait",
                )

    def _check_written_shape(self, known: KnownBuffer, shape: tuple[int, ...]) -> None:
        root = known.root
        # The first write says how large a ragged chunk's buffer is in this iteration.
        if root.allocated_in_loop and not known.is_alias and not root.writes:
            self.check_shape(known.buffer, shape)
            known.shape, known.region = (
                shape,
                whole_region(shape, len(self.ranks.sizes)),
            )
        if known.shape != shape:
            self.fail(
                f"{known.buffer.name} of shape {shape}",
                f"{known.shape}",
                "a buffer has the shape of the value written to it",
            )

    def _check_single_write(self, known: KnownBuffer) -> None:
        if not known.is_alias:
            return
        for other in self.scopes[-1].alias_writes:
            # Through one alias, or a part of it, a sum is added to in the same
            # iteration.
            if clash(known, other) and not related(known.aliases, other.aliases):
                self.fail(
                    "aliases that share no element",
                    f"{other.buffer.name} and {known.buffer.name} of {known.root.name}",
                    "no element is written through two aliases in one iteration",
                )
        self.scopes[-1].alias_writes.append(known)

    def touch(self, known: KnownBuffer, *, writes: bool) -> None:
        """Note it, and check that no later iteration had its turn there before."""
        if not self.staged:
            return
        for ahead in self.staged[-1](known, writes):
            self.fail(
                f"{known.buffer.name} used here before iteration {ahead} uses it",
                "a stage of that iteration before this one",
                "stages are issued out of order only if they share no memory",
            )

    # --- Scopes --------------------------------------------------------------- #

    @contextmanager
    def scope(self, scope: Scope, *, ends: bool) -> Generator[None]:
        """Definitions inside belong to `scope`, which `ends` behind it or goes on."""
        self.scopes.append(scope)
        yield
        if ends:
            # An error at the end is no statement's fault.
            self.stmt = None
            self.check_ended()
            for name in scope.names:
                del self.known[name]
        self.scopes.pop()

    def check_ended(self) -> None:
        """Nothing that ends with this scope is in flight or leaks."""
        # Iterations that are under way as well have memory of the same names.
        made = [self.known[name] for name in self.scopes[-1].names]
        ended = {id(known.root) for known in made if not known.is_alias}
        for communication, flight in self.in_flight.items():
            if used := [
                k for k in (*flight.reads, *flight.writes) if id(k.root) in ended
            ]:
                self.fail(
                    f"a Wait({communication})",
                    f"the end of {used[0].root.name}'s life",
                    "every communication is waited for exactly once",
                )
        kept = {self.known[name].root.name for name in self.results & set(self.known)}
        # Up to `InsertDeallocations` a program frees nothing.
        for name in self.scopes[-1].names if self.frees else ():
            known = self.known[name]
            owned = not known.is_alias and not known.root.is_param
            if owned and not known.root.freed and name not in kept:
                self.fail(
                    f"a Deallocate({name})",
                    "none",
                    "a program that deallocates frees all buffers but its results",
                )

    # --- Streams -------------------------------------------------------------- #

    def check_restored(self, before: StreamKey, what: str) -> None:
        """The current stream is again what it was."""
        if self.current != before:
            self.fail(
                f"{stream_key_text(before)} to be current at the end of {what}",
                stream_key_text(self.current),
                "a loop and a program end on the stream that they began on",
            )

    def check_used(self, stream: ir.Stream) -> StreamKey:
        """A stream that was captured or set before."""
        key = self.stream_key(stream)
        if key not in self.used_streams:
            self.fail(
                "a stream that was set or captured before",
                stream_text(stream),
                "a stream is set before it is waited for",
            )
        return key
