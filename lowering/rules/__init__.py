"""What a primitive does with dims: one rule for sharding, streams, padding and cost."""
