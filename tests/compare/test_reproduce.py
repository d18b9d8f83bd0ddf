import dataclasses
import json

import numpy as np
import pytest
from click.testing import CliRunner

from nanolib.cli import main
from nanolib.compare.reproduce import reproduction
from nanolib.experiments.attention.cases import Params, cases
from nanolib.measurement import Measurement, Status, exact
from nanolib.meters.machine import this_machine
from nanolib.meters.time.latency import summarise
from nanolib.paths import checkout
from nanolib.store import Run, Store

MACHINE = {"machine_id": "m1", "cpu": "c", "cores": 2, "ram_gib": 8, "dtypes": {"float32": "vector"}}


def _rows(
    tmp_path,
    name,
    factor=1.0,
    spread=0.002,
    machine="m1",
    predicted=None,
    status=Status.OK,
    flops=100.0,
    count=8,
    blocks=60,
):
    """Measurements of `count` cases of 10, 11, … ms, each `factor` times as slow."""
    rng = np.random.default_rng(len(name))
    made = {}
    for at in range(count):
        times = (10.0 + at) * factor * (1 + spread * rng.normal(size=blocks))
        latency = dataclasses.replace(summarise(times, scope="forward"), predicted=predicted)
        measured = [latency, exact("flops", flops, scope="forward")] if status == Status.OK else []
        ending = Measurement("case_time", 1.0, status=status, message="" if status == Status.OK else "too large")
        made[f"c{at}"] = ({"name": f"k{at}", "device": "cpu", "seq_len": 8}, [ending, *measured])
    with Store(tmp_path / f"{name}.sqlite") as store:
        store.add(Run("attention", MACHINE | {"machine_id": machine}, rows=made))
        return store.measurements()


def test_ones_own_run_is_reproduced_and_not_shifted(tmp_path):
    found = reproduction(_rows(tmp_path, "a"), _rows(tmp_path, "bb", 1.01))
    assert found.counts == {"reproduced": 16} and not found.shifted
    assert found.sentence.startswith("not shifted: 1.01 [1.0") and "slower here, within ±10%" in found.sentence


@pytest.mark.parametrize(("raised", "way"), [(1.2, "faster here"), (1 / 1.2, "slower here")])
def test_a_reference_that_was_raised_by_a_fifth_is_shifted_by_that(tmp_path, raised, way):
    found = reproduction(_rows(tmp_path, "a", raised), _rows(tmp_path, "bb"))
    assert found.shifted and found.sentence.startswith("shifted by 1.20 [1.") and found.sentence.endswith(way)
    assert found.counts == {"differs": 8, "reproduced": 8}
    assert [row.metric for row in found.rows[:8]] == ["latency forward"] * 8


def test_wide_intervals_decide_nothing(tmp_path):
    found = reproduction(_rows(tmp_path, "a", spread=0.8), _rows(tmp_path, "bb", 1.08, spread=0.8))
    verdicts = {row.verdict for row in found.rows if row.metric == "latency forward"}
    assert verdicts == {"undecided"}
    assert "undecided" in found.sentence and not found.shifted


def test_the_range_of_a_few_blocks_is_no_95_percent_interval_and_decides_nothing(tmp_path):
    there = _rows(tmp_path, "a", blocks=5)
    for found in (reproduction(there, _rows(tmp_path, "bb", 1.5)), reproduction(_rows(tmp_path, "ccc", 1.5), there)):
        told = {(row.verdict, row.message) for row in found.rows if row.metric == "latency forward"}
        assert told == {("undecided", "too few blocks for a 95 % interval; raise budget_s")}
    assert reproduction(there, _rows(tmp_path, "bbbb", 1.5, blocks=6)).counts == {"undecided": 8, "reproduced": 8}
    assert (
        reproduction(_rows(tmp_path, "f" * 5, blocks=6), _rows(tmp_path, "f" * 6, 1.5, blocks=6)).counts["differs"] == 8
    )


def test_another_machine_is_scaled_by_what_its_ceilings_predict(tmp_path):
    there, here = _rows(tmp_path, "a", 1.0, predicted=4.0), _rows(tmp_path, "bb", 2.0, machine="m2", predicted=8.0)
    found = reproduction(there, here)
    assert not found.shifted and found.counts == {"reproduced": 16} and not found.same_machine
    assert found.sentence.endswith("scaled by the ceilings of both machines")
    found = reproduction(_rows(tmp_path, "c", 1.0), here)
    assert found.counts == {"undecided": 8, "reproduced": 8} and found.shift is None
    assert "no prediction by its ceilings" in found.rows[0].message


