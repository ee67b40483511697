"""A jhost function traced, lowered and compiled: JAX's ahead-of-time words."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from jhost import errors
from jhost._calibration import rates_here
from jhost._call.config import Config, puts_are_known
from jhost._call.execute import compare, interpreted, loops_of
from jhost._call.once_a_line import notes_of_unread
from jhost._call.program import unpipelined_program
from jhost._call.whole import Whole
from jhost._jax import communication_streams, take_over
from jhost.lowering.cost.choose_permutes import by_permutes
from jhost.lowering.cost.leave_to_xla import left_to_xla
from jhost.lowering.cost.rates import Rates
from jhost.lowering.explain import DeviceFacts, Explanation, explain_program, puts
from jhost.lowering.interpret.program import Record
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.reach import between_processes, permutes, why_not_hidden
from jhost.runtime.compiler_options import explained_refusals, options_report
from jhost.runtime.devices import Devices, devices_of
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
        """Lowers the function, like `jax.stages.Traced.lower`."""
        lowered = super().lower(lowering_platforms=lowering_platforms, **private)
        return self._as_lowered(lowered)


class Lowered(jax.stages.Lowered):
    """A `jax.stages.Lowered`: a function lowered for arguments of certain types.

    Attributes:
        in_tree: the tree of the positional and keyword arguments, as in `jax.stages`.
        out_tree: the tree of the results.
        args_info: shape, dtype and donation of each argument.
        out_info: shape and dtype of each result.
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


def explained(program: Program | Whole, config: Config, call_jaxpr: Any) -> Explanation:
    """The remarks of passes on a jaxpr's `program`, and XLA's options for its loops."""
    if isinstance(program, Whole):
        # It has no streams, or it would not stay whole.
        return _explained_whole(program, config)
    devices = devices_of(config.mesh)
    explanation = explain_program(program, _known(devices, program))
    explanation = _with_times(explanation, program, config, call_jaxpr)
    loops = loops_of(program)
    options: tuple[str, ...] = ()
    if loops is not None:
        options = options_report(config.name, config.mesh, **loops)
    notes = (
        *explanation.notes,
        *notes_of_unread(call_jaxpr),
        *_notes_of_nothing_marked(explanation, config),
        *_notes_of_reach(program, devices),
        *_notes_of_puts(explanation, config),
        *_notes_of_rates(explanation, devices),
    )
    return dataclasses.replace(
        explanation, name=config.title, notes=notes, options=options
    )


def _known(devices: Devices, program: Program) -> DeviceFacts:
    """The facts that predictions use; no rates where nothing can overlap."""
    rates = rates_here(devices, puts(program))
    return DeviceFacts(rates if rates and _overlaps(rates) else None, devices.reach)


def _overlaps(rates: Rates) -> bool:
    return rates.permute.beside_compute or rates.collective.beside_compute


def _with_times(
    explanation: Explanation, program: Program, config: Config, call_jaxpr: Any
) -> Explanation:
    """The explanation with what the program takes, and would without jhost."""
    devices = devices_of(config.mesh)
    if devices.count == 1 or left_to_xla(program):
        return explanation
    explanation = dataclasses.replace(
        explanation, devices=f"{devices.count} x {devices.kind}"
    )
    rates = rates_here(devices, puts(program))
    if rates is None or not _overlaps(rates):
        return dataclasses.replace(explanation, nothing_overlaps=rates is not None)
    plain = unpipelined_program(call_jaxpr, config)
    (_, predicted), *_ = by_permutes(program, rates)
    (_, unpipelined), *_ = by_permutes(plain, rates)
    return dataclasses.replace(
        explanation, predicted=predicted, unpipelined=unpipelined
    )


def _explained_whole(whole: Whole, config: Config) -> Explanation:
    """Says that jhost makes no program, and why."""
    none = Explanation(
        name=config.title,
        loops=0,
        streams=(),
        layouts=(),
        communications=(),
        notes=(str(whole), *whole.reasons),
    )
    unmarked = _notes_of_nothing_marked(none, config)
    return dataclasses.replace(none, notes=(*none.notes, *unmarked))


def _notes_of_nothing_marked(explanation: Explanation, config: Config) -> Iterator[str]:
    """Says that settings for streams were given, but no value has a stream."""
    given = {"pipeline": config.pipeline, "chunks": config.chunks}
    asked = [f"{name}={value!r}" for name, value in given.items() if value != "auto"]
    # Only for the function itself, and not again for programs derived from it.
    if asked and not explanation.streams and not config.role:
        apply = "apply" if len(asked) > 1 else "applies"
        yield (
            f"nothing is marked: {' and '.join(asked)} only {apply} to values that "
            f"jhost.stream marks; with pipeline='auto' jhost finds streams itself"
        )


def _notes_of_rates(explanation: Explanation, devices: Devices) -> Iterator[str]:
    """Says where the rates come from by which streams were chosen, on GPUs."""
    weighed = any(stream.predicted for stream in explanation.streams)
    rates = rates_here(devices) if devices.platform == "gpu" else None
    if weighed and rates is not None:
        measures = "; python -m jhost calibrate measures them" * rates.estimated
        yield f"predicted by rates of {devices.kind} {rates.source}{measures}"


def _notes_of_puts(explanation: Explanation, config: Config) -> Iterator[str]:
    """Says why the kind of permutes was not chosen here."""
    pipelines = {stream.pipeline for stream in explanation.streams}
    if config.embedded and "p2p" in pipelines and puts_are_known(config.mesh):
        yield (
            "jhost assumes that permutes are peer copies, as jhost.compiler_options() "
            "sets them: only the outer program can set their kind"
        )


def _notes_of_reach(program: Program, devices: Devices) -> Iterator[str]:
    """Why permutes that were asked for hide less than copies."""
    axes = sorted(permutes(program))
    if devices.platform == "gpu" and between_processes(axes, devices.reach):
        text = why_not_hidden(axes, devices.reach, dict(program.mesh.shape))
        yield f"a p2p pipeline hides little here: {text}"
