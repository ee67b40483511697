"""A jhost function traced, lowered and compiled: JAX's ahead-of-time words."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jhost import errors
from jhost._call.config import Config
from jhost._call.execute import compare, interpreted
from jhost._call.explained import explained
from jhost._call.whole import Whole
from jhost._jax import communication_streams, take_over
from jhost.lowering.explanation import Explanation
from jhost.lowering.interpret.program import Record
from jhost.lowering.ir.program import Program
from jhost.runtime.accepted_options import explained_refusals
from jhost.runtime.mesh import AnyMesh
from jhost.runtime.profile.schedule import Schedule, parse_schedule, with_streams


class Traced(jax.stages.Traced):
    """A `jax.stages.Traced`: a function traced for arguments of certain types."""

    def __init__(
        self, traced: jax.stages.Traced, as_lowered: Callable[..., Lowered]
    ) -> None:
        take_over(self, traced)
        self._as_lowered = as_lowered

    def lower(
        self, *, lowering_platforms: tuple[str, ...] | None = None, **private: Any
    ) -> Lowered:
        """Lowers the function, like `jax.stages.Traced.lower`.

        Args:
            lowering_platforms: as in JAX: the platforms to lower for; None for the one
                of the devices.
            **private: JAX's own arguments.

        Returns:
            The program, which you can read, interpret and compile.

        Raises:
            JhostError: as for a call, but for errors that only a run shows.

        Example:
            >>> import jax.numpy as jnp
            >>> import jhost
            >>> traced = jhost.jit(lambda x: x + 1).trace(jnp.zeros(2))
            >>> traced.lower().compile()(jnp.zeros(2)).tolist()
            [1.0, 1.0]
        """
        lowered = super().lower(lowering_platforms=lowering_platforms, **private)
        return self._as_lowered(lowered)


class Lowered(jax.stages.Lowered):
    """A `jax.stages.Lowered`: a function lowered for arguments of certain types.

    Attributes:
        in_tree: the tree of the positional and keyword arguments, as in `jax.stages`.
        out_tree: the tree of the results.
        args_info: shape, dtype and donation of each argument.
        out_info: shape and dtype of each result.

    Example:
        >>> import jax.numpy as jnp
        >>> import jhost
        >>> lowered = jhost.jit(lambda x: x * 2).lower(jnp.zeros((4, 2)))
        >>> lowered.out_info.shape, lowered.host_ir.name
        ((4, 2), '<lambda>')
    """

    def __init__(
        self,
        lowered: jax.stages.Lowered,
        *,
        program: Program | Whole,
        config: Config,
        call_jaxpr: Any,
        consts: Sequence[Any],
    ) -> None:
        take_over(self, lowered)
        self._program = program
        self._config = config
        self._call_jaxpr = call_jaxpr
        self._consts = consts

    @property
    def host_ir(self) -> Program:
        """The Host IR program; `str` is its text.

        Raises:
            UnsupportedError: `jax.jit` compiles the function as a whole.
        """
        return _host_ir(self._program)

    def explain(self, *, detail: bool = False) -> Explanation:
        """Says what is pipelined, how and why; `jhost.explain` says more.

        Args:
            detail: True gives `str` everything, and False one screen.

        Returns:
            An explanation, as `jhost.explain` returns it, without XLA's schedule.

        Example:
            >>> import jax.numpy as jnp
            >>> import jhost
            >>> f = jhost.jit(lambda x: jhost.stream(x * 2, axis=0, chunks=2))
            >>> f.lower(jnp.ones(4)).explain().loops
            1
        """
        explanation = explained(self._program, self._config, self._call_jaxpr)
        return dataclasses.replace(explanation, detailed=detail)

    def interpret(self, *args: Any, **kwargs: Any) -> tuple[Any, list[Record]]:
        """Runs the program statement by statement on its devices.

        Args:
            *args: arrays of the shapes and dtypes it was lowered for, without static
                arguments.
            **kwargs: likewise.

        Returns:
            The results, which are arrays of the function's shapes and dtypes, and a
            trace.  For each statement that ran, the trace has its queue (`stream`), its
            text, the indices of the loops around it, and the bytes that were live on a
            device.

        Raises:
            ProcessMismatchError, ProcessTimeoutError: another process of the mesh does
                not run this program.
            UnsupportedError: `jax.jit` compiles the function as a whole.

        Example:
            >>> import jax.numpy as jnp
            >>> import jhost
            >>> f = jhost.jit(lambda x: jhost.stream(x + 1, axis=0, chunks=2))
            >>> result, trace = f.lower(jnp.zeros(4)).interpret(jnp.zeros(4))
            >>> [record.stream for record in trace if "add" in record.text]
            ['stream[0]', 'stream[1]']
        """
        operands = [*self._consts, *jax.tree.leaves((args, kwargs))]
        results, trace = interpreted(
            self.host_ir, self._config, self._call_jaxpr, operands
        )
        return jax.tree.unflatten(self.out_tree, results), trace

    def compile(
        self, compiler_options: Mapping[str, Any] | None = None, **how: Any
    ) -> Compiled:
        """Compiles the program for its devices.

        Args:
            compiler_options: XLA's options for this executable, a dict from names to
                values of the types that XLA takes.  They override the options of
                `jhost.jit`.
            **how: other arguments of `jax.stages.Lowered.compile`.

        Returns:
            The executable, which you can call and explain, and which has a schedule.

        Raises:
            CompilerOptionError: XLA refuses one of the `compiler_options`.

        Example:
            >>> import jax.numpy as jnp
            >>> import jhost
            >>> compiled = jhost.jit(lambda x: x + 1).lower(jnp.zeros(2)).compile()
            >>> compiled(jnp.zeros(2)).tolist()
            [1.0, 1.0]
        """
        given = None if compiler_options is None else dict(compiler_options)
        # JAX adds the function's own options to those that are given here, and XLA may
        # refuse any of them.
        options = dict(self._config.compiler_options) | (given or {})
        with explained_refusals(self._config.name, options):
            compiled = super().compile(given, **how)
        return Compiled(
            compiled,
            program=self._program,
            config=self._config,
            call_jaxpr=self._call_jaxpr,
        )


class Compiled(jax.stages.Compiled):
    """A `jax.stages.Compiled`; call it with arrays of the types it was lowered for.

    Attributes:
        in_tree: the tree of the positional and keyword arguments, as in `jax.stages`.
        out_tree: the tree of the results.
        args_info: shape, dtype and donation of each argument.
        out_info: shape and dtype of each result.

    Example:
        >>> import jax.numpy as jnp
        >>> import jhost
        >>> compiled = jhost.jit(lambda x: x * 2).lower(jnp.zeros(2)).compile()
        >>> compiled(jnp.ones(2)).tolist(), compiled.out_info.shape
        ([2.0, 2.0], (2,))
    """

    def __init__(
        self,
        compiled: jax.stages.Compiled,
        *,
        program: Program | Whole,
        config: Config,
        call_jaxpr: Any,
    ) -> None:
        take_over(self, compiled)
        self._program = program
        self._config = config
        self._call_jaxpr = call_jaxpr
        self._compare = functools.cache(functools.partial(_compare, program, config))

    @property
    def host_ir(self) -> Program:
        """The Host IR program; `str` is its text.

        Raises:
            UnsupportedError: `jax.jit` compiles the function as a whole.
        """
        return _host_ir(self._program)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the executable.

        Args:
            *args: arrays of the shapes and dtypes it was lowered for, without static
                arguments.
            **kwargs: likewise.

        Returns:
            The results, arrays of the shapes and dtypes that the function gives.

        Raises:
            ProcessMismatchError, ProcessTimeoutError: another process of the mesh does
                not run this program.
            TypeError: the arguments have other types than it was lowered for.
        """
        self._compare()
        return super().__call__(*args, **kwargs)

    @property
    def mesh(self) -> AnyMesh | None:
        """The mesh on which it runs; None for one device."""
        return self._config.mesh

    def schedule(self) -> Schedule:
        """Returns how XLA schedules the communications.

        Returns:
            All kernels, and all communications.  Each communication has its bytes,
            whether it is asynchronous, the kernels that XLA issues beside it, and its
            queue (with JAX 0.12, compiled for GPUs).  `str` is a table, and the fields
            are for tools.

        Raises:
            ScheduleError: the backend does not give the text of what it compiled.

        Example:
            >>> import jax.numpy as jnp
            >>> import jhost
            >>> f = jhost.jit(lambda x: jhost.stream(x @ x, axis=0, chunks=2))
            >>> print(f.lower(jnp.ones((4, 4))).compile().schedule())
            schedule: 0 communications, 2 matmuls, ...
        """
        schedule = parse_schedule(self.as_text() or "")
        return with_streams(schedule, communication_streams(self))

    def explain(self, *, detail: bool = False) -> Explanation:
        """Says what is pipelined, how and why, and how XLA schedules it.

        Args:
            detail: True gives `str` everything, and False one screen.

        Returns:
            An explanation, as `jhost.explain` returns it, with XLA's schedule.

        Example:
            >>> import jax.numpy as jnp
            >>> import jhost
            >>> f = jhost.jit(lambda x: jhost.stream(x * 2, axis=0, chunks=2))
            >>> f.lower(jnp.ones(4)).compile().explain().schedule
            'schedule: 0 communications, ...'
        """
        try:
            schedule = str(self.schedule())
        except errors.ScheduleError:
            schedule = (
                "schedule: this backend does not give the text of what it compiled"
            )
        explanation = explained(self._program, self._config, self._call_jaxpr)
        return dataclasses.replace(explanation, schedule=schedule, detailed=detail)


def _host_ir(program: Program | Whole) -> Program:
    if isinstance(program, Whole):
        program.refuse("host_ir")
    return program


def _compare(program: Program | Whole, config: Config) -> None:
    if not isinstance(program, Whole):
        compare(program, config)
