"""Energy per token, and the layers that use it."""
