"""Statements as a dependency graph, and the merging of its nodes into convex groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hypothesis import given, strategies as st

from jhost.lowering.ir.effects import reads_writes
from jhost.lowering.ir.graph import (
    Graph,
    Group,
    Node,
    ShouldMerge,
    dependencies,
    merge_groups,
    nodes,
)
from jhost.lowering.ir.statements import (
    Allocate,
    Buffer,
    Deallocate,
    Set,
    Stmt,
    Wait,
)
from tests.lowering.hand_built import buffer, communicate, compute, loop, select


def copies(text: str) -> Graph:
    """`copies("x->y y->z")`: a graph of copies between the buffers so named."""
    pairs = [pair.split("->") for pair in text.split()]
    return nodes([Set(out=named(out), source=named(source)) for source, out in pairs])


def named(name: str) -> Buffer:
    return buffer(f"{name}: f32[4]")


X, Y, Z, U = map(named, "xyzu")


# --- What a statement touches ------------------------------------------------------- #


def check_touched(stmt: Stmt, reads: str, writes: str) -> None:
    given_reads, given_writes = reads_writes(stmt)
    assert [b.name for b in given_reads] == reads.split()
    assert [b.name for b in given_writes] == writes.split()


def test_straight_line_statements_read_and_write() -> None:
    check_touched(compute(lambda x, y: x + y, (X, Y), (Z,)), "x y", "z")
    check_touched(Set(out=Y, source=X), "x", "y")
    check_touched(communicate("AllReduce", Y, X, reducer="sum"), "x", "y")
    check_touched(select(Y, X, 0, 0, 4), "x", "y")
    check_touched(Allocate(buffer=X), "", "x")
    check_touched(Deallocate(buffer=X), "x", "")


def test_an_accumulating_computation_also_reads_what_it_writes() -> None:
    check_touched(compute(lambda x: x, (X,), (Y,), reducer="sum"), "x y", "y")


def test_a_loop_that_writes_an_alias_writes_its_source() -> None:
    part, half = buffer("part: f32[1]"), buffer("half: f32[2]")
    body = (select(half, Y, 0, 0, 2), select(part, half, 0, 0), Set(out=part, source=X))
    check_touched(loop(2, *body), "x", "y")


def test_a_communication_stands_together_with_its_wait() -> None:
    gather = communicate("AllReduce", Y, X, reducer="sum", name="c0")
    graph = nodes([gather, Set(out=Z, source=X), Wait(communication="c0")])
    assert [len(node.stmts) for node in graph] == [2, 1]
    assert graph[0].stmts == (gather, Wait(communication="c0"))


# --- Dependencies ------------------------------------------------------------------- #


def test_a_read_follows_the_last_write() -> None:
    assert dependencies(copies("x->y y->z x->y y->u")) == [set(), {0}, {0, 1}, {2}]


def test_a_write_follows_the_reads_since_the_last_write() -> None:
    assert dependencies(copies("x->y x->z u->x")) == [set(), set(), {0, 1}]


def test_parameters_depend_on_nothing() -> None:
    assert dependencies(copies("x->y x->z")) == [set(), set()]


# --- Merging ------------------------------------------------------------------------ #


def groups_of(graph: Sequence[Node], groups: Sequence[Group]) -> list[list[int]]:
    numbers = {id(node): number for number, node in enumerate(graph)}
    return [[numbers[id(node)] for node in group] for group in groups]


def merged(text: str, colors: str) -> list[list[int]]:
    """The groups of a graph of copies, where nodes of one letter may merge."""
    graph = copies(text)
    color = {id(node): c for node, c in zip(graph, colors, strict=True)}
    return groups_of(graph, merge_groups(graph, dependencies(graph), same(color)))


def same(color: Mapping[int, object]) -> ShouldMerge:
    def should_merge(one: Group, other: Group) -> bool:
        return len({color[id(node)] for node in (*one, *other)}) == 1

    return should_merge


def test_a_chain_is_one_group() -> None:
    assert merged("x->a a->b b->c", "sss") == [[0, 1, 2]]


def test_independent_nodes_merge_whatever_stands_between() -> None:
    assert merged("x->a x->b x->c", "sts") == [[0, 2], [1]]


def test_a_node_on_a_path_between_splits_a_group() -> None:
    assert merged("x->a a->b b->c", "sts") == [[0], [1], [2]]


def test_a_diamond_through_another_node_stays_convex() -> None:
    """a feeds b and c, d needs both: with c outside, d cannot join a and b."""
    add = compute(lambda b, c: b + c, (named("b"), named("c")), (named("d"),))
    graph = [*copies("x->a a->b a->c"), *nodes([add])]
    color = {id(node): c for node, c in zip(graph, "ssts", strict=True)}
    groups = groups_of(graph, merge_groups(graph, dependencies(graph), same(color)))
    assert groups == [[0, 1], [2], [3]]


def test_the_predicate_that_refuses_all_keeps_every_node_alone() -> None:
    graph = copies("x->a a->b x->c")
    groups = merge_groups(graph, dependencies(graph), lambda one, other: False)
    assert groups_of(graph, groups) == [[0], [1], [2]]


def test_the_predicate_sees_whole_groups() -> None:
    """Groups of at most two."""
    graph = copies("x->a a->b b->c c->d d->e")
    groups = merge_groups(
        graph, dependencies(graph), lambda one, other: len(one) + len(other) <= 2
    )
    assert groups_of(graph, groups) == [[0, 1], [2, 3], [4]]


@st.composite
def colored_graphs(draw: st.DrawFn) -> tuple[list[Node], list[int]]:
    """Statements over few buffers, which are read and written again and again."""
    pool = st.integers(0, draw(st.integers(1, 8)))
    graph: list[Node] = []
    for _ in range(draw(st.integers(0, 12))):
        reads = draw(st.lists(pool, max_size=3, unique=True))
        out = named(f"b{draw(pool)}")
        ins = tuple(named(f"b{number}") for number in reads)
        # The statement itself plays no part beside what it reads and writes.
        graph.append(Node((Allocate(buffer=out),), ins, (out,)))
    colors = draw(st.lists(st.integers(0, 2), min_size=len(graph), max_size=len(graph)))
    return graph, colors


def reachable(before: Sequence[set[int]]) -> list[set[int]]:
    """All that each node depends on, through others as well."""
    all_before: list[set[int]] = []
    for needs in before:
        all_before.append(needs.union(*(all_before[other] for other in needs)))
    return all_before


@given(colored_graphs())
def test_groups_are_convex_and_in_order(case: tuple[list[Node], list[int]]) -> None:
    graph, colors = case
    color = {id(node): c for node, c in zip(graph, colors, strict=True)}
    groups = groups_of(graph, merge_groups(graph, dependencies(graph), same(color)))
    order = [number for group in groups for number in group]
    assert sorted(order) == list(range(len(graph)))
    assert all(len({colors[number] for number in group}) == 1 for group in groups)
    before = dependencies(graph)
    position = {number: place for place, number in enumerate(order)}
    for number, needs in enumerate(before):
        assert all(position[other] < position[number] for other in needs)
    above = reachable(before)
    for group in groups:
        for outside in set(order).difference(group):
            leaves = any(number in above[outside] for number in group)
            comes_back = any(outside in above[number] for number in group)
            assert not (leaves and comes_back)


@given(colored_graphs())
def test_the_order_inside_a_group_is_the_programs(
    case: tuple[list[Node], list[int]],
) -> None:
    graph, colors = case
    color = {id(node): c for node, c in zip(graph, colors, strict=True)}
    for group in groups_of(
        graph, merge_groups(graph, dependencies(graph), same(color))
    ):
        assert group == sorted(group)
