"""Units and types as text: what `printer.py` writes of a program's parts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var
from jax.sharding import AbstractMesh

from jhost.lowering.ir import statements as ir
from jhost.lowering.rules.dim_rule import shape_of

INDENT = "  "
# Parameters that say what an equation does and that its types do not show.
_SHOWN_PARAMS = (
    "axes",
    "axis",
    "dimension",
    "permutation",
    "start_indices",
    "limit_indices",
    "reverse",
    "y",
)


def is_inline(unit: ir.Unit) -> bool:
    """Whether a unit is one equation, which then stands in its statement."""
    return len(unit.eqns) == 1 and tuple(unit.eqns[0].eqn.outvars) == unit.outvars


def shared_units(body: tuple[ir.Stmt, ...]) -> list[ir.Unit]:
    units = [stmt.unit for stmt in ir.walk(body) if isinstance(stmt, ir.Compute)]
    return list({unit.name: unit for unit in units if not is_inline(unit)}.values())


def unit_lines(unit: ir.Unit) -> Iterator[str]:
    fresh = _letters()
    names = {var: next(fresh) for var in unit.invars}
    params = [f"{names[var]}: {aval_text(var)}" for var in unit.invars]
    yield f"unit {unit.name}({', '.join(params)}):"
    for unit_eqn in unit.eqns:
        eqn = unit_eqn.eqn
        call = eqn_text(eqn, names)
        names.update({var: next(fresh) for var in eqn.outvars})
        outs = [f"{names[var]}: {aval_text(var)}" for var in eqn.outvars]
        yield f"{INDENT}{', '.join(outs)} = {call}"
    yield f"{INDENT}return {', '.join(names[var] for var in unit.outvars)}"


def eqn_text(eqn: JaxprEqn, names: dict[Var, str]) -> str:
    parts = [
        _literal_text(v) if isinstance(v, Literal) else names[v] for v in eqn.invars
    ]
    shown = [
        name for name in _SHOWN_PARAMS if eqn.params.get(name) not in (None, False)
    ]
    parts += [f"{name}={eqn.params[name]}" for name in shown]
    return f"{eqn.primitive.name}({', '.join(parts)})"


def _literal_text(literal: Literal) -> str:
    is_number = isinstance(getattr(literal.aval, "dtype", None), np.dtype)
    if shape_of(literal) or not is_number:
        return aval_text(literal)
    return str(np.asarray(literal.val)[()])


def _letters() -> Iterator[str]:
    """a, b, ..., z, aa, ab, ..."""
    for length in itertools.count(1):
        for letters in itertools.product("abcdefghijklmnopqrstuvwxyz", repeat=length):
            yield "".join(letters)


# --- Types -------------------------------------------------------------------- #


def type_text(buffer: ir.Buffer) -> str:
    """The type of a buffer, as `f32[2@tp, 4]`."""
    dims = zip(buffer.shape, buffer.dims, strict=True)
    sizes = ", ".join(_dim_text(n, d) for n, d in dims)
    host = "<host>" if buffer.memory_space == jax.memory.Space.Host else ""
    text = f"{_dtype_text(buffer.dtype)}{host}[{sizes}]"
    if buffer.partial:
        reductions = [f"{reducer} {axis}" for axis, reducer in buffer.partial]
        text += f" partial({', '.join(reductions)})"
    return text


def mesh_text(mesh: AbstractMesh) -> str:
    axes = [f"{axis}={size}" for axis, size in mesh.shape.items()]
    return f" on {', '.join(axes)}" if axes else ""


def _dim_text(size: int, dim: ir.Dim) -> str:
    axes = dim.axes[0] if len(dim.axes) == 1 else f"({', '.join(dim.axes)})"
    stream = f"~{dim.stream}" if dim.stream else ""
    return f"{size}@{axes}{stream}" if dim.axes else f"{size}{stream}"


def aval_text(atom: Any) -> str:
    """The type of a variable or literal, as `f32[2, 4]`."""
    dtype = getattr(atom.aval, "dtype", "?")
    return f"{_dtype_text(dtype)}[{', '.join(map(str, shape_of(atom)))}]"


def _dtype_text(dtype: Any) -> str:
    name = str(getattr(dtype, "name", dtype))
    # `uint` before `int`, which is a part of it.
    for long, short in (("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c")):
        name = name.replace(long, short)
    return name
