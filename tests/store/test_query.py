"""Queries find runs by name, the newest run of each case, and histories."""

import pytest

from nanolib.measurement import BadInput, Measurement, exact
from nanolib.store.connection import process_name
from tests.store.rows import LATENCY, make_run


def _cases(names):
    return {name: ({"name": name}, [Measurement("case_duration", 1.0, n=1)]) for name in names}


def _shown(frame):
    return list(zip(frame.run_id, frame.case_id, strict=True))


def test_of_a_case_in_several_runs_the_newest_on_each_machine_is_shown(store):
    for run_id, machine_id, cases in (
        ("a", "m1", "xy"),
        ("b", "m1", "xz"),
        ("c", "m2", "x"),
        ("d", "m1", "z"),
    ):
        store.add(make_run(run_id, machine_id=machine_id, rows=_cases(cases)))
    newest = [("a", "y"), ("b", "x"), ("c", "x"), ("d", "z")]
    assert _shown(store.measurements(newest=9)) == newest
    assert _shown(store.measurements(newest=2)) == newest[2:]
    assert _shown(store.measurements(["a", "b"], newest=9)) == [("a", "y"), ("b", "x"), ("b", "z")]
    rows, runs = store.report_data("abcd")
    assert _shown(rows) == newest and "samples" in rows and list(runs.run_id) == list("abcd")
    assert "samples" not in store.measurements()


def test_a_history_has_one_metric_of_the_last_runs_of_each_machine(store):
    for number, (run_id, machine_id, experiment) in enumerate(
        (("a", "m1", "fp8"), ("b", "m1", "fp8"), ("c", "m2", "fp8"), ("d", "m1", "model"))
    ):
        rows = {"x": ({"name": "x"}, [LATENCY, exact("flops", number)])}
        store.add(make_run(run_id, machine_id=machine_id, experiment=experiment, rows=rows))
    assert list(store.figures("flops", ["m1"]).estimate) == [0, 1, 3]
    assert list(store.figures("flops", ["m1", "m2"], last=1).run_id) == ["b", "c", "d"]


def test_the_run_before_is_the_last_done_of_its_like(store):
    peak = {"peak": ({"ceiling": "copy"}, [Measurement("case_duration", 1.0, n=1)])}
    kinds = {
        "a": {},
        "b": {},
        "c": {"suite": "full"},
        "d": {"machine_id": "m2"},
        "e": {"experiment": "model"},
        "f": {"rows": {}},  # this run has not ended
        "i": {"rows": _cases("z") | peak},  # a peak rate is not a case in common
        "g": {},
        "h": {"experiment": "model"},
    }
    for run_id, rest in kinds.items():
        store.add(make_run(run_id, **{"rows": _cases("xy") | peak} | rest))
    for of, found in {"g": "b", "b": "a", "a": "", "ghf": "be"}.items():
        assert store.runs_before(of) == [*found]


def test_old_runs_go_and_running_ones_stay(store):
    for run_id, age in (("a", 40), ("b", 40), ("c", 20), ("d", 1)):
        store.add(
            make_run(run_id, rows={} if run_id == "b" else _cases("x"), process=process_name())
        )
        moment = f"strftime('%Y-%m-%dT%H:%M:%fZ', 'now', '-{age} days')"
        store.connection.execute(f"UPDATE runs SET started = {moment} WHERE run_id = ?", (run_id,))
    for days, gone in ((30, "a"), (10, "ac"), (0, "acd"), (None, "")):
        assert store.cleanup_old_runs(days, dry_run=True) == [*gone]
    for days in (-1, float("nan")):
        with pytest.raises(BadInput, match=f"max_age_days: {days} is not valid; give 0 or more"):
            store.cleanup_old_runs(days)
    with pytest.raises(BadInput, match="run: b is still running; stop it first"):
        store.cleanup_old_runs(None, run_ids=["b"])
    assert len(store.runs()) == 4
    elsewhere = "UPDATE runs SET process = '0123abcd:1:2.00' WHERE run_id = 'b'"
    store.connection.execute(elsewhere)  # a machine that cannot be asked, 40 days ago
    assert store.cleanup_old_runs(dry_run=True) == ["a", "b"]
    store.update_run("b", process=process_name())
    assert store.cleanup_old_runs() == ["a"] and list(store.runs().run_id) == ["b", "c", "d"]


NAMED = {
    "a": {"launch": "one/attention"},
    "b": {"launch": "one/model", "experiment": "model"},
    "c": {"label": "night"},
    "d": {"suite": "quick"},
    "e": {"label": "'; DROP TABLE runs; --"},
    "f": {"launch": "two/model", "experiment": "model"},
    "g": {"launch": "two/fp8", "experiment": "fp8"},
}


FOUND = {
    "all": "abcdefg",
    "latest": "fg",  # every run of one command
    "latest~1": "b",  # only the runs of the same notebooks
    "eeee0001": "e",
    "night": "c",  # the order is label, experiment, suite
    "model": "bf",
    "quick": "d",
    "aaaa": "a",
    "aaa": "",  # too few characters for the beginning of an id
    "latest~2": "",
    "": "",
}


@pytest.mark.parametrize(("name", "found"), FOUND.items())
def test_a_name_stands_for_runs_in_a_fixed_order(store, name, found):
    for letter, run in NAMED.items():
        store.add(make_run(f"{letter * 4}0001", **run))
    if found:
        assert store.resolve(name) == [f"{letter * 4}0001" for letter in found]
    else:
        with pytest.raises(BadInput, match=r"run: .* (does not exist|is not in the database)"):
            store.resolve(name)


def test_the_start_of_two_ids_names_neither(store):
    for end in "12":
        store.add(make_run(f"abcd{end}"))
    with pytest.raises(BadInput, match="'abcd' is the start of 2 IDs; give more digits"):
        store.resolve("abcd")


def test_what_is_newest_started_last_whenever_it_was_merged(store):
    for run_id, day in (("m", 9), ("z", 1), ("a", 1)):
        store.add(make_run(run_id, rows=_cases("x")))
        store.update_run(run_id, started=f"2026-01-{day:02}T00:00:00.000000Z")
    for rows in (store.runs(), store.measurements()):
        assert list(rows.run_id) == ["z", "a", "m"]
    assert store.resolve("latest") == store.newest_runs() == ["m"]
    assert store.runs_before("m") == ["a"] and list(store.measurements(newest=1).run_id) == ["m"]
    store.update_run("m", status="failed")
    assert store.newest_runs() == ["a"]  # the newest run that is done
