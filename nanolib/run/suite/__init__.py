"""Many notebooks: which jobs there are, what runs them, in this process's turn, on every GPU or as Ray tasks."""
