from nanolib.experiments.attention import cases as attention
from nanolib.experiments.summary import cases as summary
from nanolib.experiments.summary import panel as summary_panel
from nanolib.run import sweep
from nanolib.store import Store


def test_the_summary_follows_what_is_picked(tmp_path, monkeypatch):
    monkeypatch.setattr(summary_panel.sweep, "live_front_end", lambda: True)
    params = attention.Params(
        seq_lens=[16, 32],
        attention_types=["dense"],
        budget_s=0.05,
        quality_patterns=[],
        backward=False,
    )
    with Store(tmp_path / "results.sqlite") as store:
        sweep.measure(attention, params, store=store, progress=False).finish()
    runs, _, rows, _ = summary.load(summary.Params(database=str(tmp_path / "results.sqlite")))
    panel = summary_panel.SummaryPanel(rows, runs)
    assert set(panel.picks) == {"Sequence length"}  # one machine, one run: nothing to pick there
    assert panel.charts["attention"].params.pick_n is None
    both = panel.texts["attention"].value
    assert (
        panel.said.value
        == f"Shown: everything: {len(rows)} of {len(rows)} measurements, of 1 of 1 runs"
    )
    panel.picks["Sequence length"].value = "32"
    left = len(rows) - (rows["factor.seq_len"] == 16).sum()
    assert (
        panel.said.value
        == f"Shown: sequence length 32: {left} of {len(rows)} measurements, of 1 of 1 runs"
    )
    assert panel.charts["attention"].params.pick_n == [32]
    assert ">32<" in panel.texts["attention"].value and ">16<" not in panel.texts["attention"].value
    panel.picks["Sequence length"].value = "all"
    assert (
        panel.charts["attention"].params.pick_n is None and panel.texts["attention"].value == both
    )
