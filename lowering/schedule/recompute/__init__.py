"""Values are kept for later readers, or made again: one rule, at each border."""
