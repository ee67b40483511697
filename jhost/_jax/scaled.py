"""The product in scaled blocks that `jax.nn.scaled_matmul` partitions."""

# pyright: reportPrivateUsage=false, reportUnknownVariableType=false

from jax._src.cudnn.scaled_matmul_stablehlo import _scaled_matmul_p
from jax.extend.core import Primitive

scaled_matmul_p: Primitive = _scaled_matmul_p
