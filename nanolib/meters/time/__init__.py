"""Durations: `clock` times blocks, `latency` samples until it is sure, `together` does so over ranks, `timer` by name."""
