"""Measure durations: `clock` times blocks, `latency` times calls, and `ranks` times ranks."""
