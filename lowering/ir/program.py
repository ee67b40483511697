"""A whole program."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax.sharding import AbstractMesh

from jhost.lowering.ir.marks import Mark
from jhost.lowering.ir.printer import program_lines
from jhost.lowering.ir.remarks import Remark
from jhost.lowering.ir.statements import Buffer, Stmt, node
from jhost.lowering.ir.unit_printer import mesh_text


@node
class Program:
    """A whole function on `mesh`: `params` in, `results` out.

    `is_body` says whether it is a body of control flow.
    `marks` are what the user asked for and no pass has taken up yet.
    `staying` says which values are to stay over which mesh axis, as predicted times
    decided; None lets the bytes decide (`layouts/activations.py`).
    `streamed` has the dims that pipelines will cut, by value, as planned before values
    had layouts (`layouts/hidden_dims.py`).
    `display_names` has what the user calls values, by buffer; texts do not say it.
    `derived` has facts that were found out about the program (`ir/derived.py`).
    """

    name: str
    mesh: AbstractMesh
    params: tuple[Buffer, ...]
    results: tuple[Buffer, ...]
    body: tuple[Stmt, ...]
    is_body: bool = False
    marks: tuple[Mark, ...] = ()
    remarks: tuple[Remark, ...] = ()
    staying: tuple[str, str] | tuple[()] | None = None
    # One mapping for all passes: what they make has the value's name and a word more.
    display_names: Mapping[str, str] = dataclasses.field(
        default_factory=dict[str, str], compare=False, repr=False
    )
    # Not compared: it is what a pass knew, and no part of what the program does.
    streamed: Mapping[str, Any] = dataclasses.field(
        default_factory=dict[str, Any], compare=False, repr=False
    )
    derived: dict[object, Any] = dataclasses.field(
        default_factory=dict[object, Any], init=False, compare=False, repr=False
    )

    def __str__(self) -> str:
        header = f"program {self.name}{mesh_text(self.mesh)}"
        parts = self.params, self.marks, self.body, self.results
        return "\n".join(program_lines(header, *parts))
