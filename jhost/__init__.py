"""jhost: overlapping communication and computation in sharded JAX programs."""

from jhost import errors as errors
from jhost._annotate import serial as serial, shard as shard, stream as stream
from jhost._api import (
    Compiled as Compiled,
    JitFunction as JitFunction,
    Lowered as Lowered,
    explain as explain,
    jit as jit,
)
from jhost.lowering.explain import Explanation as Explanation

__version__ = "0.1.0"
