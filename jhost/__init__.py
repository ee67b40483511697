"""Communication overlapped with computation in sharded JAX programs."""

from jhost import distributed, errors
from jhost._annotate import serial, shard, stream
from jhost._api import JitFunction, explain, jit
from jhost._attention.function import dot_product_attention
from jhost._calibrate.calibrate import calibrate
from jhost._calibration import Calibration
from jhost._call.stages import Compiled, Lowered, Traced
from jhost._profile import profile
from jhost._ragged.function import ragged_dot
from jhost._tune.tune import tune
from jhost._tuning import Tuning
from jhost._version import __version__
from jhost.lowering.explanation import Explanation
from jhost.runtime.compiler_options import compiler_options
from jhost.runtime.profile.report import OverlapReport
from jhost.runtime.profile.schedule import Schedule, ScheduledCommunication

__all__ = [
    "Calibration",
    "Compiled",
    "Explanation",
    "JitFunction",
    "Lowered",
    "OverlapReport",
    "Schedule",
    "ScheduledCommunication",
    "Traced",
    "Tuning",
    "__version__",
    "calibrate",
    "compiler_options",
    "distributed",
    "dot_product_attention",
    "errors",
    "explain",
    "jit",
    "profile",
    "ragged_dot",
    "serial",
    "shard",
    "stream",
    "tune",
]
