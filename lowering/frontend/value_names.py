"""What messages call the values that equations make: as the user's own lines do.

A line that assigns a value to a variable names it; any other is named by what made it,
and where.  The buffers of a program have short names of their own, which tunings and
processes know it by.
"""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, TypeAlias

from jax.extend.core import JaxprEqn, Var

from jhost._jax import Position, file_title, is_transposed, user_position
from jhost.lowering.rules.properties import IDENTITIES

SourceSpan: TypeAlias = tuple[int, int, int, int]
"""Of an expression: its first line, its last, and the columns there."""

Variables: TypeAlias = Literal["all", "alone", "none"]
"""Which lines name values.

JAX keeps the lines in programs that it derives, but makes other values on them as well.
In a forward program those are derivatives: only an equation that is `alone` on its line
surely makes the assigned value.  In a backward they are cotangents, and none is sure.
"""


def value_names(
    eqns: Sequence[JaxprEqn], given: Mapping[Var, str], variables: Variables = "all"
) -> dict[Var, str]:
    """A name for each value that an equation makes, beside those that are `given`.

    What a call makes on the way has the same line, and the last is its value.
    """
    names = dict(given)
    found: dict[Var, str] = {}
    for position, run in itertools.groupby(eqns, user_position):
        made = list(run)
        for eqn in made:
            names |= dict.fromkeys(eqn.outvars, _named_after(eqn, names) or title(eqn))
        sure = variables == "all" or (variables == "alone" and len(made) == 1)
        sure = sure and not is_transposed(made[-1])  # what a gradient makes of a line
        variable = assigned(position) if position and sure else None
        if variable and len(made[-1].outvars) == 1:
            found[made[-1].outvars[0]] = variable
    return names | forwarded_names(eqns, found) | dict(given)


def forwarded_names(
    eqns: Sequence[JaxprEqn], names: Mapping[Var, str]
) -> dict[Var, str]:
    """Names of values, also for what copies and marks make them of."""
    found = dict(names)
    for eqn in reversed(eqns):
        operand = eqn.invars[0] if eqn.primitive.name in IDENTITIES else None
        if isinstance(operand, Var) and eqn.outvars[0] in found:
            found.setdefault(operand, found[eqn.outvars[0]])
    return found


def _named_after(eqn: JaxprEqn, names: Mapping[Var, str]) -> str | None:
    """The name of the value that a mark or a copy hands on."""
    if eqn.primitive.name not in IDENTITIES or not isinstance(eqn.invars[0], Var):
        return None
    return names[eqn.invars[0]]


def title(eqn: JaxprEqn) -> str:
    """An equation by its primitive and line, as `dot_general at model.py:12`."""
    position, primitive = user_position(eqn), eqn.primitive.name
    if position is None:
        return primitive
    return f"{primitive} at {file_title(position.file)}:{position.span[0]}"


def assigned(position: Position) -> str | None:
    """The variable that the expression there is assigned to, as a whole."""
    text = "".join(linecache.getlines(position.file))
    return _assignments(text).get(position.span)


@functools.lru_cache(maxsize=64)
def _assignments(text: str) -> dict[SourceSpan, str]:
    """The variables of a module, by where the expressions assigned to them stand."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):  # a notebook's magic, or no Python
        return {}
    pairs = itertools.chain.from_iterable(map(_pairs, ast.walk(tree)))
    return {
        _span(value): ast.unparse(target)
        for target, value in pairs
        if isinstance(target, ast.Name | ast.Attribute)
    }


def _pairs(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | ast.stmt]]:
    """Targets, each with what is assigned to it."""
    match node:
        case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=elts)):
            if len(targets) == len(elts):
                yield from zip(targets, elts, strict=True)
        case ast.Assign(targets=[target], value=value):
            yield target, value
        case ast.AnnAssign(target=target, value=ast.expr() as value):
            yield target, value
        case ast.NamedExpr(target=target, value=value):
            yield target, value
        case ast.AugAssign(target=target):
            yield target, node  # the operation is the statement itself
        case _:
            pass


def _span(node: ast.expr | ast.stmt) -> SourceSpan:
    last, end = node.end_lineno or node.lineno, node.end_col_offset or 0
    return node.lineno, last, node.col_offset, end
