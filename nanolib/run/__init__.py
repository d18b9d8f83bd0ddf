"""The one path by which a number is made: params → cases → `sweep` → rows.

1. `params` and `case` define a grid. `dry_run`, `memory_plan` and `peaks_case` predict its cases.
2. `sweep` locks the devices, skips finished cases, stores a `started` row, measures, and stores the
   rows with their `provenance`.
3. `group` measures a case here or in a fresh process, in turns with the others of its group and
   within its `timeout`.
4. A case of several processes runs on `ranks` of this machine, or on those that `torchrun` starts.
5. `notebooks` runs the `jobs` of a suite one after another, and `on_ray` runs them as Ray tasks.

Only `process` starts and ends processes. This folder imports no experiment: its functions take one
as an argument.
"""
