"""What the database says: the notebook that reads what the others wrote."""
