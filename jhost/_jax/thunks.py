"""The streams that XLA's runtime puts communications on, read back from an executable.

jaxlib tells them from 0.12 on, for executables for GPUs, also on a machine without one.
`jax.experimental.thunky` has no public name for it.
"""

# jaxlib's bindings have no types; what leaves this module is typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import jax


def communication_streams(compiled: jax.stages.Compiled) -> list[int] | None:
    """The stream of each asynchronous communication, in the order of their starts.

    None where this JAX, or the executable's backend, does not tell.
    """
    try:
        thunky: Any = import_module("jaxlib.thunky.python.thunky")
        context: Any = import_module("jaxlib.mlir.ir").Context()
    except ImportError:  # JAX before 0.12
        return None
    thunky.register_dialect(context)
    executable: Any = compiled.runtime_executable()
    try:
        module = thunky.jax_executable_to_mlir(executable.serialize(), context)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None  # no executable of GPUs, or one that cannot be serialized
    with context:
        return list(_streams(module.operation))


def _streams(operation: Any) -> Iterator[int]:
    """The streams of an operation, and of the operations in its regions."""
    for region in operation.regions:
        for block in region.blocks:
            for each in block.operations:
                op = each.operation
                if op.name == "thunky.async_start" and _communicates(op):
                    yield int(op.attributes["stream_id"].value)
                else:
                    yield from _streams(op)


def _communicates(op: Any) -> bool:
    attributes = op.attributes
    return "is_communication" in attributes and attributes["is_communication"].value
