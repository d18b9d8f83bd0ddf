"""Make cases from the parameters of a notebook, measure the cases, and store the rows.

- `params` and `case` define the cases. `dry_run`, `memory_plan` and `peaks` predict
  the results of the cases.
- `sweep` locks the devices and skips the finished cases. For each other case, `sweep` stores a
  `started` row, measures the case, and stores its rows.
- `process` starts processes, ends them with all of their children, and locks devices.
- `provenance` records the code, the machine, and the interference of other processes.
- `group` measures the cases of a group in turns, in this process or in a fresh one. `timeout`
  limits the time of each case.
- `ranks` runs a case in several processes on this machine. `torchrun` runs such a case on several
  machines.
- `jobs` makes the jobs of a command, and executes a notebook. `notebooks` runs the jobs one after
  another, and `on_ray` runs the jobs as Ray tasks.

Only `torchrun` imports an experiment. All other modules receive the experiment as an argument.
"""
