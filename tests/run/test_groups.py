"""Cases of a group are timed in the same rounds, and a failed case does not affect the others."""

import pytest

from nanolib.measurement import Flag
from nanolib.run import group, memory_plan, sweep
from tests.run import sample_groups as sample


@pytest.fixture
def measure(store):
    def measured(*names, **rest):
        rest = {"budget_s": 0.05, "case_timeout_s": 20.0} | rest
        params = sample.Params(names=list(names), **rest)
        return sweep.measure(sample, params, store=store, progress=False)

    return measured


def _ends(run):
    ends = run.measurements()[lambda rows: rows.metric == "case_duration"]
    return dict(zip(ends["factor.name"], ends["status"], strict=True))


def _gains(run):
    rows = run.measurements()[lambda rows: rows.metric == "speed_up"]
    return {(row["factor.name"], row["scope"]): row for _, row in rows.iterrows()}


@pytest.mark.parametrize("isolation", ["none", "process"])
def test_every_case_has_its_speed_up_over_each_baseline_of_its_group(measure, isolation):
    run = measure("base", "base 2", "slow", isolation=isolation)
    found = _gains(run)
    assert set(found) == {
        ("base", "work over base 2"),
        ("base 2", "work over base"),
        ("slow", "work over base"),
        ("slow", "work over base 2"),
    }
    slow = found["slow", "work over base"]
    assert slow["method"] == "rounds" and slow["n"] >= 6
    assert slow["low"] <= slow["estimate"] <= slow["high"] < 1


def test_groups_are_not_compared_with_one_another(measure):
    run = measure("base", "slow", groups=["a", "b"])
    speed_ups = run.measurements()[lambda rows: rows.metric == "speed_up"]
    assert len(_gains(run)) == 1 and len(speed_ups) == 2


@pytest.mark.parametrize(
    ("name", "status", "isolation"),
    [
        ("raises before", "error", "none"),
        ("raises within", "error", "none"),
        ("raises after", "error", "none"),
        ("unsupported before", "unsupported", "none"),
        ("hangs within", "timeout", "none"),
        ("raises within", "error", "process"),
        ("hangs within", "timeout", "process"),
    ],
)
def test_a_case_that_fails_costs_itself_alone(measure, name, status, isolation):
    limit_s = 3.0 if status == "timeout" else 20.0
    run = measure("base", name, "slow", isolation=isolation, case_timeout_s=limit_s)
    assert _ends(run) == {"base": "ok", name: status, "slow": "ok"}
    assert ("slow", "work over base") in _gains(run)
    flops = run.measurements()[lambda rows: rows.metric == "flops"]
    assert list(flops["factor.name"]) == ["base", name, "slow"]  # earlier rows stay


def test_a_process_that_says_nothing_for_longer_than_a_case_may_take_is_ended(measure, monkeypatch):
    monkeypatch.setattr(group, "_GRACE_S", 0.5)
    run = measure("base", "stuck within", "slow", isolation="process", case_timeout_s=5.0)
    assert _ends(run) == {"base": "ok", "stuck within": "timeout", "slow": "ok"}
    assert ("slow", "work over base") in _gains(run)


@pytest.mark.parametrize(
    ("name", "isolation"),
    [
        ("short before", "none"),
        ("short within", "none"),
        ("short after", "none"),
        ("short within", "process"),
    ],
)
def test_a_case_that_runs_out_of_memory_is_measured_again_alone(measure, name, isolation):
    run = measure("base", name, "slow", isolation=isolation)
    assert _ends(run) == {"base": "ok", name: "ok", "slow": "ok"}
    rows = run.measurements()
    times = rows[rows.metric == "latency"].set_index("factor.name")["flags"]
    assert Flag.SEQUENTIAL in times[name] and Flag.SEQUENTIAL not in times["base"]
    assert {own for own, _ in _gains(run)} == {"slow"}  # only these cases share rounds


@pytest.mark.parametrize("name", ["dies before", "dies within"])
def test_a_process_that_dies_names_its_case_and_the_others_go_on_without_it(
    measure, tmp_path, name
):
    run = measure("base", name, "slow", isolation="process", folder=str(tmp_path))
    assert _ends(run) == {"base": "ok", name: "error", "slow": "ok"}
    rows = run.measurements()
    (message,) = rows[(rows.metric == "case_duration") & (rows["factor.name"] == name)]["message"]
    assert message == "the process was killed by SIGKILL"
    assert (tmp_path / f"{name}.calls").read_text() == "x"
    assert ("slow", "work over base") in _gains(run)


def test_where_one_has_lost_the_device_the_others_go_on_in_a_process_of_their_own(measure):
    try:
        run = measure("base", "loses within", "slow")
    finally:
        sample._LOST.clear()
    assert _ends(run) == {"base": "ok", "loses within": "error", "slow": "ok"}
    assert ("slow", "work over base") in _gains(run)


def test_a_group_that_was_stored_by_half_is_measured_whole(measure, store, tmp_path):
    first = measure("base", "slow", folder=str(tmp_path))
    first.end("interrupted")
    case = sample.cases(sample.Params(names=["slow"]))[0]
    store.write_case(first.run_id, case.case_id, case.factors, [])
    run = measure("base", "slow", folder=str(tmp_path), resume=True)
    assert run.run_id == first.run_id and _ends(run) == {"base": "ok", "slow": "ok"}
    assert (tmp_path / "base.calls").read_text() == "xx"  # its blocks belong to the same rounds
    assert len(_gains(run)) == 1


def test_what_does_not_fit_together_is_timed_one_after_the_other_and_says_so(measure, monkeypatch):
    monkeypatch.setattr(memory_plan, "free_bytes", lambda device: 3 * 2**20)
    run = measure("base", "slow", mib=2.0)
    rows = run.measurements()
    assert all(Flag.SEQUENTIAL in flags for flags in rows[rows.metric == "latency"]["flags"])
    gain = _gains(run)["slow", "work over base"]
    assert gain["method"] == "one after the other" and Flag.SEQUENTIAL in gain["flags"]
    latency = rows[rows.metric == "latency"].set_index("factor.name")
    drift = gain["details"]["drift"]
    assert drift >= 1
    assert gain["low"] == pytest.approx(
        latency.loc["base", "low"] / latency.loc["slow", "high"] / drift
    )
    assert gain["high"] == pytest.approx(
        latency.loc["base", "high"] / latency.loc["slow", "low"] * drift
    )
