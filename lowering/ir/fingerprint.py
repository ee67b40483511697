"""Everything that a program does, as lines of text that are the same in every process.

The printed program leaves out what its reader does not need: most parameters of the
equations.  What two processes compare has them, and no addresses, which differ.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jhost._jax import Atom, ClosedJaxpr, close, is_tracing
from jhost.lowering.ir.bodies import programs
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import Compute, walk

# A function in a parameter prints with its address, another one in each process.
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]+")


def fingerprint(program: Program) -> str:
    """All that a program does, in 32 hexadecimal digits; its name does not count."""
    text = "\n".join(fingerprint_lines(program))
    # 128 bits: enough for all programs in a file of tunings to differ.
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def fingerprint_lines(program: Program) -> list[str]:
    """The statements of a program, then the equations of each with all parameters.

    The name of the program is not among them.
    """
    # A tuning must still hold if the function is renamed.
    _, *statements = str(program).splitlines()
    lines = [line.strip() for line in statements if line.strip()]
    for stmt in (s for each in programs(program) for s in walk(each.body)):
        if isinstance(stmt, Compute):
            outs = ", ".join(buffer.name for buffer in stmt.outs)
            eqns = [unit_eqn.eqn for unit_eqn in stmt.unit.eqns]
            texts = _eqn_texts(stmt.unit.invars, eqns)
            lines += [f"{outs}: {text}" for text in texts]
    return lines


def _eqn_texts(invars: Sequence[Var], eqns: Sequence[JaxprEqn]) -> Iterator[str]:
    numbers = _numbers(invars, eqns)
    for eqn in eqns:
        operands = ", ".join(_atom_text(atom, numbers) for atom in eqn.invars)
        yield f"{eqn.primitive.name}({operands}) {value_text(eqn.params)}"


def _atom_text(atom: Atom, numbers: Mapping[Var, int]) -> str:
    if isinstance(atom, Literal):
        return value_text(atom.val)
    return f"{numbers[atom]}:{atom.aval}"


def value_text(value: Any) -> str:
    """A parameter as text: sets are sorted, and arrays become digests.

    An array that is spread over processes becomes its type.
    """
    match value:
        case Mapping():
            items = [f"{key}={value_text(item)}" for key, item in value.items()]
            return f"{{{', '.join(sorted(items))}}}"
        case Set():
            # Python orders the strings of a set by a seed of the process.
            return f"{{{', '.join(sorted(map(value_text, value)))}}}"
        case tuple() | list():
            return f"({', '.join(map(value_text, value))})"
        case Jaxpr() | ClosedJaxpr():
            return _jaxpr_text(close(value))
        case np.ndarray():
            digest = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
            return f"{value.dtype}{value.shape} {digest[:16]}"
        # A constant of a trace around this one has no value yet.
        case _ if is_tracing(value):
            return str(jax.typeof(value))
        case jax.Array() if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            return f"{value.dtype} {value_text(jax.random.key_data(value))}"
        case jax.Array():
            # No process can read another one's part by itself.
            whole = value.is_fully_addressable or value.is_fully_replicated
            return value_text(np.asarray(value)) if whole else str(jax.typeof(value))
        case _:
            return _ADDRESS.sub("0x", repr(value))


def _jaxpr_text(jaxpr: ClosedJaxpr) -> str:
    invars = [*jaxpr.jaxpr.constvars, *jaxpr.jaxpr.invars]
    eqns = "; ".join(_eqn_texts(invars, jaxpr.eqns))
    types = ", ".join(str(var.aval) for var in invars)
    numbers = _numbers(invars, jaxpr.eqns)
    results = ", ".join(_atom_text(atom, numbers) for atom in jaxpr.jaxpr.outvars)
    return f"[{types} -> {eqns} -> {results}]"


def _numbers(invars: Sequence[Var], eqns: Sequence[JaxprEqn]) -> dict[Var, int]:
    # By the order in which they are made: JAX prints a variable by its identity.
    made = [var for eqn in eqns for var in eqn.outvars]
    return {var: number for number, var in enumerate([*invars, *made])}
