"""Make cases from the parameters of a notebook, measure the cases, and store the rows.

- `case` has the base classes of parameters and cases. `memory_plan` and `peaks` predict the results
  of the cases.
- `prepare` predicts a whole run, records the code and the machine, and finds a run to continue.
- `sweep` locks the devices and skips the finished cases. For each other case, `sweep` stores a
  `started` row, measures the case, and stores its rows.
- `process` starts processes, ends them with all of their children, executes notebooks, and locks
  devices.
- `group` measures the cases of a group in turns, in this process or in a fresh one. `outcome`
  limits the time of each case, and keeps its rows and its status.
- `ranks` runs a case in several processes on this machine. `torchrun` runs such a case on several
  machines.
- `notebooks` runs the jobs of a command one after another. `on_ray` runs the jobs as Ray tasks.

Only `torchrun` imports an experiment. All other modules receive the experiment as an argument.
"""
