"""A sharded cache stays where it is: what a token moves does not grow with it."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

DEVICES, LAYERS, BATCH, WIDTH, HEADS, FLOAT = 4, 4, 2, 64, 8, 4
SUMS = 2 * LAYERS * (2 * BATCH * WIDTH * FLOAT * (DEVICES - 1) // DEVICES)
"""All-reduces of what each layer's attention and MLP give, of one token."""
NEXT = (DEVICES - 1) * BATCH * 2 * FLOAT
"""From each device its largest logit, and which it is."""
SOFTMAX = LAYERS * 2 * (2 * BATCH * HEADS * FLOAT * (DEVICES - 1) // DEVICES)
"""The largest score of each head, and the sum of all, over the devices' positions."""


@pytest.fixture
def check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str, int, int], None]:
    """`check(by, tokens, moved)`: each moves so many bytes, and no key."""
    monkeypatch.syspath_prepend(EXAMPLES)
    main: Any = runpy.run_path(str(EXAMPLES / "decode.py"))["main"]

    def checked(by: str, tokens: int, moved: int) -> None:
        explanation = main(["--cache", by, "--tokens", str(tokens)])
        out = capsys.readouterr().out
        assert f"100% of {BATCH * tokens} tokens are those of `jax.jit`" in out
        (off,) = re.findall(r"caches differ by (\S+)", out)
        assert float(off) < 1e-5
        assert sum(row.bytes for row in explanation.communications) == moved

    return checked


def test_a_prompt_and_16_tokens_are_right_and_no_key_moves(
    check: Callable[[str, int, int], None],
) -> None:
    check("heads", 16, SUMS + NEXT)


@pytest.mark.slow
def test_nor_in_64_tokens_with_a_cache_of_other_positions_on_each_device(
    check: Callable[[str, int, int], None],
) -> None:
    check("positions", 64, SUMS + NEXT + SOFTMAX)
