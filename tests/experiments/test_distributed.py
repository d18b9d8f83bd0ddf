import os

import numpy as np
import pytest

from nanolib.experiments.distributed import cases as distributed
from nanolib.experiments.distributed import tables
from nanolib.experiments.distributed.decode import link_rows
from nanolib.experiments.distributed.launch import Launch
from nanolib.measurement import Flag, Unsupported
from nanolib.models.attention.ranks import Traffic
from nanolib.run import ranks
from nanolib.run.case import oversubscribed
from nanolib.run.dry_run import prediction_table
from tests.measuring import rows_of


@pytest.mark.slow
def test_a_failing_case_is_a_row_and_the_sweep_goes_on(tmp_path, monkeypatch):
    shape = {"world_sizes": [2], "seq_lens": [64, 32], "num_kv_heads": 8, "head_dim": 64}
    rest = {"prefill_seq_lens": [], "memory_seq_lens": [], "budget_s": 0.02}
    params = distributed.Params(algorithms=["gather"], **shape, **rest)
    started = ranks.run_ranks

    def first_fails(body, request, **rest):
        if request["case"]["seq_len"] == 64:
            raise ranks.RankFailed("rank 1 of 2 raised an error", 1, "ValueError: two\nlines")
        return started(body, request, **rest)

    monkeypatch.setattr("nanolib.run.case.run_ranks", first_fails)
    rows = rows_of(distributed, params, tmp_path)
    ends = rows[rows["metric"] == "case_duration"]
    assert list(ends["status"]) == ["error", "ok"]
    assert ends["message"].iloc[0] == "RankFailed: rank 1 of 2 raised an error"
    assert ends["details"].iloc[0]["traceback"] == "ValueError: two\nlines"
    # two ranks over 32 keys
    names = "comp_shard_kv comp_local_attention comp_num_den comm_gather comp_final_output"
    scopes = {f"gather: {part}" for part in (*tables.KINDS, *names.split())}
    assert set(rows[rows["metric"] == "component_time"]["scope"]) == scopes
    assert rows[rows["metric"] == "relative_error"]["estimate"].max() < 1e-6
    modelled = rows[rows["provenance"] == "modelled"]
    assert [details["world_size"] for details in modelled["details"]] == [4, 8, 16]
    assert "link_latency" in set(rows["metric"])


def test_more_ranks_than_cores_are_flagged_and_than_gpus_unsupported(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    assert not oversubscribed("cpu", 2, 2)
    assert oversubscribed("cpu", 2, 3) and oversubscribed("cpu", 5, 1)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert ranks.lacking("cuda", 1) == "" and "no backend for mps" in ranks.lacking("mps", 1)
    why = "2 ranks need as many GPUs, and this machine has 1; give fewer ranks"
    with pytest.raises(Unsupported, match=why):
        ranks.run_ranks(print, {}, world_size=2, device="cuda", timeout_s=1)


# rows from what ranks saw


def test_a_part_takes_as_long_as_on_its_slowest_rank_and_counted_bytes_have_a_prediction():
    fast = {"comp_a": 1.0, "wait": 3.0, "comm_b": 1.0}
    slow = {"comp_a": 4.0, "wait": 0.1, "comm_b": 0.9}

    def rows(*times):
        shared = {"errors": {"ring": 1e-7}, "bytes": {"ring": 440.0}}
        launch = Launch([{"parts": {"ring": of}} | shared for of in times], (Flag.OVERSUBSCRIBED,))
        return launch.algorithm("ring", Traffic(3, 3, (100.0, 300.0)), 0.8)

    steps, formula, counted, *parts, error = rows([fast] * 9, [slow] * 9)
    assert (steps.metric, steps.estimate) == ("communication_steps", 3)
    assert (formula.estimate, formula.details["most"], formula.method) == (200, 300, "formula")
    assert (counted.estimate, counted.predicted, counted.method) == (220, 200, "interface")
    assert error.estimate == 1e-7
    of = {row.scope: row for row in parts}
    assert of["ring: comp_a"].estimate == 4 and of["ring: wait"].estimate == 3
    assert of["ring: communication"].predicted == 0.8
    for row in parts:
        assert (row.flags, row.confidence) == ((Flag.OVERSUBSCRIBED,), 0.95)
    *_, few, _ = rows([fast] * 3)
    assert few.confidence == 0.75  # that of the range of three calls


def test_algorithms_are_compared_block_by_block():
    base = np.random.default_rng(0).lognormal(0, 0.5, 40)
    ranks = [{"a": base, "b": base * 0.8}, {"a": base * 0.5, "b": base * 0.1}]
    answers = [{"blocks": blocks, "busy": [False] * 39 + [True]} for blocks in ranks]
    (against,) = Launch(answers, (Flag.OVERSUBSCRIBED,)).speed_ups("b", ("a", "b"))
    assert against.low <= 1.25 <= against.high and against.high - against.low < 0.01
    assert (against.scope, against.n, against.flags) == ("b over a", 39, (Flag.OVERSUBSCRIBED,))


def test_the_cost_model_finds_what_sending_costs_and_says_how_far_off_it_is():
    alpha, beta = 2e-4, 1e-9
    links, blocks = [], {}
    for sent in (1024, 65_536, 1_048_576):
        for messages in (1, 2):
            scope = f"{messages} of {sent} B"
            links.append({"scope": scope, "messages": messages, "sent": sent})
            blocks[scope] = [1e3 * (alpha * messages + beta * sent)] * 8
    fitted, rows = link_rows(Launch([{"links": links, "blocks": blocks}] * 2), "2 ranks")
    assert (fitted.alpha, fitted.beta) == pytest.approx((alpha, beta))
    found = {row.metric: row.estimate for row in rows}
    assert (found["link_latency"], found["link_bandwidth"]) == pytest.approx((0.2, 1e9))
    timed = [row for row in rows if row.metric == "latency"]
    assert all(row.predicted == pytest.approx(row.estimate) for row in timed)
    assert max(map(abs, fitted.residuals)) < 1e-6


def test_a_prediction_has_a_line_per_algorithm_and_nothing_where_no_formula_applies():
    """Partial results (output, log-sum-exp) of 8 heads of 64 in float32: 2,080 bytes in one gather."""
    params = distributed.Params(
        algorithms=["fused", "gather"], prefill_algorithms=["ring"], memory_seq_lens=[]
    )
    table = prediction_table(distributed, params).set_index("case")
    many = table[table.index.str.contains("2 rank")]
    sent = many["bytes sent per rank"].rename(lambda case: case.split(", ")[-1])
    assert sent.to_dict() == {
        "fused": "2,112",
        "gather": "2,080",
        "dense": "",  # on one rank
        "ring": "2,097,152",
    }
    assert list(many["communication steps"]) == ["2", "1", "", "1"]
    assert list(many["shard (MiB)"]) == ["64", "64", "", ""]
    assert [bool(peak) for peak in many["peak memory (MiB)"]] == [False, False, True, True]
