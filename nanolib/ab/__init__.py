"""Measure two versions of the code in turns, for `nano ab`.

- `spec` describes the comparison and lists its tasks.
- `versions` checks out revisions and inspects interpreters.
- `pairs` defines the settings and tasks, and stores block times.
- `schedule` interleaves blocks of both versions, in many pairs of processes.
- `run` performs a whole comparison, and turns block times into findings and rows.
- `processes` starts pairs of processes, one process per version.
- `children` sends requests to the processes.
- `worker` and `forks` answer the requests inside the processes.
"""
