"""Order between the steps of a loop: a stream is a chain of tokens.

XLA keeps no order but that of values.  So the values of one step and the inputs of the
next go through one `lax.optimization_barrier`, which also keeps XLA from merging the
chunks' matmuls and collectives back into one (docs/design.md, section 7).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from jax import lax

from jhost.lowering.ir import For, Select, walk
from jhost.lowering.printer import written
from jhost.lowering.verify_state import DEFAULT_STREAM, StreamKey

Values = tuple[Any, ...]


@dataclasses.dataclass
class Order:
    """What each stream last did, and the last computation of all.

    `depth` counts the loops around.  Outside of loops, on the stream that the program
    began on, nothing is ordered, so that XLA may fuse there.
    """

    chains: dict[StreamKey, Values] = dataclasses.field(
        default_factory=dict[StreamKey, Values]
    )
    last_compute: Values = ()
    in_flight: dict[str, Values] = dataclasses.field(default_factory=dict[str, Values])
    current: StreamKey = DEFAULT_STREAM
    depth: int = 0

    @property
    def active(self) -> bool:
        """Whether what comes now has a place in an order."""
        return self.depth > 0 or self.current != DEFAULT_STREAM

    def chain(self) -> Values:
        """The tokens of the current stream."""
        return self.chains.get(self.current, ())

    def before_compute(
        self, ins: Sequence[Any], moving: Sequence[bool], beside: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """`ins`, available once the stream and the compute queue get there.

        Operands that are the same in each iteration are left alone where others move.
        What stands `beside` them has to be complete by then as well.
        """
        # XLA:GPU has one compute queue: steps on other streams come in turn as well.
        deps = _distinct((*self.chain(), *self.last_compute))
        chosen = [k for k, moves in enumerate(moving) if moves] or range(len(ins))
        tied = self._tie([*(ins[k] for k in chosen), *beside], deps)
        tied, beside = tied[: len(chosen)], tied[len(chosen) :]
        result = list(ins)
        for k, value in zip(chosen, tied, strict=True):
            result[k] = value
        return result, beside

    def after_compute(self, outs: Sequence[Any]) -> None:
        """The step's results stand for it."""
        if self.active and outs:
            self.chains[self.current] = self.last_compute = tuple(outs)

    def before_communication(self, sources: Sequence[Any]) -> list[Any]:
        """`sources`, available once the stream gets there."""
        return self._tie(sources, self.chain())

    def issued(self, name: str, results: Sequence[Any]) -> None:
        """The communication is under way; its stream goes on."""
        self.in_flight[name] = tuple(results)

    def wait(self, name: str) -> None:
        """The current stream goes on when the communication has ended."""
        self._join(self.in_flight.pop(name))

    def synchronize(self, stream: StreamKey) -> None:
        """The current stream goes on when what is on `stream` has ended."""
        self._join(self.chains.get(stream, ()))

    def copy(self) -> Order:
        """The same state, to go on from in a branch."""
        return dataclasses.replace(
            self, chains=dict(self.chains), in_flight=dict(self.in_flight)
        )

    def _join(self, values: Values) -> None:
        if self.active:
            self.chains[self.current] = _distinct((*self.chain(), *values))

    def _tie(self, values: Sequence[Any], deps: Iterable[Any]) -> list[Any]:
        own = {id(value) for value in values}
        others = [dep for dep in deps if id(dep) not in own]
        if not (self.active and values and others):
            return list(values)
        # A barrier result that nobody uses keeps its operand in the barrier as long as
        # the operand has other users, as a step's results have.
        return list(lax.optimization_barrier((*values, *others))[: len(values)])


def _distinct(values: Iterable[Any]) -> Values:
    return tuple({id(value): value for value in values}.values())


def moving_names(loop: For) -> frozenset[str]:
    """The buffers that may differ between the iterations of `loop`."""
    names: set[str] = set()
    sources: dict[str, str] = {}
    for stmt in walk(loop.body):
        names |= {buffer.name for buffer in written(stmt)}
        if isinstance(stmt, Select):
            sources[stmt.out.name] = stmt.source.name
    for stmt in walk(loop.body):
        for buffer in () if isinstance(stmt, Select) else written(stmt):
            name = buffer.name
            while name in sources:
                name = sources[name]
                names.add(name)
    return frozenset(names)
