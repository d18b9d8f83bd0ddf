"""Cases of a group are timed in the same rounds, and a failed case does not affect the others."""

import functools

import pytest

from nanolib.measurement import Flag
from nanolib.run import group, memory_plan
from tests.run import sample_experiment as sample
from tests.run.sample_experiment import ends, statuses


@pytest.fixture
def measure_group(measure):
    return functools.partial(measure, groups=["a"], budget_s=0.05)


def _speed_ups(run):
    rows = run.measurements().query("metric == 'speed_up'")
    return [((row["factor.behavior"], row["scope"]), row) for row in rows.to_dict("records")]


def test_every_case_has_its_speed_up_over_each_baseline_of_its_own_group(measure_group):
    found = _speed_ups(measure_group("base", "base 2", "slower", groups=["a", "b"]))
    expected = {
        ("base", "work over base 2"),
        ("base 2", "work over base"),
        ("slower", "work over base"),
        ("slower", "work over base 2"),
    }
    assert {place for place, _ in found} == expected and len(found) == 8
    slower = dict(found)["slower", "work over base"]
    assert slower["method"] == "rounds" and slower["n"] >= 6
    assert slower["low"] <= slower["estimate"] <= slower["high"] < 1


@pytest.mark.parametrize(
    ("isolation", "failing"),
    [
        (
            "none",
            {
                "error before": ("error", "ValueError: two lines"),
                "error within": ("error", "ValueError: two lines"),
                "unsupported before": ("unsupported", "no such device here"),
                "slow within": ("timeout", "the case ran longer than case_timeout_s 5"),
            },
        ),
        # the others go on in their own process
        ("none", {"loses within": ("error", "Lost: an assertion on the device")}),
        ("process", {"stuck within": ("timeout", "the case ran longer than case_timeout_s 5")}),
        ("process", {"kill within": ("error", "the process was killed by SIGKILL")}),
    ],
)
def test_a_case_that_fails_affects_no_other_case(
    measure_group, monkeypatch, tmp_path, isolation, failing
):
    monkeypatch.setattr(group, "_GRACE_S", 0.5)
    monkeypatch.setattr(sample, "LOST", [])
    limit_s = 5.0 if "timeout" in dict(failing.values()) else 20.0
    run = measure_group(
        "base",
        *failing,
        "slower",
        isolation=isolation,
        case_timeout_s=limit_s,
        folder=str(tmp_path),
    )
    found = ends(run)
    assert found.status.to_dict() == {"base": "ok", "slower": "ok"} | {
        name: status for name, (status, _) in failing.items()
    }
    assert ("slower", "work over base") in dict(_speed_ups(run))
    rows = run.measurements().query("metric == 'flops'")
    assert list(rows["factor.behavior"]) == ["base", *failing, "slower"]  # earlier rows stay
    (traced,) = run.store.read("SELECT count(DISTINCT case_id) AS n FROM tokens").n
    # a killed process takes its trace with it
    assert traced == 2 + len(failing) * (isolation == "none")
    for name, (_, message) in failing.items():
        assert (tmp_path / f"{name}.calls").read_text() == "x"
        assert found.message[name].startswith(message)


@pytest.mark.parametrize("name", ["short before", "short within", "short after"])
def test_a_case_that_runs_out_of_memory_is_measured_again_alone(measure_group, name):
    run = measure_group("base", name, "slower")
    assert statuses(run) == {"base": "ok", name: "ok", "slower": "ok"}
    flags = run.measurements().query("metric == 'latency'").set_index("factor.behavior")["flags"]
    assert Flag.SEQUENTIAL in flags[name] and Flag.SEQUENTIAL not in flags["base"]
    assert {own for (own, _), _ in _speed_ups(run)} == {"slower"}  # only these share rounds


def test_a_case_that_fails_in_its_blocks_leaves_its_memory_to_the_others(measure_group):
    run = measure_group("error within", "short after")  # which needs to be alone in memory
    assert statuses(run) == {"error within": "error", "short after": "ok"}
    flags = run.measurements().query("metric == 'latency'")["flags"]
    assert not any(Flag.SEQUENTIAL in found for found in flags)


def test_a_group_that_was_stored_by_half_is_measured_whole(measure_group, store, tmp_path):
    first = measure_group("base", "slower", folder=str(tmp_path))
    first.end("interrupted")
    case = sample.SampleCase("cpu", "slower", "a")
    store.write_case(first.run_id, case.case_id, case.factors, [])
    run = measure_group("base", "slower", folder=str(tmp_path), resume=True)
    assert run.run_id == first.run_id and statuses(run) == {"base": "ok", "slower": "ok"}
    assert (tmp_path / "base.calls").read_text() == "xx"  # its blocks belong to the same rounds
    assert len(_speed_ups(run)) == 1


def test_what_does_not_fit_together_is_timed_one_after_the_other(measure_group, monkeypatch):
    monkeypatch.setattr(memory_plan, "free_bytes", lambda device: 3 * 2**20)
    run = measure_group("base", "slower", mib=2.0)
    latency = run.measurements().query("metric == 'latency'").set_index("factor.behavior")
    assert all(Flag.SEQUENTIAL in flags for flags in latency["flags"])
    ((_, found),) = _speed_ups(run)
    assert found["method"] == "one after the other" and Flag.SEQUENTIAL in found["flags"]
    drift, base, slower = found["details"]["drift"], latency.loc["base"], latency.loc["slower"]
    assert drift >= 1
    assert found["low"] == pytest.approx(base["low"] / slower["high"] / drift)
    assert found["high"] == pytest.approx(base["high"] / slower["low"] * drift)
