from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nanolib.experiments.distributed import case, view
from nanolib.experiments.distributed import cases as distributed
from nanolib.experiments.distributed.launch import Launch, link_rows
from nanolib.measurement import Flag, Unsupported
from nanolib.models.attention.ranks import Traffic
from nanolib.run import group, memory_plan, ranks
from nanolib.run.case import Plan
from tests.measuring import rows_of

NOTHING = {"seq_lens": [], "prefill_seq_lens": [], "memory_seq_lens": [], "device": "cpu"}


def _params(**changes):
    return distributed.Params(**NOTHING | {"world_sizes": [2], "budget_s": 0.02} | changes)


@pytest.mark.parametrize(
    ("device", "nodes", "expected", "flags"),
    [
        ("cuda", 2, (3, ("cuda:0", "cuda:1"), 0), ()),
        ("cuda", 5, (1, ("cuda:0",), 0), ()),
        ("cpu", 2, (3, ("cpu",), 3), ()),
        ("cpu", 1, (5, ("cpu",), 5), (Flag.OVERSUBSCRIBED,)),
    ],
)
def test_ranks_are_divided_among_nodes_and_share_what_is_too_little(
    monkeypatch, device, nodes, expected, flags
):
    monkeypatch.setattr(case, "usable_cores", lambda: 6)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    dense, *_ = distributed.cases(_params(seq_lens=[64]))
    one = replace(dense, device=device, world_size=5, threads=2, nodes=nodes)
    assert (one.ranks_here, one.devices, one.ranks_on_cpu) == expected
    assert one.factors.get("nodes") == (None if nodes == 1 else nodes)
    assert (f"5 rank(s) on {nodes} nodes " in str(one)) == (nodes > 1)
    launched = []
    monkeypatch.setattr(case, "run_ranks", lambda *_, **__: [])
    monkeypatch.setattr(case, "link_rows", lambda launch: launched.append(launch) or (None, []))
    list(one.launch([], _params()))
    assert launched[0].flags == flags


@pytest.mark.slow
def test_a_failed_launch_is_a_row_of_each_case_and_the_sweep_goes_on(tmp_path, monkeypatch):
    params = _params(algorithms=["gather"], seq_lens=[64, 32])
    started = ranks.run_ranks

    def first_fails(body, request, **rest):
        if request["cases"][0]["seq_len"] == 64:
            raise ranks.RankFailed("rank 1 of 2 raised an error", 1, "ValueError: two\nlines")
        return started(body, request, **rest)

    monkeypatch.setattr("nanolib.experiments.distributed.case.run_ranks", first_fails)
    rows = rows_of(distributed, params, tmp_path)
    ends = rows[rows["metric"] == "case_duration"]
    assert list(ends["status"]) == ["error", "error", "ok", "ok"]
    assert ends["message"].iloc[0] == "RankFailed: rank 1 of 2 raised an error"
    assert ends["details"].iloc[1]["traceback"] == "ValueError: two\nlines"
    # two ranks over 32 keys
    own = rows[[factors["algorithm"] == "gather" for factors in rows["factors"]]]
    names = "comp_shard_kv comp_local_attention comp_num_den comm_gather comp_final_output"
    scopes = {*view.KINDS, *names.split()}
    assert set(own[own["metric"] == "component_time"]["scope"]) == scopes
    assert rows[rows["metric"] == "relative_error"]["estimate"].max() < 1e-6
    modelled = own[own["provenance"] == "modelled"]
    assert [details["world_size"] for details in modelled["details"]] == [2, 4, 8, 16]
    assert set(own[own["metric"] == "speed_up"]["scope"]) == {"decode over dense"}
    peak = own[own["metric"] == "peak_memory"].iloc[0]
    assert peak["estimate"] == pytest.approx(peak["predicted"], rel=0.05)


def test_a_case_that_does_not_fit_is_a_row_and_the_rest_of_its_group_is_launched(monkeypatch):
    """The baseline needs the whole sequence on one rank."""
    dense, ring = distributed.cases(_params(prefill_seq_lens=[64], prefill_algorithms=["ring"]))
    large = lambda needed, _: "too large" if needed == dense.plan().most else ""  # noqa: E731
    monkeypatch.setattr(memory_plan, "shortage", large)
    launched = []
    monkeypatch.setattr(
        case.ShardedCase, "launch", lambda _, ready, __: launched.extend(ready) or ()
    )
    outcomes = group.measure_group([dense, ring], _params(), {})
    assert [one.status for one in outcomes.values()] == ["oom_predicted", "ok"]
    assert launched == [ring] and dense.group == ring.group


def test_algorithms_that_share_their_shards_need_the_memory_of_one(monkeypatch):
    dense, fused, gather = distributed.cases(
        _params(seq_lens=[4096], algorithms=["fused", "gather"])
    )
    needed = dense.plan().most + max(fused.plan().most, gather.plan().most)
    for free, fits in ((needed, True), (needed - 1, False)):
        short = lambda needed, _, free=free: "too large" if needed > free else ""  # noqa: E731
        monkeypatch.setattr(group, "shortage", short)
        assert group.fit_together([dense, fused, gather]) == fits


