"""The user's lines that equations come from, and the scopes that JAX notes."""

# JAX's private functions are partly untyped; what leaves this module is typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import jax
from jax._src import source_info_util as private_source_info
from jax._src.compute_on import extend_compute_type
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import source_info_util
from jax.extend.core import JaxprEqn

# The user's line must never be one of jhost's, except in the demo, which is a user.
# `jhost/lowering` is a link, and an editable install imports the folder behind it, so
# both paths are excluded.
_HERE = os.path.dirname(os.path.dirname(__file__))
for _folder in (_HERE, *(os.path.join(_HERE, n) for n in ("lowering", "runtime"))):
    source_info_util.register_exclusion(os.path.realpath(_folder) + os.sep)
    source_info_util.register_exclusion(_folder + os.sep)
private_source_info.register_inclusion(os.path.join(_HERE, "_commands", "block.py"))


NO_LINE = "an unknown line"
"""The result of `source_line` for an equation that no line of the user's made."""


def source_line(eqn: JaxprEqn) -> str:
    """The user's line that an equation comes from, as `model.py:12 (mlp)`.

    A line of a library is followed by the user's own: `linear.py:7 (call) from
    model.py:12 (mlp)`.
    """
    first = private_source_info.user_frame(eqn.source_info.traceback)
    if first is None:
        return NO_LINE
    own = _own_frame(eqn)
    frames = (first,) if first is own else (first, own)
    return " from ".join(_line_text(frame) for frame in frames if frame)


class Position(NamedTuple):
    """Where an expression stands: a file, its first line, last line, and columns."""

    file: str
    span: tuple[int, int, int, int]


def is_transposed(eqn: JaxprEqn) -> bool:
    """Whether JAX made an equation by transposing another, as for a gradient.

    Equations that a backward computes again are in its scope too, but no gradients.
    """
    names = str(eqn.source_info.name_stack)
    return "transpose(" in names.rpartition("rematted_computation")[2]


def is_in_backward(eqn: JaxprEqn) -> bool:
    """Whether an equation is a gradient's, or computed again for gradients."""
    return "transpose(" in str(eqn.source_info.name_stack)


def user_position(eqn: JaxprEqn) -> Position | None:
    """The position of the user's own expression that made an equation."""
    frame = _own_frame(eqn)
    if frame is None:
        return None
    lines, columns = (
        (frame.start_line, frame.end_line),
        (frame.start_column, frame.end_column),
    )
    return Position(frame.file_name, (*lines, *columns))


def at_line_of(eqn: JaxprEqn, call: JaxprEqn) -> JaxprEqn:
    """An equation in the body of a call, in the call's scopes.

    If the equation has no line of its own, it gets the line of the call.
    """
    # JAX traces a body once for all calls, so it does not know the scopes around one of
    # them.  Nor does it keep the callers' lines for functions such as `jnp.linalg.qr`.
    own, around = eqn.source_info, call.source_info
    known = private_source_info.user_frame(own.traceback) is not None
    if known and not around.name_stack.stack:
        return eqn
    traceback = own.traceback if known else around.traceback
    names = around.name_stack + own.name_stack
    return eqn.replace(source_info=own.replace(traceback=traceback, name_stack=names))


def _own_frame(eqn: JaxprEqn) -> private_source_info.Frame | None:
    """The innermost frame of the user's code that is not in a library."""
    traceback = eqn.source_info.traceback
    frame = private_source_info.user_frame(traceback)
    if frame is None or not _is_library(frame.file_name):
        return frame
    # Only now: JAX caches the first frame, and the others take time to find.
    frames = private_source_info.user_frames(traceback)
    return next((each for each in frames if not _is_library(each.file_name)), None)


def _is_library(file: str) -> bool:
    return any(f"{os.sep}{name}-packages{os.sep}" in file for name in ("site", "dist"))


def _line_text(frame: private_source_info.Frame) -> str:
    file = file_title(frame.file_name)
    return f"{file}:{frame.start_line} ({frame.function_name})"


def file_title(path: str) -> str:
    """The name of a file, or of a notebook's cell as its reader sees it: `In[3]`."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython and ipython.get_ipython()
    cell = shell and shell.compile.format_code_name(path)
    return cell[1] if cell else os.path.basename(path)


@contextmanager
def user_context(eqn: JaxprEqn) -> Generator[None]:
    """Inside, equations get the line, name stack and metadata of `eqn`."""
    # Not its whole context: that has the abstract mesh from outside of the `shard_map`
    # in which the equation is bound again.
    source = eqn.source_info
    names = source_info_util.current_name_stack() + source.name_stack
    with ExitStack() as stack:
        stack.enter_context(
            source_info_util.user_context(source.traceback, name_stack=names)
        )
        # A setting is in the keys of JAX's caches, so it is set only where it differs.
        by_place = eqn.ctx.threefry_partitionable
        if by_place != jax.threefry_partitionable.value:
            stack.enter_context(jax.threefry_partitionable(by_place))
        if eqn.ctx.compute_type:
            stack.enter_context(extend_compute_type(eqn.ctx.compute_type))
        if eqn.ctx.xla_metadata:
            stack.enter_context(set_xla_metadata(**eqn.ctx.xla_metadata))
        yield
