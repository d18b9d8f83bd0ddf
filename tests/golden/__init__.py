"""What nanolib counts, plans and trains for the cases of each params file; it must not change."""
