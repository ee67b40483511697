"""What XLA is told in all tests, and in the processes that they start."""

from __future__ import annotations

import importlib.metadata

# XLA of JAX 0.10 compiles small programs in two thirds of the time without the emitters
# that start MLIR for each fusion; later ones do not know the flag and would end.
_OLD = importlib.metadata.version("jaxlib").startswith("0.10.")

QUICKLY = "--xla_cpu_use_fusion_emitters=false" if _OLD else ""
"""`XLA_FLAGS` of a process that says itself how many devices a CPU is."""
