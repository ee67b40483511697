"""What holds for a call of a jhost function, and for what JAX derives from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

from jhost._annotate import Pipeline
from jhost._jax import Derivation
from jhost._tuning import Tuning
from jhost.runtime.mesh import AnyMesh

Role: TypeAlias = Literal["", "forward", "recomputed", "tangents", "backward"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What holds for a jhost function and for every program derived from it.

    `embedded` calls stand in a trace of somebody else's; the others in a `jax.jit` of
    jhost's own, which sees to the compiler options.  `compared` ones are lowered in
    order to run: not those of `lower`, which one process may call alone.  `role` and
    `batched` say what JAX derived; neither is in what the user called.  `operands` are
    names for messages, of a program that JAX has made without any.
    """

    name: str
    mesh: AnyMesh | None
    chunks: int | Literal["auto"]
    pipeline: Pipeline
    streams: int
    interpret: bool
    replication_limit: int
    compiler_options: tuple[tuple[str, Any], ...] = ()
    tunings: tuple[Tuning, ...] = ()
    embedded: bool = False
    compared: bool = True
    identity: tuple[str, ...] = ()
    role: Role = ""
    batched: bool = False
    operands: tuple[str, ...] = ()

    @property
    def derived(self) -> tuple[str, ...]:
        """What JAX derived, in words: none of what the user called."""
        return tuple(filter(None, ("batched" if self.batched else "", self.role)))

    @property
    def title(self) -> str:
        """The function and what of it, as `mlp (backward)`."""
        derived = ", ".join(self.derived)
        return f"{self.name} ({derived})" if derived else self.name


def derived_params(
    params: Mapping[str, Any], how: Derivation, operands: tuple[str, ...] = ()
) -> dict[str, Any]:
    """A call's parameters, where JAX has derived its program from another's."""
    config: Config = params["config"]
    if how != "batched":
        config = dataclasses.replace(config, operands=operands)
    match how:
        case "batched":
            config = dataclasses.replace(config, batched=True)
        case "known" | "unknown":
            if how == "known" and config.role == "tangents":
                config = dataclasses.replace(config, role="recomputed")
        case "forward":
            # What is differentiated once more stays the backward, say.
            config = dataclasses.replace(config, role=config.role or "forward")
        case _:
            config = dataclasses.replace(config, role=how)
    return {**params, "config": config}


class Call(NamedTuple):
    """One call of the primitive: what it runs, and on which operands."""

    call_jaxpr: Any
    config: Config
    operands: tuple[Any, ...]


def plain(config: Config) -> Config:
    """What a program depends on: it is the same wherever it is called."""
    return dataclasses.replace(config, embedded=False, compared=True, identity=())
