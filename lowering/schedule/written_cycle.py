"""A cycle as it was written, and the same again in another program's names.

Candidates share the bodies of their scans.  So a cycle that was written for one of them
is written for the others by renaming what stands around it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.names import FreshNames
from jhost.lowering.schedule.copied import with_names


@dataclasses.dataclass(frozen=True, slots=True)
class WrittenCycle:
    """A cycle as it was written into a program.

    Attributes:
        scan: the scan that it stands for.
        stmts: the statements of the cycle.
        replaced: the new buffers of the scan's results, by name.
        said: what messages call the values that are written.
        asked: the names that were asked for, and those that they got.
    """

    scan: ir.Scan
    stmts: Sequence[ir.Stmt]
    replaced: Mapping[str, ir.Buffer]
    said: Mapping[str, str]
    asked: Sequence[tuple[str, str]]

    def fits(self, scan: ir.Scan) -> bool:
        """Whether the same cycle of another program's scan differs in names alone."""
        if scan.body is not self.scan.body or _kind(scan) != _kind(self.scan):
            return False
        around = [*zip(_around(self.scan), _around(scan), strict=True)]
        names = {before.name: after.name for before, after in around}
        return all(
            names[before.name] == after.name
            and dataclasses.replace(before, name=after.name) == after
            for before, after in around
        )

    def again(self, scan: ir.Scan, names: FreshNames) -> WrittenCycle:
        """The same for that scan; statements whose names stay are the same objects."""
        pairs = zip(_around(self.scan), _around(scan), strict=True)
        renamed = {before.name: after.name for before, after in pairs}
        for wanted, name in self.asked:
            renamed[name] = names.fresh(renamed.get(wanted, wanted))
        renamed = {old: new for old, new in renamed.items() if old != new}
        return WrittenCycle(
            scan=scan,
            stmts=with_names(self.stmts, renamed),
            replaced={
                renamed.get(name, name): dataclasses.replace(
                    buffer, name=renamed.get(buffer.name, buffer.name)
                )
                for name, buffer in self.replaced.items()
            },
            said={renamed.get(name, name): said for name, said in self.said.items()},
            asked=(),
        )


def _kind(scan: ir.Scan) -> tuple[int, ...]:
    """What a scan does with its body and its operands."""
    given = len(scan.consts), len(scan.carry)
    return *given, scan.length, scan.reverse, scan.unroll


def _around(scan: ir.Scan) -> tuple[ir.Buffer, ...]:
    """What a scan reads and makes outside of its body."""
    return (*scan.ins, *scan.outs)
