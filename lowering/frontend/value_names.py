"""The names of values in messages: those of the user's own lines.

A line that assigns a value to a variable names the value.  Any other value is named by
its equation and its line.  The buffers of a program have other, short names, by which
tunings and processes know it.
"""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
from collections.abc import (
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Literal, NamedTuple, TypeAlias

from jax.extend.core import JaxprEqn, Var

from jhost._jax import Position, aval_of, file_title, is_transposed, user_position
from jhost.lowering.rules.properties import IDENTITIES

SourceSpan: TypeAlias = tuple[int, int, int, int]
"""Of an expression: its first line, its last, and the columns there."""

Variables: TypeAlias = Literal["all", "alone", "none"]
"""Which lines name values.

JAX keeps the lines in programs that it derives, but makes other values on them as well.
In a forward program those are derivatives: only an equation that is `alone` on its line
surely makes the assigned value.  In a backward they are cotangents, and none is sure.
"""


class ValueNames:
    """What each value is called: by the user, or else by what makes it.

    A value that is only cast or reshaped is called as it was before.
    """

    def __init__(self) -> None:
        self.known: dict[Var, str] = {}
        self.titles: dict[Var, str] = {}
        self.makers: dict[Var, JaxprEqn] = {}
        self.after: dict[Var, Var] = {}

    def __getitem__(self, var: Var) -> str:
        return self.of_user(var) or self.title_of(var)

    def title_of(self, var: Var) -> str:
        """The title of what makes a value, or the value that it hands on."""
        while var not in self.titles:
            before = self.after.get(var)
            if before is None or not (before in self.titles or before in self.makers):
                # Found only now: nobody asks it of values that have a name.
                self.titles[var] = title(self.makers[var])
            else:
                var = before
        return self.titles[var]

    def of_user(self, var: Var) -> str | None:
        """The name that the user's lines give, if they give one."""
        while var not in self.known:
            if var not in self.after:
                return None
            var = self.after[var]
        return self.known[var]


def value_names(
    eqns: Sequence[JaxprEqn],
    given: Mapping[Var, str],
    variables: Variables = "all",
    paths: Collection[str] = (),
) -> ValueNames:
    """Names for the values that equations make, beside those that are `given`.

    What a call makes on the way has the same line, and the last is its value.
    A value that is one of `paths`, cast or reshaped, keeps that name on all lines.
    Gradients are named after what they are gradients of, where that is one of `paths`.
    """
    names, found = ValueNames(), dict[Var, str]()
    names.known |= given
    names.titles |= given
    names.after |= {eqn.outvars[0]: source for eqn, source in _handed_on(eqns)}
    runs = [(at, list(run)) for at, run in itertools.groupby(eqns, user_position)]
    for position, made in runs:
        names.makers |= {var: eqn for eqn in made for var in eqn.outvars}
        sure = variables == "all" or (variables == "alone" and len(made) == 1)
        last = made[-1]
        if position is None or not sure or len(last.outvars) != 1:
            continue
        out, variable = last.outvars[0], assigned(position)
        if variable and not is_transposed(last):  # what a gradient makes of a line
            # A weight that a line casts or reshapes is called by its path all the same.
            if names.of_user(out) not in paths:
                found[out] = variable
        elif text := expression(position):
            names.titles[out] = _in_words(last, text, position)
    names.known |= forwarded_names(eqns, found) | dict(given)
    # JAX keeps a line in what it derives of it: forward and backward have the same.
    lines: dict[Position | None, list[JaxprEqn]] = {}
    for position, made in runs:
        lines.setdefault(position, []).extend(made)
    for made in lines.values():
        names.known |= _gradients(made, names, paths)
    return names


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


_SAME_VALUE = IDENTITIES | {
    "convert_element_type",
    "optimization_barrier",
    "reduce_precision",
    "reshape",
    "squeeze",
    "transpose",
}
"""Equations whose result has the name of their operand."""


def _handed_on(eqns: Sequence[JaxprEqn]) -> Iterator[tuple[JaxprEqn, Var]]:
    """Equations that give the value that they read, each with what it reads."""
    for eqn in eqns:
        if eqn.primitive.name in _SAME_VALUE and len(eqn.outvars) == 1:
            if isinstance(eqn.invars[0], Var):
                yield eqn, eqn.invars[0]


def described(eqn: JaxprEqn) -> str:
    """What an equation makes, by the user's expression or else by its title."""
    position = user_position(eqn)
    text = expression(position) if position else ""
    return _in_words(eqn, text, position) if position and text else title(eqn)


def _in_words(eqn: JaxprEqn, text: str, position: Position) -> str:
    gradient = "a gradient in " if is_transposed(eqn) else ""
    return f"{gradient}`{text}` at {_place(position)}"


# --- Gradients ---------------------------------------------------------------------- #


def _gradients(
    made: Sequence[JaxprEqn], names: ValueNames, paths: Collection[str]
) -> Iterator[tuple[Var, str]]:
    """Names of what a line's gradients make for the parameters that it reads.

    `dw = x.T @ dy` and `dx = dy @ w.T` are made of one line, and share `dy`.
    """
    if not any(map(is_transposed, made)):
        return
    read = [(eqn, var) for eqn in made for var in _vars(eqn)]
    weights = [(eqn, var) for eqn, var in read if names.of_user(var) in paths]
    for eqn in made:
        if not weights or len(eqn.outvars) != 1 or not is_transposed(eqn):
            continue
        size = _sizes(eqn.outvars[0])
        fit = [
            (reader, var)
            for reader, var in weights
            if _sizes(var) == size and var not in _vars(eqn)
        ]
        if len({var for _, var in fit}) > 1:
            shared = set(_vars(eqn))
            fit = [each for each in fit if not shared.isdisjoint(_vars(each[0]))]
        found = {names[var] for _, var in fit}
        if len(found) == 1:
            yield eqn.outvars[0], f"the gradient of {found.pop()}"


def _vars(eqn: JaxprEqn) -> list[Var]:
    return [atom for atom in eqn.invars if isinstance(atom, Var)]


def _sizes(var: Var) -> list[int]:
    """The sizes of its dims but 1, in no order: a gradient may come transposed."""
    return sorted(size for size in aval_of(var).shape if size != 1)


# --- Lines -------------------------------------------------------------------------- #


def title(eqn: JaxprEqn) -> str:
    """An equation by primitive and place, as ``exp in `softmax(x)` at model.py:12``."""
    position, primitive = user_position(eqn), eqn.primitive.name
    name = _PLAIN.get(primitive, primitive)
    if position is None:
        return name
    if text := expression(position):
        gradient = "the gradient of " if is_transposed(eqn) else ""
        name = f"{name} in {gradient}`{text}`"
    return f"{name} at {_place(position)}"


_PLAIN = {
    "add_any": "a sum of gradients",
    "broadcast_in_dim": "a broadcast",
    "convert_element_type": "a cast",
    "dot_general": "a matmul",
    "reduce_sum": "a sum",
}


def _place(position: Position) -> str:
    return f"{file_title(position.file)}:{position.span[0]}"


_LONGEST = 40


def expression(position: Position) -> str:
    """The text of the expression there, or nothing.

    A long call is `function(...)`, and a long product of two is `... @ w` or `x @ ...`.
    """
    parsed = _parsed(position.file)
    lines, node = parsed.lines, parsed.expressions.get(position.span)
    if node is None:
        return ""
    if not (text := _short(node, lines)) and isinstance(node, ast.Call):
        text = _short(node.func, lines)
        return f"{text}(...)" if text else ""
    if not text and isinstance(node, ast.BinOp):
        return _shortened(node, lines)
    return text


_OPERATORS: Mapping[type[ast.operator], str] = {
    ast.Add: "+",
    ast.Div: "/",
    ast.MatMult: "@",
    ast.Mult: "*",
    ast.Sub: "-",
}


def _shortened(node: ast.BinOp, lines: Sequence[str]) -> str:
    """A long operation by its short operand, which mostly is a weight on the right."""
    sign = _OPERATORS.get(type(node.op))
    if sign and (right := _short(node.right, lines)):
        return f"... {sign} {right}"
    if sign and (left := _short(node.left, lines)):
        return f"{left} {sign} ..."
    return ""


def _short(node: ast.expr, lines: Sequence[str]) -> str:
    """The text of an expression that is a short one on one line."""
    first, last, start, end = _span(node)
    # Columns count bytes.
    text = lines[first - 1].encode()[start:end].decode() if first == last else ""
    return text if len(text) <= _LONGEST else ""


def assigned(position: Position) -> str | None:
    """The variable that the expression there is assigned to, as a whole."""
    return _parsed(position.file).assigned.get(position.span)


class _Parsed(NamedTuple):
    """The lines of a module, its expressions, and its variables by what sets them."""

    lines: Sequence[str]
    assigned: Mapping[SourceSpan, str]
    expressions: Mapping[SourceSpan, ast.expr]


def _parsed(file: str) -> _Parsed:
    """A module as it is now; a notebook's cell may have been written anew."""
    lines, last = linecache.getlines(file), _last_parsed(file)
    # The list is the same until `linecache` reads the file again.  To join and hash its
    # text for each equation took a tenth of the lowering of a U-Net.
    if not last or last[0].lines is not lines:
        last[:] = [_parsed_lines(lines)]
    return last[0]


@functools.lru_cache(maxsize=64)
def _last_parsed(file: str) -> list[_Parsed]:
    """What was made of a file last, if anything was."""
    return []


def _parsed_lines(lines: Sequence[str]) -> _Parsed:
    try:
        nodes = list(ast.walk(ast.parse("".join(lines))))
    except (SyntaxError, ValueError):  # a notebook's magic, or no Python
        return _Parsed(lines, {}, {})
    variables = {
        _span(value): ast.unparse(target)
        for target, value in itertools.chain.from_iterable(map(_pairs, nodes))
        if isinstance(target, ast.Name | ast.Attribute)
    }
    expressions = {_span(n): n for n in nodes if isinstance(n, ast.expr)}
    return _Parsed(lines, variables, expressions)


def _pairs(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | ast.stmt]]:
    """Targets, each with the value that is assigned to it."""
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
