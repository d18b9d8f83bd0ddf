"""Measure durations of calls, and of calls that all ranks make together."""
