"""Facts and figures that others published: each test names its source; none is nanolib's own."""
