"""The arms: everybody who computes the cases, by name, in the order of the tables."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from benchmarks.arms import bounds, jhost_arm, pallas, plain, xla
from benchmarks.arms.base import Arm

TORCH = ("torch_async", "torch_nccl", "torch_compute")
"""Arms that run in processes of their own; `benchmarks.torch_pool` measures them."""

ARMS: dict[str, Arm] = {
    "plain": plain.collectives,
    "compute": bounds.compute,
    "communication": bounds.communication,
    "jhost": jhost_arm.pipeline("auto"),
    "jhost_off": jhost_arm.pipeline("off"),
    "jhost_p2p": jhost_arm.pipeline("p2p"),
    "jhost_collective": jhost_arm.pipeline("collective"),
    **{f"jhost_s{n}": jhost_arm.nvfuser_chunks(n) for n in (1, 2, 4, 8)},
    "recipe": plain.recipe,
    "ring": plain.ring_attention(zigzag=False),
    "ring_zigzag": plain.ring_attention(zigzag=True),
    "pallas": pallas.all_gather_matmul,
    "xla": xla.partitioned({}),
    "xla_windowed": xla.partitioned(xla.WINDOWED),
    "xla_windowed_multi": xla.partitioned(xla.WINDOWED_MULTI),
}

NAMES = (*ARMS, *TORCH)

IDLE = ("communication",)
"""Arms that compute nothing."""

# Windowed einsums on several streams have ended whole processes (jax#39200): only
# where they are asked for by name.
DEFAULT = tuple(name for name in NAMES if name != "xla_windowed_multi")


def select(patterns: Sequence[str]) -> list[str]:
    """The arms that the patterns name, in the order of the tables.

    Raises:
        ValueError: a pattern that names none.
    """
    for pattern in patterns:
        if not fnmatch.filter(NAMES, pattern):
            raise ValueError(
                f"no arm is named {pattern!r}; there are {', '.join(NAMES)}"
            )
    return [n for n in NAMES if any(fnmatch.fnmatchcase(n, p) for p in patterns)]
