"""What is measured, by name: widths, meshes, and how layers stand in the program."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from jax.sharding import Mesh, PartitionSpec as P

from benchmarks.axes import Axes
from benchmarks.layers import MODELS, Model

WIDTHS: dict[str, tuple[Model, int]] = {
    "tiny": (
        Model("tiny", hidden=64, ffn=128, heads=8, kv_heads=4, head=8, sequence=32),
        128,
    ),
    "8b": (MODELS["8b"], 128_256),
    "13b": (Model("13b", hidden=5120, ffn=13824, heads=40, kv_heads=8), 32_000),
    "70b": (MODELS["70b"], 128_256),
}
"""Models and their vocabularies; `tiny` is for CPUs."""

LOOPS = ("scan-checkpoint", "scan", "written-checkpoint", "written")
CASTS = ("layer", "before")
AXES = ("dp", "fsdp", "tp")


@dataclasses.dataclass(frozen=True)
class Case:
    """A step of a model over a mesh; `cast` is where masters become bfloat16."""

    model: Model
    vocabulary: int
    loop: str
    layers: int
    sequences: int
    axes: tuple[tuple[str, int], ...]
    cast: str = "layer"

    @property
    def name(self) -> str:
        loop = self.loop if self.cast == "layer" else f"{self.loop}-cast-before"
        return f"{self.model.name}/{loop}/{self.layers}x{self.sequences}"

    @property
    def mesh_name(self) -> str:
        return str(Axes(self.axes))

    @property
    def scans(self) -> bool:
        return self.loop.startswith("scan")

    @property
    def checkpoints(self) -> bool:
        return self.loop.endswith("checkpoint")

    @property
    def tokens(self) -> int:
        return self.sequences * self.model.sequence

    @property
    def devices(self) -> int:
        return Axes(self.axes).devices

    def size(self, axis: str) -> int:
        """The devices along an axis, which the mesh need not have."""
        return dict(self.axes).get(axis, 1)

    @property
    def batch(self) -> tuple[str, ...]:
        """The axes that sequences are split over."""
        return tuple(axis for axis, _ in self.axes if axis != "tp")

    def spec(self, *dims: str | None) -> P:
        """The layout by these axes, of which the mesh need not have all."""
        there = dict(self.axes)
        return P(*(dim if dim in there else None for dim in dims))

    @property
    def token_spec(self) -> P:
        """Of numbers of tokens."""
        return P(self.batch or None, None)

    @property
    def rows(self) -> P:
        """Of activations between matmuls."""
        return P(self.batch or None, *self.spec("tp"), None)

    @property
    def columns(self) -> P:
        """Of activations within: heads, hidden features or the vocabulary."""
        return P(self.batch or None, None, *self.spec("tp"))

    def with_cudnn(self) -> Case:
        """With the kernel that there is on GPUs, if it takes heads of this size."""
        if self.model.head % 64:
            return self
        model = dataclasses.replace(self.model, attention="cudnn")
        return dataclasses.replace(self, model=model)

    def mesh(self) -> Mesh:
        """Of the first devices.

        Raises:
            ValueError: there are not as many.
        """
        return Axes(self.axes).mesh()


def axes_of(text: str) -> tuple[tuple[str, int], ...]:
    """The axes in "fsdp=2,tp=2", in the order dp, fsdp, tp.

    Raises:
        ValueError: it names others, or has no sizes.
    """
    pairs = [part.partition("=") for part in text.split(",")]
    sizes = {name: int(size) for name, _, size in pairs if size.isdigit()}
    if len(sizes) < len(pairs) or set(sizes) - {*AXES} or 0 in sizes.values():
        raise ValueError(f"--mesh: sizes of dp, fsdp and tp, as fsdp=2, but not {text}")
    return tuple((axis, sizes[axis]) for axis in AXES if axis in sizes)


def cases_of(
    models: Sequence[str],
    loops: Sequence[str],
    layers: Sequence[int],
    sequences: Sequence[int],
    casts: Sequence[str],
    meshes: Sequence[str],
) -> list[Case]:
    """Each of each.

    Raises:
        ValueError: an unknown name, or sizes that a mesh does not divide.
    """
    for option, given, known in (
        ("models", models, WIDTHS),
        ("loops", loops, LOOPS),
        ("cast", casts, CASTS),
    ):
        if unknown := [name for name in given if name not in known]:
            raise ValueError(
                f"--{option}: {unknown[0]!r} is none of {', '.join(known)}"
            )
    every = itertools.product(
        map(axes_of, meshes), models, loops, casts, layers, sequences
    )
    found = [
        Case(*WIDTHS[model], loop, count, rows, axes, cast)
        for axes, model, loop, cast, count, rows in every
    ]
    for case in found:
        _check(case)
    return found


def _check(case: Case) -> None:
    groups, tp, model = case.devices // case.size("tp"), case.size("tp"), case.model
    if case.sequences % groups:
        raise ValueError(
            f"--sequences: {case.sequences} cannot be split over {groups} devices"
        )
    if model.kv_heads % tp or case.vocabulary % tp:
        raise ValueError(
            f"--mesh: {model.kv_heads} key heads and a vocabulary of "
            f"{case.vocabulary} cannot be split over {tp} devices"
        )