def test_a_forward_pass_holds_no_gradient_and_dense_attention_is_on_one_rank_only():
    """1,024 tokens of 8 heads of 64 in float32 are 2 MiB per tensor: q, k and v, and the output."""
    params = _params(prefill_seq_lens=[1024], memory_seq_lens=[1024], world_sizes=[8])
    found = {(case.phase, case.algorithm): case for case in distributed.cases(params)}
    whole = found["forward", "dense"]
    assert 8 * 2**20 <= whole.plan().most < 8.1 * 2**20
    assert found["memory", "dense"].rank_plan().most == whole.plan().most
    ring = found["forward", "ring"]
    assert ring.plan().most == 8 * ring.rank_plan().most


def test_two_dtypes_have_names_of_their_own_and_without_a_plan_the_rest_is_predicted(monkeypatch):
    params = _params(prefill_seq_lens=[64], memory_seq_lens=[64], dtypes=["float32", "bfloat16"])
    found = distributed.cases(params)
    assert len({str(case) for case in found}) == len(found)
    monkeypatch.setattr(case, "plan_case", lambda *_: Plan(reason="not planned: odd"))
    predicted = [case.predict() for case in found if case.algorithm == "ring"]
    # a rank sends its 32 keys and values, 8 heads of 64 in float32, in one step
    assert predicted[0] == {"communication steps": 1, "bytes sent per rank": 2 * 32 * 8 * 64 * 4}
    assert [set(one) for one in predicted] == [set(predicted[0])] * 4
    with pytest.raises(Unsupported, match="not planned: odd"):
        next(found[-1].measure(params, {}))


def test_rows_are_of_the_slowest_rank_and_algorithms_are_compared_block_by_block():
    base = np.random.default_rng(0).lognormal(0, 0.5, 40)
    found = {"peak": 2**21, "method": "counted", "error": 1e-7, "bytes": 440.0}
    answers = [
        {
            "blocks": {"fused": base * fused, "ring": base * ring},
            "busy": [False] * 39 + [True],
            "found": {"fused": found, "ring": found},
            "parts": {"ring": [parts] * 9},
        }
        for fused, ring, parts in (
            (1.0, 0.8, {"comp_a": 1.0, "wait": 3.0, "comm_b": 1.0}),
            (0.5, 0.1, {"comp_a": 4.0, "wait": 0.1, "comm_b": 0.9}),
        )
    ]
    launch, sent = Launch(answers, (Flag.OVERSUBSCRIBED,)), Traffic(3, 3, (100.0, 300.0))
    rest = {"phase": "forward", "traffic": lambda: sent, "predict": dict}
    rows = launch.rows(SimpleNamespace(algorithm="ring", **rest))
    latency, against, peak, error, steps, formula, counted = rows
    assert latency.estimate == pytest.approx(0.8 * np.median(base))
    assert against.low <= 1.25 <= against.high and against.high - against.low < 0.01
    assert (against.scope, against.n, against.flags) == ("forward over fused", 39, launch.flags)
    assert (peak.estimate, peak.method) == (2, "counted, largest rank")
    assert (error.metric, error.estimate) == ("relative_error", 1e-7)
    assert (steps.metric, steps.estimate) == ("communication_steps", 3)
    assert (formula.estimate, formula.details["most"], formula.method) == (200, 300, "formula")
    assert (counted.estimate, counted.predicted, counted.method) == (220, 200, "interface")
    of = {row.scope: row for row in launch.parts("ring", 0.8)}
    assert of["comp_a"].estimate == 4 and of["wait"].estimate == 3
    assert of["communication"].predicted == 0.8
    assert {(row.flags, row.confidence) for row in of.values()} == {(launch.flags, 0.95)}


def test_the_cost_model_finds_what_sending_costs_and_says_how_far_off_it_is():
    alpha, beta = 2e-4, 1e-9
    links, blocks = [], {}
    for sent in (1024, 65_536, 1_048_576):
        for messages in (1, 2):
            scope = f"{messages} of {sent} B"
            links.append({"scope": scope, "messages": messages, "sent": sent})
            blocks[scope] = [1e3 * (alpha * messages + beta * sent)] * 8
    fitted, rows = link_rows(Launch([{"links": links, "blocks": blocks}] * 2))
    found = {row.metric: row.estimate for row in rows}
    assert (found["link_latency"], found["link_bandwidth"]) == pytest.approx((0.2, 1e9))
    assert max(map(abs, fitted.residuals)) < 1e-6
    assert [row.predicted for row in rows[:6]] == pytest.approx([row.estimate for row in rows[:6]])


def test_ulysses_is_unsupported_on_ranks_that_cannot_share_the_heads():
    lengths = {"prefill_seq_lens": [64], "memory_seq_lens": [64]}
    params = _params(world_sizes=[3, 4], prefill_algorithms=["ulysses"], **lengths)
    refused = [case for case in distributed.cases(params) if case.unsupported_reason()]
    assert [str(case).split(" n=")[0] for case in refused] == [
        "forward ulysses 3 rank(s)",
        "memory ulysses 3 rank(s)",
    ]
    assert (
        "cannot split 8 query heads and 8 key heads over 3 ranks" in refused[0].unsupported_reason()
    )
