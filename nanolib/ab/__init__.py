"""Two versions of the code, measured in turns.

`spec` says what to compare, and `pairs` holds the block times. `run` compares, `schedule` interleaves blocks in pairs of processes,
and `result` turns block times into findings. `processes` starts a pair of processes, `children` is this end of one, and `worker`
and `forks` are the other end.
"""
