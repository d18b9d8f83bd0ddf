"""The one path by which a number is made: cases → `sweep` → rows; everything else here serves it.

Experiments build on `case`, `params`, `memory_plan` and `rows`. `worker`, `ranks` and `torchrun` start
processes, all by `process`; `notebooks` and `on_ray` run suites. This folder knows no experiment: what
it needs of one is handed to it.
"""
