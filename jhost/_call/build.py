"""From a call's annotated jaxpr to its program before any pass, in the user's names."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from jhost._call.config import Config, Role
from jhost._call.meshes import check_devices
from jhost._garbage import no_garbage_collection
from jhost._jax import arg_names, cached_by_jaxpr, is_wide, result_paths, with_width
from jhost.lowering.frontend.value_names import Variables
from jhost.lowering.frontend.values import DisplayNames
from jhost.lowering.ir.program import Program
from jhost.lowering.pipeline import build_program
from jhost.runtime.mesh import abstract


@cached_by_jaxpr
def built(call_jaxpr: Any, config: Config) -> Program:
    """The program of a jaxpr before any pass."""
    # In programs that JAX derived from a split one, only messages use the names.
    given = () if config.role else arg_names(call_jaxpr)
    params = _numbered(given, len(call_jaxpr.in_avals), "x")
    results = _numbered(result_paths(call_jaxpr), len(call_jaxpr.out_avals), "y")
    check_devices(config.name, call_jaxpr, config.mesh)
    with lowering_of(call_jaxpr):
        return build_program(
            call_jaxpr,
            name="_".join((config.name, *config.derived)),
            mesh=abstract(config.mesh),
            param_names=params,
            result_names=results,
            display_names=_display_names(call_jaxpr, config),
        )


@contextmanager
def lowering_of(call_jaxpr: Any) -> Generator[None]:
    """Inside, programs of a jaxpr are made and changed."""
    with no_garbage_collection(), with_width(is_wide(call_jaxpr)):
        yield


def _display_names(call_jaxpr: Any, config: Config) -> DisplayNames:
    """The names of operands and results in messages.

    The paths of results that JAX makes up for a derived program are not the user's.
    """
    derived = bool(config.role)
    other = "operand {} of the " + config.role if derived else "closed-over array {}"
    count = len(call_jaxpr.in_avals)
    own = arg_names(call_jaxpr)
    names = own if any(own) else config.operands
    if len(names) != count:  # dead code was removed since, and operands with it
        names = [""] * count
    params = [name or other.format(number) for number, name in enumerate(names)]
    paths = () if derived else result_paths(call_jaxpr)
    results = [path or None for path in paths] or [None] * len(call_jaxpr.out_avals)
    paths = frozenset(filter(None, names))
    return DisplayNames(params, results, _VARIABLES[config.role], paths)


_VARIABLES: Mapping[Role, Variables] = {
    "": "all",
    "forward": "alone",
    "recomputed": "alone",
    "tangents": "none",
    "backward": "none",
}


def _numbered(names: Sequence[str | None], count: int, prefix: str) -> tuple[str, ...]:
    """The user's names, or numbered ones in programs that JAX derived."""
    given = list(names) or [None] * count
    return tuple(name or f"{prefix}{number}" for number, name in enumerate(given))
