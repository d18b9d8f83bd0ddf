"""Analyze arrays of numbers: intervals, comparisons, changes of level and steady states."""
