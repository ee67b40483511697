"""What holds for a call of a jhost function, and for what JAX derives from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

from jhost._annotate import Pipeline
from jhost._calibration_holds import rates_here
from jhost._jax import Derivation, cached
from jhost._tuning import Tuning
from jhost.runtime.compiler_options import PERMUTE_MODE
from jhost.runtime.devices import devices_of
from jhost.runtime.mesh import AnyMesh
from jhost.runtime.nccl import why_no_puts

Role: TypeAlias = Literal["", "forward", "recomputed", "tangents", "backward"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The settings of a jhost function and of every program derived from it.

    Attributes:
        name: the function's name, for messages.
        mesh: the mesh that it runs on, if it has one.
        chunks: as for `jhost.jit`.
        pipeline: likewise.
        replication_limit: likewise.
        finds: whether jhost looks for streams where nothing is marked.
        streams: how many streams a loop's iterations take turns on.  It is no argument
            of `jhost.jit`, because a GPU has one queue for computations.  `jhost.tune`
            tries fewer where that may gain.
        compiler_options: the options that the user gave for XLA.
        tunings: the tunings that the user gave.
        embedded: whether the call stands in a trace of somebody else's.  Other calls
            stand in a `jax.jit` of jhost's own, which sees to the compiler options.
        compared: whether the call is lowered in order to run, so that all processes
            have to agree on it.  One process may call `lower` alone.
        identity: lines about what makes the executable beside its program, such as
            donated arguments.  Processes compare them.
        role: the kind of program that JAX derived; empty for the user's own.
        batched: whether JAX derived it by `vmap`.
        left_to_xla: whether a function around the call is left to XLA, and so the call.
        operands: names for messages, of a program that JAX made without any.
        unchecked: whether the call was not lowered when the user made it.  A gradient's
            forward program is lowered instead.
    """

    name: str
    mesh: AnyMesh | None
    chunks: int | Literal["auto"]
    pipeline: Pipeline
    replication_limit: int
    finds: bool = True
    streams: int = 4
    compiler_options: tuple[tuple[str, Any], ...] = ()
    tunings: tuple[Tuning, ...] = ()
    embedded: bool = False
    compared: bool = True
    identity: tuple[str, ...] = ()
    role: Role = ""
    batched: bool = False
    left_to_xla: bool = False
    operands: tuple[str, ...] = ()
    unchecked: bool = False

    @property
    def derived(self) -> tuple[str, ...]:
        """What JAX derived, in words; nothing for the call that the user made."""
        return tuple(filter(None, ("batched" if self.batched else "", self.role)))

    @property
    def may_put(self) -> bool:
        """Whether permutes may be NCCL's puts: XLA's options say so, and are jhost's.

        An outer program's options are not, and give peer copies.
        """
        said = self.embedded or PERMUTE_MODE in dict(self.compiler_options)
        return not said and puts_are_known(self.mesh)

    @property
    def title(self) -> str:
        """The function and what of it, as `mlp (backward)`."""
        derived = ", ".join(self.derived)
        return f"{self.name} ({derived})" if derived else self.name


def derived_params(
    params: Mapping[str, Any], how: Derivation, operands: tuple[str, ...] = ()
) -> dict[str, Any]:
    """A call's parameters, where JAX has derived its program from another's."""
    config: Config = dataclasses.replace(params["config"], unchecked=False)
    # A batched program has the operands of the one it was, under the same names.
    if how != "batched":
        config = dataclasses.replace(config, operands=operands)
    match how:
        case "batched":
            config = dataclasses.replace(config, batched=True)
        case "known" | "unknown":
            # The known part of a checkpoint's tangents is the forward, computed again.
            if how == "known" and config.role == "tangents":
                config = dataclasses.replace(config, role="recomputed")
        case "forward":
            # Differentiated once more, a backward program stays the backward.
            config = dataclasses.replace(config, role=config.role or "forward")
        case _:
            config = dataclasses.replace(config, role=how)
    return {**params, "config": config}


class Call(NamedTuple):
    """One call of the primitive: what it runs, and on which operands."""

    call_jaxpr: Any
    config: Config
    operands: tuple[Any, ...]


def program_config(config: Config) -> Config:
    """What a program depends on: it is the same wherever it is called.

    But where it could put: in an outer program it must not.
    """
    embedded = config.embedded and puts_are_known(config.mesh)
    return dataclasses.replace(
        config, embedded=embedded, compared=True, identity=(), unchecked=False
    )


@cached(256)
def puts_are_known(mesh: AnyMesh | None) -> bool:
    """Whether NCCL can put on `mesh`, and what that takes was measured."""
    rates = rates_here(devices_of(mesh), puts=True)
    return rates is not None and rates.put is not None and not why_no_puts(mesh)
