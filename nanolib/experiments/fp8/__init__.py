"""Measure the speed, the loss parity and the numerics of FP8."""
