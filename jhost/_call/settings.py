"""The arguments of `jhost.jit`, and the checks that need no call."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict, cast, get_args

from jax.sharding import PartitionSpec

from jhost import errors
from jhost._annotate import Chunks, Pipeline, Streams, as_int
from jhost._call import shardings
from jhost._jax import ArgNames, ArgNums, Inline
from jhost._tuning import Tuning
from jhost.runtime.mesh import AnyMesh, mesh_text


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The arguments of `jhost.jit`, as given."""

    mesh: AnyMesh | None = None
    in_shardings: Any = None
    out_shardings: Any = None
    static_argnums: ArgNums = None
    static_argnames: ArgNames = None
    donate_argnums: ArgNums = None
    donate_argnames: ArgNames = None
    keep_unused: bool = False
    inline: Inline = False
    chunks: Chunks = "auto"
    pipeline: Pipeline = "auto"
    streams: Streams = "auto"
    replication_limit: int = 1 << 20
    compiler_options: Mapping[str, Any] | None = None
    tuning: Tuning | Sequence[Tuning] | None = None

    @property
    def of_arguments(self) -> dict[str, Any]:
        """The settings for `jax.jit` about arguments, except for shardings."""
        return {name: getattr(self, name) for name in _OF_ARGUMENTS}

    @property
    def for_jax(self) -> dict[str, Any]:
        """The arguments of `jax.jit` for the function itself, but for shardings."""
        options = dict(self.compiler_options or {})
        return {"compiler_options": options, **self.of_arguments}

    @property
    def tunings(self) -> tuple[Tuning, ...]:
        """The tunings, none or several."""
        if self.tuning is None:
            return ()
        return (self.tuning,) if isinstance(self.tuning, Tuning) else (*self.tuning,)

    def __str__(self) -> str:
        """The settings that are not defaults, as keyword arguments."""
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


_OF_ARGUMENTS = (
    "static_argnums",
    "static_argnames",
    "donate_argnums",
    "donate_argnames",
    "keep_unused",
    "inline",
)


# Written out once more: `Unpack` takes no dataclass, and a signature no fields of one.
class Options(TypedDict, total=False):
    """The keywords of `jhost.jit`, for type checkers."""

    mesh: AnyMesh | None
    in_shardings: Any
    out_shardings: Any
    static_argnums: ArgNums
    static_argnames: ArgNames
    donate_argnums: ArgNums
    donate_argnames: ArgNames
    keep_unused: bool
    inline: Inline
    chunks: Chunks
    pipeline: Pipeline
    streams: Streams
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
    _check_static_and_donated(settings)
    _check_compiler_options(settings.compiler_options)
    for name, choices in (("pipeline", Pipeline), ("streams", Streams)):
        value = getattr(settings, name)
        if value not in get_args(choices):
            raise errors.OptionError(
                f"jhost.jit got {name}={value!r}, but takes one of "
                f"{', '.join(map(repr, get_args(choices)))}."
            )
    limit = as_int(settings.replication_limit)
    if limit is None or limit < 0:
        raise errors.OptionError(
            f"jhost.jit got replication_limit={settings.replication_limit!r}, but "
            "needs a number of bytes, of at least 0."
        )


def check_names(options: Mapping[str, Any]) -> None:
    """Refuses keywords that `jhost.jit` does not have.

    Raises:
        ArgumentError: there is some.
    """
    known = [field.name for field in dataclasses.fields(Settings)]
    if unknown := [name for name in options if name not in known]:
        raise errors.ArgumentError(
            f"jhost.jit takes {', '.join(known)}, but with_options got "
            f"{', '.join(unknown)}."
        )


def _check_static_and_donated(settings: Settings) -> None:
    offenders = [
        f"{kind}_{what}: takes {one}s, but got {value!r}"
        for kind in ("static", "donate")
        for what, one, is_one in (
            ("argnums", "int", lambda number: as_int(number) is not None),
            ("argnames", "str", lambda name: isinstance(name, str)),
        )
        for value in (getattr(settings, f"{kind}_{what}"),)
        if value is not None and not is_one(value) and not _all(is_one, value)
    ]
    if offenders:
        raise errors.ArgumentError(
            "jhost.jit takes the numbers and names of arguments as jax.jit does.",
            offenders,
        )


def _all(is_one: Callable[[Any], bool], values: Any) -> bool:
    return isinstance(values, Iterable) and all(map(is_one, values))


_OPTION_TYPES = bool | int | float | str | enum.Enum  # as jax.CompilerEffortLevel is


def _check_compiler_options(options: Any) -> None:
    if options is None:
        return
    if not isinstance(options, Mapping):
        raise errors.ArgumentError(
            "jhost.jit takes a dict as compiler_options, such as "
            f"{{'xla_embed_ir_in_executable': True}}, but got {options!r}."
        )
    offenders = [
        f"{name!r}: {value!r}"
        for name, value in cast(Mapping[Any, Any], options).items()
        if not isinstance(name, str) or not isinstance(value, _OPTION_TYPES)
    ]
    if offenders:
        raise errors.ArgumentError(
            "jhost.jit takes compiler_options as a dict. Its keys are names of XLA's "
            "options, and each value is a bool, int, float, str or enum member.",
            offenders,
        )


def _check_tuning(tuning: Any) -> None:
    several = tuning if isinstance(tuning, list | tuple) else (tuning,)
    if tuning is not None and not all(isinstance(one, Tuning) for one in several):
        raise errors.ArgumentError(
            "jhost.jit takes a result of jhost.tune as tuning, or several in a list, "
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
    _check_unconstrained(trees)


def _check_unconstrained(trees: Mapping[str, Any]) -> None:
    offenders = [
        f"{name}_shardings{path}: {spec}"
        for name, tree in trees.items()
        for path, spec in shardings.leaves_with_path(shardings.specs(tree))
        if spec is not None and PartitionSpec.UNCONSTRAINED in spec
    ]
    if offenders:
        raise errors.OptionError(
            "Unconstrained dims are not allowed in in_shardings and out_shardings of "
            "jhost.jit, as in those of jax.jit. Give None in place of the whole spec, "
            "and jhost chooses. Or call jhost.shard(x, spec), which takes such dims, "
            "inside the function.",
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
