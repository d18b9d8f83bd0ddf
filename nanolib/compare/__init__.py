"""Compare two sets of stored runs case by case, and follow each case over all runs."""
