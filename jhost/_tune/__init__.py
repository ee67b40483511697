"""Pipelines chosen by measuring."""
