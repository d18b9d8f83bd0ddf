"""Whether 8-bit floating point pays: speed, loss parity, numerics."""
