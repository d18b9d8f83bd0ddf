"""The one path by which a number is made: params → cases → `sweep` → rows.

1. `params` and `case` define a grid. `dry_run`, `memory_plan` and `peaks_case` predict its cases.
2. `sweep` locks the devices, skips finished cases, stores a `started` row, measures, and stores the
   rows with their `provenance` and `interference`.
3. A case runs here or in a fresh process (`worker`), in turns with its `group`, within its
   `timeout`.
4. A case of several processes runs on `ranks` of this machine, or on those that `torchrun` starts.
5. `notebooks` runs the `jobs` of a suite one after another, and `on_ray` runs them as Ray tasks.

Only `process` starts and ends processes. This folder imports no experiment: its functions take one
as an argument.
"""
