"""Stored runs: two of them case by case, and each case over all of them."""
