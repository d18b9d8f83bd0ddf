"""Measure durations: of blocks (`clock`), of calls (`latency`), and on ranks (`ranks`)."""