def test_what_cannot_run_says_why(tmp_path):
    there = _rows(tmp_path, "a")
    found = reproduction(there, _rows(tmp_path, "bb", status=Status.OOM_PREDICTED))
    assert found.counts == {"cannot run": 8} and found.rows[0].message == "oom_predicted: too large"
    found = reproduction(there, _rows(tmp_path, "ccc", count=6))
    assert found.counts == {"cannot run": 2, "reproduced": 12}
    assert found.rows[0].message == "this version has no such case"
    found = reproduction(there, there.iloc[:0], {"attention": "it needs a GPU"})
    assert {row.message for row in found.rows} == {"it needs a GPU"} and "too few latencies" in found.sentence


def test_what_is_counted_must_be_equal_to_a_tenth_and_five_rows_give_no_whole(tmp_path):
    there = _rows(tmp_path, "a", count=5)
    found = reproduction(there, _rows(tmp_path, "bb", flops=120.0, count=5))
    assert found.counts == {"differs": 5, "reproduced": 5} and found.shift is None
    assert json.dumps(found.to_dict(), allow_nan=False)
    assert list(found.table(everything=False)["metric"]) == ["flops forward"] * 5


PARAMS = {"seq_lens": [32, 48], "num_heads": 1, "attention_types": ["dense"], "backward": False, "budget_s": 0.05}


def _reference(folder, **params):
    """A folder with the results of these parameters: made up, and of this machine."""
    folder.mkdir()
    times = [1 + 0.01 * (i % 7) for i in range(40)]
    known = [case for case in cases(Params(**PARAMS)) if case.interleaves]
    rows = {
        case.case_id: (case.factors, [Measurement("case_time", 1.0), summarise(times, scope="forward")])
        for case in known
    }
    with Store(folder / "results.sqlite") as store:
        store.add(Run("attention", this_machine().to_dict(), PARAMS | params, rows=rows, suite="quick"))
    return str(folder)


def _reproduce(tmp_path, *arguments):
    return CliRunner().invoke(main, ["reproduce", *arguments, "--output", str(tmp_path / "out")])


@pytest.mark.notebook
@pytest.mark.slow
def test_the_command_runs_the_same_cases_here(tmp_path):
    ended = _reproduce(tmp_path, _reference(tmp_path / "theirs"), "--json", str(tmp_path / "f.json"))
    assert ended.exit_code == 0, ended.output
    found = json.loads((tmp_path / "f.json").read_text())
    assert [row["metric"] for row in found["rows"]] == ["latency forward"] * 2
    assert all(row["here"] < 1 and row["verdict"] in ("differs", "undecided") for row in found["rows"])
    assert found["said"].startswith("too few latencies") and found["same_machine"]
    assert "too few latencies" in ended.output
    with Store(tmp_path / "out" / "results.sqlite") as store:
        (run,) = store.runs().to_dict("records")
    assert (run["label"], run["params"]["seq_lens"]) == ("reproduce theirs", [32, 48])


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"seq_lens": [-1]}, "attention.seq_lens"),
        ({"device": "cuda:7"}, "attention.device: 'cuda:7'"),
    ],
)
def test_a_reference_that_cannot_run_here_is_one_line(tmp_path, params, said):
    ended = _reproduce(tmp_path, _reference(tmp_path / "theirs", **params))
    assert ended.exit_code == 2 and said in ended.output and len(ended.output.strip().splitlines()) == 1, ended.output
    assert not (tmp_path / "out" / "results.sqlite").exists()


def test_an_unknown_reference_is_one_line_that_names_those_that_are_there(tmp_path):
    ended = _reproduce(tmp_path, "nowhere")
    assert ended.exit_code == 2 and len(ended.output.strip().splitlines()) == 1
    assert "reference: 'nowhere' is no database, nor a folder with one; outputs/reference has " in ended.output


def test_a_strangers_reference_runs_no_code(tmp_path):
    with Store(tmp_path / "theirs.sqlite") as store:
        store.add(Run("model", this_machine().to_dict(), {"model": "mine:build"}, rows={}))
    ended = _reproduce(tmp_path, str(tmp_path / "theirs.sqlite"))
    assert ended.exit_code == 2 and "it runs code that the reference names" in ended.output, ended.output


@pytest.mark.parametrize("name", ["outputs/reference/{}", "{}"])
def test_a_reference_is_found_from_anywhere_by_its_path_or_its_name(name, tmp_path, monkeypatch):
    from nanolib.cli.reproducing import _database

    monkeypatch.chdir(tmp_path)
    for shipped in (checkout() / "outputs" / "reference").glob("*/results.sqlite"):
        assert _database(name.format(shipped.parent.name)) == shipped


def test_the_references_that_are_shipped_hold_runs_and_name_nobody():
    shipped = list((checkout() / "outputs" / "reference").glob("*/results.sqlite"))
    assert shipped
    for file in shipped:
        before = file.read_bytes()
        with Store(file, create=False) as store:
            assert (store.runs()["status"] == "done").all() and len(store.measurements()) > 100
        assert file.read_bytes() == before and len(before) < 5e6
        listed = (file.parents[1] / "README.md").read_text()
        assert f"`{file.parent.name}`" in listed
