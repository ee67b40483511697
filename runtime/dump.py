"""`JHOST_DUMP`: programs written out as they are lowered and compiled.

`JHOST_DUMP=host_ir,passes,hlo,schedule` names what to write: the finished Host IR, the
program after every pass, XLA's module before and after its own passes, and the
scheduled module.  `JHOST_DUMP_DIR` is the folder.  Without it Host IR goes to standard
error, and XLA's modules to the current folder.
"""

from __future__ import annotations

import itertools
import os
import pathlib
import sys
from collections.abc import Callable, Sequence

from jhost import errors
from jhost.lowering.ir.program import Program

KINDS = ("host_ir", "passes", "hlo", "schedule")

_counter = itertools.count()


def requested() -> frozenset[str]:
    """The kinds that `JHOST_DUMP` names at this moment.

    Raises:
        OptionError: a word that is none of `KINDS`.
    """
    words = [w.strip() for w in os.environ.get("JHOST_DUMP", "").split(",")]
    unknown = [word for word in words if word and word not in KINDS]
    if unknown:
        raise errors.OptionError(
            f"JHOST_DUMP may name {', '.join(KINDS)}.", [repr(word) for word in unknown]
        )
    return frozenset(words) - {""}


def pass_dumper(
    name: str, derived: Sequence[str] = ()
) -> Callable[[str, Program], None] | None:
    """A function to call after every pass over the function `name`, or None.

    `derived` has words for the transforms that JAX has applied to the function.
    """
    wanted = requested() & {"host_ir", "passes"}
    if not wanted:
        return None
    stem, steps = _stem(name, derived), itertools.count()

    def after_pass(step: str, program: Program) -> None:
        if "passes" in wanted:
            write(f"{stem}.{next(steps):02}_{step}", str(program))

    return after_pass


def dump_host_ir(name: str, program: Program, derived: Sequence[str] = ()) -> None:
    """Write the finished program where it was asked for."""
    if "host_ir" in requested():
        write(f"{_stem(name, derived)}.host_ir", str(program))


def _stem(name: str, derived: Sequence[str]) -> str:
    """A name with a number before its words, so that folders list programs in order."""
    return ".".join([name, f"{next(_counter):02}", *derived])


def write(stem: str, text: str) -> None:
    """Write `text` to a file of the dump folder, or to standard error."""
    folder = os.environ.get("JHOST_DUMP_DIR")
    if folder is None:
        print(f"--- {stem}\n{text}", file=sys.stderr)
        return
    path = pathlib.Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    (path / f"{stem}.txt").write_text(text + "\n")


def compiler_options() -> dict[str, str | bool]:
    """The options by which XLA writes its own modules, where they were asked for."""
    wanted = requested() & {"hlo", "schedule"}
    if not wanted:
        return {}
    folder = os.environ.get("JHOST_DUMP_DIR", ".")
    return {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
