"""Earlier runs of a machine, which tell how far its runs lie apart."""

import numpy as np
import pandas as pd

from nanolib.compare.spread import repeats

KEY = ["machine_id", "experiment", "case_id", "scope", "method"]


def earlier_runs(rows, sd=0.001, runs=6, seed=0):
    """Of each timing in `rows` so many runs of one revision that differ by `sd`."""
    rng = np.random.default_rng(seed)
    timings = rows.loc[rows["metric"] == "latency", KEY]
    figures = [
        timings.assign(
            run_id=f"earlier{at}",
            git_revision="rev",
            estimate=10 * np.exp(rng.normal(0, sd, len(timings))),
        )
        for at in range(runs)
    ]
    return repeats(
        [pd.concat([timings.assign(run_id="", git_revision="", estimate=1.0), *figures])]
    )
