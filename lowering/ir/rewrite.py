"""Statements with some of their buffers replaced."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Mapping
from typing import Any, TypeVar, cast

from jhost.lowering.ir.statements import Buffer, Stmt

_S = TypeVar("_S", bound=Stmt)


def replace_buffers(stmt: _S, replaced: Mapping[str, Buffer]) -> _S:
    """`stmt`, and what it holds, with the buffers of those names replaced.

    It is itself where it has none of them.
    """
    if not replaced:
        return stmt
    changes: dict[str, Any] = {}
    for name in _fields(type(stmt)):
        before = getattr(stmt, name)
        after = _replace(before, replaced)
        if after is not before:
            changes[name] = after
    return dataclasses.replace(stmt, **changes) if changes else stmt


@functools.cache
def _fields(kind: type[Any]) -> tuple[str, ...]:
    # Those that hold buffers, or statements: each pass asks for each statement.
    fields = [(f.name, str(f.type)) for f in dataclasses.fields(kind)]
    return tuple(name for name, says in fields if "Buffer" in says or "Stmt" in says)


def _replace(value: Any, replaced: Mapping[str, Buffer]) -> Any:
    if isinstance(value, Buffer):
        return replaced.get(value.name, value)
    if isinstance(value, tuple):
        items = cast(tuple[Any, ...], value)
        # A statement that keeps its identity keeps the facts that are known of it.
        new = tuple([_replace(item, replaced) for item in items])
        return new if any(map(operator.is_not, new, items)) else items
    return replace_buffers(value, replaced)
