"""The user's lines that equations come from, and what else JAX notes of them."""

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

# The user's line must never be one of ours, but in the demo, which is a user itself.
# `jhost/lowering` is a link, and an editable install imports what is behind it.
_HERE = os.path.dirname(os.path.dirname(__file__))
for _folder in (_HERE, *(os.path.join(_HERE, n) for n in ("lowering", "runtime"))):
    source_info_util.register_exclusion(os.path.realpath(_folder) + os.sep)
    source_info_util.register_exclusion(_folder + os.sep)
private_source_info.register_inclusion(os.path.join(_HERE, "_commands", "block.py"))


NO_LINE = "an unknown line"
"""What `source_line` says of an equation that comes from no line of the user's."""


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

    What a backward computes again stands in its scope, and is no gradient.
    """
    names = str(eqn.source_info.name_stack)
    return "transpose(" in names.rpartition("rematted_computation")[2]


def user_position(eqn: JaxprEqn) -> Position | None:
    """Where the user's own expression stands that an equation comes from."""
    frame = _own_frame(eqn)
    if frame is None:
        return None
    lines, columns = (
        (frame.start_line, frame.end_line),
        (frame.start_column, frame.end_column),
    )
    return Position(frame.file_name, (*lines, *columns))


def at_line_of(eqn: JaxprEqn, call: JaxprEqn) -> JaxprEqn:
    """An equation of what a call runs, in its scopes, at its line if it has no own.

    JAX traces the body of a call once, and knows of no scope around; nor does it keep
    lines outside of what it traces once for all calls, as `jnp.linalg.qr`.
    """
    own, around = eqn.source_info, call.source_info
    known = private_source_info.user_frame(own.traceback) is not None
    if known and not around.name_stack.stack:
        return eqn
    traceback = own.traceback if known else around.traceback
    names = around.name_stack + own.name_stack
    return eqn.replace(source_info=own.replace(traceback=traceback, name_stack=names))


def _own_frame(eqn: JaxprEqn) -> private_source_info.Frame | None:
    """The innermost frame of the user's that is no library's."""
    traceback = eqn.source_info.traceback
    frame = private_source_info.user_frame(traceback)
    if frame is None or not _is_library(frame.file_name):
        return frame
    # Only here: the first frame is in a cache of JAX's, the others are not.
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
    """Gives what is bound inside an equation's line, name stack and metadata.

    Not the equation's whole context: its abstract mesh is the one outside the
    `shard_map` that the equation is bound in again.
    """
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
