"""Statements with some of their buffers replaced."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from jhost.lowering.ir.statements import Buffer, Stmt

_S = TypeVar("_S", bound=Stmt)


def replace_buffers(stmt: _S, replaced: Mapping[str, Buffer]) -> _S:
    """`stmt`, and what it holds, with the buffers of those names replaced."""
    changes = {
        field.name: _replace(getattr(stmt, field.name), replaced)
        for field in dataclasses.fields(stmt)
    }
    return dataclasses.replace(stmt, **changes)


def _replace(value: Any, replaced: Mapping[str, Buffer]) -> Any:
    if isinstance(value, Buffer):
        return replaced.get(value.name, value)
    if isinstance(value, tuple):
        return tuple(_replace(item, replaced) for item in value)
    return replace_buffers(value, replaced) if isinstance(value, Stmt) else value
