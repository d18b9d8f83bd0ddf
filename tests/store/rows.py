"""A machine, a measurement and a run for tests."""

import numpy as np

from nanolib.measurement import Flag, Measurement, exact
from nanolib.store import Run

MACHINE = {
    "machine_id": "m1",
    "cpu": "c",
    "cores": 2,
    "ram_gib": 8,
    "gpus": [{"name": "g"}],
    "dtypes": {"float32": "avx"},
}
LATENCY = Measurement(
    "latency",
    1.5,
    1.0,
    2.0,
    0.95,
    3,
    (1.0, 1.5, 2.0),
    predicted=1.2,
    method="perf_counter",
    scope="forward",
    flags=(Flag.GOT_SLOWER,),
    details={"mean": np.float64(1.5)},
)


def make_run(run_id="", label="", machine_id="m1", **rest):
    values = {
        "experiment": "attention",
        "machine": MACHINE | {"machine_id": machine_id},
        "params": {"seed": 1},
        "label": label,
        "rows": {"case1": ({"seq_len": 8, "name": "dense"}, [LATENCY, exact("flops", 42)])},
    }
    return Run(**values | rest | ({"run_id": run_id} if run_id else {}))
