"""Turn the parameters of a notebook into rows of the database: params → cases → `sweep` → rows.

- `params` and `case` define the cases. `dry_run`, `memory_plan` and `peaks_case` predict
  the results of the cases.
- `sweep` locks the devices and skips the finished cases. For each other case, `sweep` stores a
  `started` row, measures the case, and stores its rows.
- `process` starts processes, and ends them with all of their children.
- `provenance` records the code, the machine, and the interference of other processes.
- `group` measures the cases of a group in turns, in this process or in a fresh one. `timeout`
  limits the time of each case.
- `ranks` runs a case of several processes on this machine, and `torchrun` on several machines.
- `notebooks` runs the `jobs` of a suite one after another, and `on_ray` runs them as Ray tasks.

Only the command `torchrun` loads an experiment. Callers pass the experiment to all other modules
as an argument.
"""
