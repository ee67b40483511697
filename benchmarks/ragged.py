"""Products of rows in groups on one device: jhost's, JAX's, and those of equal groups.

    python -m benchmarks.ragged [--cases mixtral,deepseek] [--quick] [--json FILE]

Rows of experts on one of four devices, as `jhost.nnx.MoE` has them: in a room for four
times as many as there are on average, with an uneven number for each expert.  `equal`
is a batched matmul of as many rows in groups of one size: what a kernel can reach.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jhost
from benchmarks import environment
from benchmarks.runner import error_text, memory
from benchmarks.timing import CODE_PATH, FULL, Call, Deadline, Effort, measure


@dataclasses.dataclass(frozen=True)
class Case:
    """`[rows, k]` times `[groups, k, n]`, in a room for so many times as many rows."""

    rows: int
    groups: int
    k: int
    n: int
    room: int = 4


CASES = {
    "mixtral": Case(8192, 2, 4096, 14336),
    "deepseek": Case(16384, 64, 7168, 2048),
    "qwen": Case(8192, 32, 4096, 1536),
}
QUICK = {"quick": Case(96, 4, 32, 16)}

Product = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def equal(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, *, rows: int) -> jax.Array:
    """The first `rows` in groups of one size, whatever `sizes` says."""
    groups = lhs[:rows].reshape(len(rhs), -1, lhs.shape[1])
    return jnp.einsum("gmk,gkn->gmn", groups, rhs).reshape(rows, -1)


def operands(case: Case) -> tuple[jax.Array, jax.Array, jax.Array]:
    """bfloat16, with 0 in the room that is left, and how many rows each group has."""
    random = np.random.default_rng(0)
    shares = random.dirichlet(np.full(case.groups, 4.0))
    sizes = jnp.asarray(random.multinomial(case.rows, shares), np.int32)
    of_lhs, of_rhs = jax.random.split(jax.random.key(0))
    lhs = jax.random.normal(of_lhs, (case.rows * case.room, case.k), jnp.bfloat16)
    lhs = jnp.where(jnp.arange(len(lhs))[:, None] < case.rows, lhs, 0)
    shape = case.groups, case.k, case.n
    return lhs, jax.random.normal(of_rhs, shape, jnp.bfloat16), sizes


def gradients(product: Product) -> Callable[..., Any]:
    """The product and those by rows and matrices, of a loss that is not linear."""

    def loss(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(product(lhs, rhs, sizes)).astype(jnp.float32))

    return jax.value_and_grad(loss, (0, 1))


def measured(name: str, case: Case, effort: Effort) -> list[dict[str, Any]]:
    """A row for each pass."""
    ways: dict[str, Product] = {
        "jhost": jhost.ragged_dot,
        "jax": lax.ragged_dot,
        "equal": functools.partial(equal, rows=case.rows),
    }
    of_both = {way: gradients(product) for way, product in ways.items()}
    given = operands(case)
    return [
        {"case": name, "pass": which, **_measured(functions, given, effort)}
        for which, functions in {"forward": ways, "both": of_both}.items()
    ]


def _measured(
    functions: dict[str, Product], given: Sequence[jax.Array], effort: Effort
) -> dict[str, Any]:
    """A function that does not fit has what is wrong in place of times."""
    errors: dict[str, str] = {}
    programs: dict[str, Any] = {}

    def failed(way: str, error: Exception) -> None:
        errors[way] = error_text(error)

    for way, f in functions.items():
        try:
            programs[way] = jax.jit(f).lower(*given).compile()
        except jax.errors.JaxRuntimeError as error:
            failed(way, error)
    calls: dict[str, Call] = {
        way: lambda _, program=program: program(*given)
        for way, program in programs.items()
    }
    times = measure(calls, effort, 1, Deadline(None), failed)
    return {
        "times": {way: each.figures() for way, each in times.items()},
        "memory": {
            way: memory(program.memory_analysis()) for way, program in programs.items()
        },
        "errors": errors,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measures the cases, prints a table, and writes JSON if it is asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES), help="their names")
    parser.add_argument("--quick", action="store_true", help="a small one, on any CPU")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    arguments = parser.parse_args(argv)
    cases = QUICK if arguments.quick else CASES
    names = list(cases) if arguments.quick else arguments.cases.split(",")
    if unknown := set(names) - set(cases):
        parser.error(f"no cases {sorted(unknown)}; there are {', '.join(cases)}")
    effort = CODE_PATH if arguments.quick else FULL
    print("| case | pass | jhost | JAX | equal groups |\n|---|---|---|---|---|")
    rows = list[dict[str, Any]]()
    for name in names:
        for row in measured(name, cases[name], effort):
            cells = " | ".join(_cell(row, way) for way in ("jhost", "jax", "equal"))
            print(f"| {name} | {row['pass']} | {cells} |", flush=True)
            rows.append(row)
    if arguments.json is not None:
        found = {"environment": environment.describe(), "rows": rows}
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


def _cell(row: dict[str, Any], way: str) -> str:
    if way not in row["times"]:
        return row["errors"][way]
    times, size = row["times"][way], row["memory"][way]["temp_bytes"]
    return f"{times['min_ms']:.2f} / {times['median_ms']:.2f} ms, {size / 1e6:,.0f} MB"


if __name__ == "__main__":
    main()
