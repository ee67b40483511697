"""`python -m jhost`."""
