import json

import numpy as np
import pytest
from click.testing import CliRunner

from nanolib.cli import main
from nanolib.measurement import Flag, Measurement, Status, exact
from nanolib.meters.latency import summarise
from nanolib.regression.compare import block_medians, compare_rows
from nanolib.store import Run, Store


def _machine(machine_id="m1"):
    return {"machine_id": machine_id, "cpu": "c", "cores": 2, "ram_gib": 8}


def _case(seed, level=10.0, flops=100.0, memory=8.0, status=Status.OK, flags=(), blocks=40):
    times = level * np.exp(0.01 * np.random.default_rng(seed).normal(size=blocks))
    latency = summarise(times, scope="forward")
    rows = [Measurement("case_time", 1.0, status=status, message="" if status is Status.OK else "why")]
    if status is Status.OK:
        latency = Measurement.from_dict(latency.to_dict() | {"flags": list(flags) or list(latency.flags)})
        rows += [latency, exact("flops", flops, scope="forward"), exact("peak_memory", memory, scope="forward")]
    return rows


def _run(cases, run_id, machine_id="m1", **rest):
    rows = {name: ({"name": name, "seq_len": 8}, measurements) for name, measurements in cases.items()}
    return Run("attention", _machine(machine_id), rows=rows, run_id=run_id, **rest)


@pytest.fixture
def found(tmp_path):
    def compare(base, current, machines=("m1", "m1")):
        with Store(tmp_path / "r.sqlite") as store:
            store.add(_run(base, "base", machines[0]))
            store.add(_run(current, "current", machines[1]))
            return compare_rows(*(store.measurements([name], samples=True) for name in ("base", "current")))

    return compare


def _finding(comparison, metric):
    return next(line.finding for line in comparison.lines if line.metric.startswith(metric))


def test_a_run_against_itself_is_all_equivalent(found):
    comparison = found({"a": _case(1), "b": _case(2)}, {"a": _case(1), "b": _case(2)})
    assert set(comparison.counts) == {"equivalent"} and not comparison.regressed


def test_a_slower_case_regressed_and_comes_first(found):
    comparison = found({"a": _case(1), "b": _case(2)}, {"a": _case(3), "b": _case(4, level=11.5)})
    first = comparison.lines[0]
    assert (first.finding, first.case, first.metric) == ("regressed", "b seq_len=8", "latency forward")
    assert first.verdict.ratio == pytest.approx(1.15, rel=0.01) and comparison.regressed


def test_a_faster_case_never_fails(found):
    comparison = found({"a": _case(1)}, {"a": _case(3, level=5)})
    assert _finding(comparison, "latency") == "improved" and not comparison.regressed


def test_another_machine_is_never_a_gate(found):
    comparison = found({"a": _case(1)}, {"a": _case(3, level=20)}, machines=("m1", "m2"))
    assert _finding(comparison, "latency") == "regressed" and not comparison.regressed


def test_a_deterministic_metric_that_changed_is_reported(found):
    comparison = found({"a": _case(1)}, {"a": _case(1, flops=101)})
    assert _finding(comparison, "flops") == "changed" and not comparison.regressed


@pytest.mark.parametrize(
    ("memory", "finding"), [(9.0, "regressed"), (8.1, "changed"), (7.0, "improved"), (8.0, "equivalent")]
)
def test_memory_is_held_against_the_threshold(found, memory, finding):
    assert _finding(found({"a": _case(1)}, {"a": _case(1, memory=memory)}), "peak_memory") == finding


def test_cases_that_vanished_broke_or_are_new_are_reported(found):
    base = {"a": _case(1), "b": _case(2), "c": _case(3)}
    comparison = found(base, {"a": _case(1), "b": _case(2, status=Status.OOM), "d": _case(4)})
    said = {line.case.split()[0]: (line.finding, line.message) for line in comparison.lines if not line.metric}
    assert said["c"][0] == "vanished" and said["d"][0] == "new" and said["b"] == ("broke", "oom: why")


def test_what_never_settled_gets_no_verdict(found):
    comparison = found({"a": _case(1)}, {"a": _case(3, level=20, flags=(Flag.NO_STEADY_STATE,))})
    assert _finding(comparison, "latency") == "inconclusive" and not comparison.regressed


def test_too_few_blocks_are_inconclusive_and_say_so(found):
    comparison = found({"a": _case(1)}, {"a": _case(3, level=20, blocks=4)})
    line = next(line for line in comparison.lines if line.metric == "latency forward")
    assert line.finding == "inconclusive" and "raise budget_s" in line.message


def test_blocks_are_those_of_the_measurement(tmp_path):
    times = np.random.default_rng(5).normal(10, 0.1, 200)
    times[:10] = 30
    row = summarise(times, calls_per_block=5, scope="forward")
    with Store(tmp_path / "b.sqlite") as store:
        store.add(_run({"a": [row]}, "x"))
        stored = store.measurements(samples=True).iloc[0]
    assert stored["details"]["warmup_cut"] == 10
    assert np.median(block_medians(stored)) == row.estimate and len(block_medians(stored)) == row.n


def test_a_run_against_its_own_rows_is_equivalent_however_noisy(tmp_path):
    with Store(tmp_path / "s.sqlite") as store:
        store.add(_run({"a": _case(1, blocks=4), "b": _case(2, flags=(Flag.NO_STEADY_STATE,))}, "x"))
        rows = store.measurements(samples=True)
    assert set(compare_rows(rows, rows).counts) == {"equivalent"}


@pytest.fixture
def nano(tmp_path):
    with Store(tmp_path / "results.sqlite") as store:
        store.add(_run({"a": _case(1)}, "aaaa", label="before", suite="quick"))
        store.add(_run({"a": _case(2, level=12)}, "bbbb", label="after"))
        store.add(_run({"z": _case(2)}, "cccc", label="else"))
    return lambda *args: CliRunner().invoke(main, ["compare", *args, "--output", str(tmp_path)])


def test_the_exit_code_is_one_on_a_regression_and_only_then(nano, tmp_path):
    ended = nano("before", "after", "--json", str(tmp_path / "c.json"), "--markdown", str(tmp_path / "c.md"))
    assert ended.exit_code == 1 and "regressed" in ended.output and "drift" in ended.output
    assert json.loads((tmp_path / "c.json").read_text())["regressed"] is True
    assert "| regressed |" in (tmp_path / "c.md").read_text()
    assert nano("after", "before").exit_code == 0
    assert nano("before", "before").exit_code == 0
    assert nano("quick", "bbbb").exit_code == 1
    assert nano("before", str(tmp_path / "results.sqlite")).exit_code == 1
    assert nano("before", "after", "--threshold", "30%").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing", "after"], "run: 'nothing' is not in the database"),
        (["before", "nowhere.sqlite"], "database: nowhere.sqlite does not exist"),
        (["before", "after", "--threshold", "much"], "--threshold: 'much' will not do; give a share such as 5%"),
    ],
)
def test_what_cannot_be_compared_is_told(nano, arguments, said):
    ended = nano(*arguments)
    assert ended.exit_code == 2 and said in ended.output and len(ended.output.strip().splitlines()) == 1


def test_memory_from_nothing_is_a_regression(found):
    comparison = found({"a": _case(1, memory=0.0)}, {"a": _case(1, memory=5.0)})
    assert _finding(comparison, "peak_memory") == "regressed" and comparison.regressed
