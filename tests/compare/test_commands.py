"""What `nano compare` says of busy machines, of sides that share nothing, of lost cases."""

import json
from dataclasses import replace

import pytest

from nanolib.compare.runs import BUSY
from nanolib.measurement import Flag, Measurement, Status, exact
from nanolib.store import Store
from tests.compare.test_compare import failed, measured, run_of
from tests.processes import invoked
from tests.store.rows import MACHINE


@pytest.fixture
def nano(tmp_path, monkeypatch):
    """Adds runs, then asks; also gives what was written as JSON."""
    monkeypatch.setenv("NANOLIB_OUTPUT", str(tmp_path))

    def asked(runs, *arguments):
        with Store(tmp_path / "results.sqlite") as store:
            for run in runs:
                store.add(run)
        file = tmp_path / "found.json"
        ended = invoked("compare", *arguments, "--json", file)
        return ended, json.loads(file.read_text()) if file.exists() else {}

    return asked


BASE = {"a": measured(1), "b": measured(2)}
EARLIER = [run_of({"a": measured(10 + at)}, f"earlier{at}", git_revision="rev") for at in range(5)]


@pytest.mark.parametrize(
    ("flags", "disturbed"),
    [((), ["other processes use 60% of the CPUs"]), ((Flag.BUSY_MACHINE,), [])],
)
def test_a_busy_one_is_suspect_at_most_and_says_so_above_the_table(nano, flags, disturbed):
    now = {"a": measured(3, level=13.0, flags=flags), "b": measured(4)}
    ended, found = nano(
        [*EARLIER, run_of(BASE, "base"), run_of(now, "curr", interference=disturbed)],
        "base",
        "curr",
    )
    assert ended.exit_code == 0 and "1 suspect" in ended.output and "regressed" not in ended.output
    assert BUSY in ended.output
    if disturbed:
        first, *_ = ended.output.splitlines()
        assert first == f"run curr began on a busy machine: {disturbed[0]}" == found["noise"][0]


@pytest.mark.parametrize("strict", [False, True])
def test_where_nothing_was_measured_twice_nothing_passes(nano, strict):
    bad = failed(Status.UNSUPPORTED)
    base = {"both": failed(), "cannot": bad, "then": failed(), "now": measured(1)}
    now = {"both": failed(Status.OOM), "cannot": bad, "then": measured(1), "now": bad}
    ended, found = nano(
        [run_of(base, "base"), run_of(now, "curr")], "base", "curr", *["--strict"] * strict
    )
    said = [(line["case"].split()[0], line["finding"], line["message"]) for line in found["lines"]]
    assert said == [
        ("now", "failed", "unsupported: why"),
        ("both", "inconclusive", "oom: why; not measured in base"),
        ("then", "new", "not measured in base"),
    ]
    assert "so nothing was compared" in ended.output and ended.exit_code == strict


def test_the_exit_code_is_one_on_a_regression_and_only_then(nano, tmp_path):
    runs = [run_of({"a": measured(1)}, "aaaa", label="before")]
    runs.append(run_of({"a": measured(2, 12)}, "bbbb", label="after"))
    markdown = tmp_path / "c.md"
    ended, found = nano(EARLIER + runs, "before", "after", "--markdown", markdown)
    assert ended.exit_code == 1 and found["regressed"] is True and "drift" in ended.output
    assert "| regressed |" in markdown.read_text()
    better, _ = nano([], "after", "before")
    assert better.exit_code == 0 and "1 improved" in better.output
    assert nano([], "before", "after", "--threshold", "30%")[0].exit_code == 0


