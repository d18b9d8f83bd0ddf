"""Tables: over what a ratio is, what is counted, what failed, and how cells are written."""

import math

import pandas as pd

from nanolib.measurement import Flag, Status
from nanolib.report import overview, tables
from tests.report.rows import SIZES, ended, interval


def test_cases_that_failed_and_flags_are_counted(measured):
    slower = interval("latency", 1, 2, 4, scope="forward", flags=(Flag.GOT_SLOWER,))
    full = [ended(Status.OOM, "full"), interval("latency", 1, 2, 4, scope="forward")]
    cases = [(SIZES | {"name": "good"}, [slower]), (SIZES | {"name": "odd"}, full)]
    rows = measured("attention", cases)
    (bad,) = overview.failures(rows).to_dict("records")
    assert bad["case"].startswith("odd ") and (bad["status"], bad["message"]) == ("oom", "full")
    both = overview.failures(pd.concat([rows, rows.assign(machine_id="other678")]))
    assert [case.split()[-1] for case in both["case"]] == ["machine=m1", "machine=other6"]
    (line,) = overview.flag_lines(rows)
    assert str(line).startswith(f"1 of 2 timings have the flag {Flag.GOT_SLOWER}: ")


def test_cells_are_for_people():
    table = pd.DataFrame(
        {"a": [12.0, math.nan], "a_low": [11.0, 1.0], "a_high": [15.0, 2.0],
         "b": ["x", None], "algorithm": ["pass_q", None],
         "direction": "forward_backward", "hidden": 1}
    )  # fmt: skip
    names = {"direction": "D", "a": "A [95 %]", "b": "B", "algorithm": "", "none": "N"}
    shown = tables.readable(table, names)
    assert list(shown.columns) == ["D", "A [95 %]", "B", ""]
    assert shown.to_numpy().tolist() == [
        ["forward + backward", "12.0 [11.0 … 15.0]", "x", "pass q"],
        ["forward + backward", "—", "—", "—"],
    ]
