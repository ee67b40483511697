"""Which dims to pad so that dims read in windows have equal parts.

`x[1:] - x[:-1]` of 256 rows has 255, which no mesh divides.  With one row of padding
each device has its part of them, and needs one row of a neighbour's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from jhost._jax import NO_LINE, source_line
from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.bodies import programs
from jhost.lowering.ir.layout import axes_size
from jhost.lowering.ir.operation import followed_dims
from jhost.lowering.ir.program import Program
from jhost.lowering.padding.flat import with_paths
from jhost.lowering.padding.reached import DimOfValue, reached_axes
from jhost.lowering.padding.region import PadRequest

# Over 16 devices four elements are padded, and three are not.
_MOST_TIMES = 4
"""How many times as long padding may make a dim."""


def windowed_requests(program: Program) -> list[PadRequest]:
    """The dims that windows of a program, and of its bodies, want to be padded."""
    wanted = [
        found
        for each in programs(program)
        for stmt in each.body
        if isinstance(stmt, ir.Compute)
        for found in _windowed(each, stmt)
    ]
    mesh = dict(program.mesh.shape)
    # By all devices, before it is known which axes come: more than enough.
    devices = math.prod(mesh.values())
    uneven = [found for found in wanted if found[1] % devices]
    if not uneven:  # as in most programs
        return []
    reached = reached_axes(program)
    # Two statements may have one body: it is built once for each jaxpr.
    paths: dict[int, list[str]] = {}
    for path, each in with_paths(program):
        paths.setdefault(id(each), []).append(path)
    requests: list[PadRequest] = []
    for key, size, where in uneven:
        owner, name, dim = key
        # Sorted, because all processes have to write the same program.
        for axes in sorted(reached.get(key, ())):
            devices = axes_size(axes, mesh)
            # One element has no parts.  Of few elements, many more would be padding.
            few = size == 1 or _MOST_TIMES * size < devices
            if size % devices and not few:
                requests += [
                    PadRequest(
                        buffer=path + name,
                        dim=dim,
                        size=size,
                        axes=axes,
                        devices=devices,
                        where=where,
                    )
                    for path in paths[owner]
                ]
    return requests


def _windowed(
    program: Program, stmt: ir.Compute
) -> Iterator[tuple[DimOfValue, int, str]]:
    """The dims that windows of a computation read and make, with size and line."""
    (unit_eqn,) = stmt.unit.eqns
    rule = unit_eqn.rule
    if not rule.windowed:
        return
    line = source_line(unit_eqn.eqn)
    where = "" if line == NO_LINE else line
    for buffer, dim, mapped in followed_dims(stmt):
        if mapped.factor in rule.windowed:
            yield (id(program), buffer.name, dim), buffer.shape[dim], where