def test_packages_that_differ_are_named_and_two_methods_have_two_names(nano, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    flops = [exact("flops", 7, scope="backward")]
    flops.append(exact("flops", 9, scope="backward", method="flop_counter"))
    cases = {"a": [*measured(2), *flops]}
    of_base = {"python": "3.11.7", "torch": "2.12.0", "sources": "a"}
    of_now = {"python": "3.12.1", "torch": "2.12.0", "sources": "b", "OMP_NUM_THREADS": "1"}
    runs = [run_of(cases, "base", versions=of_base), run_of(cases, "curr", versions=of_now)]
    ended, found = nano(runs, "base", "curr", "--all")
    differ = ["python 3.11.7 → 3.12.1", "OMP_NUM_THREADS none → 1"]
    assert found["differ"] == differ and f"A → B: {', '.join(differ)}\n" in ended.output
    words = " ".join(ended.output.split())
    assert "flops backward by formula, FLOP 7 7" in words
    assert "flops backward by flop_counter, FLOP 9 9" in words
    ended, found = nano([], "base", "base")
    assert "A → B" not in ended.output and set(found["counts"]) == {"equivalent"}
    assert [line["message"] for line in found["lines"]].count("the same run") == 1


@pytest.mark.parametrize(
    ("metric", "base", "current", "moved"),
    [
        ("energy_per_token", (0.9, 1.0, 1.1), (1.11, 1.2, 1.3), True),
        ("energy_per_token", (0.9, 1.0, 1.1), (1.09, 1.2, 1.3), False),
        ("loss", (2.0, 2.1, 2.2), (1.8, 1.9, 1.99), True),
        ("relative_error", (None, 2e-7, None), (None, 0.3, None), True),
        ("relative_error", (1e-7, 1e-7, 1e-7), (1.04e-7, 1.04e-7, 1.04e-7), False),
        ("sqnr", (40.0, 40.0, 40.0), (37.9, 37.9, 37.9), True),
    ],
)
def test_a_value_without_blocks_is_suspect_if_its_interval_moved(
    nano, metric, base, current, moved
):
    def run(run_id, ends):
        low, estimate, high = ends
        row = Measurement(metric, estimate, low, high, scope="decode")
        return run_of({"a": [*measured(1), row]}, run_id)

    ended, found = nano([run("base", base), run("curr", current)], "base", "curr")
    lines = [line for line in found["lines"] if line["metric"] == f"{metric} decode"]
    assert [line["finding"] for line in lines] == ["suspect"] * moved and ended.exit_code == 0
    assert all("the intervals do not overlap" in line["message"] for line in lines)


def test_sides_without_a_common_case_are_refused_in_one_line(nano):
    ended, _ = nano(
        [run_of(BASE, "base"), run_of({"c": measured(5)}, "modl", "model")], "base", "modl"
    )
    assert ended.exit_code == 2 and ended.output.count("\n") == 1
    assert "'base' and 'modl' have no case in common" in ended.output


def test_notebooks_of_one_side_are_named_in_one_line_and_no_case_of_theirs_is_missing(nano):
    runs = [
        run_of(BASE, experiment, experiment, suite="quick")
        for experiment in ("attention", "model", "energy")
    ]
    ended, found = nano([*runs, run_of(BASE, "mine")], "quick", "mine", "--all", "--strict")
    assert "experiments only in base are not compared: energy, model" in ended.output.splitlines()
    assert {line["experiment"] for line in found["lines"]} == {"attention"}
    assert found["missing"] == ["energy", "model"] and ended.exit_code == 1


def test_rows_number_their_notes_and_words_that_all_cases_share_are_above_the_table(nano):
    levels = {"first": 13.0, "second": 7.0}
    runs = [
        run_of({name: measured(at, level) for at, (name, level) in enumerate(of.items())}, run_id)
        for run_id, of in (("base", dict.fromkeys(levels, 10.0)), ("curr", levels))
    ]
    ended, found = nano(runs, "base", "curr")
    slower, faster = [line["message"] for line in found["lines"] if line["finding"] == "suspect"]
    lines = ended.output.splitlines()
    assert {f"1: {slower}", f"2: {faster}", "all: attention seq_len=8"} <= {*lines}
    assert [line.split()[1] for line in lines if line.endswith(("1", "2"))] == [*levels]


def _stored(path, machine, factor, predicted, flops=100.0):
    cases = {}
    for at in range(8):
        ended, latency, *others = measured(at, (10 + at) * factor, flops)
        cases[f"c{at}"] = [ended, replace(latency, predicted=predicted), *others]
    with Store(path) as store:
        store.add(replace(run_of(cases, machine), machine=MACHINE | {"machine_id": machine}))


@pytest.mark.parametrize(
    ("predicted", "flops", "expected"),
    [
        (
            8.0,
            100.0,
            ["scaled by peak rates: 1 ", "24 equivalent"],
        ),  # twice as slow, as its peaks say
        (4.0, 100.0, ["scaled by peak rates: 2.0", "8 regressed"]),
        (8.0, 101.0, ["8 changed", "deterministic metric changed"]),
        (None, 100.0, ["excluded: 8 latencies", "too few for a ratio", "16 equivalent"]),
    ],
)
def test_a_reference_is_scaled_by_the_peaks_and_is_no_gate(tmp_path, predicted, flops, expected):
    theirs, mine = tmp_path / "theirs", tmp_path / "mine"
    theirs.mkdir()
    _stored(theirs / "results.sqlite", "m1", 1.0, 4.0)
    _stored(mine / "results.sqlite", "m2", 2.0, predicted, flops)
    ended = invoked("compare", theirs, "latest", "--across-machines", "--output", mine)
    assert ended.exit_code == 0, ended.output
    told = " ".join(ended.output.split())
    assert all(words in told for words in expected), told
