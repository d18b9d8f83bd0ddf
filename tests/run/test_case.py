"""What a case predicts, plans and needs, and what a dry run says."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from nanolib.run import memory_plan
from nanolib.run.case import Plan
from nanolib.run.peaks import roofline_ms
from nanolib.run.prepare import dry_run_table, prediction_table
from nanolib.stats.intervals import Interval
from tests.run import sample_experiment as sample

MIB = 2**20


@dataclass(frozen=True)
class _Sized(sample.SampleCase):
    """A case with formulas, which runs a user's code if its behavior is `own`."""

    @property
    def runs_code(self):
        return self.behavior == "own"

    def unsupported_reason(self):
        return "no such unit" if self.behavior == "unsupported" else ""

    def plan(self):
        odd = {"unknown": Plan(reason="why"), "planned": Plan(unsupported_reason="no such kernel")}
        return odd.get(self.behavior, Plan({"a": MIB, "b": 9 * MIB, "c": 2}))

    def predict(self, ceilings=None):
        rest = {"bytes": 5.0 * MIB, "weight_memory": 7.0, "kept_share": "half"}
        return rest | {"latency": roofline_ms(6e9, 1e6, "float32", ceilings)}


RATES = {name: Interval(rate, rate, rate) for name, rate in (("float32", 2e9), ("copy", 1e6))}


def test_a_prediction_has_its_unit():
    experiment = SimpleNamespace(cases=lambda _: [_Sized("cpu", "ok")])
    (line,) = prediction_table(experiment, sample.Params(), RATES).to_dict("records")
    units = {"bytes (MiB)": "5", "weight memory (MiB)": "7", "latency (ms)": "3,000"}
    assert line == {"case": "ok", "kept share": "half"} | units


@pytest.mark.parametrize(
    ("behavior", "free", "told"),
    [
        ("ok", 10 * MIB, ("3,000", "9", "runs")),  # a tenth is left to the system
        ("ok", 10 * MIB - 1, ("3,000", "9", "oom_predicted: the case needs 9 MiB, over 90% of")),
        ("ok", None, ("3,000", "9", "runs")),
        ("unknown", MIB, ("3,000", "—", "runs (why)")),
        ("unsupported", MIB, ("3,000", "—", "unsupported: no such unit")),
        ("planned", MIB, ("3,000", "—", "unsupported: no such kernel")),
        ("own", MIB, ("—", "—", "known after a run, because the model is your own code")),
    ],
)
def test_whether_a_case_runs_here_is_said_with_its_time_and_memory(
    monkeypatch, behavior, free, told
):
    monkeypatch.setattr(memory_plan, "free_bytes", lambda device: free)
    cases = [_Sized("cpu", behavior, group) for group in "ab"]
    table = dry_run_table(cases, RATES)
    assert {*zip(table["predicted ms"], table["predicted MiB"], strict=True)} == {told[:2]}
    assert table["here"].str.startswith(told[2]).all()
    names = [*map(str, cases)] if told[1] != "—" else [f"{cases[0]} and 1 more"]
    assert list(table["case"]) == names
