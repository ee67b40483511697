"""Statements with some of their buffers replaced."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jhost.lowering.ir import Buffer, For, If, Stmt


def replace_buffers(stmt: Stmt, replaced: Mapping[str, Buffer]) -> Stmt:
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
    if dataclasses.is_dataclass(value) and _is_statement(value):
        return replace_buffers(value, replaced)
    return value


def _is_statement(value: Any) -> bool:
    return isinstance(value, Stmt)
