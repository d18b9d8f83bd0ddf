"""Attention kinds and sparse patterns: how fast, how much memory, how exact, and what the missing connections cost."""
