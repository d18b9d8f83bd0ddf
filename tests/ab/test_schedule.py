"""Blocks of A and B, the rules that end a comparison, and the verdict on all of them."""

import contextlib
import itertools
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from nanolib.ab import run, schedule
from nanolib.ab.children import ANSWER_S, VersionDied
from nanolib.ab.pairs import Pairs, Settings, Task, TaskResult
from nanolib.ab.run import Spec, lines_of
from nanolib.ab.schedule import _judge, _run_task, _run_tasks, compare_pairs, compare_versions
from nanolib.ab.versions import Version
from nanolib.stats.compare import THRESHOLD
from nanolib.stats.intervals import median_interval

TASK = Task("call", "c1", {"name": "work:run"}, {})


def _series(ratios, blocks=5):
    """Pairs of processes with these ratios, each with a number of pairs of blocks."""
    a = np.random.default_rng(0).lognormal(0, 0.1, blocks * len(ratios))
    return Pairs(a.tolist(), (a * np.repeat(ratios, blocks)).tolist(), [blocks] * len(ratios))


@pytest.mark.parametrize(("call_ms", "calls"), [(100, 1), (13, 2), (1e-6, 10_000)])
def test_a_block_is_as_many_calls_as_come_nearest_to_twenty_milliseconds(call_ms, calls):
    assert schedule.block_calls(call_ms) == calls


@pytest.mark.parametrize(
    ("number", "spent_s", "ends"),
    [(1, 99, False), (2, 40, False), (2, 40.1, True), (5, 50.1, True)],
)
def test_it_ends_before_it_takes_more_than_the_budget(number, spent_s, ends):
    assert schedule.ends_after(number, spent_s, 60) == ends


def test_a_case_is_done_when_each_interval_is_narrow_and_rests_on_twenty_pairs_of_processes():
    rng = np.random.default_rng(4)
    narrow, wide = (_series(np.exp(rng.normal(0, spread, 20))) for spread in (0.001, 0.1))
    low, _, high = median_interval(np.log(wide.ratios))
    just = (high - low) / 2
    for blocks, rel_ci, is_done in (
        ({"": narrow}, 0.01, True),
        ({"": narrow, "b": wide}, 0.01, False),
        ({"": wide}, just * 1.001, True),
        ({"": wide}, just * 0.999, False),
        ({"": _series(np.ones(19))}, 0.01, False),
        ({}, 0.01, False),
    ):
        assert schedule.is_precise_enough(blocks, rel_ci) == is_done


def test_tasks_are_judged_together_and_what_has_too_few_pairs_has_no_verdict():
    slow, few = _series([1.3, 1.31, 1.29, 1.32, 1.28, 1.3]), Pairs([1.0] * 5, [2.0] * 5, [5])
    results = [TaskResult(TASK, {"forward": slow, "backward": few}), TaskResult(TASK, {"": slow})]
    _judge(results, Settings())
    assert [list(result.verdicts) for result in results] == [["forward"], [""]]
    alone, found = compare_pairs(slow, THRESHOLD), results[0].verdicts["forward"]
    assert found.raw_p == alone.p and found.p == pytest.approx(2 * alone.p)
    (line,) = lines_of(results[1], "c1", THRESHOLD)
    assert line.current / line.base == pytest.approx(found.ratio)  # that of the medians is another
    assert np.median(slow.b) / np.median(slow.a) != pytest.approx(found.ratio)
    assert line.base == np.median(slow.a)


class _Version:
    """A process that times two phases, whose times are constant only in sum if they alternate."""

    is_forked = True

    def __init__(self, phases, alternates):
        self.phases, self.alternates = np.array(phases), alternates
        self.blocks, self.kept, self.asked = count(), [], []

    def ask(self, **request):
        self.asked.append(request)
        if request["do"] == "next":
            return {"ended": "ok", "rows": [{"at": len(self.asked)}]}
        return {"timing": ["forward", "backward"], "last": True}

    def time_block(self, calls, keep):
        if keep:
            self.kept.append(calls)
        by = self.alternates * (-1) ** next(self.blocks)
        warm = self.phases + np.array([by, -by])
        return [self.phases * 100, *[warm] * (calls - 1)]  # the first call is cold


HERE = [SimpleNamespace(is_here=True)] * 2
CASE = replace(TASK, request={"do": "case"})


