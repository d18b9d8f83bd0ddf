"""Paths of GPUs, walked without one: tensors without data whose device is `cuda`, stubs of the driver. No GPU is seen."""
