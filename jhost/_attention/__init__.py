"""Attention that keeps no scores: the function, its primitives, what they compute."""
