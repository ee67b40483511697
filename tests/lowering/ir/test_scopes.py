"""What XLA makes of a statement is found again by its scope."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, PartitionSpec as P

import jhost
from jhost.lowering.ir.scopes import Origin, origin_of, statement_texts
from jhost.lowering.ir.statements import Communicate, Compute, walk


def lowered(make_mesh: Callable[..., Mesh], pipeline: Any) -> Any:
    f = jhost.jit(
        lambda x, w: jhost.stream(x @ w, axis=0, chunks=2, pipeline=pipeline),
        mesh=make_mesh((2,), ("tp",)),
        in_shardings=(P("tp", None), P(None, "tp")),
        out_shardings=P(None, "tp"),
    )
    return f.lower(jnp.ones((8, 16)), jnp.ones((16, 32)))


def origins(text: str) -> set[Origin]:
    found = (origin_of(name) for name in re.findall(r'op_name="([^"]*)"', text))
    return {origin for origin in found if origin is not None}


@pytest.mark.parametrize("pipeline", ["collective", "p2p", "off"])
def test_what_works_leaves_its_scope_in_the_compiled_module(
    make_mesh: Callable[..., Mesh], pipeline: str
) -> None:
    low = lowered(make_mesh, pipeline)
    found = origins(low.compile().as_text())
    stmts = list(walk(low.host_ir.body))
    for place, stmt in enumerate(stmts):
        if isinstance(stmt, Compute | Communicate):
            assert any(origin.statement == place for origin in found), stmt
    assert {origin.statement for origin in found} <= set(range(len(stmts) + 1))


def test_every_iteration_has_a_scope_of_its_own(make_mesh: Callable[..., Mesh]) -> None:
    low = lowered(make_mesh, "collective")
    (gather,) = (
        place
        for place, stmt in enumerate(walk(low.host_ir.body))
        if isinstance(stmt, Communicate)
    )
    found = origins(low.compile().as_text())
    iterations = {o.iterations for o in found if o.statement == gather}
    assert iterations == {(0,), (1,)}


@pytest.mark.parametrize(
    ("op_name", "origin"),
    [
        ("jit(f)/shard_map/host_ir.12[3].x_i/ppermute", Origin(12, (3,))),
        ("host_ir.4[0][11].c_1/dot_general", Origin(4, (0, 11))),
        ("jit(f)/host_ir.7.y/while/body/host_ir.1[2].z/add", Origin(7, ())),
        ("jit(f)/shard_map/dot_general", None),
        ("jit(host_ir)/add", None),
        ("", None),
    ],
)
def test_an_origin_is_read_from_metadata(op_name: str, origin: Origin | None) -> None:
    assert origin_of(op_name) == origin


def test_texts_stand_at_the_places_of_their_statements(
    make_mesh: Callable[..., Mesh],
) -> None:
    program = lowered(make_mesh, "p2p").host_ir
    stmts, texts = list(walk(program.body)), statement_texts(program)
    assert len(texts) == len(stmts) + 1
    assert texts[-1] == f"return {program.results[0].name}"
    for stmt, text in zip(stmts, texts, strict=False):
        if isinstance(stmt, Compute):
            assert text.startswith(stmt.outs[0].name)
