"""What devices do per second, measured on those that are there."""
