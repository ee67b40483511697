"""What stands behind `jhost.testing`: its refusals, and how it compares."""
