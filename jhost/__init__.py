"""jhost: overlapping communication and computation in sharded JAX programs."""

from jhost import distributed as distributed, errors as errors
from jhost._annotate import serial as serial, shard as shard, stream as stream
from jhost._api import JitFunction as JitFunction, explain as explain, jit as jit
from jhost._call.stages import Compiled as Compiled, Lowered as Lowered
from jhost._profile import profile as profile
from jhost._tune.tune import tune as tune
from jhost._tuning import Tuning as Tuning
from jhost._version import __version__ as __version__
from jhost.lowering.explain import Explanation as Explanation
from jhost.runtime.compiler_options import compiler_options as compiler_options
from jhost.runtime.profile.report import OverlapReport as OverlapReport
from jhost.runtime.profile.schedule import (
    Schedule as Schedule,
    ScheduledCommunication as ScheduledCommunication,
)
