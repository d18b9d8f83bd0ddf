"""Summary of all results in a database."""
