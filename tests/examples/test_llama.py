"""The Llama trains alike with jhost and without, and goes on from its checkpoints."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jhost
from tests.llama_step import example, step_of

optax: Any = pytest.importorskip("optax")
pytest.importorskip("orbax.checkpoint")
pytest.importorskip("tqdm")

# What orbax and optax warn of is theirs.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

STEPS = 8
TINY = (
    "--layers 2 --width 32 --heads 4 --kv-heads 2 --hidden 64 --sequence 16 --batch 8 "
    "--lr 0.01"
).split()
MESHES = "dp=2,fsdp=2,tp=2", "tp=2"

# Numbers that are rounded elsewhere differ by half of this; a loss is a mean of many.
BFLOAT16 = float(jnp.finfo(jnp.bfloat16).eps)


def losses_of(*argv: str, steps: int = STEPS) -> list[float]:
    """Of a training with these arguments; optax mixes dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        return example()["main"]([*TINY, "--steps", str(steps), *argv])


@functools.cache
def plain_losses(mesh: str) -> list[float]:
    return losses_of("--plain", "--mesh", mesh)


@pytest.mark.parametrize(
    "mesh", [pytest.param(MESHES[0], marks=pytest.mark.slow), MESHES[1]]
)
def test_the_loss_falls(mesh: str) -> None:
    losses = plain_losses(mesh)
    assert len(losses) == STEPS
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.slow
def test_losses_are_the_same_on_every_mesh() -> None:
    one, other = map(plain_losses, MESHES)
    np.testing.assert_allclose(one, other, rtol=BFLOAT16 / 4)


@pytest.mark.parametrize(
    "mesh", [pytest.param(MESHES[0], marks=pytest.mark.slow), MESHES[1]]
)
def test_losses_are_the_same_with_jhost(mesh: str) -> None:
    losses = losses_of("--mesh", mesh)
    np.testing.assert_allclose(losses, plain_losses(mesh), rtol=BFLOAT16 / 4)


@pytest.mark.slow
def test_a_training_goes_on_from_its_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exactly, in the state and in the data, which go on with their own seed."""
    mesh = "tp=2"
    argv = "--plain", "--mesh", mesh, "--checkpoint", str(tmp_path), "--keep", "1"
    before = losses_of(*argv, steps=STEPS // 2)
    assert [folder.name for folder in tmp_path.iterdir()] == ["4"]
    after = losses_of(*argv, "--seed", "1")
    assert before + after == plain_losses(mesh)
    bar = capsys.readouterr().err
    assert re.search(r" 8/8 .*loss \d\.\d{3}, [\d,]+ tokens/s", bar)


def test_the_cross_entropy_leaves_logits_where_they_are() -> None:
    """Value and gradient are optax's, and no device gets another's part."""
    mesh = jax.make_mesh((8,), ("tp",), axis_types=(AxisType.Auto,))
    logits = jax.random.normal(jax.random.key(0), (2, 3, 32))
    targets = jax.random.randint(jax.random.key(1), (2, 3), 0, 32)
    shardings = NamedSharding(mesh, P(None, None, "tp")), NamedSharding(mesh, P())
    loss: Any = jax.value_and_grad(example()["cross_entropy"])
    sharded = jax.jit(loss, in_shardings=shardings).lower(logits, targets).compile()

    def wanted(logits: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    placed = jax.device_put((logits, targets), shardings)
    given = sharded(*placed)
    for one, other in zip(given, jax.value_and_grad(wanted)(logits), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
    text = sharded.as_text() or ""
    assert "all-reduce" in text
    assert "all-gather" not in text


def test_the_explanation_has_the_names_of_the_script() -> None:
    """Of no value that of its buffer, in the step, its scans and their backwards."""
    axes = ("dp", "fsdp", "tp")
    mesh = jax.make_mesh((2, 2, 2), axes, axis_types=(AxisType.Auto,) * 3)
    jit = functools.partial(jhost.jit, mesh=mesh, pipeline="p2p")
    step, arguments = step_of(jit, mesh, layers=2)
    with jax.set_mesh(mesh), jax.numpy_dtype_promotion("standard"):
        explanation = jhost.explain(step, *arguments)
    text = explanation.text
    assert "llama.py:" in text
    assert "state.params['layers']['gate']" in text
    assert "the gradient of state.params['layers']['gate']" in text
    assert not re.findall(r"(?:scan|dot_general) at \S+", text)
    assert not re.findall(r".*\b[vxyo]_?\d+\b.*", text)
    assert not re.findall(r".*_(?:i|partial|gathered)\b.*", text)
    screen = str(explanation).splitlines()
    assert len(screen) <= 40
    (largest,) = (line for line in screen if "largest exposed transfer" in line)
    assert "`normal.astype(x.dtype) * scale` at llama.py:" in largest


def test_a_mesh_has_three_axes() -> None:
    with pytest.raises(SystemExit, match="dp, fsdp and tp, but not data"):
        example()["main"](["--mesh", "data=2,tp=4"])
