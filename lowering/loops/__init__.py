"""Streams as loops over chunks."""
