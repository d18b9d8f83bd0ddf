"""Whole models: inference, generation, training, and what optimizations change."""
