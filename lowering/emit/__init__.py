"""From a program to JAX."""
