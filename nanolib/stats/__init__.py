"""Compute intervals, verdicts and labels of arrays, without torch, devices or stored rows."""
