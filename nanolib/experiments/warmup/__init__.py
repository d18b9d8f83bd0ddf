"""How many steps of warm-up are enough."""
