"""The errors and warnings of jhost, one class for each cause.

Each class is also a subclass of the builtin that fits (`ValueError`, `TypeError`), and
each has a section in `docs/errors.md` with an example and its fix.  The page is in the
wheel, too: `help` of a class has its section, and messages say so.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from importlib import resources
from typing import Any

_PAGE = resources.files("jhost").joinpath("errors.md").read_text(encoding="utf-8")


def section_of(cls: type) -> str:
    """What the page says of a class, in Markdown."""
    found = re.search(rf"^### {cls.__name__}\n(.*?)(?=^#+ \w|\Z)", _PAGE, re.M | re.S)
    return found[1].strip() if found else ""


def _with_section(cls: type) -> None:
    """Adds what the page says of a class to its docstring."""
    # `help` works without network, and says the same as the page.
    if section := section_of(cls):
        cls.__doc__ = f"{inspect.cleandoc(cls.__doc__ or '')}\n\n{section}\n"


def more_in_help(cls: type) -> str:
    """The last line of a message: where there is more about errors of a class."""
    return f"For an example and its fix: help(jhost.errors.{cls.__name__})"


class JhostError(Exception):
    """The base of everything that jhost raises on purpose.

    Args:
        message: what is wrong, and what to try.
        offenders: every offending argument, value or option, with a line for each.
    """

    def __init__(self, message: str, offenders: Sequence[str] = ()) -> None:
        lines = [message, *(f"  * {offender}" for offender in offenders)]
        super().__init__("\n".join([*lines, more_in_help(type(self))]))
        self.offenders = tuple(offenders)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Here, so that a new class cannot forget it.
        _with_section(cls)


class DimError(JhostError, ValueError):
    """A dim is out of range for its array."""


class SpecRankError(JhostError, ValueError):
    """A PartitionSpec has more entries than its array has dims."""


class UnknownAxisError(JhostError, ValueError):
    """A PartitionSpec names an axis that the mesh does not have."""


class DuplicateAxisError(JhostError, ValueError):
    """A PartitionSpec uses one mesh axis for two dims."""


class DivisibilityError(JhostError, ValueError):
    """A mesh axis does not divide the dim of a parameter or result that it shards."""


class StreamConflictError(JhostError, ValueError):
    """Two marks ask for streams along two dims of one value."""


class StreamDimError(JhostError, ValueError):
    """A mark asks for a stream along a dim that must stay whole."""


class PipelineError(JhostError, ValueError):
    """A mark asks for a pipeline that is not possible there."""


class ChunksError(JhostError, ValueError):
    """A chunk count is below 1, or above what the dim or the pipeline allows."""


class OptionError(JhostError, ValueError):
    """An argument of a function of jhost has a value that is not accepted."""


class ArgumentError(JhostError, TypeError):
    """An argument of a function of jhost has the wrong type."""


class OperandsError(JhostError, ValueError):
    """The shapes or dtypes of two operands do not fit together."""


class NoMeshError(JhostError, ValueError):
    """Shardings were given, but no mesh is known."""


class MeshMismatchError(JhostError, ValueError):
    """An array, a sharding or a `shard_map` is on another mesh than the function."""


class CompilerOptionError(JhostError, ValueError):
    """XLA refuses a compiler option that the user gave."""


class InitializeError(JhostError, RuntimeError):
    """`jhost.distributed.initialize` was called too late, or twice."""


class ProcessMismatchError(JhostError, RuntimeError):
    """The processes of a mesh were about to run different programs."""


class ProcessTimeoutError(JhostError, TimeoutError):
    """A process of a mesh did not reach a program that others wait to run."""


class UnsupportedError(JhostError, NotImplementedError):
    """A feature of JAX does not work inside or around a jhost function."""


class ScheduleError(JhostError, ValueError):
    """A text is not a module that XLA has scheduled."""


class ProfileError(JhostError, RuntimeError):
    """jhost cannot record a profile, or it has no events of the function."""


class MissingPackageError(JhostError, ImportError):
    """An optional package is needed, but it is not installed."""


class IndexRangeError(JhostError, IndexError):
    """An alias in a Host IR program would lie outside its source."""


class TuningError(JhostError, ValueError):
    """A text is not a tuning, or this version cannot read it."""


class VerifyError(JhostError, RuntimeError):
    """A Host IR program breaks a rule of the Host IR."""


class ReplicationWarning(UserWarning):
    """An operation gathers sharded values, and all devices repeat it.

    `jhost.jit(replication_limit=...)` sets the smallest number of bytes with a warning.
    """


class StreamWarning(UserWarning):
    """A mark has fewer chunks than it asks for, or nothing reads its result."""


_with_section(ReplicationWarning)
_with_section(StreamWarning)


def first_line(error: BaseException) -> str:
    """What is wrong, in one line."""
    return (str(error).splitlines() or [type(error).__name__])[0]
