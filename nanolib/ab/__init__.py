"""Two versions of the code, measured in turns.

`spec` says what to compare and `pairs` holds its block times. `run` compares, `schedule` interleaves blocks in pairs of processes,
`worker` is a version in its own process and `processes` its other end. `fork_server` makes such processes fast, and `result` turns
block times into findings.
"""
