"""What is asked of runs: names, the newest of each case, histories, and what goes."""

from dataclasses import replace

import pytest

from nanolib.measurement import BadInput, Measurement, Status, exact
from tests.store.rows import LATENCY, MACHINE, make_run


def _at(store, run_id, day):
    store.connection.execute(
        "UPDATE runs SET started = ? WHERE run_id = ?", (f"2026-01-{day:02}T00:00:00.000000Z", run_id)
    )


def _cases(*names, estimate=1.0):
    return {name: ({"name": name}, [Measurement("case_time", estimate, n=1)]) for name in names}


def _shown(frame):
    return list(zip(frame.run_id, frame.case_id, strict=True))


def test_a_run_keeps_all_that_it_was_given(store):
    run = make_run(
        "a", "mine", suite="quick", device="cpu", versions={"torch": "2"}, git_revision="abc", fingerprint="f"
    )
    run = replace(
        run, process="p", launch="l", disturbances=("a fan",), machine=MACHINE | {"governor": "g", "threads": 2}
    )
    store.add(run)
    row = store.runs().iloc[0].to_dict()
    assert {name: row[name] for name in ("experiment", "suite", "label", "machine_id", "device", "git_revision")} == {
        "experiment": "attention",
        "suite": "quick",
        "label": "mine",
        "machine_id": "m1",
        "device": "cpu",
        "git_revision": "abc",
    }
    assert (row["params"], row["versions"], row["disturbances"]) == ({"seed": 1}, {"torch": "2"}, ["a fan"])
    assert (row["fingerprint"], row["process"], row["launch"], row["cases"]) == ("f", "p", "l", 1)
    assert row["duration_s"] is None and row["message"] == "" and row["started"].endswith("Z")
    machine = store.machines().iloc[0]
    assert (machine.cpu, machine.cores, machine.ram_gib, machine.governor, machine.threads) == ("c", 2, 8, "g", 2)
    assert machine["dtypes"] == {"float32": "avx"} and machine.driver is None
    first, second = store.measurements().to_dict("records")
    assert (first["suite"], first["case_id"], first["confidence"], first["n"]) == ("quick", "case1", 0.95, 3)
    assert (first["scope"], first["method"], first["message"], first["metric"]) == (
        "forward",
        "perf_counter",
        "",
        "latency",
    )
    assert (second["metric"], second["estimate"]) == ("flops", 42) and "samples" not in second


def test_cases_are_counted_where_a_run_says_how_many_it_will_have(store):
    store.add(make_run("a", rows={}, cases=7))
    assert store.runs().cases.iloc[0] == 7 and store.runs().status.iloc[0] == "running"


def test_of_a_case_in_several_runs_the_newest_on_each_machine_is_shown(store):
    for day, (run_id, machine, cases) in enumerate(
        [("a", "m1", "xy"), ("b", "m1", "xz"), ("c", "m2", "x"), ("d", "m1", "z")], 1
    ):
        store.add(make_run(run_id, machine=MACHINE | {"machine_id": machine}, rows=_cases(*cases)))
        _at(store, run_id, day)
    assert _shown(store.measurements(newest=9)) == [("a", "y"), ("b", "x"), ("c", "x"), ("d", "z")]
    assert _shown(store.measurements(newest=2)) == [("c", "x"), ("d", "z")]
    assert _shown(store.measurements(["a", "b"], newest=9)) == [("a", "y"), ("b", "x"), ("b", "z")]
    assert _shown(store.measurements(["a"])) == [("a", "x"), ("a", "y")]
    assert store.count_cases("abcd") == 4 and store.count_cases("a") == 2 and store.count_cases([]) == 0
    rows, runs = store.shown("abcd")
    assert _shown(rows) == [("a", "y"), ("b", "x"), ("c", "x"), ("d", "z")] and "samples" in rows
    assert list(runs.run_id) == list("abcd")


def test_each_experiment_keeps_the_ceilings_of_its_own_run(store):
    for run_id, experiment in (("a", "attention"), ("b", "model")):
        store.add(make_run(run_id, experiment=experiment, rows=_cases("ceiling", run_id)))
    assert _shown(store.measurements(newest=9)) == [("a", "ceiling"), ("a", "a"), ("b", "ceiling"), ("b", "b")]
    assert store.count_cases("ab") == 4


