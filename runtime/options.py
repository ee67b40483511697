"""XLA's compiler options: which of the user's it refused."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import jax

from jhost import errors

_REFUSAL = re.compile(r"No such compile option: '(\w+)'|While setting option (\w+)")


def explain_refusal(
    error: Exception, function: str, options: Mapping[str, Any]
) -> None:
    """Raises jhost's own error if `error` says that XLA refuses one of `options`.

    Raises:
        CompilerOptionError: it does.
    """
    refused = {name for match in _REFUSAL.findall(str(error)) for name in match}
    offenders = [
        f"{name}={value!r}: {error}"
        for name, value in options.items()
        if name in refused
    ]
    if offenders:
        raise errors.CompilerOptionError(
            f"XLA refuses an option of {function}. Options are fields of XLA's "
            "DebugOptions, as for jax.jit; not every version and backend has each.",
            offenders,
        ) from error


@contextmanager
def explained_refusals(function: str, options: Mapping[str, Any]) -> Generator[None]:
    """Inside, XLA's refusals of `options` are jhost's errors."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        explain_refusal(error, function, options)
        raise
