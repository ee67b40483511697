"""A user's whole training step, by several arms: `benchmarks.step --form whole`."""
