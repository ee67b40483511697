"""Passes: each turns a valid program into a valid program, one file each."""
