"""Measure whole models in inference, generation and training, and their optimizations."""
