"""Facts and figures that others published: each test names its source, and nothing of nanolib made the number."""
