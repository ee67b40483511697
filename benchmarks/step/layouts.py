"""Programs by the layouts that `jax.jit` chooses, and by jhost's: seconds predicted.

    JAX_NUM_CPU_DEVICES=4 python -m benchmarks.step.layouts [--of layers] [--part 1/8]

XLA says of each value where it lies: values go through a `custom_partitioning` that
changes nothing, and is told the shardings.  The same values are then constrained to
them, and jhost lowers the program as any other.  Whole steps and layers are as they are
measured, and once more without what they say of activations.  GPUs are H200s.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias
from unittest import mock

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Literal
from jax.interpreters import mlir
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from benchmarks import report
from benchmarks.axes import along_tp
from benchmarks.run_file import separated
from benchmarks.step import arms as of_layers, found
from benchmarks.step.predicted import KIND, as_with_cudnn
from benchmarks.step.records import stored
from benchmarks.step.whole import arms as whole, page, sizes
from benchmarks.step.whole.model import first_state, tokens_of
from jhost._call.bind import call_of
from jhost._call.build import built
from jhost.lowering.cost.choose_layouts import ChooseLayouts
from jhost.lowering.cost.choose_permutes import ranked_kinds
from jhost.lowering.cost.rates import rates_of
from jhost.lowering.emit.control_flow import call_control_flow
from jhost.lowering.ir.bodies import CONTROL_FLOW, programs, with_each_body
from jhost.lowering.ir.marks import ShardMark
from jhost.lowering.ir.operation import has_contraction
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.remarks import Note
from jhost.lowering.ir.requests import StreamDefaults
from jhost.lowering.ir.statements import Buffer, Compute, Set, Stmt
from jhost.lowering.pipeline import passes, run_passes
from jhost.lowering.rules.dim_rule import bind

HEAD = ("program", "GPUs", "by bytes, ms", "jhost, ms", "jit's, ms", "jhost / best")
MOST = 1.01
"""The most time that jhost's layouts may take, as a share of the best."""

LEAST = 1 << 16
"""The layouts of smaller values, in bytes, are not asked for."""

_UNOPTIMIZED = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
"""Options for a quick compilation: only the layouts are read, and nothing runs."""

Specs: TypeAlias = dict[tuple[int, str], P]
"""How values lie, by the place of the program among `programs`, and by name."""


# --- What XLA chooses --------------------------------------------------------------- #


class Asking:
    """A program before layouts as a function for `jax.jit`; XLA says its layouts."""

    def __init__(self, program: Program, mesh: Mesh) -> None:
        self.program, self.mesh = program, mesh
        self.places = {id(each): n for n, each in enumerate(programs(program))}
        self.found: Specs = {}

    def specs(self) -> Specs:
        """How XLA has values lie."""
        types = [jax.ShapeDtypeStruct(p.shape, p.dtype) for p in self.program.params]
        made = jax.jit(functools.partial(self.run, self.program)).lower(*types)
        made.compile(compiler_options=_UNOPTIMIZED)
        return self.found

    def run(self, program: Program, *args: Any) -> list[Any]:
        """The results of a program or a body."""
        said = {m.buffer: m.spec for m in program.marks if isinstance(m, ShardMark)}
        values: dict[str, Any] = {}

        def keep(buffers: Sequence[Any], results: Sequence[Any]) -> None:
            for buffer, value in zip(buffers, results, strict=True):
                if (spec := said.get(buffer.name)) is not None:
                    value = jax.lax.with_sharding_constraint(value, self.named(spec))
                key = self.places[id(program)], buffer.name
                values[buffer.name] = self.asked(key, value)

        keep(program.params, args)
        for stmt in program.body:
            match stmt:
                case Compute(outs=outs):
                    keep(outs, _run(stmt, values))
                case Set(out=out, source=source):
                    keep([out], [values[source.name]])
                case _:
                    assert isinstance(stmt, CONTROL_FLOW)
                    given = [values[buffer.name] for buffer in stmt.ins]
                    keep(stmt.outs, call_control_flow(stmt, given, self.run))
        return [values[result.name] for result in program.results]

    def named(self, spec: Sequence[tuple[str, ...] | None]) -> NamedSharding:
        entries = [P.UNCONSTRAINED if axes is None else axes for axes in spec]
        return NamedSharding(self.mesh, P(*entries))

    def asked(self, key: tuple[int, str], x: jax.Array) -> jax.Array:
        """x, whose layout is found when XLA partitions the program."""
        if not x.ndim or x.nbytes < LEAST:
            return x

        def partition(mesh: Any, ins: Any, _: Any) -> Any:
            sharding = ins[0].sharding
            self.found[key] = sharding.spec
            return mesh, lambda x: x, sharding, (sharding,)

        same: Any = custom_partitioning(lambda x: x)
        dims = " ".join(f"d{n}" for n in range(x.ndim))
        same.def_partition(partition=partition, sharding_rule=f"{dims} -> {dims}")
        return same(x)


