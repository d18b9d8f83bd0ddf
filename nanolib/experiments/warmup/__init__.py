"""Measure how many warm-up steps are enough."""
