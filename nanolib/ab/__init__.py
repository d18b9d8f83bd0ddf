"""Two versions of the code, measured in turns.

`spec` says what to compare, `run` compares it, `schedule` interleaves blocks in pairs of processes, `worker` is a version in its
own process and `processes` its other end, `fork_server` makes such processes fast, `result` turns block times into findings.
"""
