"""The product in scaled blocks that `jax.nn.scaled_matmul` partitions."""

# pyright: reportPrivateUsage=false, reportUnknownVariableType=false

from jax._src.cudnn.scaled_matmul_stablehlo import (
    _scaled_matmul_p as scaled_matmul_p,
)

__all__ = ["scaled_matmul_p"]
