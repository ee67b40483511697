"""The list of cases, fixed before measuring: names, operands, layouts."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterable, Iterator, Sequence

from jax.sharding import PartitionSpec as P

from benchmarks import layers
from benchmarks.axes import Axes
from benchmarks.case import COLUMNS, ROWS, WHOLE, Case, Operand
from benchmarks.communication import AXIS
from benchmarks.layers import EXPERTS, MODELS, Layer, Model

TOKENS = (8192, 4096, 2048)

LONG = (131072, 32768)
"""Tokens of a sequence that no device has whole."""

RING = "ring_attention"

GROUP = 256
"""Tokens that are routed together."""

ROOM = 1.25
"""How many of a group an expert has room for, relative to an even spread."""

_UNIT = 128.0
"""Integer operands of activation functions are multiples of it: there gelu and silu
are exact, x or 0."""


def _weight(
    name: str, shape: tuple[int, int], spec: P, nonzeros: float = 1024.0
) -> Operand:
    return Operand(name, shape, spec, scale=shape[0] ** -0.5, nonzeros=nonzeros)


def _make(name: str, model: Model, tokens: int, axes: Axes) -> Case:
    """One of the Llama layers.  The nonzeros keep the variance of sums near 1000."""
    kind = name.partition("/")[0]
    hidden, ffn, attended = model.hidden, model.ffn, model.heads * model.head
    x = Operand("x", (tokens, hidden), axes.rows)
    x_units = dataclasses.replace(x, unit=_UNIT)
    few, some = 4.0, 128.0
    gate = _weight("gate", (hidden, ffn), COLUMNS, few)
    up = _weight("up", (hidden, ffn), COLUMNS, few)
    down = _weight("down", (ffn, hidden), ROWS)
    qkv = _weight("qkv", (hidden, model.qkv), COLUMNS)
    out = _weight("out", (attended, hidden), ROWS)
    gains = [Operand(f"{nth}_gain", (hidden,), WHOLE) for nth in ("first", "second")]
    wide = Operand("h", (tokens, ffn), axes.columns)
    mixed = Operand("h", (tokens, attended), axes.columns)
    down_few = dataclasses.replace(down, nonzeros=some)
    table: dict[str, tuple[Layer, tuple[Operand, ...], P]] = {
        "ag_qkv": (layers.gathered, (x, qkv), axes.columns),
        "ag_up": (
            layers.gathered,
            (x, dataclasses.replace(up, nonzeros=1024.0)),
            axes.columns,
        ),
        "ag_gate_up": (layers.gathered_swiglu, (x_units, gate, up), axes.columns),
        "out_rs": (layers.scattered, (mixed, out), axes.rows),
        "down_rs": (layers.scattered, (wide, down), axes.rows),
        "down_ar": (layers.reduced, (wide, down), axes.whole),
        "mlp": (layers.mlp, (x_units, up, down_few), axes.rows),
        "swiglu_mlp": (layers.swiglu_mlp, (x_units, gate, up, down_few), axes.rows),
        "attention": (layers.attention, (x, qkv, out), axes.rows),
        "layer": (
            layers.layer,
            (x, gains[0], qkv, out, gains[1], gate, up, down),
            axes.rows,
        ),
    }
    function, operands, out_spec = table[kind]
    return Case(
        name=name,
        model=model,
        tokens=tokens,
        axes=axes,
        layer=function,
        operands=operands,
        out_spec=out_spec,
        exact_integers=kind not in ATTENDING,  # softmax and norms
    )


def _experts(name: str, model: Model, tokens: int, axes: Axes, shrink: int) -> Case:
    """Tokens in the places that experts have for them, and SwiGLU experts."""
    group, hidden, ffn = GROUP // shrink, model.hidden, model.ffn
    room = max(1, int(ROOM * model.chosen * group / model.experts))

    def weight(name: str, rows: int, columns: int, nonzeros: float) -> Operand:
        shape = model.experts, rows, columns
        return Operand(name, shape, P(AXIS), rows**-0.5, nonzeros, along=1)

    return Case(
        name=name,
        model=model,
        tokens=tokens,
        axes=axes,
        layer=layers.experts,
        operands=(
            Operand(
                "x",
                (tokens // group, model.experts, room, hidden),
                axes.rows,
                unit=_UNIT,
            ),
            weight("gate", hidden, ffn, 4.0),
            weight("up", hidden, ffn, 4.0),
            weight("down", ffn, hidden, 128.0),
        ),
        out_spec=axes.rows,
    )


def _long(model: Model, tokens: int, axes: Axes, shrink: int) -> Case:
    """Attention with a model's heads over one long sequence."""
    rows, name = tokens // shrink, f"{RING}/{model.name}/{tokens}"
    queries, keys = ((rows, n, model.head) for n in (model.heads, model.kv_heads))
    return Case(
        name=name,
        model=dataclasses.replace(model, attention="cudnn" if shrink == 1 else ""),
        tokens=rows,
        axes=axes,
        layer=layers.context_parallel,
        operands=(
            Operand("q", queries, axes.rows),
            Operand("k", keys, axes.rows),
            Operand("v", keys, axes.rows),
        ),
        out_spec=axes.rows,
        exact_integers=False,
        kernel_flops=2 * rows * rows * model.heads * model.head,
    )


