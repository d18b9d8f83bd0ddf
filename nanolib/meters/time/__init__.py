"""Measure durations: `clock` times blocks, `latency` one call, `across_ranks` ranks, `timer` named code."""
