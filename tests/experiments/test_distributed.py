import os

import numpy as np
import pandas as pd
import pytest

from nanolib.experiments.distributed import cases as distributed
from nanolib.experiments.distributed.decode import DecodeCase, link_rows
from nanolib.experiments.distributed.prefill import MemoryCase
from nanolib.experiments.distributed.rank_rows import bytes_rows, part_rows, rounds_of, speed_up_rows
from nanolib.experiments.distributed.view import decode as report
from nanolib.experiments.distributed.view import sharding
from nanolib.measurement import BadInput, Flag, Provenance, Unsupported
from nanolib.meters import links
from nanolib.run import ranks, sweep
from nanolib.run.ranks import oversubscribed
from nanolib.store import Store
from tests.report.rounds import in_turns
from tests.run import rank_bodies
from tests.shown import CHARTS, VERDICTS


@pytest.mark.slow
def test_a_failing_case_is_a_row_and_the_sweep_goes_on(tmp_path, monkeypatch):
    params = distributed.Params(
        world_sizes=[2],
        seq_lens=[64, 32],
        algorithms=["gather"],
        prefill_seq_lens=[],
        memory_seq_lens=[],
        num_kv_heads=8,
        head_dim=64,
        training_preset="",
        budget_s=0.02,
        private_network=False,
    )
    started = ranks.run_ranks

    def first_fails(body, request, **rest):
        if request["seq_len"] == 64:
            return started(rank_bodies.misbehave, {"how": "raise", "rank": 1}, **rest)
        return started(body, request, **rest)

    monkeypatch.setattr("nanolib.run.ranks.run_ranks", first_fails)
    with Store(tmp_path / "results.sqlite") as store:
        run = sweep.measure(distributed, params, store=store, progress=False)
        rows = run.measurements(samples=True)
    ends = rows[rows["metric"] == "case_time"]
    assert list(ends["status"]) == ["error", "ok"]
    assert ends["message"].iloc[0] == "RankFailed: rank 1 of 2 raised ValueError: two lines"
    assert "ValueError: two\nlines" in ends["details"].iloc[0]["traceback"]
    _rows_of_a_real_case_hold(rows[rows["status"] == "ok"])


def _rows_of_a_real_case_hold(rows):
    """Of two ranks over 32 keys in the form `gather`."""
    shares = rows[rows["metric"] == "time_share"]
    assert (
        shares["estimate"].sum() == pytest.approx(1, abs=1e-9)
        and shares["details"].map(lambda d: d["rank"]).nunique() == 1
    )
    parts = rows[rows["metric"] == "part_time"].set_index("scope")["estimate"]
    assert set(parts.index) == {
        *(f"gather: {kind}" for kind in report.KINDS),
        *(f"gather: {part}" for part in ("comp_local_attention", "comp_num_den", "comm_gather", "comp_final_output")),
    }
    rounds = rows[rows["metric"] == "rounds"]
    assert list(rounds["estimate"]) == [1]
    sent = rows[(rows["metric"] == "wire_bytes") & (rows["method"] == "formula")]
    assert list(sent["estimate"]) == [8 * 65 * 4]
    assert rows[rows["metric"] == "relative_error"]["estimate"].max() < 1e-6
    modelled = rows[rows["provenance"] == "modelled"]
    assert [details["world_size"] for details in modelled["details"]] == [4, 8, 16]
    assert {"link_latency"} <= set(rows["metric"])


