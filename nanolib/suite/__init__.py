"""Many notebooks: each run by papermill in a process of its own, watched through the rows it writes."""
