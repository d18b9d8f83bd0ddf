"""Measure durations: `clock` times blocks, `latency` times calls, `ranks` times several ranks."""
