"""Measure speed, memory, error and loss of attention kinds and sparse patterns."""
