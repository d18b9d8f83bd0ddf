"""What this machine can measure, and its peak rates."""
