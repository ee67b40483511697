"""What jhost is meant to reach, and whether a measurement does.

On four H200s, forward, in program; ratios of minima inside one run.  On two, no case
may be slower than plain by more than 1 %.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Target:
    """Bounds for the cases that a pattern names; None where there is none."""

    pattern: str
    over_compute_at_most: float | None
    speedup_at_least: float
    versus_async_tp_at_least: float | None


TARGETS = (
    Target("ag_up/8b/8192", 1.15, 1.35, 1.00),
    Target("ag_up/70b/8192", 1.10, 1.20, 1.02),
    Target("ag_qkv/*/8192", 1.30, 1.35, 1.00),
    Target("down_rs/8b/8192", 1.15, 1.35, 1.00),
    Target("down_rs/70b/8192", 1.10, 1.20, 1.00),
    Target("out_rs/*/8192", 1.35, 1.30, 1.00),
    Target("down_ar/8b/8192", None, 1.12, None),
    Target("down_ar/70b/8192", None, 1.18, None),
    Target("mlp/8b/8192", 1.15, 1.35, 1.05),
    Target("mlp/8b/4096", 1.28, 1.20, 1.00),
    Target("mlp/8b/2048", None, 0.99, 1.00),
    Target("mlp/70b/8192", 1.08, 1.15, 1.07),
    Target("swiglu_mlp/70b/8192", None, 1.10, 1.05),
    Target("attention/70b/8192", None, 1.10, 1.05),
    Target("layer/70b/8192", None, 1.10, 1.05),
)

TWO_DEVICES = Target("*", None, 0.99, None)


def target(case: str, devices: int) -> Target | None:
    """The target of a case, forward and in program."""
    if devices == 2:
        return TWO_DEVICES
    if devices != 4:
        return None
    named = (t for t in TARGETS if fnmatch.fnmatchcase(case, t.pattern))
    return next(named, None)


def misses(wanted: Target, figures: Mapping[str, float]) -> list[str]:
    """The bounds that are not kept; what was not measured is not judged."""
    found: list[str] = []
    most = wanted.over_compute_at_most
    if most is not None and figures.get("over_compute", 0.0) > most:
        found.append(f"over compute {figures['over_compute']:.2f} > {most:.2f}")
    for name, least in (
        ("speedup", wanted.speedup_at_least),
        ("versus_async_tp", wanted.versus_async_tp_at_least),
    ):
        if least is not None and figures.get(name, least) < least:
            label = name.replace("_", " ")
            found.append(f"{label} {figures[name]:.2f} < {least:.2f}")
    return found
