"""Attention across ranks."""