def test_more_ranks_than_cores_are_flagged(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    assert not oversubscribed("cpu", 2, 2) and oversubscribed("cpu", 2, 3) and oversubscribed("cpu", 5, 1)
    monkeypatch.delattr(os, "sched_getaffinity")  # Linux alone has it
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert not oversubscribed("cpu", 2, 1) and oversubscribed("cpu", 3, 1)


def test_more_ranks_than_gpus_are_unsupported(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert ranks.lacking("cuda", 1) == ""
    assert ranks.lacking("cuda", 2) == "2 ranks need as many GPUs, and 1 are here; give fewer ranks"
    assert "no backend for mps" in ranks.lacking("mps", 1)
    with pytest.raises(Unsupported, match="2 ranks need as many GPUs"):
        ranks.run_ranks(print, {}, world_size=2, device="cuda", timeout_s=1)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"world_sizes": [0]}, "distributed.world_sizes[0]: Input should be greater than 0, got 0"),
        (
            {"world_sizes": []},
            "distributed.world_sizes: List should have at least 1 item after validation, not 0, got []",
        ),
        ({"world_sizes": [2, 2]}, "distributed.world_sizes: 2 is given twice; leave one out"),
        (
            {"algorithms": ["tree"]},
            "distributed.algorithms[0]: Input should be 'three_allreduce', 'fused', 'gather', 'ring' or 'pass_q', got 'tree'",
        ),
        ({"num_kv_heads": 3}, "distributed.num_kv_heads: 3 does not divide num_heads 8; choose a divisor"),
        ({"q_len": 9, "seq_lens": [8]}, "distributed.q_len: 9 new tokens do not fit into a sequence of 8; give fewer"),
        (
            {"world_sizes": [3], "prefill_algorithms": ["ulysses"]},
            "distributed.world_sizes: 8 and 2 heads do not share out over 3 ranks, as ulysses needs",
        ),
        ({"training_preset": "tiny"}, "distributed.training_preset: 'tiny' is no preset; use "),
        (
            {"training_preset": "decoder_tiny", "overrides": {"d_modl": 8}},
            "distributed.overrides: decoder_tiny: config.d_modl: unknown name; did you mean d_model?",
        ),
        (
            {"training_preset": "decoder_tiny", "train_seq_len": 9999},
            "distributed.train_seq_len: 9999 exceeds the context_length 1024 of decoder_tiny; shorten it",
        ),
        ({"dtypes": ["int8"]}, "distributed.dtypes: 'int8' is no dtype; use "),
    ],
)
def test_bad_parameters_get_one_line(values, said):
    with pytest.raises(BadInput) as error:
        distributed.Params(**values)
    (line,) = error.value.lines
    assert line.startswith(said)


def test_prefill_and_training_have_one_rank_alone_in_the_same_launch():
    params = distributed.Params(world_sizes=[1, 2], seq_lens=[], memory_seq_lens=[])
    prefill, training = distributed.cases(params)
    assert prefill.world_size == training.world_size == 2 and prefill.prefill_forms[0] == "dense"


# rows from what ranks saw


def test_a_call_takes_as_long_as_on_its_slowest_rank_and_parts_add_up():
    fast = {"comp_a": 1.0, "wait": 3.0, "comm_b": 1.0}
    slow = {"comp_a": 4.0, "wait": 0.1, "comm_b": 0.9}
    rows = {
        row.scope + row.metric: row for row in part_rows([[fast] * 9, [slow] * 9], "f", (Flag.OVERSUBSCRIBED,), 0.8)
    }
    assert rows["f: comp_apart_time"].estimate == 4 and rows["f: waitpart_time"].estimate == 3
    assert rows["f: communicationpart_time"].predicted == 0.8
    shares = [row for row in rows.values() if row.metric == "time_share"]
    assert sum(row.estimate for row in shares) == pytest.approx(1) and all(row.details == {"rank": 1} for row in shares)
    assert all(row.flags == (Flag.OVERSUBSCRIBED,) for row in rows.values())


def test_forms_are_compared_block_by_block():
    rng = np.random.default_rng(0)
    base = rng.lognormal(0, 0.5, 40)
    ranks = [{"a": base, "b": base * 0.8}, {"a": base * 0.5, "b": base * 0.1}]
    rounds = rounds_of([{"blocks": blocks, "busy": [False] * 39 + [at == 1]} for at, blocks in enumerate(ranks)])
    (against,) = speed_up_rows(rounds, "b", ("a", "b"), (Flag.OVERSUBSCRIBED,))
    assert against.low <= 1.25 <= against.high and against.high - against.low < 0.01
    assert (against.scope, against.n, against.flags) == ("b over a", 39, (Flag.OVERSUBSCRIBED,))


