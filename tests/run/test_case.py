"""What a case predicts, plans and needs, on one machine and on several, and what a dry run says of it."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from nanolib.measurement import Measurement
from nanolib.run import case as cases
from nanolib.run import memory_plan
from nanolib.run.case import Plan, RanksCase, compile_row, oversubscribed
from nanolib.run.dry_run import predict_case, prediction_table
from nanolib.run.memory_plan import FOLLOWED_BATCH, bytes_at, shortage
from nanolib.run.peaks_case import ceiling_cases, rate_rows, roofline_ms
from nanolib.stats.intervals import Interval
from tests.run import sample_experiment as sample

MIB = 2**20


@dataclass(frozen=True)
class _Ranks(RanksCase):
    world_size: int


@pytest.mark.parametrize(
    ("device", "nodes", "here", "devices", "sharing", "ranks"),
    [
        ("cuda", 2, 3, ("cuda:0", "cuda:1"), 1, "5 rank(s) on 2 nodes"),
        ("cuda", 4, 2, ("cuda:0", "cuda:1"), 1, "5 rank(s) on 4 nodes"),
        ("cuda", 5, 1, ("cuda:0",), 1, "5 rank(s) on 5 nodes"),
        ("cpu", 2, 3, ("cpu",), 3, "5 rank(s) on 2 nodes"),
        ("cpu", 1, 5, ("cpu",), 5, "5 rank(s)"),
    ],
)
def test_ranks_are_divided_among_nodes_and_use_the_gpus_of_theirs(
    monkeypatch, device, nodes, here, devices, sharing, ranks
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    case = _Ranks(device, world_size=5, nodes=nodes)
    assert (case.ranks_here, case.devices, case.sharing, case.ranks) == (
        here,
        devices,
        sharing,
        ranks,
    )
    assert case.factors.get("nodes", 1) == nodes and ("nodes" in case.factors) == (nodes > 1)


@pytest.mark.parametrize(
    ("device", "ranks", "threads", "too_many"),
    [("cpu", 2, 3, False), ("cpu", 2, 4, True), ("cuda:0", 2, 9, False), ("cuda", 3, 1, True)],
)
def test_ranks_share_once_they_need_more_than_there_is(
    monkeypatch, device, ranks, threads, too_many
):
    monkeypatch.setattr(cases, "usable_cores", lambda: 6)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert oversubscribed(device, ranks, threads) == too_many


def test_compiling_is_what_the_first_call_takes_longer_and_never_less_than_nothing():
    assert [compile_row(*ms).estimate for ms in ((70.0, 20.0), (20.0, 70.0))] == [50.0, 0.0]


@dataclass(frozen=True)
class _Sized(sample.SampleCase):
    """A case with formulas, which runs a user's code if its behavior is `own`."""

    @property
    def runs_code(self):
        return self.behavior == "own"

    def unsupported(self):
        return "no such unit" if self.behavior == "unsupported" else ""

    def plan(self):
        return Plan() if self.behavior == "unknown" else Plan({"a": MIB, "b": 3 * MIB, "c": 2})

    def formulas(self, ceilings=None):
        if self.behavior == "own":
            return {}
        timed = {"latency": roofline_ms(6e9, 1e6, "float32", ceilings)} if ceilings else {}
        return {"flops": 6e9, "bytes": 5.0 * MIB, "kept_share": "half", **timed}


RATES = {name: Interval(rate, rate, rate) for name, rate in (("float32", 2e9), ("copy", 1e6))}


def test_a_dry_run_has_the_predictions_with_their_units_and_no_line_without_any():
    every = [_Sized("cpu", name) for name in ("ok", "unknown", "own")]
    experiment = SimpleNamespace(cases=lambda _: every)
    table = prediction_table(experiment, sample.Params(), RATES)
    common = {"flops (FLOP)": "6,000,000,000", "bytes (MiB)": "5", "kept share": "half"}
    common["latency (ms)"] = "3,000"
    assert table.to_dict("records") == [
        {"case": "ok 0.0", **common, "peak memory (MiB)": "3"},
        {"case": "unknown 0.0", **common, "peak memory (MiB)": ""},
    ]
    assert "latency (ms)" not in prediction_table(experiment, sample.Params())


@pytest.mark.parametrize(
    ("behavior", "free_mib", "told"),
    [
        ("ok", 4, ("3,000", "3", "runs")),
        ("ok", 3, ("3,000", "3", "oom_predicted: the case needs 3 MiB, over 90% of the 3 MiB")),
        ("unknown", 1, ("3,000", "—", "runs")),
        ("unsupported", 1, ("3,000", "—", "unsupported: no such unit")),
        ("own", 1, ("—", "—", "known after a run, because the model is your own code")),
    ],
)
def test_whether_a_case_runs_here_is_said_with_its_time_and_memory(
    monkeypatch, behavior, free_mib, told
):
    monkeypatch.setattr(memory_plan, "free_bytes", lambda device: free_mib * MIB)
    _, *found, here = predict_case(_Sized("cpu", behavior), RATES)
    assert tuple(found) == told[:2] and here.startswith(told[2])


@pytest.mark.parametrize(
    ("needed", "free", "fits"), [(90, 100, True), (91, 100, False), (91, None, True)]
)
def test_a_tenth_of_the_free_memory_is_left_to_the_system(monkeypatch, needed, free, fits):
    monkeypatch.setattr(memory_plan, "free_bytes", lambda device: free)
    assert (not shortage(Plan({"a": 1, "b": needed}), "cpu")) == fits
    assert not shortage(Plan(), "cpu")


def test_only_bytes_that_grow_with_the_batch_are_scaled():
    sizes = (12 * FOLLOWED_BATCH, 12 * FOLLOWED_BATCH + 1)
    assert [bytes_at(3, size) for size in sizes] == [36, sizes[1]]


def test_a_roofline_is_the_slower_of_products_and_copies_and_needs_both_rates():
    assert roofline_ms(6e9, 1e6, "float32", RATES) == 3000
    assert roofline_ms(6e9, 5e6, "float32", RATES) == 5000
    for lacking in RATES:
        known = {name: rate for name, rate in RATES.items() if name != lacking}
        assert roofline_ms(6e9, 1e6, "float32", known) is None


def test_peaks_take_four_budgets_and_at_most_two_seconds():
    for budget_s, seconds in ((0.25, 1.0), (0.5, 2.0), (3.0, 2.0)):
        found = ceiling_cases("cpu", ["float32"], budget_s)
        assert [(str(case), case.budget_s) for case in found] == [
            ("ceiling float32", seconds),
            ("ceiling copy", seconds),
        ]


def test_without_an_interval_or_a_peak_rate_a_share_has_no_ends_or_there_is_none():
    latency = Measurement("latency", 2.0, None, None, None, 1, (2.0,), scope="forward")
    _, share = rate_rows(latency, 5e7, "float32", {"float32": Interval(0.8e11, 1e11, 2e11)})
    assert (share.low, share.estimate, share.high) == (None, 0.25, None)
    assert [row.metric for row in rate_rows(latency, 5e7, "float32", {})] == ["flops_per_second"]
