"""Dims that a sharding does not divide."""