def test_the_cost_model_finds_what_sending_costs_and_says_how_far_off_it_is():
    alpha, beta = 2e-4, 1e-9
    links = []
    for payload in (1024, 65_536, 1_048_576):
        for name, messages, sent in (("all_reduce", 2, payload), ("all_gather", 1, payload)):
            ms = 1e3 * (alpha * messages + beta * sent)
            links.append(
                {"collective": name, "payload": payload, "messages": messages, "sent": sent, "blocks": [ms] * 8}
            )
    fitted, rows = link_rows([{"links": links}, {"links": links}], 2, ())
    assert fitted.alpha == pytest.approx(alpha) and fitted.beta == pytest.approx(beta)
    found = {row.metric: row.estimate for row in rows}
    assert found["link_latency"] == pytest.approx(0.2) and found["link_bandwidth"] == pytest.approx(1e9)
    timed = [row for row in rows if row.metric == "latency"]
    assert all(row.predicted == pytest.approx(row.estimate) for row in timed)
    assert max(map(abs, fitted.residuals)) < 1e-6


def test_bytes_that_were_counted_stand_beside_the_formula():
    formula, counted = bytes_rows("ring", (100.0, 300.0), 440.0, ())
    assert (formula.estimate, formula.details["most"], formula.method) == (200, 300, "formula")
    assert (counted.estimate, counted.predicted, counted.method) == (220, 200, "interface")


# the report


def _decode_rows(store, share):
    """One and two ranks; on two the given share of the time is communication."""
    from nanolib.measurement import Measurement, exact
    from nanolib.store.schema import Run

    machine = {"machine_id": "m", "cpu": "c", "cores": 2, "ram_gib": 8, "gpus": [], "system": "s", "driver": ""}
    machine |= {"torch": "2", "threads": 2, "governor": "", "dtypes": {}}
    rows = {}
    for world in (1, 2):
        case = DecodeCase("cpu", world, 4096, ("fused", "gather"), 1, 8, 8, 64, 1, "float32", 1)
        found = [Measurement("case_time", 1.0, n=1)]
        for form, ms in (("fused", 10.0), ("gather", 9.0)):
            took = ms if world == 1 else 0.6 * ms
            found.append(Measurement("latency", took, took * 0.99, took * 1.01, 0.95, n=20, method="m", scope=form))
            found.append(exact("rounds", {"fused": 2, "gather": 1}[form], scope=form))
            parts = {"compute": took * (1 - share), "wait": 0.0, "communication": took * share}
            found += [Measurement("part_time", v, v, v, 0.95, n=20, scope=f"{form}: {k}") for k, v in parts.items()]
            found += [Measurement("time_share", v / took, n=20, scope=f"{form}: {k}") for k, v in parts.items()]
        found.append(
            Measurement(
                "latency",
                7.0,
                n=1,
                provenance=Provenance.MODELLED,
                scope="fused at 4 ranks",
                details={"form": "fused", "world_size": 4},
            )
        )
        if world > 1:
            found.append(Measurement("latency", 9.0, 8.9, 9.1, 0.95, n=20, method="m", scope="one rank"))
        rows[case.case_id] = (case.factors, found)
    store.add(Run("distributed", machine, cases=2, rows=in_turns("distributed", rows)))
    return store.measurements(samples=True)


@pytest.mark.parametrize(
    ("share", "bound", "remedy"),
    [(0.1, "compute (90%)", "more ranks would help"), (0.8, "communication (80%)", "longer sequences per rank")],
)
def test_the_verdict_says_what_bounds_it_with_one_remedy(tmp_path, share, bound, remedy):
    with Store(tmp_path / "results.sqlite") as store:
        rows = _decode_rows(store, share)
    table = report.decode_table(rows)
    two = table[(table["world_size"] == 2) & (table["form"] == "gather")].iloc[0]
    assert (
        two["efficiency"] == pytest.approx(9 / (2 * 5.4))
        and two["efficiency_low"] < two["efficiency"] < two["efficiency_high"]
    )
    assert two["bound"] == bound
    words = VERDICTS["distributed"](rows)
    assert "as fast as one rank: gather takes" in words[0] and remedy in words[1]


