"""What a token costs in joules, and which layers it goes to."""
