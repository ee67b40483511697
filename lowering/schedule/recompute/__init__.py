"""What is kept for later readers, and what is made again: one rule, at each border."""
