"""The plots of docs/benchmarks.md, by matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_GAIN, _LOSS, _LINE = "#4878a8", "#b8523a", "#303030"


def speedups(bars: Mapping[str, tuple[float, float | None]], path: Path) -> None:
    """A bar for each case's speedup over plain, and a mark at its ceiling, if known."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    # The same bytes from the same figures, so that only changes show in a diff.
    plt.rcParams.update({"svg.hashsalt": "jhost", "font.size": 9})
    figure, axes = plt.subplots(figsize=(7.0, 0.8 + 0.24 * len(bars)))
    names = list(bars)
    heights = [bars[name][0] for name in names]
    colors = [_GAIN if height >= 1 else _LOSS for height in heights]
    axes.barh(names, heights, color=colors, height=0.7)
    for row, name in enumerate(names):
        limit = bars[name][1]
        if limit is not None:
            axes.plot([limit, limit], [row - 0.4, row + 0.4], color=_LINE, linewidth=2)
    axes.axvline(1.0, color=_LINE, linewidth=0.8, linestyle="--")
    has_ceilings = any(limit is not None for _, limit in bars.values())
    mark = "; the mark is the ceiling" if has_ceilings else ""
    axes.set_xlabel(f"speedup over plain{mark}")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
