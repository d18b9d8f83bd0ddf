"""Each case of a suite with every number that is the same on every machine. Nothing is timed.

`python -m tests.golden.sheet [SUITE] [NOTEBOOK]` writes the files in `sheet/` after a change that
is meant, and their diff is the list old → new.
"""

import contextlib
import itertools
import json
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from nanolib.experiments import ALL, MEASURING
from nanolib.measurement import METRICS, Direction
from nanolib.params import read_yaml
from nanolib.paths import checkout
from tests.measuring import timed_alone

SUITES = ("quick", "full")
LOSSES = {"loss", "loss_difference", "loss_difference_from_bf16"}
# By torch's and oneDNN's code for SSE 4.1, AVX2 and AVX-512, on one thread and two, losses differ
# by at most 0.00013 nats.
DECIMALS = 3
SAME_EVERYWHERE = {name for name, metric in METRICS.items() if metric.direction == Direction.EQUAL}
SAME_EVERYWHERE |= {"peak_memory", *LOSSES}
# Class → how many of its rows are made; the others are times, rates and joules, and what ranks send
# is predicted.
ROWS = {"CeilingCase": 0, "WarmupCase": 0, "ShardedCase": 0, "EnergyCase": 1}
_MACHINE = 2**34  # bytes, on every machine the same
# Python's own sources, which are trained on, differ between its versions.
_TEXT = " ".join(f"{n} times {n} is {n * n}." for n in range(20_000)).encode()


def path_of(suite, notebook):
    """The file of a suite's notebook."""
    return Path(__file__).parent / "sheet" / suite / f"{notebook}.json"


@contextlib.contextmanager
def everywhere_alike():
    """One thread, so much memory, one text."""
    threads, text = torch.get_num_threads(), torch.frombuffer(bytearray(_TEXT), dtype=torch.uint8)
    torch.set_num_threads(1)
    with (
        mock.patch("nanolib.run.memory_plan.free_bytes", lambda *_: _MACHINE),
        mock.patch("nanolib.models.training.load_text", lambda *_, **__: text),
    ):
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def params_of(suite, notebook):
    """The parameters of a notebook in a suite; in the place of blocks of calls, none is called."""
    values = read_yaml(checkout() / "params" / suite / f"{notebook}.yml")
    params = ALL[notebook]().Params(**values | {"device": "cpu"})
    return params.with_collector(
        lambda clock, phases, *_: (np.ones((6, 1, len(phases))), {"calls_per_block": 1})
    )


def cases_of(notebook, params):
    """Each case by its line in the sheet: the class, and the factors that are set."""
    found = ALL[notebook]().cases(params)
    by_line = {_line(case): case for case in found}
    assert len(by_line) == len(found), "the lines do not tell all cases apart"
    return by_line


def _line(case):
    factors = [
        f"{name}={json.dumps(value)}"
        for name, value in case.factors.items()
        if value and name not in ("device", "name")
    ]
    return " ".join([type(case).__name__, *factors]).replace('"', "")


def numbers(suite, case, params):
    """All that is said of a case. Cases of the full suite are not run: they take over an hour."""
    found = {f"planned {scope}": peak for scope, peak in case.plan().peaks.items()}
    for name, value in case.predict().items():
        if not isinstance(value, str | dict):
            found[f"predicted {name}"] = value
    most = ROWS.get(type(case).__name__)
    if suite == "full" or most == 0 or case.unsupported_reason():
        return found
    rows = timed_alone(case.measure(params, {}))
    for row in itertools.islice(rows, most):
        if row.metric in SAME_EVERYWHERE and row.estimate is not None:
            title = f"{row.metric} {row.scope} ({row.method})"
            found[title] = row.estimate
            if row.predicted is not None:
                found[f"{title} predicted"] = row.predicted
    return found


def main(asked):
    """Write those files whose suite and notebook are asked for; all where none is."""
    for suite in SUITES:
        for notebook in MEASURING:
            if set(asked) <= {suite, notebook}:
                params = params_of(suite, notebook)
                with everywhere_alike():
                    sheet = {
                        line: numbers(suite, case, params)
                        for line, case in cases_of(notebook, params).items()
                    }
                text = json.dumps(sheet, indent=0, sort_keys=True, default=float)
                path_of(suite, notebook).write_text(text + "\n")
                print(f"{suite} {notebook}: {len(sheet)} cases", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
