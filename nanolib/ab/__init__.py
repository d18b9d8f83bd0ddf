"""Two versions of the code, measured in turns.

`spec` says what to compare, `versions` checks it out, and `pairs` contains the block times. `run` compares and turns block times
into findings, and `schedule` interleaves blocks in pairs of processes. `processes` starts a pair of processes, `children` is this
end of one, and `worker` and `forks` are the other end.
"""
