"""Attention and training across ranks."""
