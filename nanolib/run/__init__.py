"""The one path by which a number is made: params → cases → `sweep` → rows.

Experiments build on `case`, `params`, `memory_plan` and `rows`. `worker`, `ranks` and `torchrun`
start processes, all by `process`. `notebooks` and `on_ray` run suites. This folder imports no
experiment: its functions take one as an argument.
"""
