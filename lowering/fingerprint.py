"""A digest of a Host IR program: equal programs have equal ones, on every machine."""

from __future__ import annotations

import dataclasses
import hashlib

from jhost.lowering.ir import Program
from jhost.lowering.printer import program_text


def fingerprint(program: Program) -> str:
    """What `program` says, in 32 hexadecimal digits.

    Its name does not count, nor the lines of the source that it was written on.
    """
    text = program_text(dataclasses.replace(program, name="f"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
