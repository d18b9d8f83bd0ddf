"""What nanolib counts, plans and trains for the cases of each params file, and must go on saying."""
