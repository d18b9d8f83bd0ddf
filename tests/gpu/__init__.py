"""Paths of GPUs, walked without one: tensors on `cuda` without data, and stubs of the driver."""