def _run(stmt: Compute, values: dict[str, Any]) -> list[Any]:
    (each,) = stmt.unit.eqns
    read = dict(zip(stmt.unit.invars, stmt.ins, strict=True))
    operands = [
        v.val if isinstance(v, Literal) else values[read[v].name]
        for v in each.eqn.invars
    ]
    return bind(each.eqn, operands)


@contextmanager
def kernels_of_zeros() -> Generator[None]:
    """cuDNN's kernels compile for a CPU, partitioned as JAX has them partitioned."""
    cudnn = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")

    def zeros(context: Any, *_: Any, **__: Any) -> Any:
        def made() -> list[jax.Array]:
            return [jnp.zeros(out.shape, out.dtype) for out in context.avals_out]

        return mlir.lower_fun(made, multiple_results=True)(context.replace(avals_in=[]))

    for way in ("fwd", "bwd"):
        kernel = getattr(cudnn, f"_dot_product_attention_{way}_p")
        mlir.register_lowering(kernel, zeros, platform="cpu")
    yield


# --- The same program with these layouts -------------------------------------------- #


def constrained(program: Program, specs: Specs) -> Program:
    """`program` with the layouts in `specs` for the results of products and bodies.

    Layouts that the user gives stay.  jhost decides those of all other values.
    """
    places = {id(each): n for n, each in enumerate(programs(program))}

    def change(each: Program) -> Program:
        said = {mark.buffer for mark in each.marks if isinstance(mark, ShardMark)}
        values = (b for stmt in each.body for b in _results(stmt))
        more = [
            ShardMark(
                buffer=value.name,
                spec=_entries(specs[key], len(value.shape)),
                where="",
            )
            for value in values
            if value.name not in said
            and (key := (places[id(each)], value.name)) in specs
        ]
        changed = with_each_body(each, change)
        return dataclasses.replace(changed, marks=(*changed.marks, *more))

    return change(program)


def _results(stmt: Stmt) -> Sequence[Buffer]:
    if isinstance(stmt, CONTROL_FLOW):
        return stmt.outs
    return stmt.outs if isinstance(stmt, Compute) and has_contraction(stmt) else ()


def _entries(spec: P, rank: int) -> tuple[tuple[str, ...], ...]:
    said = [(e,) if isinstance(e, str) else tuple(e or ()) for e in spec]
    return (*said, *[()] * (rank - len(said)))


# --- Times -------------------------------------------------------------------------- #


class Times(NamedTuple):
    """Milliseconds by each choice of layouts."""

    by_bytes: float
    chosen: float
    of_jit: float

    @property
    def ratio(self) -> float:
        return self.chosen / min(self)


def times(program: Program, mesh: Mesh) -> Times:
    """What a program takes."""
    of_jit = constrained(program, Asking(program, mesh).specs())
    chosen, notes = lowered(program)
    with mock.patch.object(ChooseLayouts, "apply", lambda _, given: given):
        weighed = any(note.startswith("layouts: ") for note in notes)
        by_bytes = lowered(program)[0] if weighed else chosen
    return Times(by_bytes, chosen, lowered(of_jit)[0])


def lowered(program: Program) -> tuple[float, list[str]]:
    """Milliseconds of one run after all passes, and what they noted."""
    rates = rates_of(KIND)
    assert rates is not None
    every = passes(settings=StreamDefaults(), streams=4, rates=rates, device_kind=KIND)
    program = run_passes(program, every.all)
    (_, predicted), *_ = ranked_kinds(program, rates)
    notes = [each.text for each in program.remarks if isinstance(each, Note)]
    return 1e3 * predicted.total, notes