@pytest.mark.parametrize(("budget_s", "blocks"), [(0.55, [6] * 2), (700.0, [10] * 20)])
def test_a_window_of_blocks_is_timed_in_each_pair_of_processes(monkeypatch, budget_s, blocks):
    """The phases of A take 2 and 3 ms, those of B 2 and 3.5 ms, and a look at the clock 1 s."""
    sides = _Version([2.0, 3.0], 0.0), _Version([2.0, 3.5], 1.0)
    running = SimpleNamespace(processes=sides, renew=lambda: sides)
    monkeypatch.setattr(schedule, "Processes", lambda *_, **__: contextlib.nullcontext(running))
    monkeypatch.setattr(schedule, "WARM_UP_S", 0.0)
    monkeypatch.setattr(schedule, "time", SimpleNamespace(monotonic=itertools.count().__next__))
    (result,) = compare_versions(HERE, [CASE], Settings(budget_s=budget_s))
    assert [side.kept for side in sides] == [[4] * sum(blocks)] * 2  # 4 calls of 5.5 ms
    generations = {name: found.generations for name, found in result.blocks.items()}
    assert generations == dict.fromkeys(("forward", "backward", "total"), blocks)
    total = result.blocks["total"]
    assert set(total.a) == {5.0} and set(total.b) == {5.5}
    assert set(result.blocks["backward"].b) == {2.5, 4.5}
    assert result.rows[0] == [{"at": 2 * len(blocks)}] and not result.failures
    assert set(result.verdicts) == {"forward", "backward", "total"}


def test_a_case_that_ends_early_leaves_its_budget_to_no_other(monkeypatch):
    now, rng = [0.0], np.random.default_rng(0)
    results = [TaskResult(replace(TASK, case_id=name)) for name in "ab"]

    def run_task(_sides, result, *_limits_s):
        now[0] += 2
        ratio = np.exp(rng.normal(0, 0.5 * (result is results[1])))
        result.add({"": Pairs([1.0], [ratio], [1])})
        return True

    monkeypatch.setattr(schedule, "_run_task", run_task)
    monkeypatch.setattr(schedule, "time", SimpleNamespace(monotonic=lambda: now[0]))
    _run_tasks(SimpleNamespace(processes=[1], renew=list), results, Settings(budget_s=61))
    assert [len(one.blocks[""].a) for one in results] == [20, 30]


@pytest.mark.parametrize(
    ("has_driver", "factors", "forks", "binds"),
    [(False, {}, True, True), (True, {}, True, False), (True, {"device": "cuda:0"}, False, False)],
)
def test_a_function_may_be_forked_beside_a_gpu_and_a_case_on_it_is_not(
    monkeypatch, has_driver, factors, forks, binds
):
    asked = {}
    monkeypatch.setattr(Path, "exists", lambda _: has_driver)
    monkeypatch.setattr(schedule, "sys", SimpleNamespace(platform="linux"))
    monkeypatch.setattr(schedule, "Processes", lambda *_, **how: asked.update(how) or stack())
    monkeypatch.setattr(schedule, "_run_tasks", lambda *_: None)
    stack = contextlib.nullcontext
    experiment = "attention" if factors else "call"
    compare_versions(HERE, [replace(TASK, experiment=experiment, factors=factors)], Settings())
    assert (asked["fork"], asked["bound"]) == (forks, binds)


def _row(metric, estimate, scope="forward"):
    row = {"metric": metric, "scope": scope, "method": "formula", "estimate": estimate}
    return row | {"low": estimate, "high": None}


BAD, OK = ("error", "why"), ("ok", "note")
FEW = {"x": Pairs([1.0, 2.0, 4.0], [2.0, 3.0, 9.0], [3])}
TOO_FEW = "3 pairs in 1 pairs of processes are too few; raise --budget"


@pytest.mark.parametrize(
    ("endings", "blocks", "found"),
    [
        ([BAD, OK], FEW, ("", "new", "A: error: why")),
        ([OK, OK], {}, ("", "inconclusive", "the case has no timed calls")),
        ([OK, OK], FEW, ("latency x", "inconclusive", TOO_FEW)),
    ],
)
def test_what_has_no_verdict_says_why_and_whose_failure_it_is(endings, blocks, found):
    result = TaskResult(TASK, blocks, endings=endings)
    (line,) = lines_of(result, "c1", THRESHOLD)
    assert (line.metric, line.finding, line.message) == found
    if blocks and not result.failures:  # the medians, although there are too few for a verdict
        assert (line.base, line.current) == pytest.approx((2.0, 3.0))


def test_each_counted_figure_that_changed_is_a_finding_beside_the_times():
    both = [
        [
            _row("flops", flops),
            _row("bytes", 8.0),
            _row("bytes", None, "backward"),
            _row("peak_memory", 8.0),
            _row("peak_memory", 8 * flops, "backward"),
        ]
        for flops in (1.0, 2.0)
    ]
    result = TaskResult(TASK, rows=both, blocks={"": _series([1.3, 1.31, 1.29, 1.32, 1.28, 1.3])})
    _judge([result], Settings())
    assert [(line.metric, line.finding) for line in lines_of(result, "c1", THRESHOLD)] == [
        ("flops forward", "changed"),
        ("peak_memory backward", "regressed"),
        ("latency", "regressed"),
    ]


