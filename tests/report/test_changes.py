"""What changed since earlier runs, and what a report says of runs and machines."""

from dataclasses import replace

import pandas as pd
import pytest

from nanolib.compare.findings import Comparison, Line, worst_first
from nanolib.compare.history import Change
from nanolib.report import overview
from nanolib.report.overview import changes, comparison_chart, comparison_verdict, history_verdict
from nanolib.report.section import Estimate, Finding, comparing
from nanolib.stats.compare import Kind, Verdict
from nanolib.stats.intervals import Interval
from nanolib.store import Store
from tests.compare.test_compare import measured, run_of
from tests.compare.test_history import history_of
from tests.report.rows import points

STILL = [10.0] * 8


def test_the_five_latest_changes_are_named():
    found = [history_of(f"c{at}", STILL, Change(at, 1.5, at % 2 == 0, "a", "b")) for at in range(7)]
    level, *findings = history_verdict([*found, history_of("level", STILL)])
    assert level.text == "7 of 8 timings changed their level over up to 8 runs"
    ways = ("worse", "better", "worse", "better", "worse")
    changed = [f"model c{at} decode became {way}" for at, way in enumerate(ways)]
    assert [finding.text for finding in findings] == changed
    assert findings[0].next_step == "run nano ab a b model"


@pytest.mark.parametrize(("runs", "few"), [(5, True), (6, False)])
def test_six_runs_can_show_a_change(runs, few):
    said = "\n".join(map(str, history_verdict([history_of("c", STILL[:runs])])))
    assert ("needs at least 6 runs" in said) == few


def _line(at, kind=Kind.REGRESSED, ratio=1.2):
    interval = Interval(ratio - 0.05, ratio, ratio + 0.05)
    verdict = Verdict(kind, ratio, interval, 0.01, 0.02, interval, 0.01)
    return Line("model", f"c{at}", "latency", kind, 1.0, ratio, verdict)


def test_five_changes_are_named_after_the_counts_and_before_what_limits_the_comparison():
    failed = Line("model", "x", "", "failed", message="why")
    others = [_line(9, Kind.EQUIVALENT, 1.0), _line(8, Kind.SUSPECT)]
    lines = [failed, *others, *(_line(at) for at in range(4))]
    found = Comparison(worst_first(lines), True, 0.05, noise=["loud"])
    counts, *named, limit, drift = comparison_verdict(found)
    assert counts.evidence == "4 regressed, 1 failed, 1 suspect, 1 equivalent"
    regressed = [f"Regressed: model c{at} latency: +20.0% [+15.0% … +25.0%]." for at in range(4)]
    assert [str(finding) for finding in named] == [*regressed, "Failed: model x: why."]
    assert limit.evidence == "loud" and "REV_A" in drift.next_step


def test_the_newest_runs_are_compared_with_the_runs_before(tmp_path):
    with Store(tmp_path / "results.sqlite") as store:
        store.add(run_of({"a": measured(1), "b": measured(2)}, "run0"))
        first = changes(store, store.runs())
        store.add(run_of({"a": measured(3)}, "run1"))
        second = changes(store, store.runs())
    assert not first.charts and not first.tables and "no history yet" in first.verdict[0].text
    level, _, counts, *_ = map(str, second.verdict)
    assert level == "0 of 1 timings changed their level over up to 2 runs."
    # A case that only one run has is not missing.
    assert counts == "The newest runs were compared with earlier runs: 3 equivalent."
    assert [*second.charts] == ["since_the_run_before"]
    assert [*second.tables] == ["All but equivalent cases"]


MACHINE = {"cpu": "c", "cores": 2, "ram_gib": 8, "torch": "2", "dtypes": {"float32": "vector"}}
GPU = {"name": "G", "memory_gib": 80, "compute_capability": "9.0", "fp8": True}


def test_a_machine_of_the_rows_is_told_with_its_gpus_and_its_newest_peak_rates():
    peaks = [("m1", "ceiling_bytes", 2e10, "copy"), ("m1", "ceiling_bytes", 3e10, "copy")]
    peaks += [(one, "ceiling_flops", 4e12, "float32") for one in ("m2", "m3")]
    rows = pd.DataFrame(peaks, columns=["machine_id", "metric", "estimate", "scope"])
    rows = rows.assign(low=rows["estimate"], high=rows["estimate"])
    gpus = {"m1": [GPU] * 2, "m2": [GPU | {"fp8": False}], "m3": [], "m4": []}
    machines = pd.DataFrame([{"machine_id": one, "gpus": gpus[one], **MACHINE} for one in gpus])
    table = overview.hardware_table(rows, machines)
    assert list(table["GPU"]) == ["G × 2", "G", "no GPU"]
    assert list(table["GPU memory (GiB)"]) == [80, 80, "—"]
    assert list(table["Native FP8"]) == ["yes", "no", "no"]
    assert list(table["copy (B/s)"]) == ["30,000,000,000", "—", "—"]


def test_intervals_that_touch_have_no_order_and_no_order_of_a_busy_machine_is_stated():
    below, touching, above = (Estimate(low, 4, 5) for low in (1, 5, 6))
    orders = [below.compare_to(other) for other in (touching, above)]
    assert [*orders, above.compare_to(below)] == ["no clear difference", "below", "above"]
    many = [Estimate(at, at, at + 1, name=f"e{at}", busy=at == 0) for at in range(6)]
    pairs = comparing(*many, Estimate.exact(9.0, "bound"))
    busy = Finding("e0 is the fastest", about="m", compared=pairs).without_busy_order()
    assert "does not rank" in busy.text and (busy.about, busy.compared) == ("m", ())
    assert busy.figures == tuple(many) and "e3: " in busy.evidence and "e4: " not in busy.evidence
    calm = Finding("Why?", "seen", "go", compared=comparing(*many[1:]))
    assert calm.without_busy_order() is calm and str(calm) == "Why?: seen. Next: go."


def test_forty_timings_are_drawn_changed_ones_first_in_the_band_of_no_change():
    scopes = [f"{name} of 1024 B" for name in ("all_reduce", "all_gather")]
    unclear = [_line(at, Kind.INCONCLUSIVE) for at in range(39)]
    moved = replace(_line(0, Kind.IMPROVED), experiment="distributed", case="dense seq_len=32768")
    moved = [replace(moved, metric=f"latency {scope}") for scope in scopes]
    chart = comparison_chart(Comparison((*unclear, *moved), True, 0.07))
    # The words that all timings of a panel share are its title.
    titles = [panel.title.text for panel in chart.vconcat]
    assert titles == ["distributed dense seq_len=32768 of 1024 B", "model"]
    drawn = points(chart, "series", "text")
    assert [name for name, _ in drawn[:2]] == ["all_reduce", "all_gather"]
    assert {text for _, text in drawn[2:]} == {"inconclusive"} and len(drawn) == 40
    assert chart.title.subtitle[1:] == [
        "The chart shows 40 of 41 timings.",
        "Green: no change (±3%). Changes below 7% do not count.",
    ]
    assert set(points(chart, "from", "to")) == {(0.97, 1.03)}
