"""Measure attention over sequences that are sharded across ranks."""
