"""Whole models: inference, generation, training, and what optimisations change."""
