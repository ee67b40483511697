"""flax layers whose matmuls and communications jhost pipelines: tensor parallelism.

Most layers are flax layers with shardings on their parameters and marks in their
forward, and give the same results.  Under `jax.jit` the marks do nothing.  Under
`jhost.jit` a block of layers becomes a few pipelined loops, forward and backward.
"""

import inspect

try:
    import flax.nnx as _  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"jhost.nnx has layers for flax, but {error}. Install it with "
        "pip install 'flax>=0.12.8'; jhost itself does not need it.",
        name=error.name,
    ) from error

from jhost.nnx._attention import ParallelAttention as ParallelAttention
from jhost.nnx._block import TransformerBlock as TransformerBlock
from jhost.nnx._dots import (
    ColumnParallelDot as ColumnParallelDot,
    RowParallelDot as RowParallelDot,
)
from jhost.nnx._embed import ParallelEmbed as ParallelEmbed
from jhost.nnx._jit import jit as jit
from jhost.nnx._linear import (
    ColumnParallelLinear as ColumnParallelLinear,
    RowParallelLinear as RowParallelLinear,
)
from jhost.nnx._mlp import ParallelMLP as ParallelMLP, ParallelSwiGLU as ParallelSwiGLU
from jhost.nnx._moe import MoE as MoE

# flax's metaclass would show `(*args, **kwargs)` in `help` and in editors.
for _layer in (
    ParallelAttention,
    TransformerBlock,
    ParallelEmbed,
    ColumnParallelLinear,
    RowParallelLinear,
    ParallelMLP,
    ParallelSwiGLU,
    MoE,
):
    _self, *_parameters = inspect.signature(_layer.__init__).parameters.values()
    setattr(_layer, "__signature__", inspect.Signature(_parameters))  # noqa: B010
