"""The values of a program that is being built: a buffer for each, with its names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn, Literal, Var

from jhost._jax import aval_of
from jhost.lowering.frontend.inline_calls import FlatJaxpr
from jhost.lowering.frontend.value_names import (
    ValueNames,
    Variables,
    forwarded_names,
    value_names,
)
from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.names import FreshNames


class DisplayNames(NamedTuple):
    """What messages call params and results; None where a result has no own name.

    Which of the user's `variables` name the values between, `value_names` says.
    `paths` are the user's names of the arguments: a weight is called by its own
    wherever it is read, and so is its gradient.
    """

    params: Sequence[str]
    results: Sequence[str | None]
    variables: Variables = "all"
    paths: frozenset[str] = frozenset()

    def of(self, flat: FlatJaxpr) -> ValueNames:
        """Each value's name."""
        params = dict(zip(flat.invars, self.params, strict=True))
        results = zip(flat.outvars, self.results, strict=True)
        known = {var: name for var, name in results if name}
        names = value_names(flat.eqns, params, self.variables, self.paths)
        names.known |= forwarded_names(flat.eqns, known) | params
        return names


class Values:
    """Buffers for the variables of a jaxpr, and the statements that make them."""

    def __init__(
        self,
        flat: FlatJaxpr,
        result_names: Mapping[Var, str],
        display_names: DisplayNames,
    ) -> None:
        self.names = FreshNames()
        self.body: list[ir.Stmt] = []
        self.buffers: dict[Var, ir.Buffer] = {}
        self.taken: set[str] = set()
        self.result_names = forwarded_names(flat.eqns, result_names)
        self.value_names = display_names.of(flat)
        self.display_names: dict[str, str] = {}

    def params(
        self, invars: Sequence[Var], names: Sequence[str]
    ) -> tuple[ir.Buffer, ...]:
        pairs = zip(invars, names, strict=True)
        params = tuple(self.define(var, name) for var, name in pairs)
        self.taken.update(buffer.name for buffer in params)
        return params

    def results(
        self, outvars: Sequence[Var], names: Sequence[str]
    ) -> tuple[ir.Buffer, ...]:
        """The result buffers: each its own, and none a parameter's."""
        results: list[ir.Buffer] = []
        for var, name in zip(outvars, names, strict=True):
            buffer = self.buffers[var]
            # JAX may return a parameter, or one value twice.  Each result has its own
            # memory.
            if buffer.name in self.taken:
                buffer = self.set(buffer, var, name)
            self.taken.add(buffer.name)
            results.append(buffer)
        return tuple(results)

    def define(self, var: Var, name: str | None = None) -> ir.Buffer:
        self.buffers[var] = self.buffer(var, aval_of(var), name)
        return self.buffers[var]

    def buffer(self, var: Var, aval: Any, name: str | None) -> ir.Buffer:
        buffer = ir.Buffer(
            name=self.names.fresh(name or self.result_names.get(var, "v")),
            shape=tuple(aval.shape),
            dtype=aval.dtype,
            dims=(ir.Dim(),) * len(aval.shape),
            memory_space=aval.memory_space,
        )
        # By buffer, for passes keep names of buffers and not of variables.
        self.display_names[buffer.name] = self.value_names[var]
        return buffer

    def set(self, source: ir.Buffer, var: Var, name: str | None = None) -> ir.Buffer:
        """A copy of `source`: a value with a layout and a stream of its own."""
        out = self.buffer(var, source, name)
        self.body.append(ir.Set(out=out, source=source))
        return out

    def name_result(self, var: Var, name: str) -> None:
        """Calls what control flow makes as its body does, unless the user has a name.

        So are the values that are made of it further on.
        """
        if self.value_names.of_user(var) is None:
            self.value_names.known[var] = name
            self.display_names[self.buffers[var].name] = name

    def operand(self, eqn: JaxprEqn) -> ir.Buffer:
        return self.buffers[as_var(eqn.invars[0])]


def as_var(atom: Var | Literal) -> Var:
    """`atom`, which an identity reads and `inline_calls` has made a variable."""
    assert isinstance(atom, Var)
    return atom
