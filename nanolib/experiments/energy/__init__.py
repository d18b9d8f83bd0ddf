"""Measure the energy per token, and the energy of layers."""
