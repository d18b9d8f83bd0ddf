"""Measure durations with `clock` (blocks), `latency` (calls) and `ranks` (calls on all ranks)."""
