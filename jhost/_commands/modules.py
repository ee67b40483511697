"""Names in modules of the user's: `mymodel.layers:mlp`."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import jax

from jhost import errors


class NotThereError(Exception):
    """A name that a module does not have, or a module that there is not."""


def made(name: str) -> Any:
    """What a name means, or what the function of that name returns."""
    found = loaded(name)
    return found() if callable(found) else found


def loaded(name: str) -> Any:
    """What a name such as `mymodel.layers:mlp` means.

    Raises:
        NotThereError: it is no such name, or nothing has it.
    """
    module, _, path = name.partition(":")
    if not module or not path:
        raise NotThereError(f"{name!r} is no name in a module; write module:name")
    if not all(part.isidentifier() for part in module.split(".")):
        raise NotThereError(
            f"{module!r} is no module's name; write it with dots, as mymodel.layers, "
            "from the folder that holds it"
        )
    if os.getcwd() not in sys.path:  # as for `python -m`, also under `python -P`
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, and what it needs is not
        raise NotThereError(f"there is no module {module!r}") from error
    except ValueError as error:
        # How `jax.make_mesh` begins it (JAX 0.10 to 0.12); other errors are the
        # module's own.
        if not str(error).startswith("Number of devices"):
            raise
        raise NotThereError(
            f"{module} makes a mesh of more devices than the {jax.device_count()} that "
            f"there are: {errors.first_line(error)}. JAX_PLATFORMS=cpu "
            "JAX_NUM_CPU_DEVICES=8, or as many as it needs, makes them of any CPU"
        ) from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise NotThereError(f"the module {module} has no {path!r}")
        found = getattr(found, part)
    return found