def test_runs_of_one_moment_follow_the_order_in_which_they_came(store):
    for run_id in "ab":
        store.add(make_run(run_id, rows=_cases("x")))
        _at(store, run_id, 1)
    assert _shown(store.measurements(newest=5)) == [("b", "x")]
    assert store.newest_runs() == ["b"] and list(store.runs().run_id) == ["a", "b"]


def test_the_limit_of_cases_is_of_each_experiment(store):
    for run_id, experiment in (("a", "attention"), ("b", "model")):
        store.add(make_run(run_id, experiment=experiment, rows=_cases(*(f"{run_id}{n}" for n in range(3)))))
    rows = store.measurements(newest=2)
    assert sorted(rows.experiment) == ["attention"] * 2 + ["model"] * 2


def test_a_run_that_shows_no_case_is_among_those_shown(store, monkeypatch):
    monkeypatch.setattr("nanolib.store.reading.SHOWN_CASES", 2)
    for day, run_id in enumerate("abcd", 1):
        store.add(make_run(run_id, rows=_cases("x") if run_id != "d" else {}))
        _at(store, run_id, day)
    rows, runs = store.shown("abcd")
    assert _shown(rows) == [("c", "x")] and list(runs.run_id) == ["c", "d"]


def test_a_history_has_one_metric_of_the_last_runs_of_each_machine(store):
    for day, (run_id, machine, experiment) in enumerate(
        [("a", "m1", "attention"), ("b", "m1", "attention"), ("c", "m2", "attention"), ("d", "m1", "model")], 1
    ):
        rows = {"x": ({"name": "x"}, [LATENCY, exact("flops", day)])}
        store.add(
            make_run(
                run_id, machine=MACHINE | {"machine_id": machine}, experiment=experiment, rows=rows, git_revision="r"
            )
        )
        _at(store, run_id, day)
    found = store.figures("flops", ["m1"])
    assert list(zip(found.run_id, found.estimate, strict=True)) == [("a", 1), ("b", 2), ("d", 4)]
    assert list(store.figures("flops", ["m1"], last=1).run_id) == ["b", "d"]
    assert list(store.figures("flops", ["m1", "m2"], last=1).run_id) == ["b", "c", "d"]
    one = store.figures("latency", ["m2"]).iloc[0]
    assert (one.low, one.estimate, one.high, one.scope, one.method) == (1.0, 1.5, 2.0, "forward", "perf_counter")
    assert (one.git_revision, one.case_id, one.experiment, one.factors) == (
        "r",
        "x",
        "attention",
        {"name": "x"},
    )


def test_a_figure_without_a_number_is_no_history(store):
    store.add(
        make_run("a", rows={"x": ({}, [Measurement("latency", status=Status.UNSUPPORTED, message="no"), LATENCY])})
    )
    assert len(store.figures("latency", ["m1"])) == 1


def test_numbers_are_numbers_where_no_row_has_one(store):
    store.add(make_run("a", rows={"x": ({}, [Measurement("latency", 2.0, n=1)])}))
    frame = store.measurements()
    numbers = frame[["estimate", "low", "high", "predicted"]]
    assert {*map(str, numbers.dtypes)} == {"float64"} and numbers["low"].isna().all()


def test_the_run_before_is_the_last_done_of_its_like(store):
    kinds = {
        "a": {},
        "b": {},
        "c": {"suite": "full"},
        "d": {"machine": MACHINE | {"machine_id": "m2"}},
        "e": {"experiment": "model"},
        "f": {"rows": {}},  # it never ended
        "g": {},
        "h": {"experiment": "model"},
    }
    for day, (run_id, rest) in enumerate(kinds.items(), 1):
        store.add(make_run(run_id, **rest))
        _at(store, run_id, day)
    assert store.runs_before(["g"]) == ["b"] and store.runs_before(["b"]) == ["a"] and store.runs_before(["a"]) == []
    assert store.runs_before(["g", "h", "f"]) == ["b", "e"] and store.runs_before(["g", "h"], but="model") == ["b"]


def test_cases_that_began_and_cases_that_ended_are_told_apart(store):
    store.add(make_run("a", rows={}))
    for name, status, seconds in (("x", Status.OK, 2.0), ("y", Status.ERROR, 3.0), ("z", Status.OK, 5.0)):
        store.write_case("a", name, {}, [Measurement("case_time", seconds, n=1, status=status, message="m"), LATENCY])
    started = Measurement("case_time", status=Status.STARTED, details={"attempts": 2})
    store.write_case("a", "w", {}, [started])
    assert store.finished_cases("a") == {"x", "y", "z"} and store.started_attempts("a") == {"w": 2}
    assert sorted(store.case_endings("a")) == [("error", 1, 3.0), ("ok", 2, 7.0), ("started", 1, 0.0)]
    assert store.finished_cases("b") == set() and store.started_attempts("b") == {} and store.case_endings("b") == []


