"""Measure durations: of blocks (`clock`), calls (`latency`), ranks and named code (`timer`)."""
