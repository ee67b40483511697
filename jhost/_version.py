"""The version of jhost: a literal, which the build reads without importing it."""

__version__ = "0.1.0"
