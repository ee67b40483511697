"""What tests of the dim rules share: JAX's primitives, and the check of one rule."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import JaxprEqn, Literal, Primitive, Var

from jhost._jax import ClosedJaxpr, aval_of
from jhost.lowering.rules.dim_rule import DimRule, Dims, FactorDim, bind, factors_of
from jhost.lowering.rules.elementwise import ELEMENTWISE
from jhost.lowering.rules.reducers import Reducer
from jhost.lowering.rules.table import rule_of

# Public modules with primitives of their own that `import jax` does not load.
_PUBLIC = (
    "jax.custom_batching",
    "jax.experimental.buffer_callback",
    "jax.experimental.checkify",
    "jax.experimental.compute_on",
    "jax.experimental.custom_partitioning",
    "jax.experimental.fused",
    "jax.experimental.multihost_utils",
    "jax.experimental.rnn",
    "jax.experimental.sparse",
    "jax.experimental.xla_metadata",
    "jax.export",
)
# Languages for kernels: their primitives stand in a kernel's body, where no rule looks.
_KERNEL_LANGUAGES = (
    "jax._src.pallas",
    "jax._src.thunky",
    "jax._src.tpu_custom_call",
    "jax.experimental.mosaic",
    "jax.experimental.pallas",
    "jax.experimental.thunky",
)


@pytest.fixture(scope="session")
def jax_primitives() -> dict[str, Primitive]:
    """The primitives that a user's function may hold, by name.

    These are the ones in the modules that JAX's public modules load, but for those of
    kernel languages.
    """
    for name in _PUBLIC:
        importlib.import_module(name)
    modules = [
        module
        for name, module in sorted(sys.modules.items())
        if name.startswith("jax.") and not name.startswith(_KERNEL_LANGUAGES)
    ]
    values = [value for module in modules for value in list(vars(module).values())]
    return {value.name: value for value in values if isinstance(value, Primitive)}


@pytest.fixture(scope="session")
def check_rule() -> Callable[..., set[str]]:
    """`check_rule(f, *args)`: each equation of `f` in parts gives what the whole gives.

    Each factor of its rule is cut in several ways, alone and together with the others.
    Returns the names of the primitives.
    """
    return _check_equations


def _check_equations(function: Callable[..., Any], *args: Any) -> set[str]:
    closed = jax.make_jaxpr(function)(*args)
    values = _values(closed, [_concrete(leaf) for leaf in jax.tree.leaves(args)])
    cases = [
        _Case(
            eqn,
            rule_of(eqn),
            [_read(atom, values) for atom in eqn.invars],
            [values[var] for var in eqn.outvars],
        )
        for eqn in closed.jaxpr.eqns
        if not _checked_before(eqn)
    ]
    _run_parts(cases)
    for case in cases:
        _check(case)
    return {eqn.primitive.name for eqn in closed.jaxpr.eqns}


def _values(closed: ClosedJaxpr, args: Sequence[Any]) -> dict[Var, Any]:
    """The values of all variables, those of several equations by one program."""
    jaxpr = closed.jaxpr
    given = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    given |= zip(jaxpr.invars, args, strict=True)
    outvars = [var for eqn in jaxpr.eqns for var in eqn.outvars]

    def run(args: Sequence[Any]) -> list[Any]:
        values = given | dict(zip(jaxpr.invars, args, strict=True))
        for eqn in jaxpr.eqns:
            operands = [_read(atom, values) for atom in eqn.invars]
            values |= zip(eqn.outvars, bind(eqn, operands), strict=True)
        return [values[var] for var in outvars]

    results = (jax.jit(run) if len(jaxpr.eqns) > 1 else run)(args)
    return given | dict(zip(outvars, map(_concrete, results), strict=True))


def _read(atom: Var | Literal, values: Mapping[Var, Any]) -> Any:
    if isinstance(atom, Literal):
        return np.asarray(atom.val, aval_of(atom).dtype)
    return values[atom]


def _checked_before(eqn: JaxprEqn) -> bool:
    """Whether one like it was checked, if it is elementwise: values make no matter."""
    if eqn.primitive.name not in ELEMENTWISE:
        return False
    avals = tuple(str(aval_of(atom)) for atom in eqn.invars)
    alike = eqn.primitive.name, str(eqn.params), avals
    if alike in _checked:
        return True
    _checked.add(alike)
    return False


_checked: set[tuple[Any, ...]] = set()


# --- One rule ------------------------------------------------------------------ #


@dataclasses.dataclass(frozen=True)
class _Part:
    """The part `[offset : offset + size]` of each factor."""

    parts: tuple[tuple[int, int], ...]

    @property
    def shape(self) -> tuple[tuple[int, int], ...]:
        """Of each factor, the size and how long the stretches are that make it."""
        return tuple((size, math.gcd(start, size) or 1) for start, size in self.parts)


@dataclasses.dataclass(frozen=True)
class _Shard:
    """A `Shard` with a part of that shape, whose offsets are known when it runs."""

    shape: tuple[tuple[int, int], ...]
    offsets: Any
    sizes: tuple[int, ...]
    accumulator: np.dtype | None = None
    zigzag: int = 1

    def size(self, factor: int) -> int:
        return self.shape[factor][0]

    def positions(self, factor: int) -> Any:
        return self.offsets[factor] + jnp.arange(self.size(factor), dtype=jnp.int32)

    def starts(self, factor: int) -> list[Any]:
        size, stretch = self.shape[factor]
        return [self.offsets[factor] + step for step in range(0, size, stretch)]

    def grain(self, factor: int) -> int:
        return self.shape[factor][1]

    def varies(self, factor: int) -> bool:
        return self.size(factor) < self.sizes[factor]

    def parts(self, factor: int) -> int:
        return -(-self.sizes[factor] // self.size(factor))


@dataclasses.dataclass(frozen=True)
class _Case:
    """An equation, its rule, the whole values, and the results of parts."""

    eqn: JaxprEqn
    rule: DimRule
    operands: Sequence[Any]
    results: Sequence[Any]
    made: dict[_Part, Sequence[Any]] = dataclasses.field(default_factory=dict)

    def rebound(self, part: _Part, offsets: Any, operands: Sequence[Any]) -> Any:
        return self.rule.rebind(
            self.eqn, operands, _Shard(part.shape, offsets, self.rule.sizes)
        )

    def cut(self, part: _Part) -> list[Any]:
        maps = zip(self.operands, self.rule.operands, strict=True)
        return [
            _cut(_windows(value, dims, part, self.rule), dims, part)
            for value, dims in maps
        ]


def _run_parts(cases: Sequence[_Case]) -> None:
    """All parts of all equations, in one program: XLA takes longest to begin one.

    Offsets are known when it runs, as those of devices are.
    """
    wanted = [(case, part) for case in cases for part in set(_parts(case.rule))]
    operands = [case.cut(part) for case, part in wanted]
    offsets = [np.array([start for start, _ in p.parts], np.int32) for _, p in wanted]

    @jax.jit
    def run(operands: Any, offsets: Any) -> list[Any]:
        given = zip(wanted, offsets, operands, strict=True)
        return [case.rebound(part, *rest) for (case, part), *rest in given]

    for (case, part), results in zip(wanted, run(operands, offsets), strict=True):
        case.made[part] = [_concrete(result) for result in results]


def _parts(rule: DimRule) -> Iterator[_Part]:
    """Those that are compared; the whole is a part of every factor."""
    for factor in range(len(rule.sizes)):
        for chunks in _chunkings(rule, factor):
            yield from _chunks(rule, factor, chunks)
    yield from _together(rule)


def _check(case: _Case) -> None:
    rule = case.rule
    _check_sizes(rule.operands, rule.sizes, case.operands)
    _check_sizes(rule.results, rule.sizes, case.results)
    for factor in range(len(rule.sizes)):
        for chunks in _chunkings(rule, factor):
            _check_chunks(case, factor, chunks)
    _check_together(case)
    _check_joined(case)


def _check_joined(case: _Case) -> None:
    """Each step reads one element of one operand, and the result has it there."""
    joined = case.rule.joined
    if joined is None:
        return
    (result,) = case.results
    made = np.zeros_like(result)
    seen = Counter[int]()
    for number, reads in joined.reads:
        for step in range(*reads.steps):
            at = np.moveaxis(made, joined.dim, 0)
            at[step] = np.moveaxis(case.operands[number], joined.dim, 0)[
                reads.start(step, 1)
            ]
            seen[step] += 1
    assert seen == Counter(range(result.shape[joined.dim]))
    _assert_same(made, result)


def _check_sizes(
    maps: Sequence[Dims], sizes: Sequence[int], values: Sequence[Any]
) -> None:
    """The steps of a factor fill each dim that follows it."""
    for dims, value in zip(maps, values, strict=True):
        assert len(dims) == np.ndim(value)
        for dim, size in zip(dims, np.shape(value), strict=True):
            if dim is not None and dim.reads is not None:
                assert dim.reads.size == size
                continue
            while dim is not None:
                assert sizes[dim.factor] * dim.scale == size
                dim, size = dim.inside, dim.scale


def _chunkings(rule: DimRule, factor: int) -> Iterator[tuple[int, ...]]:
    """Ways to cut a factor: not at all, and at places that are no multiples.

    There are single steps at both ends, and half of all between them.
    """
    size = rule.sizes[factor]
    yield (size,)
    if _is_joined(rule, factor) or factor in rule.inner:
        return
    if _has_gaps(rule, factor):
        part = _last(size)[1] if size > 1 else 1
        yield (part,) * (size // part)
        return
    half = size - size // 2
    if size > 3:
        yield tuple(part for part in (1, half, size - half - 2, 1) if part)
    elif size > 1:
        yield (1, size - 1)


def _has_gaps(rule: DimRule, factor: int) -> bool:
    """Whether steps read elements with places between them: then parts are equal."""
    mapped = (dim for dims in rule.operands for dim in dims if dim and dim.reads)
    gaps = {dim.factor for dim in mapped if dim.reads and dim.reads.dilation > 1}
    return factor in gaps


def _is_joined(rule: DimRule, factor: int) -> bool:
    """Whether no part of a factor is ever run: its pieces are put together instead."""
    return rule.joined is not None and rule.joined.factor == factor


def _chunks(rule: DimRule, factor: int, chunks: Sequence[int]) -> list[_Part]:
    whole = tuple((0, size) for size in rule.sizes)
    offsets = [sum(chunks[:position]) for position in range(len(chunks))]
    return [
        _Part((*whole[:factor], part, *whole[factor + 1 :]))
        for part in zip(offsets, chunks, strict=True)
    ]


def _check_chunks(case: _Case, factor: int, chunks: Sequence[int]) -> None:
    parts = [case.made[part] for part in _chunks(case.rule, factor, chunks)]
    reducer = case.rule.reducers[factor]
    totals = _combined(case.rule, reducer, parts) if reducer else case.results
    for dims, result, total, *given in zip(
        case.rule.results, case.results, totals, *parts, strict=True
    ):
        positions = [i for i, dim in enumerate(dims) if dim and dim.factor == factor]
        if positions:  # also where another result reduces the factor
            (position,) = positions
            _assert_same(_joined(given, position), result)
        elif reducer:
            _assert_same(total, result)
        else:
            for part in given:
                _assert_same(part, result)


def _together(rule: DimRule) -> list[_Part]:
    """The last part of all parallel factors at once, as on a mesh of several axes.

    With it go halves of all that are reduced, which are put together; what another
    result follows is whole.  Around inner factors there is one step.
    """
    nested = [d for dims in (*rule.operands, *rule.results) for d in dims if d]
    around = {factor for dim in nested for factor in dim.factors[:-1]}
    followed = set[int]().union(*map(factors_of, rule.results))
    pairs = zip(rule.sizes, rule.reducers, strict=True)
    parts = [
        [(0, size)]
        if _is_joined(rule, factor) or (reducer is not None and factor in followed)
        else [(size - 1, 1)]
        if factor in around
        else [_last(size)]
        if factor in rule.inner or (_has_gaps(rule, factor) and size > 1)
        else [(size // 2, size - size // 2)]
        if reducer is None
        else _halves(size)
        for factor, (size, reducer) in enumerate(pairs)
    ]
    return [_Part(chosen) for chosen in itertools.product(*parts)]


def _check_together(case: _Case) -> None:
    places = _together(case.rule)
    given = [case.made[place] for place in places]
    reducers: set[Reducer] = {r for r in case.rule.reducers if r}
    (reducer,) = reducers or ("sum",)
    totals = _combined(case.rule, reducer, given)
    for dims, result, total in zip(
        case.rule.results, case.results, totals, strict=True
    ):
        _assert_same(total, _cut(result, dims, places[0]))


def _last(size: int) -> tuple[int, int]:
    """The last of few equal parts."""
    part = size // next(n for n in range(2, size + 1) if size % n == 0)
    return size - part, part


def _halves(size: int) -> list[tuple[int, int]]:
    if size < 2:
        return [(0, size)]
    return [(0, size // 2), (size // 2, size - size // 2)]


# --- Values -------------------------------------------------------------------- #

_COMBINE: dict[Reducer, Callable[[Any, Any], Any]] = {
    "sum": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "prod": np.multiply,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
}


def _combined(
    rule: DimRule, reducer: Reducer, parts: Sequence[Sequence[Any]]
) -> Sequence[Any]:
    """The results of all parts, by `reducer`; where shapes differ, nobody asks."""
    if reducer == "softmax":
        assert rule.combine is not None
        return functools.reduce(rule.combine, parts)
    return [
        functools.reduce(_COMBINE[reducer], each)
        if len({np.shape(part) for part in each}) == 1
        else None
        for each in zip(*parts, strict=True)
    ]


def _concrete(value: Any) -> Any:
    """A NumPy array, of which NumPy makes parts without compiling; keys stay."""
    # Not by `jnp.array`, which has XLA compile a copy for each shape (0.10 to 0.12).
    return value if _are_keys(value) else np.asarray(value, jnp.result_type(value))


def _are_keys(value: Any) -> bool:
    extended = jax.dtypes.extended
    return isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, extended)


def _joined(values: Sequence[Any], dim: int) -> Any:
    join = jnp.concatenate if _are_keys(values[0]) else np.concatenate
    return join(values, dim)


def _cut(value: Any, dims: Dims, part: _Part) -> Any:
    """What of `value` is in `part`."""
    return value[tuple(_slice(dim, part) for dim in dims)]


def _windows(value: Any, dims: Dims, part: _Part, rule: DimRule) -> Any:
    """A value with the windows of `part`, and anything where it has no element."""
    for number, dim in enumerate(dims):
        if dim is None or dim.reads is None:
            continue
        start, size = part.parts[dim.factor]
        if size == rule.sizes[dim.factor]:
            continue
        first = dim.reads.start(start, size)
        places = np.arange(first, first + dim.reads.window(size))
        value = np.take(value, places % dim.reads.size, number)
    return value


def _slice(dim: FactorDim | None, part: _Part) -> slice:
    if dim is None or dim.reads is not None:
        return slice(None)
    start, size = part.parts[dim.factor]
    inside = _slice(dim.inside, part)
    if dim.inside is not None and size == 1:
        first = start * dim.scale
        return slice(first + inside.start, first + inside.stop)
    return slice(start * dim.scale, (start + size) * dim.scale)


def _assert_same(given: Any, wanted: Any) -> None:
    """Equal, to the rounding of sums where the values are not integers."""
    assert given.shape == wanted.shape
    assert given.dtype == wanted.dtype
    if jnp.issubdtype(wanted.dtype, jax.dtypes.prng_key):
        given, wanted = jax.random.key_data(given), jax.random.key_data(wanted)
    if jnp.issubdtype(wanted.dtype, np.inexact):
        np.testing.assert_allclose(given, wanted, rtol=1e-5, atol=1e-5)
    else:
        np.testing.assert_array_equal(given, wanted)
