"""How much room a program has for sums under way: in a window of bytes, and in all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

from jhost.lowering.ir.program import Program
from jhost.lowering.schedule.blocks import blocks_of
from jhost.lowering.schedule.held import held
from jhost.lowering.schedule.scheduled_transfer import ScheduledTransfer, TransferForm

_WINDOW: Mapping[TransferForm, int] = {"permutes": 3, "collective": 5}
"""Sums under way take at most so many times the bytes of the largest sum's terms.

As permutes there is room for one all-reduce, which brings as much as it sends, and for
two reduce-scatters over two devices: a copy ends beside the next work.  Collectives
start later, and a network is slower.  There is room for five all-reduces, which work in
place, and for three reduce-scatters.
"""

_LAST_WINDOW = 2
"""The same behind the last work, where little hides a transfer under way.

There the gradient of a step's embedding comes, as large as that of its output weights.
"""


class Room:
    """The room for the sums among the transfers of a program."""

    def __init__(
        self, program: Program, transfers: Sequence[ScheduledTransfer]
    ) -> None:
        self.blocks = blocks_of(program)
        sums = [each for each in transfers if each.sums]
        self.largest = max((each.interval.bytes for each in sums), default=0)
        """The bytes of the largest sum's terms."""
        working = (n for n, block in enumerate(self.blocks.all) if block.works)
        self.last_work = max(working, default=-1)
        copied = any(each.way == "permutes" for each in sums)
        self.there = held(program) if copied else []
        """The bytes that the program holds at each block as it is."""
        self.most = max(self.there, default=0)

    def has(
        self,
        number: int,
        terms: Iterable[ScheduledTransfer],
        ways: Set[TransferForm],
        under_way: int,
    ) -> bool:
        """Whether the window has room for a block beside the bytes `under_way`.

        The block makes the `terms` of sums to come.  Those under way go in `ways`.
        """
        made = sum(each.held for each in terms)
        window = self.largest * min((_WINDOW[way] for way in ways), default=0)
        if number > self.last_work:
            made, window = self.blocks.makes(number), _LAST_WINDOW * self.largest
        return not (made and made + under_way > window)

    def is_full(self, number: int, *under_way: ScheduledTransfer) -> bool:
        """Whether permutes add to the most that the program holds at a block."""
        if not (self.there and under_way):
            return False
        return self.there[number] + sum(t.added for t in under_way) > self.most
