"""FP8: speed, loss parity, numerics."""