MICROBATCHES = 8

STAGES = ("stages", "delayed_stages")
"""A stage a device, and microbatches that go from one to the next."""


def _stages(kind: str, model: Model, tokens: int, axes: Axes) -> Case:
    hidden, ffn = model.hidden, model.ffn

    def weight(name: str, rows: int, columns: int) -> Operand:
        shape = axes.tp, rows, columns
        return Operand(name, shape, P(AXIS), scale=rows**-0.5, nonzeros=4.0, along=1)

    x = Operand("x", (MICROBATCHES, tokens // 4, hidden), WHOLE)
    return Case(
        name=f"{kind}/{model.name}/{tokens}",
        model=model,
        tokens=tokens,
        axes=axes,
        layer=layers.delayed_stages if kind == "delayed_stages" else layers.stages,
        operands=(
            x,
            weight("gate", hidden, ffn),
            weight("up", hidden, ffn),
            weight("down", ffn, hidden),
        ),
        out_spec=axes.rows,
        exact_integers=False,
    )


KINDS = (
    "ag_qkv",
    "ag_up",
    "ag_gate_up",
    "out_rs",
    "down_rs",
    "down_ar",
    "mlp",
    "swiglu_mlp",
    "attention",
    "layer",
)

ATTENDING = ("attention", "layer")
"""Cases with attention within sequences; one group of devices has all of a sequence."""


GPT = "nvfuser_layer"

WHOLE_LAYERS = ("layer", GPT)
"""Cases that compute what they gather."""


def _gpt(axes: Axes, shrink: int) -> Case:
    """A layer of GPT-3 with 175 billion parameters, one sequence, as nvFuser has it."""
    whole = Model("gpt3", hidden=12288, ffn=4 * 12288, heads=96, kv_heads=96)
    model = whole.shrunk(shrink)
    hidden, ffn, attended = model.hidden, model.ffn, model.heads * model.head
    gains = [Operand(f"{nth}_gain", (hidden,), WHOLE) for nth in ("first", "second")]
    return Case(
        name=f"{GPT}/gpt3/2048",
        model=model,
        tokens=model.sequence,
        axes=axes,
        layer=layers.gelu_layer,
        operands=(
            Operand("x", (model.sequence, hidden), axes.rows),
            gains[0],
            _weight("qkv", (hidden, model.qkv), COLUMNS),
            _weight("out", (attended, hidden), ROWS),
            gains[1],
            _weight("up", (hidden, ffn), COLUMNS),
            _weight("down", (ffn, hidden), ROWS),
        ),
        out_spec=axes.rows,
        exact_integers=False,
    )


def _peers_own(axes: Axes, shrink: int) -> Iterator[Case]:
    """The sizes that nvFuser's and Pallas' own benchmarks publish."""

    def case(name: str, layer: Layer, shapes: Sequence[tuple[int, int]]) -> Case:
        left, right = ((m // shrink, k // shrink) for m, k in shapes)
        gathers = layer is layers.gathered
        _, size, _ = name.split("/")
        return Case(
            name=name,
            model=Model(size, right[0], right[1], heads=0, kv_heads=0),
            tokens=left[0],
            axes=axes,
            layer=layer,
            operands=(
                Operand("x", left, ROWS if gathers else COLUMNS),
                _weight("w", right, COLUMNS if gathers else ROWS),
            ),
            out_spec=COLUMNS if gathers else WHOLE,
        )

    row_parallel = [(8192, 32768), (32768, 8192)]
    yield case("nvfuser_ar/h8192/8192", layers.reduced, row_parallel)
    column_parallel = [(8192, 8192), (8192, 32768)]
    yield case("nvfuser_ag/h8192/8192", layers.gathered, column_parallel)
    deep, few = [(32768, 32768), (32768, 8192)], [(1024, 1024), (1024, 1024)]
    yield case("nvfuser_ag/k32768/32768", layers.gathered, deep)
    yield case("nvfuser_ag/k1024/1024", layers.gathered, few)
    yield _gpt(axes, shrink)
    for k in (4096, 65536):
        # There each device multiplies by 1024 columns.
        wide = (k, 1024 * axes.tp)
        yield case(f"nvfuser_ag/k{k}/65536", layers.gathered, [(65536, k), wide])
    rows, columns = 1024 * axes.tp, 4096 * axes.tp
    square = [(rows, 4096), (4096, columns)]
    yield case(f"pallas_ag/k4096/{rows}", layers.gathered, square)


def all_cases(
    axes: Axes,
    *,
    small: bool,
    models: Sequence[str] = (*MODELS, *EXPERTS),
    tokens: Sequence[int] | None = None,
    peers_own: bool = True,
) -> list[Case]:
    """The list; `small` for CPUs, where no time means anything.

    Peers' own sizes and long sequences are for tp alone, and other sequences for groups
    that have whole ones.
    """
    shrink = 64 if small else 1  # all sizes alike: ratios decide about layouts
    cases = [
        _make(
            f"{kind}/{model}/{count}",
            MODELS[model].shrunk(shrink),
            count // shrink,
            axes,
        )
        for kind in KINDS
        for model in models
        if model in MODELS
        for count in tokens or TOKENS
        if kind not in ATTENDING or not count % (axes.groups * MODELS[model].sequence)
    ]
    cases += [
        _experts(
            f"experts/{model}/{count}",
            EXPERTS[model].shrunk(shrink),
            count // shrink,
            axes,
            shrink,
        )
        for model in models
        if model in EXPERTS
        for count in tokens or TOKENS
    ]
    cases += [
        dataclasses.replace(
            _stages(kind, MODELS[model].shrunk(shrink), count // shrink, axes),
            name=f"{kind}/{model}/{count}",
        )
        for kind in STAGES
        for model in models
        if model in MODELS and not axes.batch
        for count in tokens or TOKENS
    ]
    cases += [
        _long(MODELS["8b"].shrunk(shrink), count, axes, shrink)
        for count in LONG
        if "8b" in models and not axes.batch and count in (tokens or LONG)
    ]
    own = _peers_own(axes, shrink) if peers_own and not axes.batch else ()
    return [*cases, *own]


def select(cases: Iterable[Case], patterns: Sequence[str]) -> list[Case]:
    """The cases that a pattern names, in the order of the patterns.

    A pattern is a name with wildcards, as `mlp/8b/*`, or the start of one, as `mlp`.

    Raises:
        ValueError: a pattern that names none.
    """
    pool, chosen = list(cases), dict[str, Case]()
    for pattern in patterns:
        found = [
            case
            for case in pool
            if fnmatch.fnmatchcase(case.name, pattern)
            or fnmatch.fnmatchcase(case.name, f"{pattern}/*")
        ]
        if not found:
            kinds = ", ".join(dict.fromkeys(case.kind for case in pool))
            raise ValueError(f"no case is named {pattern!r}; there are {kinds}")
        chosen |= {case.name: case for case in found}
    return list(chosen.values())