@pytest.mark.parametrize(
    ("total_s", "share_s", "duration"),
    [(float("inf"), 60.0, "2 min"), (90.0, 45.0, "2 min"), (88.0, 44.0, "88 s")],
)
def test_all_tasks_share_the_time_and_the_most_it_takes_is_said_first(
    monkeypatch, tmp_path, total_s, share_s, duration
):
    version = Version("v", "+", tmp_path, tmp_path, tmp_path)
    said, given = [], []
    monkeypatch.setattr(run, "checked_out", lambda *_: contextlib.nullcontext([version] * 2))
    monkeypatch.setattr(run, "device_lock", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(run, "compare_versions", lambda *x: given.append(x[2]) or [])
    asked = Spec(("a", "b"), tmp_path, functions=["work:run", "work:walk"])
    run.run_ab(asked, Settings(total_s=total_s), said.append, agree=said.append)
    assert said == [
        f"A is v (+), B is v (+); 2 case(s), at most {duration} and start-up",
        2 * share_s,
    ]
    assert given[0].budget_s == share_s


@pytest.mark.parametrize(
    ("ratios", "found"),
    [
        ((1.2, 1.2), "regressed"),
        ((1.2, 1.1, 1.02), "suspect"),  # the last does not show it
        ((0.8, 0.85, 0.8), "improved"),
        ((0.8, 0.98), "suspect"),
        ((1.2, 1.1, 1.2, 1.1, 1.02), "suspect"),
        ((1.2, 1.1, 1.2, 1.1, 1.2, 1.02), "regressed"),
    ],
)
def test_a_change_in_few_pairs_of_processes_is_one_only_if_each_pair_shows_it(ratios, found):
    result = TaskResult(TASK, {"": _series(ratios, 12)})
    _judge([result], Settings())
    assert result.verdicts[""].kind == found
    (line,) = lines_of(result, "c1", THRESHOLD)
    assert line.message.endswith("raise --budget") == (found == "suspect")


def test_identical_code_rarely_regresses_in_few_pairs_of_processes():
    """Processes differ by 1.5 %, and one of twenty is 10 to 40 % slower, as docs/method.md says."""
    rng, shape = np.random.default_rng(2), (2, 100, 2)
    slower = np.where(rng.random(shape) < 0.05, rng.uniform(1.1, 1.4, shape), 1)
    a, b = rng.lognormal(0, 0.015, shape) * slower
    results = [TaskResult(TASK, {"": _series(ratios, 12)}) for ratios in b / a]
    for result in results:
        _judge([result], Settings())
    assert sum(result.verdicts[""].kind == "regressed" for result in results) <= 1


def test_a_case_whose_fewest_calls_exceed_the_budget_ends_after_its_first_calls():
    """Two pairs of processes each make eight calls of 2 and of 2.5 s, so they need 72 s."""
    sides = _Version([1500.0, 500.0], 0.0), _Version([2000.0, 500.0], 0.0)
    result, said = (
        TaskResult(CASE),
        "call takes 2.5 s, so a comparison needs 72 s; use --budget 80s",
    )
    assert not _run_task(sides, result, 0.0, 71.9)
    assert not sides[0].kept and sides[0].block_s < ANSWER_S
    (line,) = lines_of(result, "c1", THRESHOLD)
    assert line.finding == "inconclusive" and said in line.message
    assert _run_task(sides, result, 0.0, 72.0)
    # Later, a slow pair of processes does not end a case.
    assert _run_task([_Version([9000.0, 0.0], 0.0)] * 2, result, 0.0, 72.0)


@pytest.mark.parametrize("first", [0, 1])
def test_a_call_that_fails_in_both_versions_fails_in_both(monkeypatch, first):
    """The version whose block comes first fails first, a whole block before the other one."""

    class Side(_Version):
        def time_block(self, calls, keep):
            self.calls = getattr(self, "calls", 0) + calls
            if self.calls >= 40:
                raise VersionDied(self, "the fortieth call")
            return super().time_block(calls, keep)

    monkeypatch.setattr(schedule, "WARM_UP_S", 0.0)
    monkeypatch.setattr(schedule, "random", SimpleNamespace(sample=lambda *_: (first, 1 - first)))
    result = TaskResult(CASE)
    sides = [Side([3.0, 2.0], 0.0) for _ in range(2)]
    assert not _run_task(sides, result, 1.0, 60.0)
    assert result.endings == [("error", "the fortieth call")] * 2
