"""Measure two versions of the code in turns, for `nano ab`.

- `versions` checks out revisions and inspects interpreters.
- `pairs` defines the settings and tasks, and stores block times.
- `schedule` interleaves blocks of both versions, in many pairs of processes.
- `run` defines a comparison, performs it, and turns block times into findings.
- `processes` starts pairs of processes, one process per version.
- `children` sends requests to the processes.
- `worker` and `forks` answer the requests inside the processes.
"""
