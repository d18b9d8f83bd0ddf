"""What this machine can measure, and its ceilings."""
