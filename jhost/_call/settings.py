"""The arguments of `jhost.jit`, and what can be said of them before it is called."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, get_args

from jhost import errors
from jhost._annotate import Chunks, Pipeline, as_int
from jhost._call import shardings
from jhost._jax import Names, Nums
from jhost._tuning import Tuning
from jhost.runtime.mesh import AnyMesh, mesh_text


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The arguments of `jhost.jit`, as given."""

    mesh: AnyMesh | None = None
    in_shardings: Any = None
    out_shardings: Any = None
    static_argnums: Nums = None
    static_argnames: Names = None
    donate_argnums: Nums = None
    donate_argnames: Names = None
    chunks: Chunks = "auto"
    pipeline: Pipeline = "auto"
    streams: int = 4
    interpret: bool = False
    replication_limit: int = 1 << 20
    compiler_options: Mapping[str, Any] | None = None
    tuning: Tuning | Sequence[Tuning] | None = None

    @property
    def tunings(self) -> tuple[Tuning, ...]:
        """The tunings, none or several."""
        if self.tuning is None:
            return ()
        return (self.tuning,) if isinstance(self.tuning, Tuning) else (*self.tuning,)

    def __str__(self) -> str:
        """The settings that are not the defaults, as one would write them."""
        given: list[str] = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is field.default or value == field.default:
                continue
            match field.name:
                case "mesh":
                    given.append(mesh_text(value))
                case "tuning":  # as long as what was measured
                    given.append("tuning=...")
                case name:
                    given.append(f"{name}={value!r}")
        return ", ".join(given)


class Options(TypedDict, total=False):
    """The keywords of `jhost.jit`, for type checkers."""

    mesh: AnyMesh | None
    in_shardings: Any
    out_shardings: Any
    static_argnums: Nums
    static_argnames: Names
    donate_argnums: Nums
    donate_argnames: Names
    chunks: Chunks
    pipeline: Pipeline
    streams: int
    interpret: bool
    replication_limit: int
    compiler_options: Mapping[str, Any] | None
    tuning: Tuning | Sequence[Tuning] | None


def check(settings: Settings) -> None:
    """Refuses values that no function could be compiled with.

    Raises:
        ArgumentError, ChunksError, OptionError: there are some.
    """
    _check_mesh(settings.mesh)
    _check_shardings({"in": settings.in_shardings, "out": settings.out_shardings})
    _check_chunks(settings.chunks)
    _check_tuning(settings.tuning)
    _check_compiler_options(settings.compiler_options)
    if settings.pipeline not in get_args(Pipeline):
        raise errors.OptionError(
            f"jhost.jit got pipeline={settings.pipeline!r}, which is none of "
            f"{', '.join(map(repr, get_args(Pipeline)))}."
        )
    limit = as_int(settings.replication_limit)
    if limit is None or limit < 0:
        raise errors.OptionError(
            f"jhost.jit got replication_limit={settings.replication_limit!r}, but "
            "needs a number of bytes, of at least 0."
        )
    streams = as_int(settings.streams)
    if streams is None or streams < 1:
        raise errors.OptionError(
            f"jhost.jit got streams={settings.streams!r}, but needs an int of at least "
            "1."
        )


def _check_compiler_options(options: Any) -> None:
    if options is None:
        return
    if not isinstance(options, Mapping):
        raise errors.ArgumentError(
            "jhost.jit takes a mapping from names to values as compiler_options, but "
            f"got {options!r}."
        )
    offenders = [
        f"{name!r}: {value!r}"
        for name, value in options.items()
        if not isinstance(name, str) or not isinstance(value, str | bool | int | float)
    ]
    if offenders:
        raise errors.ArgumentError(
            "jhost.jit takes names of XLA's options with texts, numbers or bools as "
            "compiler_options.",
            offenders,
        )


def _check_tuning(tuning: Any) -> None:
    several = tuning if isinstance(tuning, list | tuple) else (tuning,)
    if tuning is not None and not all(isinstance(one, Tuning) for one in several):
        raise errors.ArgumentError(
            "jhost.jit takes what jhost.tune returned as tuning, or several in a list, "
            f"but got {tuning!r}. Read a file with jhost.Tuning.from_json(text)."
        )


def _check_mesh(mesh: Any) -> None:
    if mesh is not None and not isinstance(mesh, AnyMesh):
        raise errors.ArgumentError(
            f"jhost.jit takes a jax.sharding.Mesh as mesh, but got {mesh!r}."
        )


def _check_shardings(trees: Mapping[str, Any]) -> None:
    offenders = [
        f"{name}_shardings{path}: {leaf!r}"
        for name, tree in trees.items()
        for path, leaf in shardings.leaves_with_path(tree)
        if not shardings.is_sharding(leaf)
    ]
    if offenders:
        raise errors.ArgumentError(
            "jhost.jit takes trees of PartitionSpecs, NamedShardings and None as "
            "shardings.",
            offenders,
        )


def _check_chunks(chunks: Any) -> None:
    if chunks is None or chunks == "auto":
        return
    count = as_int(chunks)
    if count is None:
        raise errors.ArgumentError(
            f"jhost.jit takes an int or 'auto' as chunks, but got {chunks!r}."
        )
    if count < 1:
        raise errors.ChunksError(
            f"jhost.jit got chunks={count}, but needs at least 1. To turn streams off, "
            "use pipeline='off'."
        )