def test_only_what_changes_in_a_run_can_be_set(store):
    store.add(make_run("a"))
    store.add(make_run("b"))
    store.update_run("a", status="failed", message="why", duration_s=2.5, process="p", launch="l", cases=9, suite="s")
    rows = store.runs().set_index("run_id")
    assert list(rows.loc["a", ["status", "message", "duration_s", "process", "launch", "cases", "suite"]]) == [
        "failed",
        "why",
        2.5,
        "p",
        "l",
        9,
        "s",
    ]
    assert rows.loc["b", "status"] == "done" and set(store.measurements(["a"]).suite) == {"s"}
    assert set(store.measurements(["b"]).suite) == {""}
    with pytest.raises(
        BadInput, match="run: device, git_revision cannot be set; only cases, disturbances, duration_s, label, "
    ):
        store.update_run("a", git_revision="x", device="y", label="z")
    assert store.runs().label.iloc[0] == ""


def test_a_name_is_looked_for_among_labels_first_and_then_experiments_suites_and_ids(store):
    store.add(make_run("abcd1", "quick"))
    store.add(make_run("abcd2", suite="quick"))
    store.add(make_run("abce3", "warmup"))
    store.add(make_run("abcf4", experiment="warmup"))
    assert store.resolve("quick") == ["abcd1"] and store.resolve("warmup") == ["abce3"]
    assert store.resolve("abcd") == ["abcd1", "abcd2"] and store.resolve("abcf4") == ["abcf4"]
    assert store.resolve("latest~0") == store.resolve("latest") == store.resolve("latest~") == ["abcf4"]
    with pytest.raises(BadInput, match=r"run: 'latest~1' is not there; the database holds 1 launch\(es\) of warmup"):
        store.resolve("latest~1")
    with pytest.raises(BadInput, match="'latest~1000000000' is not there"):
        store.resolve("latest~1000000000")
    with pytest.raises(BadInput, match="run: 'abc' is not in the database; `nano runs` lists what is"):
        store.resolve("abc")  # three characters are too few for the beginning of an id


def test_the_run_before_is_of_the_same_notebook(store):
    for run_id, experiment, launch in (
        ("aaaa1", "attention", "one"),
        ("aaaa2", "model", "one"),
        ("bbbb1", "warmup", "two"),
        ("cccc1", "model", "three"),
    ):
        store.add(make_run(run_id, experiment=experiment, launch=launch))
    assert store.resolve("latest") == ["cccc1"] and store.resolve("latest~1") == ["aaaa2"]
    with pytest.raises(BadInput, match="'latest~2' is not there"):
        store.resolve("latest~2")


def test_old_runs_go_by_age_or_number_and_running_ones_stay(store):
    for run_id in "abcd":
        store.add(make_run(run_id, rows={} if run_id == "b" else _cases("x")))
    for run_id, age in (("a", 40), ("b", 40), ("c", 20)):
        moment = f"strftime('%Y-%m-%dT%H:%M:%fZ', 'now', '-{age} days')"
        store.connection.execute(f"UPDATE runs SET started = {moment} WHERE run_id = ?", (run_id,))
    assert store.cleanup_old_runs(dry_run=True) == ["a"]
    assert store.cleanup_old_runs(10, dry_run=True) == ["a", "c"]
    assert store.cleanup_old_runs(None, dry_run=True) == []
    assert store.cleanup_old_runs(None, max_runs=4, dry_run=True) == []
    assert store.cleanup_old_runs(None, max_runs=2, dry_run=True) == ["a"]
    assert store.cleanup_old_runs(None, max_runs=0, dry_run=True) == ["a", "c", "d"]
    assert store.cleanup_old_runs(0, dry_run=True)[:2] == ["a", "c"]
    for limits in ({"max_age_days": -1}, {"max_age_days": float("nan")}, {"max_runs": -1}):
        (name, value), *_ = limits.items()
        with pytest.raises(BadInput, match=f"{name}: {value} will not do; give 0 or more"):
            store.cleanup_old_runs(**limits)
    assert len(store.runs()) == 4
    assert store.cleanup_old_runs() == ["a"] and list(store.runs().run_id) == ["b", "c", "d"]
