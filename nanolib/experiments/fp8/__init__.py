"""Measure the speed, the loss and the rounding error of FP8."""
