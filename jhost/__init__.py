"""jhost: overlapping communication and computation in sharded JAX programs."""

from jhost import distributed as distributed, errors as errors
from jhost._annotate import serial as serial, shard as shard, stream as stream
from jhost._api import JitFunction as JitFunction, explain as explain, jit as jit
from jhost._stages import Compiled as Compiled, Lowered as Lowered
from jhost.lowering.explain import Explanation as Explanation
from jhost.runtime.overlap_options import compiler_options as compiler_options
from jhost.runtime.schedule import (
    Schedule as Schedule,
    ScheduledCommunication as ScheduledCommunication,
)

__version__ = "0.1.0"