# --- Programs ----------------------------------------------------------------------- #


class Subject(NamedTuple):
    """A program to lay out: `make` gives the function for a mesh, and its arguments."""

    name: str
    mesh: Callable[[], Mesh]
    make: Callable[[Mesh], tuple[Any, Sequence[Any]]]
    free: bool = False
    """Whether nothing is said of activations."""

    @property
    def title(self) -> str:
        return f"{self.name}{', free' * self.free}"

    def program(self, mesh: Mesh) -> Program:
        """The program before any pass."""
        silent = mock.Mock(side_effect=lambda x, _: x)
        said = silent if self.free else jax.lax.with_sharding_constraint
        with (
            mock.patch.object(whole, "constrain", said),
            mock.patch.object(of_layers, "constrain", said),
        ):
            function, types = self.make(mesh)
            jaxpr, config, _ = call_of(function.__jhost_source__, types, {})
        return built(jaxpr, config)


def whole_steps() -> Iterator[Subject]:
    """Those that are stored."""
    for case in stored_cases():
        make = functools.partial(_whole, case)
        every = Subject(f"{case.name}, whole", case.mesh, make)
        yield from (every, every._replace(free=True))


def layers_in_steps() -> Iterator[Subject]:
    """Layers one after another or in a scan."""
    for axes in found.MESHES:
        for each in found.steps(("8b", "70b"), axes):
            every = Subject(each.name, axes.mesh, functools.partial(_unmarked, each))
            yield from (every, every._replace(free=True))


def single_layers() -> Iterator[Subject]:
    """Layers alone, which say nothing of activations."""
    for devices in (2, 4):
        axes = along_tp(devices)
        for each in found.layers(("8b", "70b"), axes):
            yield Subject(each.name, axes.mesh, functools.partial(_unmarked, each))


SUBJECTS = {"whole": whole_steps, "steps": layers_in_steps, "layers": single_layers}


def _whole(case: sizes.Case, mesh: Mesh) -> tuple[Any, Sequence[Any]]:
    case = case.with_cudnn()
    state = jax.eval_shape(functools.partial(first_state, case))
    tokens = jax.eval_shape(functools.partial(tokens_of, case))
    return whole.hosted("auto")(case, mesh), (state, tokens)


def _unmarked(subject: found.Subject, mesh: Mesh) -> tuple[Any, Sequence[Any]]:
    return subject.make(False, "auto", mesh), tuple(subject.types())


def stored_cases() -> list[sizes.Case]:
    """The whole steps in benchmarks/results, each once."""
    cases: dict[str, sizes.Case] = {}
    for record in (r for run in stored(page.SUFFIX) for r in run["measurements"]):
        axes = ",".join(f"{name}={size}" for name, size in record["mesh"].items())
        names = ("model", "loop", "layers", "sequences", "cast")
        given: list[Any] = [[record[name]] for name in names]
        (case,) = sizes.cases_of(*given, meshes=[axes])
        cases[f"{case.name} on {axes}"] = case
    return [*cases.values()]


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a row for each program as soon as it is known."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--of", type=separated(str), default=[*SUBJECTS])
    found.add_part(parser)
    arguments = parser.parse_args(argv)
    every = [each for of in arguments.of for each in SUBJECTS[of]()]
    print(report.table(HEAD, ()))
    with as_with_cudnn(), kernels_of_zeros():
        for subject in arguments.part(every):
            mesh = subject.mesh()
            try:
                found_times = times(subject.program(mesh), mesh)
            except jax.errors.JaxRuntimeError:
                # As of cuDNN's attention along a sequence that is sharded.
                print(
                    report.row_text([subject.title, "-", "jax.jit does not compile it"])
                )
                continue
            over = " !" * (found_times.ratio > MOST)
            axes = ",".join(f"{name}={size}" for name, size in mesh.shape.items())
            cells = [f"{each:.2f}" for each in found_times]
            cells.append(f"{found_times.ratio:.3f}{over}")
            print(report.row_text([subject.title, axes, *cells]), flush=True)


if __name__ == "__main__":
    main()
