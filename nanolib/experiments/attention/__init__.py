"""Measure speed, memory, error and loss of dense, sparse and other attention."""