def test_what_the_model_says_is_dashed_and_never_a_mark(tmp_path):
    with Store(tmp_path / "results.sqlite") as store:
        spec = CHARTS["decode_scaling"](_decode_rows(store, 0.1)).to_dict()
    (panel,) = spec["hconcat"]
    dashed = [layer for layer in panel["layer"] if layer["mark"].get("strokeDash")]
    assert len(dashed) == 1 and dashed[0]["mark"]["type"] == "line"
    marks = next(layer for layer in panel["layer"] if layer["mark"]["type"] == "point")
    shown = spec["datasets"][marks["data"]["name"]] if "data" in marks else spec["datasets"][panel["data"]["name"]]
    assert {row["ranks"] for row in shown} == {1, 2}


def test_the_model_goes_on_from_the_most_ranks_that_were_measured(tmp_path):
    with Store(tmp_path / "results.sqlite") as store:
        spec = CHARTS["decode_scaling"](_decode_rows(store, 0.1)).to_dict()
    (panel,) = spec["hconcat"]
    dashed = next(layer for layer in panel["layer"] if layer["mark"].get("strokeDash"))
    ends = [row["from"] for row in spec["datasets"][dashed["data"]["name"]] if row["ranks"] == 4]
    assert ends == [2]


def test_several_nodes_have_a_panel_of_their_own_beside_the_one_rank(tmp_path):
    with Store(tmp_path / "results.sqlite") as store:
        rows = _decode_rows(store, 0.1)
    several = rows["factor.world_size"] == 2
    spread = rows.assign(run_id="b", **{"factor.nodes": 2}).loc[several]
    spread["case_id"] += "2"
    rows = pd.concat([rows, spread], ignore_index=True)
    table = report.decode_table(rows)
    assert set(table["ranks"]) == {"1", "2", "2 on 2 nodes"} and table["efficiency"].notna().sum() == 4
    spec = CHARTS["decode_scaling"](rows).to_dict()
    titles = [panel["title"]["text"] for panel in spec["hconcat"]]
    assert titles == ["n = 4,096, float32", "n = 4,096, float32, 2 nodes"]
    for panel in spec["hconcat"]:
        points = next(layer for layer in panel["layer"] if layer["mark"]["type"] == "point")
        name = points.get("data", panel.get("data"))["name"]
        assert {row["ranks"] for row in spec["datasets"][name]} == {1, 2}
    assert "2 ranks over 2 nodes are" in VERDICTS["distributed"](spread)[0]


@pytest.mark.parametrize(
    "name", ["decode_scaling", "decode_shares", "link_model", "prefill_times", "sharded_memory", "training_scaling"]
)
def test_without_rows_a_chart_says_so(tmp_path, name):
    with Store(tmp_path / "results.sqlite") as store:
        rows = store.measurements(samples=True)
    assert "why" in str(CHARTS[name](rows).to_dict()["datasets"])
    assert (
        report.decode_table(rows).empty and sharding.prefill_table(rows).empty and sharding.training_table(rows).empty
    )
    assert VERDICTS["distributed"](rows) == [
        "No case across ranks gave a time, so there is no verdict. Next: nano run quick distributed."
    ]


def test_one_rank_alone_has_words_and_shares_no_memory():
    params = distributed.Params(
        world_sizes=[1], memory_seq_lens=[64], training_preset="", seq_lens=[], prefill_seq_lens=[64]
    )
    forms = {case.memory_form for case in distributed.cases(params) if isinstance(case, MemoryCase)}
    assert forms and not forms & {"ring", "ulysses"}
    table = pd.DataFrame({"form": ["dense"], "flags": [[]], "latency": [1.0]})
    assert list(report.fair(table[table["form"] != "dense"]).columns) == ["form", "flags", "latency"]


def test_what_the_barriers_send_is_taken_off_the_bytes_of_a_call(monkeypatch):
    monkeypatch.setattr(links, "only_loopback", lambda: True)
    monkeypatch.setattr("torch.distributed.get_backend", lambda: "gloo")
    monkeypatch.setattr(links, "_counted", lambda call, calls: 10 + 100 * calls)
    assert links.count_bytes(lambda: None) == 100
