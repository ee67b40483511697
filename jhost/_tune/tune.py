"""`jhost.tune`: measures what could be done with a function's streams on the devices.

In several processes all measure the same candidates at the same time, and choose by the
times of the slowest; process 0 looks into its cache for all.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jhost import _tuning_cache, errors
from jhost._annotate import as_int
from jhost._api import JitFunction, as_jhost_function, check_kwargs
from jhost._call.program import host_program, planned
from jhost._progress import no_progress, progress as progress_bar
from jhost._tune.calls import calls_of
from jhost._tune.operands import drawn
from jhost._tune.tuner import Tuner
from jhost._tuning import Tuning
from jhost._tuning_holds import environment_of
from jhost.lowering.ir.fingerprint import fingerprint
from jhost.runtime.mesh import automatic_axes


def tune(
    f: JitFunction[..., Any],
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    gradients: bool | int | Sequence[int] = False,
    rounds: int = 10,
    draw: bool = True,
    cache: bool = True,
    progress: bool = True,
) -> Tuning:
    """Measures which pipelines suit a function's streams best, on its own devices.

    It compiles each way to run a stream, checks its results against the plain function,
    and times it in turns with the others.  It does not change what marks and settings
    fix.  It chooses a pipeline if its median time is at least 3 % below the time
    without a pipeline.

    In a job of several processes all processes have to call it with the same arguments.
    They measure together, and all make the same choice: in each round the time of the
    slowest process counts.

    Args:
        f: a function made by `jhost.jit`.  It is called many times, and so are host
            callbacks in it.  Donated arguments stay valid.
        *args: arrays of the shapes and dtypes that `f` takes.
        kwargs: its keyword arguments, likewise.
        gradients: also tune the programs of `jax.grad`: the forward with its residuals,
            and the backward.  Numbers are the `argnums` of `jax.grad`, and True stands
            for all floats.
        rounds: how many turns each candidate has, of ten calls each.
        draw: replace float arrays whose elements are all equal, such as `jnp.ones`, by
            random numbers from 0.5 to 1.5.  With equal elements gradients cancel each
            other, and GPUs take less power than in real work.
        cache: reuse measurements from the user's cache folder, and store new ones
            there.
        progress: show a bar, or lines if tqdm is not installed, on standard error.  Of
            several processes only process 0 shows it.

    Returns:
        The measured times, the predicted times and the choice for each stream.
        `jhost.jit(..., tuning=...)` takes it.

    Raises:
        ArgumentError: `f` is not a jhost function, an argument is a type, or
            `gradients` are not numbers.
        OptionError: `rounds` is below 1, or `gradients` name no argument.

    Example:
        >>> import jax.numpy as jnp
        >>> import jhost
        >>> def double(x):
        ...     return jhost.stream(x * 2, axis=0)
        >>> x = jnp.ones((8, 2))
        >>> tuning = jhost.tune(jhost.jit(double), x, cache=False, progress=False)
        >>> fast = jhost.jit(double, tuning=tuning)
        >>> fast(x).shape
        (8, 2)
    """
    f, args = as_jhost_function("tune", f, args)
    check_kwargs("tune", kwargs)
    _check_rounds(rounds)
    _check_arrays(args, kwargs or {})
    # GPUs take less power for equal elements, so `jnp.ones` would be timed too fast.
    args, kwargs = drawn(args, kwargs or {}) if draw else (args, kwargs)
    calls = calls_of(f, args, kwargs or {}, gradients=gradients)
    primal = calls[f.__name__]
    host_program(primal.call_jaxpr, primal.config)  # raises what is wrong with marks
    plans = {
        name: planned(call.call_jaxpr, call.config) for name, call in calls.items()
    }
    key = _tuning_cache.CacheKey(
        environment=environment_of(primal.config.mesh),
        fingerprints=tuple(fingerprint(plan.program) for plan in plans.values()),
    )
    if cache and (kept := _kept(key)) is not None:
        return kept
    tuners = [Tuner(n, calls[n], plan, rounds) for n, plan in plans.items()]
    steps = sum(tuner.steps for tuner in tuners)
    shown = progress and steps > 0 and jax.process_index() == 0
    bar = progress_bar(steps, unit="step") if shown else no_progress()
    try:
        with automatic_axes():
            programs = [tuner.tuned_program(bar) for tuner in tuners]
    finally:
        bar.close()
    for text in [text for tuner in tuners for text in tuner.warnings]:
        warnings.warn(text, stacklevel=2)  # not across the bar
    tuning = Tuning(
        function=f.__name__, environment=key.environment, programs=tuple(programs)
    )
    # Only process 0 reads the folder, so only it has to write there.
    if cache and jax.process_index() == 0:
        _tuning_cache.store(key, tuning)
    if progress and not steps and jax.process_index() == 0:
        print(f"jhost.tune: {tuning.programs[0].title}", file=sys.stderr)
    return tuning


def _check_rounds(rounds: Any) -> None:
    count = as_int(rounds)
    if count is None:
        raise errors.ArgumentError(
            f"jhost.tune takes an int as rounds, but got {rounds!r}."
        )
    if count < 1:
        raise errors.OptionError(
            f"jhost.tune got rounds={rounds!r}, but needs at least 1."
        )


def _check_arrays(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    leaves = jax.tree_util.tree_leaves_with_path((args, dict(kwargs)))
    types = [
        f"{jax.tree_util.keystr(path)}: {leaf}"
        for path, leaf in leaves
        if isinstance(leaf, jax.ShapeDtypeStruct)
    ]
    if types:
        raise errors.ArgumentError(
            "jhost.tune runs the function, and takes arrays, but got types.", types
        )


def _kept(key: _tuning_cache.CacheKey) -> Tuning | None:
    """What process 0 finds on its disk, for all processes."""
    found = _tuning_cache.load(key) if jax.process_index() == 0 else None
    if jax.process_count() == 1:
        return found
    text = b"" if found is None else found.to_json().encode()
    # The size goes first: all processes have to give arrays of one shape.
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    padded = np.frombuffer(text[:size].ljust(size), np.uint8)
    text = bytes(np.asarray(multihost_utils.broadcast_one_to_all(padded), np.uint8))
    return Tuning.from_json(text.decode()) if size else None
