"""One module per notebook: `Params`, `cases(params)`, `predict(case)`, `measure_case(case, params, ceilings)`.

`sweep` is the one path by which their numbers are made; everything else reads the rows that it writes. A new experiment is one
module here, one notebook of the same name, and one params file per suite.
"""
