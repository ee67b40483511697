"""A training step of Llama layers, by several arms: `python -m benchmarks.step`."""
