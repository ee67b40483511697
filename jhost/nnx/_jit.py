"""`flax.nnx.jit` with jhost in the place of `jax.jit`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, Unpack, overload

from flax import nnx

from jhost._api import jit as jhost_jit
from jhost._call.settings import Options
from jhost._jax import shardings_given

P = ParamSpec("P")
R = TypeVar("R")


@overload
def jit(
    f: Callable[P, R],
    /,
    *,
    graph: bool | None = None,
    graph_updates: bool | None = None,
    **options: Unpack[Options],
) -> Callable[P, R]: ...


@overload
def jit(
    f: None = None,
    /,
    *,
    graph: bool | None = None,
    graph_updates: bool | None = None,
    **options: Unpack[Options],
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def jit(
    f: Callable[..., Any] | None = None,
    /,
    *,
    graph: bool | None = None,
    graph_updates: bool | None = None,
    **options: Any,
) -> Any:
    """Compiles a function of modules as `flax.nnx.jit` does, by `jhost.jit`.

    If the function changes modules, optimizers or other flax objects, the objects of
    the caller change.

    Args:
        f: the function of flax objects and pytrees of arrays, of any shapes and dtypes.
            Without `f` the result is a decorator.
        graph: as for `flax.nnx.jit`, if this version of flax has it.
        graph_updates: likewise.
        **options: the arguments of `jhost.jit`.  As for `flax.nnx.jit`, `in_shardings`
            and `out_shardings` may have a `flax.nnx.StateSharding` in the place of a
            module.

    Returns:
        A function like the result of `flax.nnx.jit`, with `lower`, `trace` and
        `eval_shape`.  `jhost.explain` takes it, too.  It takes and returns arrays of
        the same shapes and dtypes as `f`.

    Raises:
        JhostError: as for `jhost.jit`.

    Example:
        >>> from flax import nnx
        >>> import jax.numpy as jnp
        >>> import jhost.nnx
        >>> @jhost.nnx.jit
        ... def scale(layer, x):
        ...     layer.kernel[...] *= 2
        ...     return layer(x)
        >>> ones = nnx.initializers.ones
        >>> layer = nnx.Linear(2, 2, kernel_init=ones, rngs=nnx.Rngs(0))
        >>> float(scale(layer, jnp.ones((1, 2)))[0, 0]), float(layer.kernel[0, 0])
        (4.0, 2.0)
    """
    modes = {"graph": graph, "graph_updates": graph_updates}
    modes = {name: mode for name, mode in modes.items() if mode is not None}
    if f is None:
        return functools.partial(jit, **modes, **options)
    # flax reads some options, such as `donate_argnums`, and jhost gets all of them.
    theirs = options.keys() & inspect.signature(nnx.jit).parameters.keys()
    made: Any = nnx.jit(f, **modes, **{name: options[name] for name in theirs})
    # flax tells JAX's jit of each module's state what it was told of the module.
    given = shardings_given(made.jitted_fn)
    made.jitted_fn = jhost_jit(made.jitted_fn.__wrapped__, **{**options, **given})
    return made
