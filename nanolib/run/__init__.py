"""The one path by which a number is made: cases → `sweep` → rows; everything else here serves it.

`params` and `workload` are what experiments build on; `launch`, `worker` and `ranks/` start processes; `suite/` runs notebooks.
It knows no experiment: what it needs of one is handed to it.
"""
